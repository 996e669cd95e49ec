//! `pilotfish check`: everything that is wrong with resources and configuration, without serving them.

use std::fmt;
use std::path::Path;

use crate::config::{self, TokenizerSettings};
use crate::document::{Place, Problem, Problems, Severity, nearest};
use crate::feed::file;
use crate::feed::redis::limits::Allowed;
use crate::resources::lower::{Lowered, lower};
use crate::state::ObjectName;

/// What the command line says beside the two paths.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// The pool of requests that no ModelRoute decides.
    pub default_pool: Option<&'a ObjectName>,
    /// Where limits may be counted by replicas together.
    pub stores: Option<&'a Allowed>,
    /// How the configuration is read.
    pub config: config::Options<'a>,
}

/// All that was found.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Problems of the resources, then those of the configuration.
    pub problems: Vec<Problem>,
}

impl Report {
    /// Whether anything is an error; warnings alone are none.
    pub fn has_errors(&self) -> bool {
        self.problems.iter().any(|problem| problem.severity == Severity::Error)
    }

    /// The status the process ends with.
    pub fn exit_code(&self) -> u8 {
        u8::from(self.has_errors())
    }

    /// The problems as a JSON array.
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!(self.problems)
    }
}

/// Every problem as text, with its source line and a caret.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problems.iter().try_for_each(|problem| problem.fmt(f))
    }
}

/// Checks a folder of resources and a configuration file.
pub fn check(resources: Option<&Path>, config: Option<&Path>, options: &Options<'_>) -> Report {
    let mut report = Report::default();
    let (tokenizers, problems) = match config.map(|path| (path, file::text_of(path))) {
        None => Default::default(),
        Some((path, Ok(text))) => {
            let read = config::read(path, text, &options.config, None);
            (read.tokenizers, read.problems)
        }
        Some((path, Err(why))) => (TokenizerSettings::default(), whole(path, why, None)),
    };
    if let Some(dir) = resources {
        report.problems.extend(check_resources(dir, options, &tokenizers));
    }
    report.problems.extend(problems);
    report
}

fn check_resources(dir: &Path, options: &Options<'_>, tokenizers: &TokenizerSettings) -> Vec<Problem> {
    let loaded = match file::load(dir) {
        Ok(loaded) => loaded,
        Err(error) => {
            let advice = Some("name a folder of *.yaml files".to_owned());
            return whole(dir, format!("cannot be read: {error}"), advice);
        }
    };
    let mut lowered = lower(&loaded.files);
    lowered.judge_stores(|at| options.stores.is_some_and(|stores| stores.find(at).is_some()));
    let mut problems = loaded.problems;
    problems.extend(lowered.problems.iter().cloned());
    let unlisted = lowered.tokenizer_urls.iter().filter(|(url, _)| !tokenizers.lists(url));
    problems.extend(unlisted.map(|(_, problem)| problem.clone()));
    problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
    problems.extend(together(dir, &lowered, options.default_pool, problems.is_empty()));
    problems
}

/// What only shows when all documents are known.
fn together(dir: &Path, lowered: &Lowered, default_pool: Option<&ObjectName>, clean: bool) -> Vec<Problem> {
    if lowered.dump.is_empty() {
        let advice = Some("write Endpoint and ModelServer or InferencePool documents into *.yaml".to_owned());
        // Where a document is wrong, it is there.
        return if clean { whole(dir, "no document was found".to_owned(), advice) } else { Vec::new() };
    }
    let pools = &lowered.world.pools;
    match default_pool {
        Some(name) if !pools.iter().any(|pool| pool.name.object == *name) => {
            let known: Vec<String> = pools.iter().map(|pool| pool.name.object.to_string()).collect();
            let advice = nearest(&name.to_string(), known.iter().map(String::as_str))
                .map(|name| format!("did you mean `{name}`?"));
            whole(dir, format!("the default pool {name} does not exist"), advice)
        }
        None if pools.len() > 1 && lowered.world.routes.is_empty() => {
            let message = format!("{} pools and no ModelRoute: nothing says which pool serves", pools.len());
            whole(dir, message, Some("write a ModelRoute, or name one with --default-pool".to_owned()))
        }
        _ => Vec::new(),
    }
}

