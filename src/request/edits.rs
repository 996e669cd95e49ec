//! Changes to a body as byte ranges and what takes their place: everything else stays as the client sent it.

use std::fmt;
use std::ops::Range;

/// A sorted list of changes to one body, never overlapping. It is the only way in which a body changes.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Edits(Vec<Edit>);

#[derive(Clone, PartialEq, Eq)]
struct Edit {
    range: Range<usize>,
    bytes: Vec<u8>,
}

impl Edits {
    /// No change.
    pub fn new() -> Edits {
        Edits::default()
    }

    /// Puts `bytes` in the place of `range`. Earlier edits that overlap the range are dropped: the last word counts.
    pub fn replace(&mut self, range: Range<usize>, bytes: impl Into<Vec<u8>>) {
        if range.start >= range.end {
            self.insert(range.start, bytes);
            return;
        }
        self.0.retain(|old| old.range.end <= range.start || range.end <= old.range.start);
        let at = self.0.partition_point(|old| (old.range.start, old.range.end) <= (range.start, range.start));
        self.0.insert(at, Edit { range, bytes: bytes.into() });
    }

    /// Puts `bytes` before the byte at `at`, after what was inserted there before. Inside a range that is already
    /// replaced the insertion takes that edit's place, as in [`Edits::replace`].
    pub fn insert(&mut self, at: usize, bytes: impl Into<Vec<u8>>) {
        self.0.retain(|old| at <= old.range.start || old.range.end <= at);
        let index = self.0.partition_point(|old| (old.range.start, old.range.end) <= (at, at));
        self.0.insert(index, Edit { range: at..at, bytes: bytes.into() });
    }

    /// Whether the body stays as it is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many bytes longer (or, below zero, shorter) the body becomes.
    pub fn delta(&self) -> i64 {
        self.0.iter().map(|edit| edit.bytes.len() as i64 - edit.range.len() as i64).sum()
    }

    /// The changed body in one piece. Edits beyond its end take effect at the end.
    pub fn apply(&self, body: &[u8]) -> Vec<u8> {
        let length = (body.len() as i64 + self.delta()).max(0) as usize;
        let mut out = Vec::with_capacity(length);
        let mut done = 0;
        for edit in &self.0 {
            out.extend_from_slice(&body[done..edit.range.start.clamp(done, body.len())]);
            out.extend_from_slice(&edit.bytes);
            done = edit.range.end.clamp(done, body.len());
        }
        out.extend_from_slice(&body[done..]);
        out
    }

    /// The changed body in pieces of at most `max_piece` bytes, from the chunks in which it arrived. Chunks that no
    /// edit touches and that are short enough are moved through without a copy. A piece is never empty, unless
    /// the whole body is: then there is one empty piece.
    pub fn apply_pieces(&self, chunks: Vec<Vec<u8>>, max_piece: usize) -> Vec<Vec<u8>> {
        let mut pieces =
            Pieces { done: Vec::with_capacity(chunks.len() + 1), max: max_piece.max(1), open: Vec::new() };
        let mut edits = self.0.iter().peekable();
        let total = chunks.iter().map(Vec::len).sum::<usize>();
        let mut start = 0;
        // Everything before `skip_to` is deleted or replaced.
        let mut skip_to = 0;
        for chunk in chunks {
            let end = start + chunk.len();
            let touched = skip_to > start || edits.peek().is_some_and(|edit| edit.range.start < end);
            if !touched && chunk.len() <= pieces.max {
                pieces.push_whole(chunk);
                start = end;
                continue;
            }
            let mut at = start.max(skip_to).min(end);
            while let Some(edit) = edits.next_if(|edit| edit.range.start < end) {
                let edit_start = edit.range.start.max(at);
                pieces.extend(&chunk[at - start..edit_start - start]);
                pieces.extend(&edit.bytes);
                skip_to = edit.range.end.max(skip_to);
                at = skip_to.clamp(edit_start, end);
            }
            pieces.extend(&chunk[at - start..]);
            pieces.close();
            start = end;
        }
        debug_assert_eq!(start, total);
        for edit in edits {
            pieces.extend(&edit.bytes);
        }
        pieces.close();
        if pieces.done.is_empty() {
            pieces.done.push(Vec::new());
        }
        pieces.done
    }
}

