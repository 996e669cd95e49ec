//! What is wrong with a document: where, why, and what to do, printed with a caret.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use super::node::Place;

/// How bad a problem is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It works, but not as written.
    Warning,
    /// It cannot be used.
    Error,
}

/// What a problem is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum About {
    /// What the document says.
    #[default]
    Content,
    /// Something it names that is not there.
    Reference,
    /// Another document that says the same.
    Conflict,
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Problem {
    /// The file, or `--config-text`.
    pub file: PathBuf,
    /// Line from 1.
    pub line: u32,
    /// Column from 1.
    pub column: u32,
    /// How bad.
    pub severity: Severity,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub advice: Option<String>,
    /// What it is about.
    #[serde(skip)]
    pub about: About,
    /// The line of the file.
    #[serde(skip)]
    pub source: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = if self.severity == Severity::Error { "error" } else { "warning" };
        let Self { file, line, column, message, .. } = self;
        writeln!(f, "{}:{line}:{column}: {severity}: {message}", file.display())?;
        if !self.source.is_empty() {
            writeln!(f, "  | {}", self.source)?;
            writeln!(f, "  | {:>width$}", "^", width = *column as usize)?;
        }
        match &self.advice {
            Some(advice) => writeln!(f, "  = {advice}"),
            None => Ok(()),
        }
    }
}

/// The problems of one file, while it is read.
#[derive(Debug)]
pub struct Problems {
    file: PathBuf,
    text: Arc<str>,
    /// All found so far.
    pub found: Vec<Problem>,
}

impl Problems {
    /// No problems yet with `text`, which `file` holds.
    pub fn new(file: &Path, text: Arc<str>) -> Self {
        Self { file: file.to_owned(), text, found: Vec::new() }
    }

    /// The text of the file.
    pub fn text(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// Adds an error.
    pub fn error(&mut self, place: Place, message: impl Into<String>, advice: Option<String>) {
        self.push(Severity::Error, place, message.into(), advice);
    }

    /// Adds a warning.
    pub fn warning(&mut self, place: Place, message: impl Into<String>, advice: Option<String>) {
        self.push(Severity::Warning, place, message.into(), advice);
    }

    /// Says what the newest problem is about.
    pub fn newest_is_about(&mut self, about: About) {
        if let Some(newest) = self.found.last_mut() {
            newest.about = about;
        }
    }

    fn push(&mut self, severity: Severity, place: Place, message: String, advice: Option<String>) {
        let source = self.text.lines().nth((place.line as usize).saturating_sub(1)).unwrap_or_default();
        self.found.push(Problem {
            file: self.file.clone(),
            line: place.line.max(1),
            column: place.column.max(1),
            severity,
            message,
            advice,
            about: About::default(),
            source: source.replace('\t', " "),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_stands_under_the_place() {
        let mut problems = Problems::new(Path::new("a.yaml"), "a: 1\nbeta: x\n".into());
        problems.error(Place { line: 2, column: 7 }, "not a number", Some("write 1".into()));
        assert_eq!(
            problems.found[0].to_string(),
            "a.yaml:2:7: error: not a number\n  | beta: x\n  |       ^\n  = write 1\n"
        );
    }
}
