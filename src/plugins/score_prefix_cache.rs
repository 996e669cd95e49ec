//! Prefers endpoints that were sent the same leading text before.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::prompt::BlockNeeds;
use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `matched blocks / blocks of the prompt x min(1, matched bytes / fullCreditBytes)`. Prompts are cut into blocks of
/// `blockSizeToHash` bytes, hashed in a chain (Kthena's rule, XXH64); what each endpoint was sent is remembered in an LRU
/// of `maxHashCacheSize` blocks. Only an unbroken match from the first block counts. The second factor keeps a short
/// common head from outweighing load: a match saves prefill by its length, not by its share. `fullCreditBytes: 0` gives
/// Kthena's pure ratio. A prompt that is unknown or empty makes it abstain. `topKMatches` is accepted and has no effect:
/// every endpoint is rated, none is cut off arbitrarily.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Bytes in a block; 0 or less means the default.
    pub block_size_to_hash: i64,
    /// Leading blocks looked at; 0 or less means the default.
    pub max_blocks_to_match: i64,
    /// Blocks remembered for each endpoint; 0 or less means the default.
    pub max_hash_cache_size: i64,
    /// Has no effect.
    pub top_k_matches: i64,
    /// Matched bytes from which a match counts whole.
    pub full_credit_bytes: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            block_size_to_hash: 64,
            max_blocks_to_match: 2_048,
            max_hash_cache_size: 50_000,
            top_k_matches: 5,
            full_credit_bytes: 1_024,
        }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "prefix-cache",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let or = |given: i64, default: i64| (if given > 0 { given } else { default }) as usize;
        let default = Config::default();
        let needs = BlockNeeds {
            block_bytes: or(config.block_size_to_hash, default.block_size_to_hash),
            max_blocks: or(config.max_blocks_to_match, default.max_blocks_to_match),
            capacity: or(config.max_hash_cache_size, default.max_hash_cache_size),
            follows_engine: false,
        };
        Ok(Instance::scorer(PrefixCache { full_credit: config.full_credit_bytes })
            .needs(Needs { blocks: Some(needs), ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct PrefixCache {
    full_credit: u32,
}

impl Scorer for PrefixCache {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let blocks = &cx.ask.prompt.text;
        if blocks.is_empty() {
            return;
        }
        let total = blocks.len() as f32;
        for (candidate, out) in candidates.iter().zip(out) {
            let credit = match self.full_credit {
                0 => 1.0,
                full => (blocks.bytes(candidate.held.text) as f32 / full as f32).min(1.0),
            };
            *out = candidate.held.text as f32 / total * credit;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::{Blocks, Prepared};

    fn score(full_credit: u32, text_bytes: usize, depth: u32) -> f32 {
        let needs = BlockNeeds { block_bytes: 64, max_blocks: 128, capacity: 10, follows_engine: false };
        let text = Blocks::of_text(needs, "m", None, |sink| sink(&vec![b'x'; text_bytes]));
        let prompt = Prepared { text, ..Prepared::default() };
        cycle(&pool(1), &ask(&prompt, "m"), |cx, candidates| {
            candidates[0].held.text = depth;
            let mut out = [f32::NAN];
            PrefixCache { full_credit }.score(cx, candidates, &mut out);
            out[0]
        })
    }

    #[test]
    fn the_ratio_counts_whole_only_for_matches_worth_saving() {
        assert_eq!(score(0, 256, 2), 0.5);
        assert_eq!(score(1_024, 256, 2), 0.5 * 0.125);
        assert_eq!(score(1_024, 4_096, 32), 0.5);
        assert!(score(1_024, 0, 0).is_nan(), "no prompt, no opinion");
    }

    #[test]
    fn kthenas_arguments_are_taken() {
        let given = serde_json::json!({"blockSizeToHash": 0, "maxBlocksToMatch": 128, "MAXHASHCACHESIZE": 7, "topKMatches": 5});
        let needs = (KIND.build)(given).unwrap().needs.blocks.unwrap();
        assert_eq!(
            needs,
            BlockNeeds { block_bytes: 64, max_blocks: 128, capacity: 7, follows_engine: false }
        );
    }
}
