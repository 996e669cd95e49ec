//! Resources from a folder of YAML files, kept at their last good version while a file is wrong.

mod watch;

pub use watch::{Timing, Watch};

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::document::{About, Place, Problem, Problems, Severity};
use crate::resources::lower::{Lowered, lower, lower_objects};

/// Bytes from which a file is taken for a mistake.
pub const MAX_FILE_BYTES: u64 = 8 << 20;

/// The files of a folder.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Path and text, in the order of names.
    pub files: Vec<File>,
    /// Files that are there and could not be read.
    pub problems: Vec<Problem>,
}

/// Reads every `*.yaml` and `*.yml` of a folder: not its subfolders, not hidden files, through symbolic links, as mounted
/// ConfigMaps have them. An error means that the folder itself cannot be listed.
pub fn load(dir: &Path) -> io::Result<Loaded> {
    let mut loaded = Loaded::default();
    for path in documents(dir)? {
        match text_of(&path) {
            Ok(text) => loaded.files.push((path, text)),
            Err(why) => {
                let mut problems = Problems::new(&path, "".into());
                problems.error(Place::START, why, None);
                loaded.problems.append(&mut problems.found);
            }
        }
    }
    Ok(loaded)
}

/// Paths of the files that count, in the order of names.
fn documents(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        let yaml = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        if yaml && !hidden && !path.is_dir() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The text of a file, or why it is none.
pub fn text_of(path: &Path) -> Result<Arc<str>, String> {
    let cannot = |error: io::Error| format!("cannot be read: {error}");
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(cannot)?;
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        return Err(format!("is larger than {} MiB", MAX_FILE_BYTES >> 20));
    }
    String::from_utf8(bytes)
        .map(Arc::from)
        .map_err(|error| format!("is not UTF-8: see byte {}", error.utf8_error().valid_up_to()))
}

/// Reads resources again and again, and remembers each file as it was when it last had no errors.
#[derive(Debug)]
pub struct Resources {
    good: BTreeMap<PathBuf, Arc<str>>,
    lower: fn(&[File]) -> Lowered,
    are_files: bool,
}

/// Path and text.
type File = (PathBuf, Arc<str>);

impl Default for Resources {
    fn default() -> Self {
        Self { good: BTreeMap::new(), lower: lower::<PathBuf>, are_files: true }
    }
}

impl Resources {
    /// For what an API server holds, each object a file of its own.
    pub fn of_objects() -> Self {
        Self { good: BTreeMap::new(), lower: lower_objects::<PathBuf>, are_files: false }
    }

    /// Whether a problem makes a version that is not served. Files that belong together stay together; objects come one by
    /// one, and one that names another which is not there yet is served but for that.
    fn counts(&self, problem: &Problem) -> bool {
        self.are_files || problem.about != About::Reference
    }

