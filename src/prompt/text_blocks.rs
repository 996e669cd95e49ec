//! Chained hashes of a prompt's text blocks, by the rule of Kthena's `prefix-cache` plugin.
//!
//! `h(-1) = XXH64(model)`, `h(i) = XXH64(decimal digits of h(i-1) ++ block i)`, blocks of a fixed number of bytes, the last
//! partial block included, at most a fixed number of blocks. Equal hashes at depth i mean equal text up to there, so
//! holding block i implies holding all before it.

use xxhash_rust::xxh64::{Xxh64, xxh64};

/// How text is cut, and how much of it is remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockNeeds {
    /// Bytes in a block.
    pub block_bytes: usize,
    /// Leading blocks looked at.
    pub max_blocks: usize,
    /// Blocks remembered for each endpoint.
    pub capacity: usize,
    /// Whether the size of the engine's own cache, where it is known, is taken in place of `capacity`.
    pub follows_engine: bool,
}

impl BlockNeeds {
    /// How text is cut where no plugin says. What a match is worth changes little below 512 bytes, and every block costs a
    /// cache miss in an index. The capacity is llm-d's, for engines that do not say how much they hold.
    pub const DEFAULT: BlockNeeds =
        BlockNeeds { block_bytes: 512, max_blocks: 1_024, capacity: 31_250, follows_engine: true };
}

/// The chain of the text that `render` yields piece by piece, and the bytes it covers. Engines share nothing between cache
/// salts, so neither do the hashes.
pub fn chain(
    needs: BlockNeeds,
    model: &str,
    salt: Option<&str>,
    render: impl FnOnce(&mut dyn FnMut(&[u8])),
) -> (Vec<u64>, u64) {
    let seed = match salt {
        None => xxh64(model.as_bytes(), 0),
        Some(salt) => {
            let mut hasher = Xxh64::new(0);
            hasher.update(model.as_bytes());
            hasher.update(&[0]);
            hasher.update(salt.as_bytes());
            hasher.digest()
        }
    };
    let mut chain = Chain {
        needs,
        buffer: Vec::with_capacity(MOST_DIGITS + needs.block_bytes),
        digits: 0,
        hashes: Vec::new(),
        bytes: 0,
    };
    chain.begin(seed);
    render(&mut |text| chain.push(text));
    chain.finish()
}

/// Decimal digits of `u64::MAX`.
const MOST_DIGITS: usize = 20;

struct Chain {
    needs: BlockNeeds,
    /// The digits of the previous hash and what has come of the block: hashed in one go, which beats the streaming hasher
    /// for inputs as short as a block.
    buffer: Vec<u8>,
    digits: usize,
    hashes: Vec<u64>,
    /// Bytes the hashes cover.
    bytes: u64,
}

impl Chain {
    fn begin(&mut self, previous: u64) {
        self.buffer.clear();
        self.buffer.extend_from_slice(itoa::Buffer::new().format(previous).as_bytes());
        self.digits = self.buffer.len();
    }

    fn push(&mut self, mut text: &[u8]) {
        while !text.is_empty() && self.hashes.len() < self.needs.max_blocks {
            let room = self.needs.block_bytes - self.filled();
            let (now, later) = text.split_at(room.min(text.len()));
            self.buffer.extend_from_slice(now);
            text = later;
            if self.filled() == self.needs.block_bytes {
                self.close();
            }
        }
    }

    fn filled(&self) -> usize {
        self.buffer.len() - self.digits
    }

    fn close(&mut self) {
        let hash = xxh64(&self.buffer, 0);
        self.hashes.push(hash);
        self.bytes += self.filled() as u64;
        self.begin(hash);
    }

    fn finish(mut self) -> (Vec<u64>, u64) {
        if self.filled() > 0 {
            self.close();
        }
        (self.hashes, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    const KTHENA: BlockNeeds =
        BlockNeeds { block_bytes: 64, max_blocks: 128, capacity: 50_000, follows_engine: false };

    fn hashes(model: &str, text: &[u8]) -> Vec<u64> {
        chain(KTHENA, model, None, |sink| sink(text)).0
    }

    /// Vectors recomputed from Kthena's rule with an independent implementation.
    #[rstest]
    #[case("test-model", "Hello World", &[1_993_528_491_812_861_608])]
    #[case("m", "<|im_start|>user\nhi<|im_end|>\n", &[9_652_232_318_509_682_243])]
    #[case("m", &"a".repeat(64), &[13_915_909_083_615_432_819])]
    #[case("m", &"a".repeat(65), &[13_915_909_083_615_432_819, 2_655_498_438_455_834_009])]
    #[case("", &"a".repeat(64), &[1_576_699_153_624_199_785])]
    #[case("m", &"héllo wörld ".repeat(12), &[11_859_178_435_642_820_092, 17_803_411_585_659_159_580, 1_066_189_564_980_749_117])]
    fn the_hashes_are_kthenas(#[case] model: &str, #[case] text: &str, #[case] expected: &[u64]) {
        assert_eq!(hashes(model, text.as_bytes()), expected);
    }

    #[test]
    fn a_long_prompt_stops_at_the_last_block() {
        let text: Vec<u8> = (b'a'..=b'z').cycle().take(8_192).collect();
        let golden = hashes("bench-model", &text);
        assert_eq!(
            (golden.len(), golden[0], golden[1]),
            (128, 2_255_003_460_060_045_391, 11_149_546_857_834_002_314)
        );
        assert_eq!(golden[127], 3_713_727_362_220_958_295);
        let longer: Vec<u8> = (b'a'..=b'z').cycle().take(9_000).collect();
        assert_eq!(hashes("bench-model", &longer), golden);
    }

    #[test]
    fn a_cache_salt_shares_nothing() {
        let salted = |salt| chain(KTHENA, "m", salt, |sink| sink(b"text")).0;
        assert_ne!(salted(None), salted(Some("a")));
        assert_ne!(salted(Some("a")), salted(Some("b")));
    }

    proptest! {
        #[test]
        fn pieces_do_not_matter(text in prop::collection::vec(any::<u8>(), 0..400), cuts in prop::collection::vec(1usize..50, 1..20)) {
            let (pieces, bytes) = chain(KTHENA, "m", None, |sink| {
                let mut rest = text.as_slice();
                for cut in cuts.iter().cycle() {
                    if rest.is_empty() { break; }
                    let (piece, later) = rest.split_at((*cut).min(rest.len()));
                    sink(piece);
                    rest = later;
                }
            });
            prop_assert_eq!(pieces, hashes("m", &text));
            prop_assert_eq!(bytes, text.len() as u64);
        }
    }
}
