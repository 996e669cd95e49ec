//! What engines hash into a block beside its tokens, as they publish it: one list a block, its entries without tags.
//!
//! vLLM writes them in the order adapter, media (each `[id, offset]`), `cache_salt` (in the first block of a chain only),
//! digests of prompt embeddings.

use super::cursor::{Bad, Cursor};
use crate::prompt::blocks::digest;

/// The lists of one event.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExtraKeys<'a> {
    lists: Option<(usize, Cursor<'a>)>,
}

impl PartialEq for ExtraKeys<'_> {
    fn eq(&self, other: &Self) -> bool {
        let mut both = (*self, *other);
        let len = |keys: &Self| keys.lists.map_or(0, |(n, _)| n);
        len(self) == len(other) && (0..len(self)).all(|_| both.0.next(None, true) == both.1.next(None, true))
    }
}

/// What one block holds beside tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Extra<'a> {
    /// The tenant's `cache_salt`.
    pub salt: Option<&'a str>,
    /// Digest of the rest, 0 for nothing.
    pub further: u64,
}

impl<'a> ExtraKeys<'a> {
    pub(super) fn read(cursor: &mut Cursor<'a>) -> Result<Self, Bad> {
        let raw = cursor.raw()?;
        let mut lists = Cursor::new(raw);
        Ok(Self { lists: lists.array_if()?.map(|n| (n, lists)) })
    }

    /// What the next block holds. `adapter` is the event's: the first entry repeats it. Only the first block of a chain
    /// (`is_first`) has a salt.
    pub fn next(&mut self, adapter: Option<&str>, is_first: bool) -> Extra<'a> {
        let Some((left, cursor)) = &mut self.lists else { return Extra::default() };
        let Some(fewer) = left.checked_sub(1) else { return Extra::default() };
        *left = fewer;
        let mut extra = Extra::default();
        // The list was skipped once as a whole: it cannot end within a value.
        let Ok(Some(entries)) = cursor.array_if() else {
            let _ = cursor.skip();
            return extra;
        };
        let mut adapter = adapter;
        for _ in 0..entries {
            match cursor.text_or_raw() {
                Ok(Ok(text)) if adapter == Some(text) => adapter = None,
                Ok(Ok(text)) if is_first && extra.salt.is_none() => extra.salt = Some(text),
                Ok(Ok(text)) => extra.add(text.as_bytes()),
                Ok(Err(raw)) => extra.add(raw),
                Err(Bad) => return extra,
            }
        }
        extra
    }
}

impl Extra<'_> {
    fn add(&mut self, bytes: &[u8]) {
        // A digest of 0 would say that there is nothing.
        self.further = self.further.rotate_left(5).wrapping_add(digest(bytes)).max(1);
    }
}
