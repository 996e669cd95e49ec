//! The tokenizers of the pools, loaded by a thread of their own and swapped when their files change.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use ahash::AHashMap;
use parking_lot::{Mutex, RwLock};

use super::super::skipped::Skipped;
use super::super::tokenizer::{LoadError, LocalTokenizer};

/// Files that make a tokenizer.
const FILES: [&str; 3] = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Time and size of each file, by which a change is seen.
type Print = [Option<(SystemTime, u64)>; FILES.len()];

#[derive(Debug)]
pub struct Library {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: Option<PathBuf>,
    slots: RwLock<AHashMap<Arc<str>, Slot>>,
    /// One file is loaded at a time: a large vocabulary takes some 200 MB while it is.
    loading: Mutex<()>,
}

#[derive(Debug, Default)]
struct Slot {
    print: Option<Print>,
    ready: Option<Arc<LocalTokenizer>>,
    problem: Option<(Skipped, String)>,
}

impl Library {
    pub fn new(dir: Option<PathBuf>) -> Self {
        Self { inner: Arc::new(Inner { dir, slots: RwLock::default(), loading: Mutex::default() }) }
    }

    /// The tokenizer of a file. One that was never asked for begins to load.
    pub fn get(&self, file: &Arc<str>) -> Result<Arc<LocalTokenizer>, Skipped> {
        {
            let slots = self.inner.slots.read();
            if let Some(slot) = slots.get(file) {
                return match (&slot.ready, &slot.problem) {
                    (Some(tokenizer), _) => Ok(Arc::clone(tokenizer)),
                    (None, Some((reason, _))) => Err(*reason),
                    (None, None) => Err(Skipped::NoTokenizer),
                };
            }
        }
        self.inner.slots.write().entry(Arc::clone(file)).or_default();
        self.load(vec![Arc::clone(file)]);
        Err(Skipped::NoTokenizer)
    }

    /// Keeps these files, loads what is new or changed, and forgets all others.
    pub fn follow(&self, files: Vec<Arc<str>>) {
        {
            let mut slots = self.inner.slots.write();
            slots.retain(|file, _| files.contains(file));
            for file in &files {
                slots.entry(Arc::clone(file)).or_default();
            }
        }
        if !files.is_empty() {
            self.load(files);
        }
    }

    fn load(&self, files: Vec<Arc<str>>) {
        let inner = Arc::clone(&self.inner);
        let thread = std::thread::Builder::new().name("tokenizer-load".to_owned());
        let started = thread.spawn(move || files.iter().for_each(|file| inner.load(file)));
        if let Err(error) = started {
            tracing::error!(
                "no thread to load tokenizers: {error}; raise the limit of threads of this process"
            );
        }
    }

    pub fn problems(&self) -> Vec<(Arc<str>, String)> {
        let slots = self.inner.slots.read();
        let mut problems: Vec<_> = slots
            .iter()
            .filter_map(|(file, slot)| Some((Arc::clone(file), slot.problem.as_ref()?.1.clone())))
            .collect();
        problems.sort();
        problems
    }

    pub fn is_ready(&self, file: &str) -> bool {
        self.inner.slots.read().get(file).is_some_and(|slot| slot.ready.is_some())
    }
}

impl Inner {
    fn load(&self, file: &Arc<str>) {
        let _one = self.loading.lock();
        let path = match self.path(file) {
            Ok(path) => path,
            Err(problem) => return self.fail(file, None, problem),
        };
        let print = print(&path);
        let unchanged = |slot: &Slot| slot.print.is_some_and(|before| before == print);
        if self.slots.read().get(file).is_none_or(unchanged) {
            return;
        }
        match LocalTokenizer::load(&path) {
            Ok(tokenizer) => {
                tracing::info!(
                    file = &**file,
                    engine = tokenizer.engine(),
                    reuses_prefixes = tokenizer.reuses_prefixes(),
                    chat_template = tokenizer.template(false).is_some(),
                    "a tokenizer is ready"
                );
                if let Some(slot) = self.slots.write().get_mut(file) {
                    *slot = Slot { print: Some(print), ready: Some(Arc::new(tokenizer)), problem: None };
                }
            }
            Err(error) => {
                let missing =
                    matches!(&error, LoadError::Read { source, .. } if source.kind() == ErrorKind::NotFound);
                let reason = if missing { Skipped::NoTokenizer } else { Skipped::Failed };
                self.fail(file, Some(print), (reason, error.to_string()));
            }
        }
    }

    /// Notes a problem and logs it, once for each version of the files. A tokenizer that worked stays.
    fn fail(&self, file: &Arc<str>, print: Option<Print>, problem: (Skipped, String)) {
        let mut slots = self.slots.write();
        let Some(slot) = slots.get_mut(file) else { return };
        let known = slot.problem.as_ref().is_some_and(|known| *known == problem);
        if !known {
            let stays = if slot.ready.is_some() { "; the last version stays" } else { "" };
            tracing::error!("tokenizer {file}: {}{stays}", problem.1);
        }
        slot.print = print;
        slot.problem = Some(problem);
    }

    /// Where a file is. Links may not lead out of the folder.
    fn path(&self, file: &str) -> Result<PathBuf, (Skipped, String)> {
        let Some(dir) = &self.dir else {
            let problem = "no folder of tokenizers is known; start with --tokenizer-dir".to_owned();
            return Err((Skipped::NoTokenizer, problem));
        };
        let path = dir.join(file);
        match (dir.canonicalize(), path.canonicalize()) {
            (Ok(dir), Ok(path)) if !path.starts_with(&dir) => {
                Err((Skipped::Failed, LoadError::Outside(path).to_string()))
            }
            (_, Ok(path)) => Ok(path),
            // Loading says that it is missing.
            (_, Err(_)) => Ok(path),
        }
    }
}

fn print(path: &Path) -> Print {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
    FILES.map(|name| {
        let file = if name == FILES[0] && !path.is_dir() { path.to_owned() } else { folder.join(name) };
        let metadata = std::fs::metadata(file).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    })
}
