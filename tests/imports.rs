//! The direction of imports: what decides knows nothing of how it is asked.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders and files that must stay free of gRPC, HTTP and clusters, and of everything above them.
const PURE: [&str; 16] = [
    "admission",
    "decision",
    "disagg",
    "document",
    "index",
    "metrics",
    "plugins",
    "prompt",
    "refusal",
    "request",
    "route",
    "schedule",
    "session",
    "snapshot",
    "state",
    "usage",
];
const FOREIGN: [&str; 9] =
    ["tonic", "hyper", "kube", "redis", "axum", "envoy_types", "hyper_util", "prost", "anyhow"];
const ABOVE: [&str; 9] = ["extproc", "admin", "app", "args", "feed", "settle", "decide", "command", "zmtp"];

fn sources(path: &Path, into: &mut Vec<PathBuf>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            sources(&entry.unwrap().path(), into);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        into.push(path.to_owned());
    }
}

#[test]
fn what_decides_knows_nothing_of_how_it_is_asked() {
    let src = Path::new("src");
    let mut files = Vec::new();
    for name in PURE {
        let before = files.len();
        sources(&src.join(name), &mut files);
        let file = src.join(name).with_extension("rs");
        if file.exists() {
            files.push(file);
        }
        assert!(files.len() > before, "{name} does not exist: correct the list");
    }
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for line in text
            .lines()
            .map(str::trim_start)
            .filter(|line| line.starts_with("use ") || line.starts_with("pub use "))
        {
            let path = line.trim_start_matches("pub ").trim_start_matches("use ");
            let first = path.split("::").next().unwrap_or_default();
            assert!(!FOREIGN.contains(&first), "{}: {line}", file.display());
            if let Some(module) = path.strip_prefix("crate::").and_then(|rest| rest.split([':', ';']).next())
            {
                assert!(!ABOVE.contains(&module), "{}: {line}", file.display());
            }
        }
    }
}
