//! Helm, and the chart as it renders with some values.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use pilotfish::document::Node;
use serde_json::Value;
use tempfile::TempDir;

/// The chart.
pub const CHART: &str = "charts/pilotfish";

/// What an installation consists of.
#[derive(Debug)]
pub struct Installation(pub Vec<Value>);

impl Installation {
    /// Renders the release `r` in a namespace with values as YAML, or says why Helm refuses them.
    pub fn render(namespace: &str, values: &str) -> Result<Self, String> {
        let text = helm(&["template", "r", CHART, "--namespace", namespace], values)?;
        Ok(Self::of(&text))
    }

    /// What Helm has rendered.
    pub fn of(text: &str) -> Self {
        let documents = Node::parse(text).unwrap();
        let objects = documents.iter().map(Node::to_json);
        Self(objects.filter(|object| !object.is_null()).collect())
    }

    /// Its objects of a kind.
    pub fn all(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |object| object["kind"] == kind)
    }

    /// Its only object of a kind.
    pub fn only(&self, kind: &str) -> &Value {
        let found: Vec<&Value> = self.all(kind).collect();
        assert_eq!(found.len(), 1, "objects of kind {kind}");
        found[0]
    }

    /// The pods it makes.
    pub fn pod(&self) -> &Value {
        &self.only("Deployment")["spec"]["template"]
    }

    /// The picker's container.
    pub fn picker(&self) -> &Value {
        &self.pod()["spec"]["containers"][0]
    }

    /// The arguments of the picker.
    pub fn args(&self) -> Vec<String> {
        strings(&self.picker()["args"])
    }

    /// Envoy's container, if there is one.
    pub fn envoy(&self) -> Option<&Value> {
        self.pod()["spec"]["initContainers"].get(0)
    }

    /// Envoy's configuration, if there is one.
    pub fn envoy_config(&self) -> Option<&str> {
        self.all("ConfigMap").find_map(|map| map["data"]["envoy.yaml"].as_str())
    }
}

/// A list of strings.
pub fn strings(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|member| member.as_str().unwrap().to_owned()).collect()
}

/// Runs Helm with values as YAML: its output, or what it complains of.
pub fn helm(args: &[&str], values: &str) -> Result<String, String> {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(binary());
    command.args(args).args(["--values", "-"]);
    for home in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(home, dir.path());
    }
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(values.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    let said = |bytes| String::from_utf8(bytes).unwrap();
    let output = said(done.stdout);
    if done.status.success() { Ok(output) } else { Err(output + &said(done.stderr)) }
}

/// The pinned Helm: of `make test`, else built by the script.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("PILOTFISH_HELM").filter(|path| !path.is_empty()) {
            return path.into();
        }
        let built = Command::new("scripts/helm.sh").stderr(Stdio::inherit()).output().unwrap();
        assert!(built.status.success(), "scripts/helm.sh built no Helm");
        String::from_utf8(built.stdout).unwrap().trim().into()
    })
}
