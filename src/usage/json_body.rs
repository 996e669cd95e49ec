//! Keeps a bounded copy of a JSON document until its end, where its usage stands.

use memchr::memmem;

use super::message::{Findings, counts_at_start};

/// Longest document that is read as a whole.
pub(super) const WHOLE_MAX: usize = 1 << 20;

/// How much of the end of a longer one is searched.
pub(super) const TAIL: usize = WHOLE_MAX / 2;

#[derive(Default)]
pub(super) struct JsonBody {
    copy: Vec<u8>,
    /// The beginning of the document is gone.
    cut: bool,
}

impl JsonBody {
    pub(super) fn push(&mut self, chunk: &[u8]) {
        // In steps, so that a huge chunk makes no huge copy.
        for part in chunk.chunks(TAIL) {
            if self.copy.len() + part.len() > WHOLE_MAX {
                self.cut = true;
                self.copy.drain(..self.copy.len().saturating_sub(TAIL));
            }
            self.copy.extend_from_slice(part);
        }
    }

    pub(super) fn finish(&mut self, findings: &mut Findings) {
        let copy = std::mem::take(&mut self.copy);
        if !self.cut {
            findings.read(&copy);
            return;
        }
        // The last member of that name that is an object; quotes in strings are escaped, so no text can feign it.
        let tail = &copy[copy.len().saturating_sub(TAIL)..];
        let counts = memmem::rfind_iter(tail, b"\"usage\"").find_map(|at| {
            let value = tail[at + b"\"usage\"".len()..].trim_ascii_start().strip_prefix(b":")?;
            counts_at_start(value)
        });
        if let Some(counts) = counts {
            findings.note(counts);
        }
    }
}