/// Names positions and lengths only: replacements may hold a client's text.
impl fmt::Debug for Edits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|edit| (&edit.range, edit.bytes.len()))).finish()
    }
}

struct Pieces {
    done: Vec<Vec<u8>>,
    max: usize,
    open: Vec<u8>,
}

impl Pieces {
    fn push_whole(&mut self, chunk: Vec<u8>) {
        self.close();
        if !chunk.is_empty() {
            self.done.push(chunk);
        }
    }

    fn extend(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.max - self.open.len()));
            self.open.extend_from_slice(now);
            bytes = later;
            if self.open.len() == self.max {
                self.close();
            }
        }
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.done.push(std::mem::take(&mut self.open));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Edits;
    use proptest::prelude::*;

    #[test]
    fn edits_apply_in_order_of_position() {
        let mut edits = Edits::new();
        edits.replace(6..11, "there");
        edits.insert(0, "<");
        edits.insert(0, "<");
        edits.insert(6, "[");
        edits.insert(11, "]");
        assert_eq!(edits.apply(b"hello world"), b"<<hello [there]");
        assert_eq!(edits.delta(), 4);
    }

    #[test]
    fn the_last_of_two_overlapping_edits_counts() {
        let mut edits = Edits::new();
        edits.replace(0..5, "a");
        edits.replace(3..8, "b");
        assert_eq!(edits.apply(b"0123456789"), b"012b89");
        edits.replace(3..8, "c");
        assert_eq!(edits.apply(b"0123456789"), b"012c89");
    }

    #[test]
    fn untouched_chunks_are_moved_not_copied() {
        let chunks = vec![b"{\"model\":\"a\",".to_vec(), b"\"prompt\":\"hi\"}".to_vec()];
        let second = chunks[1].as_ptr();
        let mut edits = Edits::new();
        edits.replace(9..12, "\"long-name\"");
        let pieces = edits.apply_pieces(chunks, 1024);
        assert_eq!(pieces.concat(), b"{\"model\":\"long-name\",\"prompt\":\"hi\"}");
        assert_eq!(pieces[1].as_ptr(), second);
    }

    #[test]
    fn an_empty_body_is_one_empty_piece() {
        let mut edits = Edits::new();
        assert_eq!(edits.apply_pieces(vec![], 8), vec![Vec::<u8>::new()]);
        assert_eq!(edits.apply_pieces(vec![vec![], vec![]], 8), vec![Vec::<u8>::new()]);
        edits.insert(0, "x");
        assert_eq!(edits.apply_pieces(vec![], 8), vec![b"x".to_vec()]);
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_whole(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..8),
            edits in prop::collection::vec((0_usize..120, 0_usize..30, prop::collection::vec(any::<u8>(), 0..40)), 0..6),
            max_piece in 1_usize..64,
        ) {
            let body = chunks.concat();
            let mut list = Edits::new();
            for (start, length, bytes) in edits {
                let start = start.min(body.len());
                list.replace(start..(start + length).min(body.len()), bytes);
            }
            let whole = list.apply(&body);
            prop_assert_eq!(whole.len() as i64, body.len() as i64 + list.delta());
            let pieces = list.apply_pieces(chunks, max_piece);
            prop_assert_eq!(pieces.concat(), whole.clone());
            prop_assert!(pieces.iter().all(|piece| piece.len() <= max_piece));
            prop_assert!(pieces.iter().all(|piece| !piece.is_empty()) || (whole.is_empty() && pieces.len() == 1));
        }
    }
}
