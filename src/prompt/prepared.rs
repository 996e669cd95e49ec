//! A prompt as a scheduling cycle sees it: cut in every way that a source of cache knowledge compares.

use smallvec::SmallVec;
use xxhash_rust::xxh3::Xxh3;

use super::{Blocks, Tokens};
use crate::index::shared::SharedOwners;

/// A prompt, ready for a cycle.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// Prompt tokens, counted or estimated; 0 if unknown.
    pub tokens: u64,
    /// Whether `tokens` was counted.
    pub counted: bool,
    /// Tokens in a block of the engines' caches; none if they do not say. Caches hold whole blocks.
    pub engine_block: Option<usize>,
    /// Its canonical text in blocks of bytes; empty if nobody asks or the text is unknown.
    pub text: Blocks,
    /// Hashes of its leading bytes, by their number.
    pub heads: SmallVec<[(usize, u64); 1]>,
    /// Its token ids in blocks of the engines' size; empty if nobody asks or the ids are unknown.
    pub ids: Blocks,
    /// Its token ids.
    pub token_ids: Option<Tokens>,
    /// Who owns its blocks in the shared index; none if nobody asks, its ids are unknown, or the index did not answer.
    pub shared: Option<SharedOwners>,
}

impl Prepared {
    /// Hashes the first `bytes` of the text that `render` yields piece by piece; an empty text has no hash.
    pub fn add_head(&mut self, bytes: usize, render: impl FnOnce(&mut dyn FnMut(&[u8]))) {
        let mut hasher = Xxh3::new();
        let mut left = bytes;
        render(&mut |text| {
            let taken = text.len().min(left);
            hasher.update(&text[..taken]);
            left -= taken;
        });
        if left < bytes {
            self.heads.push((bytes, hasher.digest()));
        }
    }

    /// The hash of its first `bytes`, if a plugin asked for it and the text is known.
    pub fn head(&self, bytes: usize) -> Option<u64> {
        self.heads.iter().find(|(asked, _)| *asked == bytes).map(|(_, hash)| *hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_the_first_bytes_however_they_come() {
        let head = |pieces: &[&str]| {
            let mut prompt = Prepared::default();
            prompt.add_head(5, |sink| pieces.iter().for_each(|piece| sink(piece.as_bytes())));
            prompt.head(5)
        };
        assert_eq!(head(&["abcdef"]), head(&["ab", "cdeX"]));
        assert_ne!(head(&["abcde"]), head(&["abcd"]));
        assert_eq!(head(&[""]), None);
    }
}