/// An error of a whole file or folder.
fn whole(path: &Path, message: String, advice: Option<String>) -> Vec<Problem> {
    let mut problems = Problems::new(path, "".into());
    problems.error(Place::START, message, advice);
    problems.found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::fs;

    fn server(name: &str) -> String {
        format!(
            "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {{name: {name}}}\n\
             spec: {{model: m, inferenceEngine: vLLM, workloadSelector: {{matchLabels: {{app: x}}}}, workloadPort: {{port: 8000}}}}\n"
        )
    }

    const ENDPOINT: &str = "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n\
        metadata: {name: e, labels: {app: x}}\nspec: {address: '10.0.0.1:8000'}\n";
    const ROUTE: &str = "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\n\
        metadata: {name: r}\nspec: {modelName: m, rules: [{name: r, targetModels: [{modelServerName: one}]}]}\n";

    fn checked(text: &str, default_pool: Option<&str>) -> (tempfile::TempDir, Report) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("all.yaml"), text).unwrap();
        let name = default_pool.map(|name| ObjectName::new("default", name));
        let options = Options { default_pool: name.as_ref(), ..Options::default() };
        let report = check(Some(dir.path()), None, &options);
        (dir, report)
    }

    #[rstest]
    #[case(&format!("{ENDPOINT}{}", server("one")), None, "")]
    #[case(&format!("{ENDPOINT}{}{}", server("one"), server("two")), None, ":1:1: error: 2 pools and no ModelRoute")]
    #[case(&format!("{ENDPOINT}{}{}", server("one"), server("two")), Some("two"), "")]
    #[case(&format!("{ENDPOINT}{}{}{ROUTE}", server("one"), server("two")), None, "")]
    #[case(&format!("{ENDPOINT}{}", server("one")), Some("onne"), ":1:1: error: the default pool default/onne does not exist\n  = did you mean `default/one`?")]
    #[case("# nothing yet\n", None, ":1:1: error: no document was found")]
    #[case("kind: Secret\n", None, "all.yaml:1:7: warning: kind `Secret` is not read")]
    #[case(&ENDPOINT.replace("8000", "x"), None, "all.yaml:5:17: error: `10.0.0.1:x` is not an address")]
    fn resources_are_checked_alone_and_together(
        #[case] text: &str,
        #[case] default_pool: Option<&str>,
        #[case] expected: &str,
    ) {
        let (dir, report) = checked(text, default_pool);
        let shown = report.to_string();
        let start = if expected.starts_with(':') { dir.path().display().to_string() } else { String::new() };
        assert!(shown.contains(&format!("{start}{expected}")), "{shown}");
        assert_eq!(report.problems.is_empty(), expected.is_empty(), "{shown}");
        assert_eq!(report.exit_code() == 1, expected.contains("error"), "{shown}");
    }

    #[test]
    fn a_tokenizer_is_taken_from_a_model_server_and_a_url_only_if_it_is_listed() {
        let annotated = |source: &str| {
            let name = format!("{{name: one, annotations: {{pilotfish.dev/tokenizer: '{source}'}}}}");
            format!("{ENDPOINT}{}", server("one").replace("{name: one}", &name))
        };
        for (source, problem) in [
            ("qwen3", ""),
            ("engine", ""),
            ("http://r:1", "all.yaml:9:62: error: prompts are not sent to `http://r:1`"),
            ("/etc/x", "all.yaml:9:62: error: `/etc/x` does not lie below --tokenizer-dir"),
        ] {
            let (_dir, report) = checked(&annotated(source), None);
            let shown = report.to_string();
            assert!(shown.contains(problem) && report.has_errors() != problem.is_empty(), "{shown}");
        }
        let (dir, _) = checked(&annotated("http://r:1"), None);
        let config = dir.path().join("c.config");
        let text = "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\ntokenizers: [{model: m, source: 'http://r:1'}]\n";
        fs::write(&config, text).unwrap();
        let report = check(Some(dir.path()), Some(&config), &Options::default());
        assert!(report.problems.is_empty(), "{report}");
        let pod = ENDPOINT.replace("labels", "annotations: {pilotfish.dev/tokenizer: engine}, labels");
        let (_dir, report) = checked(&format!("{pod}{}", server("one")), None);
        assert!(
            report.to_string().contains("pilotfish.dev/tokenizer is not taken from endpoints"),
            "{report}"
        );
        assert!(report.has_errors());
    }

    #[test]
    fn a_configuration_is_checked_and_shown_in_both_forms() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("scheduler.yaml");
        fs::write(&file, "scheduler:\n  plugins:\n    Score: {enabled: [{name: gpu-usag, weight: 1}]}\n")
            .unwrap();
        let strict = check(None, Some(&file), &Options::default());
        assert_eq!(strict.exit_code(), 1);
        let shown = strict.to_string();
        let caret = format!("  | {:>30}\n", "^");
        assert!(shown.contains("scheduler.yaml:3:30: error: unknown plugin type `gpu-usag`"), "{shown}");
        assert!(shown.contains(&caret), "{shown}");
        let json = strict.json();
        assert_eq!(json[0]["severity"], "error");
        assert_eq!((json[0]["line"].as_u64(), json[0]["column"].as_u64()), (Some(3), Some(30)));
        let picker = "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: encode-filter}]\n";
        fs::write(&file, picker).unwrap();
        assert_eq!(check(None, Some(&file), &Options::default()).exit_code(), 1);
        let mut lenient = Options::default();
        lenient.config.allow_unsupported = true;
        let report = check(None, Some(&file), &lenient);
        assert_eq!((report.exit_code(), report.problems.is_empty()), (0, false));
    }

    #[test]
    fn what_cannot_be_read_is_a_problem_of_its_path() {
        let missing = Path::new("/nonexistent/here");
        let report = check(Some(missing), Some(missing), &Options::default());
        assert_eq!(report.problems.len(), 2);
        assert!(report.problems.iter().all(|p| p.file == missing && p.message.starts_with("cannot be read")));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a.yaml"), b"\xff").unwrap();
        let report = check(Some(dir.path()), None, &Options::default());
        assert_eq!(report.problems.len(), 1, "{report}");
    }
}
