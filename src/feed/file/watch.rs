//! Tells when the content of a folder or a file has really changed.

use std::path::{Path, PathBuf};
use std::time::Duration;

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout_at};
use xxhash_rust::xxh3::Xxh3;

use super::{documents, text_of};

/// How patiently a watch looks.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Quiet time after which a burst of events is over.
    pub quiet: Duration,
    /// The longest a burst may put off a look.
    pub patience: Duration,
    /// Time between looks without any event: events get lost, and some file systems send none.
    pub poll: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(100),
            patience: Duration::from_secs(1),
            poll: Duration::from_secs(30),
        }
    }
}

/// A watched folder or file. What it held when the watch began is its first state, so begin the watch, then read.
#[derive(Debug)]
pub struct Watch {
    changes: mpsc::Receiver<()>,
    task: JoinHandle<()>,
    /// Dropping it ends the events. `None` where the system would not watch; then the polls have to do.
    _watcher: Option<RecommendedWatcher>,
}

impl Watch {
    /// Watches a folder's YAML files, or a single file through its folder: editors and ConfigMaps replace files rather
    /// than write into them. Must be called inside a tokio runtime.
    pub fn new(path: &Path, timing: Timing) -> Self {
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        // The parent of a bare file name is the empty path.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        let (events_in, events) = mpsc::channel(1);
        let started = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Our own reading is an access. A full channel holds an event already.
            if event.is_ok_and(|event| !matches!(event.kind, EventKind::Access(_))) {
                let _ = events_in.try_send(());
            }
        })
        .and_then(|mut watcher| {
            watcher.watch(folder, RecursiveMode::NonRecursive)?;
            Ok(watcher)
        });
        let watcher = started
            .inspect_err(|error| {
                tracing::warn!(path = %folder.display(), %error, "no file events, changes are found by polling");
            })
            .ok();
        let (changed, changes) = mpsc::channel(1);
        let first = fingerprint(path);
        let task = tokio::spawn(look(path.to_owned(), first, events, changed, timing));
        Self { changes, task, _watcher: watcher }
    }

    /// Waits for the next change; several in a row may be told as one.
    pub async fn changed(&mut self) {
        if self.changes.recv().await.is_none() {
            // The task only ends with the watch itself or its runtime.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn look(
    path: PathBuf,
    mut known: u64,
    mut events: mpsc::Receiver<()>,
    changed: mpsc::Sender<()>,
    timing: Timing,
) {
    let mut watching = true;
    loop {
        tokio::select! {
            event = events.recv(), if watching => match event {
                Some(()) => burst(&mut events, timing).await,
                None => watching = false,
            },
            () = sleep_until(Instant::now() + timing.poll) => {}
        }
        let at = path.clone();
        let Ok(found) = tokio::task::spawn_blocking(move || fingerprint(&at)).await else { return };
        if found != known {
            known = found;
            // A full channel tells the change already.
            let _ = changed.try_send(());
        }
    }
}

/// Waits until events pause.
async fn burst(events: &mut mpsc::Receiver<()>, timing: Timing) {
    let end = Instant::now() + timing.patience;
    while let Ok(Some(())) = timeout_at(end.min(Instant::now() + timing.quiet), events.recv()).await {
        if Instant::now() >= end {
            return;
        }
    }
}

/// A number that differs when names or content differ.
fn fingerprint(path: &Path) -> u64 {
    let mut hash = Xxh3::new();
    let files = if path.is_dir() { documents(path).unwrap_or_default() } else { vec![path.to_owned()] };
    for file in files {
        let name = file.as_os_str().as_encoded_bytes();
        let text = text_of(&file);
        let content = match &text {
            Ok(text) => text.as_bytes(),
            Err(why) => why.as_bytes(),
        };
        for part in [&[u8::from(text.is_ok())][..], name, content] {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    hash.digest()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use tokio::time::timeout;

    const DEADLINE: Duration = Duration::from_secs(10);

    /// So long that a change found by polling fails the test.
    const BY_EVENTS: Timing = Timing {
        quiet: Duration::from_millis(5),
        patience: Duration::from_millis(200),
        poll: Duration::from_mins(10),
    };

    /// Writes a file in one step, so that nobody sees half of it.
    fn put(file: &Path, text: &str) {
        let draft = file.with_extension("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(&draft, file).unwrap();
    }

    async fn told(watch: &mut Watch) -> bool {
        timeout(DEADLINE, watch.changed()).await.is_ok()
    }

    #[tokio::test]
    async fn changed_added_and_removed_files_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        put(&file, "1");
        let mut watch = Watch::new(dir.path(), BY_EVENTS);
        put(&file, "2");
        assert!(told(&mut watch).await, "changed");
        put(&dir.path().join("b.yaml"), "");
        assert!(told(&mut watch).await, "added");
        fs::remove_file(&file).unwrap();
        assert!(told(&mut watch).await, "removed");
    }

    #[tokio::test]
    async fn a_single_file_is_followed_through_replacement() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("scheduler.conf");
        put(&file, "1");
        let mut watch = Watch::new(&file, BY_EVENTS);
        for text in ["2", "3"] {
            put(&file, text);
            assert!(told(&mut watch).await, "{text}");
        }
    }

    /// As the kubelet does it: the files are links through `..data`, which is replaced in one step.
    #[cfg(unix)]
    #[tokio::test]
    async fn a_mounted_config_map_is_followed() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("..1")).unwrap();
        fs::write(at("..1/a.yaml"), "1").unwrap();
        symlink("..1", at("..data")).unwrap();
        symlink("..data/a.yaml", at("a.yaml")).unwrap();
        let mut watch = Watch::new(dir.path(), BY_EVENTS);
        fs::create_dir(at("..2")).unwrap();
        fs::write(at("..2/a.yaml"), "2").unwrap();
        symlink("..2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert!(told(&mut watch).await);
        assert_eq!(fs::read_to_string(at("a.yaml")).unwrap(), "2");
    }

    /// The second write is the same text, so it can only be told if events alone count.
    #[tokio::test]
    async fn touching_a_file_or_writing_another_is_no_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        put(&file, "1");
        let mut watch = Watch::new(dir.path(), BY_EVENTS);
        put(&file, "1");
        put(&dir.path().join("notes.txt"), "x");
        assert!(timeout(3 * BY_EVENTS.patience, watch.changed()).await.is_err());
        put(&file, "2");
        assert!(told(&mut watch).await, "and the watch goes on");
    }

    #[tokio::test]
    async fn without_events_polling_finds_the_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.yaml");
        let (events_in, events) = mpsc::channel(1);
        drop(events_in);
        let (changed, mut changes) = mpsc::channel(1);
        let timing = Timing { poll: Duration::from_millis(5), ..BY_EVENTS };
        let task =
            tokio::spawn(look(dir.path().to_owned(), fingerprint(dir.path()), events, changed, timing));
        put(&file, "1");
        assert!(timeout(DEADLINE, changes.recv()).await.is_ok());
        task.abort();
    }

    #[test]
    fn names_and_contents_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let missing = fingerprint(&dir.path().join("a.yaml"));
        fs::write(dir.path().join("a.yaml"), "").unwrap();
        assert_ne!(missing, fingerprint(&dir.path().join("a.yaml")));
        let before = fingerprint(dir.path());
        fs::rename(dir.path().join("a.yaml"), dir.path().join("b.yaml")).unwrap();
        assert_ne!(before, fingerprint(dir.path()));
    }
}
