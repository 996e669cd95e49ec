//! A prompt as a chain of blocks: each block has a content, and a name that stands for it and all before it.

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::text_blocks::{self, BlockNeeds};
use crate::request::BYTES_PER_TOKEN;

/// Seed of token hashes. Dynamo, SMG and Mooncake use the same, so their golden vectors hold here.
const SEED: u64 = 1337;

/// Fewest tokens in a block of a prompt: engines with pages of one token would cost an entry a token.
pub const LEAST_BLOCK: usize = 16;

/// What keeps two equal prompts apart in an engine's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespace<'a> {
    /// The LoRA adapter by the name that requests give it.
    pub adapter: Option<&'a str>,
    /// vLLM's `cache_salt`.
    pub salt: Option<&'a str>,
}

impl Namespace<'_> {
    /// The seed of the first block's content. That is enough: what differs in its first block is another chain.
    /// `1337 + xxh3(adapter, seed 0) + xxh3(salt, seed 1)`, wrapping, absent and empty count 0 (the rule of `kv-index`).
    pub fn seed(&self) -> u64 {
        let part = |text: Option<&str>, seed| match text {
            None | Some("") => 0,
            Some(text) => xxh3_64_with_seed(text.as_bytes(), seed),
        };
        SEED.wrapping_add(part(self.adapter, 0)).wrapping_add(part(self.salt, 1))
    }
}

/// Hash of a block's tokens: XXH3-64 over them as little-endian `u32`. `seed` is [`Namespace::seed`] for the first block of
/// a chain. `further` is what the block holds beside text (digests of media), 0 for nothing.
pub fn token_content(tokens: &[u32], seed: u64, further: u64, scratch: &mut Vec<u8>) -> u64 {
    scratch.clear();
    scratch.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    xxh3_64_with_seed(scratch, seed.wrapping_add(further))
}

/// Seed of the blocks after the first.
pub const LATER_SEED: u64 = SEED;

/// Name of the block with `content` that follows the block named `previous`.
pub fn chain_name(previous: u64, content: u64) -> u64 {
    let mut both = [0; 16];
    both[..8].copy_from_slice(&previous.to_le_bytes());
    both[8..].copy_from_slice(&content.to_le_bytes());
    xxh3_64_with_seed(&both, SEED)
}

/// The blocks of one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// `names[i]` stands for the prompt up to and including block i.
    names: Vec<u64>,
    /// Contents block by block; empty where names serve as contents.
    contents: Vec<u64>,
    /// Bytes or tokens in a full block.
    unit: u64,
    /// Bytes or tokens of the prompt that can be cached.
    covered: u64,
    tokens: bool,
}

/// The end of a prompt: its last whole block and the tokens behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Name of the last whole block.
    pub name: u64,
    /// Hash of the tokens behind it.
    pub tail: u64,
    /// How many those are.
    pub tail_tokens: u32,
}

impl Ending {
    /// Hash of the tokens behind the last whole block.
    pub fn hash(tail: &[u32]) -> u64 {
        token_content(tail, SEED, 0, &mut Vec::with_capacity(4 * tail.len()))
    }
}

impl Blocks {
    /// Cuts text by the rule of Kthena's `prefix-cache`, for `model` (the target's name). `render` yields the text piece by
    /// piece.
    pub fn of_text(
        needs: BlockNeeds,
        model: &str,
        salt: Option<&str>,
        render: impl FnOnce(&mut dyn FnMut(&[u8])),
    ) -> Self {
        let (names, covered) = text_blocks::chain(needs, model, salt, render);
        Self { names, contents: Vec::new(), unit: needs.block_bytes as u64, covered, tokens: false }
    }

    /// Cuts token ids into full blocks of `engine_block` tokens, or of as many of those as make [`LEAST_BLOCK`]. The last
    /// token counts as cached never, though the block that it completes is kept: an engine computes it always.
    pub fn of_tokens(ids: &[u32], engine_block: usize, namespace: Namespace<'_>) -> Self {
        let engine_block = engine_block.max(1);
        let block_size = engine_block * LEAST_BLOCK.div_ceil(engine_block);
        let full = ids.len() / block_size;
        let usable = ids.len().saturating_sub(1) / block_size;
        let mut blocks = Self {
            names: Vec::with_capacity(full),
            contents: Vec::with_capacity(full),
            unit: block_size as u64,
            covered: (usable * block_size) as u64,
            tokens: true,
        };
        let mut scratch = Vec::with_capacity(4 * block_size);
        let mut seed = namespace.seed();
        for block in ids.chunks_exact(block_size) {
            let content = token_content(block, seed, 0, &mut scratch);
            let name = blocks.names.last().map_or(content, |&previous| chain_name(previous, content));
            blocks.names.push(name);
            blocks.contents.push(content);
            seed = LATER_SEED;
        }
        blocks
    }

