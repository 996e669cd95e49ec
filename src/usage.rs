//! Reads what a response says about tokens while its body passes, split anywhere and possibly compressed.

mod decoding;
mod json_body;
mod message;
mod report;
mod source;
mod sse;

#[cfg(test)]
mod tests;

use decoding::Decoding;
use json_body::JsonBody;
use message::Findings;
pub use report::{Attribute, ExpressionError};
pub use source::UsageSource;
use sse::EventStream;

/// Tokens of one response, as the engine counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt: u64,
    /// Tokens generated, over all choices.
    pub completion: u64,
    /// Prompt tokens found in the engine's cache, where the engine tells.
    pub cached: Option<u64>,
}

/// What to pass on in place of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Forward {
    /// The chunk as it is.
    Unchanged,
    /// These bytes, possibly none. Only while usage is withheld.
    Replaced(Vec<u8>),
}

/// Reads a response body chunk by chunk: server-sent events, or one JSON document.
///
/// Memory is bounded: an event of more than 1 MiB is not read, of a JSON document of more than 1 MiB only the last
/// 512 KiB are searched for `"usage"`. A compressed body is decoded aside while its bytes pass untouched, up to 256 MiB of
/// decoded bytes.
pub struct Scanner {
    bytes: u64,
    decoding: Decoding,
}

/// A plain body on its way through.
#[derive(Default)]
struct Body {
    findings: Findings,
    format: Format,
}

#[derive(Default)]
enum Format {
    /// No content type: the first byte tells.
    Untold {
        withhold: bool,
    },
    Events(EventStream),
    Json(JsonBody),
    /// Audio and other bodies that carry no usage.
    #[default]
    Opaque,
}

impl std::fmt::Debug for Scanner {
    /// Response text stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scanner")
            .field("events", &self.events())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Scanner {
    /// A scanner for one response, from its headers.
    ///
    /// With `withhold_usage` the event that was added on our own behalf (`choices` empty, `usage` not null) is taken out
    /// of what is forwarded. That cannot be done in a compressed body, which always passes as it is.
    pub fn new(content_type: Option<&str>, content_encoding: Option<&str>, withhold_usage: bool) -> Scanner {
        let encoded = content_encoding.is_some_and(|value| {
            let value = value.trim();
            !value.is_empty() && !value.eq_ignore_ascii_case("identity")
        });
        let body = Body {
            findings: Findings::default(),
            format: Format::from_content_type(content_type, withhold_usage && !encoded),
        };
        Scanner { bytes: 0, decoding: Decoding::new(content_encoding, body) }
    }

    /// Reads the next chunk and tells what to pass on.
    pub fn push(&mut self, chunk: &[u8]) -> Forward {
        self.bytes += chunk.len() as u64;
        self.decoding.push(chunk)
    }

    /// Ends the body: reads what is left, and gives the bytes that were still held back.
    pub fn finish(&mut self) -> Vec<u8> {
        self.decoding.finish()
    }

    /// The last usage seen; of a JSON document and of compressed bodies complete only after [`Scanner::finish`].
    pub fn usage(&self) -> Option<Usage> {
        self.decoding.body().findings.usage()
    }

    /// Whether the body reported an error under its good status.
    pub fn saw_error(&self) -> bool {
        self.decoding.body().findings.error
    }

    /// Whether the stream came to its proper end: `[DONE]`, `message_stop`, or a finished response.
    pub fn saw_done(&self) -> bool {
        self.decoding.body().findings.done
    }

    /// Events with data so far, `[DONE]` left out: about one per token.
    pub fn events(&self) -> u64 {
        self.decoding.body().findings.events
    }

    /// Events that were too long to be read.
    pub fn skipped_events(&self) -> u64 {
        self.decoding.body().findings.skipped_events
    }

    /// Bytes that arrived, as encoded on the wire.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Format {
    fn from_content_type(content_type: Option<&str>, withhold: bool) -> Format {
        let Some(content_type) = content_type else { return Format::Untold { withhold } };
        let media_type = content_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        match media_type.as_str() {
            "" => Format::Untold { withhold },
            "text/event-stream" => Format::Events(EventStream::new(withhold)),
            json if json == "application/json" || json.ends_with("+json") => {
                Format::Json(JsonBody::default())
            }
            _ => Format::Opaque,
        }
    }
}

impl Body {
    fn push(&mut self, chunk: &[u8]) -> Forward {
        if let Format::Untold { withhold } = self.format
            && let Some(first) = chunk.first()
        {
            self.format = match first {
                b'{' | b'[' => Format::Json(JsonBody::default()),
                _ => Format::Events(EventStream::new(withhold)),
            };
        }
        match &mut self.format {
            Format::Events(events) => return events.push(chunk, &mut self.findings),
            Format::Json(json) => json.push(chunk),
            Format::Untold { .. } | Format::Opaque => {}
        }
        Forward::Unchanged
    }

    fn finish(&mut self) -> Vec<u8> {
        match &mut self.format {
            Format::Events(events) => return events.finish(&mut self.findings),
            Format::Json(json) => json.finish(&mut self.findings),
            Format::Untold { .. } | Format::Opaque => {}
        }
        Vec::new()
    }
}
