//! Splits a stream of server-sent events, wherever its chunks end, and takes the usage event out on request.

use memchr::memchr2;

use super::Forward;
use super::message::Findings;

/// Longest event that is read.
pub(super) const EVENT_MAX: usize = 1 << 20;

/// Most bytes of an unfinished event that are held back while usage is withheld; a usage event has some hundred.
pub(super) const HOLD_MAX: usize = 64 << 10;

pub(super) struct EventStream {
    withhold: bool,
    /// The unfinished event, as far as it arrived in earlier chunks.
    partial: Vec<u8>,
    /// The unfinished event was longer than [`HOLD_MAX`] and has been forwarded as far as it came.
    released: bool,
    /// The unfinished event is longer than [`EVENT_MAX`] and is not kept.
    too_long: bool,
    /// The current line has bytes.
    in_line: bool,
    /// The last byte was CR: a LF that follows belongs to it.
    after_cr: bool,
    /// The last finished event was taken out.
    removed_last: bool,
    /// Joins the data lines of events that have several.
    joined: Vec<u8>,
}

/// What is forwarded of one chunk: copied only once it differs from the chunk.
struct Output<'c> {
    chunk: &'c [u8],
    done: Vec<u8>,
    /// Bytes of the chunk before this place are dealt with.
    from: usize,
    changed: bool,
}

impl Output<'_> {
    /// Forwards bytes of earlier chunks; they precede everything of this one.
    fn prepend(&mut self, held: &[u8]) {
        self.done.extend_from_slice(held);
        self.changed |= !held.is_empty();
    }

    fn leave_out(&mut self, start: usize, end: usize) {
        self.done.extend_from_slice(&self.chunk[self.from..start]);
        self.from = end;
        self.changed = true;
    }

    fn finish(mut self) -> Forward {
        if !self.changed {
            return Forward::Unchanged;
        }
        self.done.extend_from_slice(&self.chunk[self.from..]);
        Forward::Replaced(self.done)
    }
}

impl EventStream {
    pub(super) fn new(withhold: bool) -> EventStream {
        EventStream {
            withhold,
            partial: Vec::new(),
            released: false,
            too_long: false,
            in_line: false,
            after_cr: false,
            removed_last: false,
            joined: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, chunk: &[u8], findings: &mut Findings) -> Forward {
        let mut output = Output { chunk, done: Vec::new(), from: 0, changed: false };
        let mut start = self.line_feed_of_last_chunk(&mut output);
        let mut at = start.max(usize::from(self.after_cr && chunk.first() == Some(&b'\n')));
        if !chunk.is_empty() {
            self.after_cr = false;
        }
        while let Some(found) = memchr2(b'\n', b'\r', &chunk[at..]) {
            let blank = found == 0 && !self.in_line;
            self.in_line = false;
            at += found + 1;
            if chunk[at - 1] == b'\r' {
                match chunk.get(at) {
                    Some(b'\n') => at += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            if blank {
                self.end_event(&chunk[start..at], start, findings, &mut output);
                start = at;
            }
        }
        self.in_line |= at < chunk.len();
        self.keep_unfinished(start, &mut output);
        output.finish()
    }

    /// An event whose blank line was a CR at the end of the last chunk shares the LF that follows: it is gone or
    /// forwarded with the event. Gives the start of the next event.
    fn line_feed_of_last_chunk(&mut self, output: &mut Output<'_>) -> usize {
        let between_events = self.partial.is_empty() && !self.too_long;
        if !self.after_cr || !between_events || output.chunk.first() != Some(&b'\n') {
            return 0;
        }
        if self.removed_last {
            output.leave_out(0, 1);
        }
        1
    }

    /// Ends an event whose last bytes are `bytes`, from `start` in the chunk; the others are in `partial`.
    fn end_event(&mut self, bytes: &[u8], start: usize, findings: &mut Findings, output: &mut Output<'_>) {
        let held = self.partial.len();
        let remove = if self.too_long {
            findings.events += 1;
            findings.skipped_events += 1;
            false
        } else if held == 0 {
            self.read(bytes, findings)
        } else {
            self.partial.extend_from_slice(bytes);
            let event = std::mem::take(&mut self.partial);
            let remove = self.read(&event, findings);
            self.partial = event;
            remove
        };
        if self.withhold && !self.released {
            if remove {
                output.leave_out(start, start + bytes.len());
            } else {
                output.prepend(&self.partial[..held]);
            }
        }
        self.removed_last = remove && self.withhold && !self.released;
        self.partial.clear();
        self.released = false;
        self.too_long = false;
    }

    fn keep_unfinished(&mut self, start: usize, output: &mut Output<'_>) {
        let rest = &output.chunk[start..];
        if rest.is_empty() || self.too_long {
            return;
        }
        let held = self.partial.len();
        if self.withhold && !self.released {
            if held + rest.len() > HOLD_MAX {
                output.prepend(&self.partial);
                self.released = true;
            } else {
                output.leave_out(start, output.chunk.len());
            }
        }
        if held + rest.len() > EVENT_MAX {
            self.too_long = true;
            self.partial = Vec::new();
        } else {
            self.partial.extend_from_slice(rest);
        }
    }

    /// Reads the event that has no blank line after it, and gives what was held back of it.
    pub(super) fn finish(&mut self, findings: &mut Findings) -> Vec<u8> {
        let event = std::mem::take(&mut self.partial);
        if std::mem::take(&mut self.too_long) {
            findings.events += 1;
            findings.skipped_events += 1;
        }
        let remove = self.read(&event, findings);
        if self.withhold && !self.released && !remove { event } else { Vec::new() }
    }

    /// Reads a whole event. True if it is the usage event, and short enough to be held back in any case.
    fn read(&mut self, event: &[u8], findings: &mut Findings) -> bool {
        // Whether the last LF is here depends on the chunks; the limits must not.
        let length = event.len() - usize::from(event.ends_with(b"\r\n"));
        if length > EVENT_MAX {
            findings.events += 1;
            findings.skipped_events += 1;
            return false;
        }
        let mut data: Option<&[u8]> = None;
        let mut several = false;
        for line in lines(event) {
            let Some(value) = data_of(line) else { continue };
            if let Some(first) = data {
                if !several {
                    several = true;
                    self.joined.clear();
                    self.joined.extend_from_slice(first);
                }
                self.joined.push(b'\n');
                self.joined.extend_from_slice(value);
            } else {
                data = Some(value);
            }
        }
        let Some(data) = data else { return false };
        let data = if several { &self.joined } else { data };
        if data.trim_ascii() == b"[DONE]" {
            findings.done = true;
            return false;
        }
        findings.events += 1;
        findings.read(data) && length <= HOLD_MAX
    }
}

/// The lines of an event that are not empty.
fn lines(event: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = event;
    std::iter::from_fn(move || {
        while !rest.is_empty() {
            let end = memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
            let line = &rest[..end];
            rest = &rest[(end + 1).min(rest.len())..];
            if !line.is_empty() {
                return Some(line);
            }
        }
        None
    })
}

/// The value of a `data` line; comments and other fields have none.
fn data_of(line: &[u8]) -> Option<&[u8]> {
    // A byte order mark may open the stream.
    let line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
    let value = line.strip_prefix(b"data")?;
    if value.is_empty() {
        return Some(value);
    }
    let value = value.strip_prefix(b":")?;
    Some(value.strip_prefix(b" ").unwrap_or(value))
}