    /// Names, one a block: they stand for the whole prompt up to there.
    pub fn names(&self) -> &[u64] {
        &self.names
    }

    /// Contents, one a block: what an index compares.
    pub fn contents(&self) -> &[u64] {
        if self.tokens { &self.contents } else { &self.names }
    }

    /// Tokens in a full block, whether or not the prompt fills one; of text by [`BYTES_PER_TOKEN`].
    pub fn block_tokens(&self) -> u64 {
        if self.tokens { self.unit } else { self.unit / BYTES_PER_TOKEN as u64 }
    }

    /// Bytes or tokens in a block.
    pub fn unit(&self) -> usize {
        self.unit as usize
    }

    /// The end of the prompt with those `ids`; none if it has no whole block.
    pub fn ending(&self, ids: &[u32]) -> Option<Ending> {
        let tail = ids.get(self.len() * self.unit()..)?;
        Some(Ending { name: *self.names.last()?, tail: Ending::hash(tail), tail_tokens: tail.len() as u32 })
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there is nothing to compare.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Tokens in the leading `depth` blocks; of text by [`BYTES_PER_TOKEN`].
    pub fn tokens(&self, depth: u32) -> u64 {
        let covered = (u64::from(depth) * self.unit).min(self.covered);
        if self.tokens { covered } else { covered / BYTES_PER_TOKEN as u64 }
    }

    /// Bytes of text in the leading `depth` blocks; of tokens by [`BYTES_PER_TOKEN`].
    pub fn bytes(&self, depth: u32) -> u64 {
        let covered = (u64::from(depth) * self.unit).min(self.covered);
        if self.tokens { covered * BYTES_PER_TOKEN as u64 } else { covered }
    }
}

/// Digest of what a block holds beside text.
pub fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(range: std::ops::Range<u32>) -> Vec<u32> {
        range.collect()
    }

    /// Vectors computed with Python's xxhash and with `kv-index`.
    #[test]
    fn token_hashes_are_the_golden_ones() {
        let blocks = Blocks::of_tokens(&ids(0..33), 16, Namespace::default());
        assert_eq!(blocks.contents(), [0xd47a_8f41_c833_328a, 0xd439_3917_8abd_00db]);
        assert_eq!(blocks.names(), [0xd47a_8f41_c833_328a, 0xbf15_dffb_1644_7f38]);
        let scratch = &mut Vec::new();
        assert_eq!(token_content(&ids(0..16), 0, 0, scratch), 0x79c2_079c_74a8_ee4d);
        assert_eq!(token_content(&ids(16..32), 0, 0, scratch), 0x0de7_5b0e_004b_90fe);
    }

    #[test]
    fn the_last_token_is_always_computed() {
        let most = |n| Blocks::of_tokens(&ids(0..n), 32, Namespace::default()).tokens(99);
        assert_eq!([most(0), most(32), most(33), most(64), most(65)], [0, 0, 32, 32, 64]);
        assert_eq!(
            Blocks::of_tokens(&ids(0..64), 32, Namespace::default()).len(),
            2,
            "the next turn finds both"
        );
        let blocks = Blocks::of_tokens(&ids(0..161), 32, Namespace::default());
        assert_eq!((blocks.tokens(3), blocks.tokens(5), blocks.tokens(9)), (96, 160, 160));
    }

    #[test]
    fn tokens_of_a_text_never_exceed_it() {
        let needs = BlockNeeds { block_bytes: 64, max_blocks: 128, capacity: 1, follows_engine: false };
        let blocks = Blocks::of_text(needs, "m", None, |sink| sink(&[b'x'; 70]));
        assert_eq!((blocks.tokens(0), blocks.tokens(1), blocks.tokens(2), blocks.tokens(9)), (0, 16, 17, 17));
    }

    #[test]
    fn adapters_and_salts_share_no_block() {
        let spaces = [
            Namespace::default(),
            Namespace { adapter: Some("t1"), salt: None },
            Namespace { adapter: None, salt: Some("t1") },
            Namespace { adapter: Some("t1"), salt: Some("t1") },
        ];
        let named: Vec<Blocks> =
            spaces.iter().map(|space| Blocks::of_tokens(&ids(0..65), 16, *space)).collect();
        for (at, a) in named.iter().enumerate() {
            for b in &named[at + 1..] {
                assert_ne!(a.contents()[0], b.contents()[0]);
                assert!(a.names().iter().zip(b.names()).all(|(a, b)| a != b));
            }
        }
        assert_eq!(Namespace { adapter: Some(""), salt: Some("") }.seed(), Namespace::default().seed());
    }
}
