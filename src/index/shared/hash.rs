//! Token ids in blocks, each with the hash that names it.

use sha2::{Digest, Sha256};

/// The top bit is never set: Kthena's hashes are positive in 64 signed bits.
const MASK: u64 = (1 << 63) - 1;

/// The name of a block: the first 8 bytes of the SHA-256 of its tokens, each as 4 bytes big-endian, read big-endian, without
/// the top bit. No tokens have the name 0.
pub fn standard_hash(tokens: &[u32]) -> u64 {
    if tokens.is_empty() {
        return 0;
    }
    let mut hasher = Sha256::new();
    for token in tokens {
        hasher.update(token.to_be_bytes());
    }
    let digest = hasher.finalize();
    digest.iter().take(8).fold(0, |hash, byte| hash << 8 | u64::from(*byte)) & MASK
}

/// A prompt as the index cuts it: blocks of `block_tokens`, `max_blocks` at most, the last shorter where tokens are left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// The blocks in order.
    pub hashes: Vec<u64>,
    /// Tokens in a whole block, at least 1.
    pub block_tokens: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
}

impl Chunks {
    /// Cuts and hashes a prompt.
    pub fn of(ids: &[u32], block_tokens: usize, max_blocks: usize) -> Self {
        let block_tokens = block_tokens.max(1);
        let hashes = ids.chunks(block_tokens).take(max_blocks).map(standard_hash).collect();
        Self { hashes, block_tokens, prompt_tokens: ids.len() }
    }

    /// Blocks that an engine can use again: whole ones, and never the last token, which is always computed.
    pub fn reusable(&self) -> usize {
        self.prompt_tokens.saturating_sub(1) / self.block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&[], 0)]
    #[case(&[1], 3_748_984_630_417_570_165)]
    #[case(&[0], 6_863_311_662_677_045_211)]
    #[case(&[123], 3_207_548_891_546_131_000)]
    #[case(&[151_643], 2_497_437_684_470_250_816)]
    #[case(&[1, 2, 3, 4, 5], 6_818_328_894_798_336_332)]
    #[case(&[u32::MAX], 3_284_552_513_154_947_520)]
    #[case(&[0; 16], 8_477_460_337_017_888_816)]
    fn blocks_have_the_names_that_kthena_gives_them(#[case] tokens: &[u32], #[case] expected: u64) {
        assert_eq!(standard_hash(tokens), expected);
    }

    #[test]
    fn a_trailing_part_is_a_block_of_its_own_and_never_reusable() {
        let ids: Vec<u32> = (1..=40).collect();
        let expected = [6_615_856_733_697_512_468, 1_408_734_799_202_240_436, 7_874_165_726_608_114_604];
        let chunks = Chunks::of(&ids, 16, 128);
        assert_eq!((&chunks.hashes[..], chunks.reusable()), (&expected[..], 2));
        assert_eq!(Chunks::of(&ids[..32], 16, 128).reusable(), 1, "the last token is always computed");
        assert_eq!(Chunks::of(&ids, 16, 2).hashes, expected[..2]);
        assert_eq!((Chunks::of(&[], 0, 128).hashes.len(), Chunks::of(&[], 0, 128).reusable()), (0, 0));
    }
}
