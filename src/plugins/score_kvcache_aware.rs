//! Prefers endpoints that own the beginning of the prompt in the block index that Kthena's engines share in Redis.

use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, SharedNeeds, parameters};
use crate::schedule::{Candidate, Cycle};

/// `owned blocks / blocks of the prompt`, cut off at whole hundredths (Kthena's formula), by the block index in Redis that
/// `--redis-url` names. Prompts are cut into blocks of `blockSizeToHash` tokens, which must be the engines' own block size,
/// or nothing is ever found; a shorter last block counts among the blocks of the prompt, although engines never own it. Only
/// an unbroken run from the first block counts, and claims from before an engine's process started do not. An endpoint
/// that owns nothing gets 0. If the index does not answer within `deadlineMilliseconds`, without `--redis-url`, and if the
/// prompt's tokens are unknown, every endpoint abstains. Names that Kthena's argument lists have for tokenizer ports are
/// accepted and have no effect.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Tokens in a block; 0 or less means the default.
    pub block_size_to_hash: i64,
    /// Leading blocks looked up; 0 or less means the default.
    pub max_blocks_to_match: i64,
    /// Time that a pick waits for the index, milliseconds; 0 or less means the default.
    pub deadline_milliseconds: i64,
    /// Has no effect.
    pub vllm_tokenizer_port: i64,
    /// Has no effect.
    pub sglang_tokenizer_port: i64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            block_size_to_hash: 16,
            max_blocks_to_match: 128,
            deadline_milliseconds: 20,
            vllm_tokenizer_port: 8_000,
            sglang_tokenizer_port: 30_000,
        }
    }
}

/// Blocks asked for at most, each a command in the index.
const MOST_BLOCKS: u64 = 8_192;
/// The longest a pick may wait for an answer, milliseconds: half of the default `--decision-timeout`.
const LONGEST: u64 = 2_000;

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "kvcache-aware",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let or = |given: i64, default: i64| (if given > 0 { given } else { default }) as u64;
        let default = Config::default();
        let deadline = or(config.deadline_milliseconds, default.deadline_milliseconds).min(LONGEST);
        let blocks = or(config.max_blocks_to_match, default.max_blocks_to_match).min(MOST_BLOCKS);
        let needs = SharedNeeds {
            block_tokens: or(config.block_size_to_hash, default.block_size_to_hash) as usize,
            max_blocks: blocks as usize,
            deadline: Duration::from_millis(deadline),
        };
        let needs = Needs { tokens: true, shared: Some(needs), ..Needs::default() };
        Ok(Instance::scorer(KvcacheAware).needs(needs))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct KvcacheAware;

impl Scorer for KvcacheAware {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let Some(owners) = cx.ask.prompt.shared.as_ref().filter(|owners| owners.blocks > 0) else { return };
        for (candidate, out) in candidates.iter().zip(out) {
            let Some(depth) = candidate.held.shared else { continue };
            // In doubles and in this order, as Kthena does, so that equal counts are cut off alike: 57 of 100 is 0.56.
            let share = f64::from(depth) / f64::from(owners.blocks);
            *out = ((share * 100.0).trunc() / 100.0) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::shared::{Answer, Chunks, SharedOwners};
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use serde_json::json;

    /// Scores of endpoints that own so many of 3 blocks, the last shorter.
    fn scores(depths: [Option<u32>; 2], shared: Option<SharedOwners>) -> [f32; 2] {
        let prompt = Prepared { tokens: 40, shared, ..Prepared::default() };
        cycle(&pool(2), &ask(&prompt, "m"), |cx, candidates| {
            let mut out = [f32::NAN; 2];
            candidates.iter_mut().zip(depths).for_each(|(candidate, depth)| candidate.held.shared = depth);
            KvcacheAware.score(cx, candidates, &mut out);
            out
        })
    }

    #[test]
    fn the_share_is_cut_off_at_hundredths_and_nothing_owned_is_nothing() {
        let owners = SharedOwners::of(&Chunks::of(&[7; 40], 16, 128), &Answer::default(), []);
        assert_eq!(scores([Some(2), Some(0)], Some(owners.clone())), [0.66, 0.0]);
        assert_eq!(scores([Some(3), Some(1)], Some(owners)), [1.0, 0.33]);
        let owners = SharedOwners::of(&Chunks::of(&[7; 1_600], 16, 128), &Answer::default(), []);
        assert_eq!(scores([Some(57), Some(100)], Some(owners)), [0.56, 1.0]);
    }

    #[test]
    fn everybody_abstains_if_the_index_did_not_answer() {
        assert!(scores([None, None], None).iter().all(|score| score.is_nan()));
    }

    #[test]
    fn kthenas_arguments_are_taken_in_any_letter_case_and_bounded() {
        let given = json!({
            "BLOCKSIZETOHASH": 128, "maxBlocksToMatch": -1, "vllmTokenizerPort": 0, "sglangTokenizerPort": 99_999,
        });
        let needs = (KIND.build)(given).unwrap().needs;
        let deadline = Duration::from_millis(20);
        let expected = SharedNeeds { block_tokens: 128, max_blocks: 128, deadline };
        assert_eq!((needs.shared, needs.tokens), (Some(expected), true));
        let given = json!({"maxBlocksToMatch": 1_000_000, "deadlineMilliseconds": 1_000_000});
        let shared = (KIND.build)(given).unwrap().needs.shared.unwrap();
        assert_eq!((shared.max_blocks, shared.deadline), (8_192, Duration::from_secs(2)));
    }
}