    /// What the files mean now. A file with errors counts as it last was without any; if it never was, its wrong documents
    /// are left out. The problems are those of the files as they are.
    pub fn reload(&mut self, loaded: Loaded) -> Lowered {
        let Loaded { files, problems: unreadable } = loaded;
        let mut lowered = (self.lower)(&files);
        let wrong = |file: &Path| {
            let mut errors = lowered.problems.iter().filter(|problem| problem.severity == Severity::Error);
            errors.any(|problem| problem.file == file && self.counts(problem))
        };
        let mut served = files.clone();
        let mut replaced = false;
        for (file, text) in &mut served {
            if wrong(file)
                && let Some(good) = self.good.get(file)
                && good != text
            {
                *text = Arc::clone(good);
                replaced = true;
            }
        }
        for problem in &unreadable {
            if let Some(good) = self.good.get(&problem.file) {
                served.push((problem.file.clone(), Arc::clone(good)));
                replaced = true;
            }
        }
        served.sort_by(|(a, _), (b, _)| a.cmp(b));
        let mut good: BTreeMap<PathBuf, Arc<str>> =
            files.into_iter().filter(|(file, _)| !wrong(file)).collect();
        for (file, text) in &served {
            if let Some(before) = self.good.get(file)
                && before == text
            {
                good.entry(file.clone()).or_insert_with(|| Arc::clone(text));
            }
        }
        self.good = good;
        if replaced {
            let instead = (self.lower)(&served);
            lowered.world = instead.world;
            lowered.dump = instead.dump;
        }
        lowered.problems.extend(unreadable);
        lowered.problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
        lowered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(name: &str, address: &str) -> String {
        format!(
            "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: {name}}}\nspec: {{address: '{address}'}}\n"
        )
    }

    fn server(name: &str) -> String {
        format!(
            "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {{name: {name}}}\n\
             spec: {{model: m, inferenceEngine: vLLM, workloadSelector: {{matchLabels: {{app: x}}}}, workloadPort: {{port: 8000}}}}\n"
        )
    }

    fn route(name: &str, server: &str) -> String {
        format!(
            "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\nmetadata: {{name: {name}}}\n\
             spec: {{modelName: {name}, rules: [{{name: r, targetModels: [{{modelServerName: {server}}}]}}]}}\n"
        )
    }

    fn set(files: &[(&str, &str)]) -> Loaded {
        let files = files.iter().map(|(file, text)| (PathBuf::from(file), Arc::from(*text))).collect();
        Loaded { files, problems: Vec::new() }
    }

    fn addresses(lowered: &Lowered) -> Vec<String> {
        lowered.world.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
    }

    #[test]
    fn a_wrong_file_keeps_its_last_good_version_and_the_others_move_on() {
        let mut resources = Resources::default();
        let (a, b) = (endpoint("a", "10.0.0.1:1"), endpoint("b", "10.0.0.2:1"));
        assert!(!resources.reload(set(&[("a.yaml", &a), ("b.yaml", &b)])).has_errors());
        let (wrong, moved) = (endpoint("a", "nowhere"), endpoint("b", "10.0.0.2:2"));
        for _ in 0..2 {
            let lowered = resources.reload(set(&[("a.yaml", &wrong), ("b.yaml", &moved)]));
            assert_eq!(addresses(&lowered), ["10.0.0.1:1", "10.0.0.2:2"]);
            assert_eq!(lowered.problems.len(), 1);
            assert_eq!((lowered.problems[0].line, lowered.problems[0].column), (4, 17));
            assert_eq!(lowered.dump.len(), 2);
        }
        let lowered = resources.reload(set(&[("a.yaml", "a: [\n"), ("b.yaml", &moved)]));
        assert_eq!(
            addresses(&lowered),
            ["10.0.0.1:1", "10.0.0.2:2"],
            "nor does a broken syntax lose anything"
        );
        let lowered = resources.reload(set(&[("b.yaml", &moved)]));
        assert_eq!(addresses(&lowered), ["10.0.0.2:2"], "a file that is gone is gone");
        let lowered = resources.reload(set(&[("a.yaml", &wrong), ("b.yaml", &moved)]));
        assert_eq!(addresses(&lowered), ["10.0.0.2:2"], "and is not remembered");
    }

    #[test]
    fn at_first_a_wrong_document_is_left_out_and_the_rest_of_its_file_is_served() {
        let text = format!("{}---\n{}", endpoint("a", "nowhere"), endpoint("b", "10.0.0.2:1"));
        let lowered = Resources::default().reload(set(&[("a.yaml", &text)]));
        assert!(lowered.has_errors());
        assert_eq!(addresses(&lowered), ["10.0.0.2:1"]);
    }

    /// A route that follows a server to its new name must not be served with a server that could not be renamed.
    #[test]
    fn files_that_belong_together_stay_together() {
        let mut resources = Resources::default();
        let (old_server, old_route) = (server("old"), route("m", "old"));
        resources.reload(set(&[("route.yaml", &old_route), ("server.yaml", &old_server)]));
        let broken = server("new").replace("spec: {", "spec: {nonsense: 1, ");
        let lowered = resources.reload(set(&[("route.yaml", &route("m", "new")), ("server.yaml", &broken)]));
        assert!(lowered.problems.iter().any(|p| p.file == Path::new("route.yaml")), "{:?}", lowered.problems);
        assert_eq!(lowered.world.pools[0].name.object.name.as_ref(), "old");
        assert_eq!(lowered.world.routes[0].rules[0].targets.len(), 1);
        let lowered =
            resources.reload(set(&[("route.yaml", &route("m", "new")), ("server.yaml", &server("new"))]));
        assert!(!lowered.has_errors());
        assert_eq!(lowered.world.pools[0].name.object.name.as_ref(), "new");
    }

    #[test]
    fn a_file_that_cannot_be_read_any_more_keeps_its_last_good_version() {
        let mut resources = Resources::default();
        resources.reload(set(&[("a.yaml", &endpoint("a", "10.0.0.1:1"))]));
        let mut problems = Problems::new(Path::new("a.yaml"), "".into());
        problems.error(Place::START, "is not UTF-8", None);
        for _ in 0..2 {
            let unreadable = Loaded { files: Vec::new(), problems: problems.found.clone() };
            let lowered = resources.reload(unreadable);
            assert_eq!(addresses(&lowered), ["10.0.0.1:1"]);
            assert!(lowered.has_errors());
        }
    }

    #[test]
    fn a_folder_is_read_in_order_without_what_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("b.yml"), "b: 1").unwrap();
        fs::write(at("..data.yaml"), "hidden").unwrap();
        fs::write(at("c.json"), "{}").unwrap();
        fs::create_dir(at("d.yaml")).unwrap();
        fs::write(at("latin.yaml"), b"caf\xe9").unwrap();
        fs::write(at("target"), "a: 1").unwrap();
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(at("target"), at("a.yaml")).unwrap();
            std::os::unix::fs::symlink(at("nothing"), at("dangling.yaml")).unwrap();
        }
        let big = fs::File::create(at("big.yaml")).unwrap();
        big.set_len(MAX_FILE_BYTES + 1).unwrap();
        let loaded = load(dir.path()).unwrap();
        let names = |paths: Vec<&PathBuf>| -> Vec<String> {
            paths.iter().map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect()
        };
        assert_eq!(names(loaded.files.iter().map(|(path, _)| path).collect()), ["a.yaml", "b.yml"]);
        assert_eq!(&*loaded.files[0].1, "a: 1");
        let problems = names(loaded.problems.iter().map(|problem| &problem.file).collect());
        assert_eq!(problems, ["big.yaml", "dangling.yaml", "latin.yaml"]);
        assert_eq!(loaded.problems[0].message, "is larger than 8 MiB");
        assert_eq!(loaded.problems[2].message, "is not UTF-8: see byte 3");
        assert!(load(&at("missing")).is_err());
    }
}
