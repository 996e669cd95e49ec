//! Why a request body cannot be routed, in words for the client.

use std::fmt;

/// A place in the body: byte offset from 0, line and column from 1 (columns count bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Bytes before the place.
    pub offset: usize,
    /// Line, from 1.
    pub line: usize,
    /// Column in bytes, from 1.
    pub column: usize,
}

impl Position {
    /// The position of the byte at `offset`.
    pub(super) fn of(body: &[u8], offset: usize) -> Position {
        let before = &body[..offset.min(body.len())];
        let start_of_line = memchr::memrchr(b'\n', before).map_or(0, |newline| newline + 1);
        Position {
            offset: before.len(),
            line: memchr::memchr_iter(b'\n', before).count() + 1,
            column: before.len() - start_of_line + 1,
        }
    }

    /// The position that serde_json gives as line (from 1) and column (bytes read in that line) of `text`, which
    /// starts `skipped` bytes into the body.
    pub(super) fn of_json_error(text: &[u8], skipped: usize, error: &serde_json::Error) -> Position {
        let start_of_line = match error.line() {
            0 | 1 => 0,
            line => memchr::memchr_iter(b'\n', text).nth(line - 2).map_or(text.len(), |newline| newline + 1),
        };
        // The column counts the offending byte itself, if there is one.
        let offset = (start_of_line + error.column()).saturating_sub(usize::from(!error.is_eof()));
        let in_line = if error.line() <= 1 { skipped } else { 0 };
        Position {
            offset: skipped + offset.min(text.len()),
            line: error.line().max(1),
            column: (error.column() + in_line).max(1),
        }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} (line {}, column {})", self.offset, self.line, self.column)
    }
}

/// What is wrong with `model`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelProblem {
    /// A number, a list, null and so on.
    NotAString,
    /// Empty, or nothing but white space.
    Blank,
}

/// Why a request body cannot be routed. The text is made for the client: it names the place and the remedy, and never
/// quotes the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// Not JSON, or something after the JSON value.
    #[error(
        "the request body is not valid JSON at {at}; send one JSON object, UTF-8 encoded, and nothing after it"
    )]
    NotJson {
        /// Where reading stopped.
        at: Position,
    },
    /// JSON that ends too early.
    #[error(
        "the request body ends before its JSON object does, at {at}; send it whole, check content-length and proxies"
    )]
    CutOff {
        /// The end of the body.
        at: Position,
    },
    /// JSON, but not an object.
    #[error(
        "the request body starts with a JSON value that is not an object at {at}; send an object with a `model` member"
    )]
    NotAnObject {
        /// Where the value starts.
        at: Position,
    },
    /// `model` is there but names nothing.
    #[error("`model` at {at} {}; name the model as a non-empty JSON string", match problem {
        ModelProblem::NotAString => "is not a string",
        ModelProblem::Blank => "is blank",
    })]
    Model {
        /// Where the value stands.
        at: Position,
        /// What is wrong with it.
        problem: ModelProblem,
    },
    /// Nested deeper than any request needs.
    #[error("the request body is nested too deeply at {at}; at most 128 levels are read")]
    TooDeep {
        /// Where the limit was passed.
        at: Position,
    },
    /// The form cannot be read.
    #[error("the multipart form cannot be read: {problem}")]
    Multipart {
        /// What is wrong with it, and the remedy.
        problem: &'static str,
    },
    /// Positions are 32 bit wide.
    #[error(
        "the request body has {bytes} bytes; bodies of 4 GiB and more cannot be read, send a shorter one"
    )]
    TooLarge {
        /// Length of the body.
        bytes: usize,
    },
}
