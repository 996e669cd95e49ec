//! Prefers endpoints that hold more of the prompt, by llm-d's formula.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::prompt::BlockNeeds;
use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `(1 - w) x matched blocks / blocks of the prompt + w x min(1, matched tokens / matchLengthScaleTokens)^2`, w being
/// `matchLengthWeight`. What is matched is what each endpoint was sent, in blocks of `blockSizeTokens` tokens of four bytes,
/// or with `source: precise` (in an llm-d configuration: a scorer that names a `precise-prefix-cache-producer`) what the
/// engines' own events announced; then an endpoint whose events are not followed abstains, and so does every endpoint if the
/// prompt's tokens are unknown. A prompt that is unknown or empty makes it abstain. With `autoTune` as many blocks are
/// remembered for an endpoint as its cache holds, once it said so, and `lruCapacityPerServer` until then.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// The instance that says how prompts are cut, in llm-d's configurations.
    pub prefix_match_info_producer_name: Option<String>,
    /// What is matched.
    pub source: Source,
    /// Part of the matched length, beside the matched share, in the score, 0 to 1.
    pub match_length_weight: f64,
    /// Tokens from which the matched length counts whole.
    pub match_length_scale_tokens: u64,
    /// Whether an endpoint's own cache says how much is remembered for it.
    pub auto_tune: bool,
    /// Tokens in a block; 0 or less means the default.
    pub block_size_tokens: i64,
    /// Leading tokens looked at; 0 or less means the default.
    pub max_prefix_tokens_to_match: i64,
    /// Leading blocks looked at; wins over tokens.
    pub max_prefix_blocks_to_match: Option<i64>,
    /// Blocks remembered for each endpoint; 0 or less means the default.
    pub lru_capacity_per_server: i64,
}

/// Sources of matches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// What each endpoint was sent.
    #[default]
    Approximate,
    /// What engines' events announced.
    Precise,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prefix_match_info_producer_name: None,
            source: Source::Approximate,
            match_length_weight: 0.0,
            match_length_scale_tokens: 8_192,
            auto_tune: true,
            block_size_tokens: 64,
            max_prefix_tokens_to_match: 131_072,
            max_prefix_blocks_to_match: None,
            lru_capacity_per_server: 31_250,
        }
    }
}

impl Config {
    fn cut(&self) -> BlockNeeds {
        let or = |given: i64, default: i64| if given > 0 { given } else { default } as usize;
        let default = Self::default();
        let block = or(self.block_size_tokens, default.block_size_tokens);
        let tokens = or(self.max_prefix_tokens_to_match, default.max_prefix_tokens_to_match);
        let blocks =
            self.max_prefix_blocks_to_match.filter(|blocks| *blocks > 0).map(|blocks| blocks as usize);
        BlockNeeds {
            block_bytes: block.saturating_mul(crate::request::BYTES_PER_TOKEN),
            max_blocks: blocks.unwrap_or((tokens / block).max(1)),
            capacity: or(self.lru_capacity_per_server, default.lru_capacity_per_server),
            follows_engine: self.auto_tune,
        }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "prefix-cache-scorer",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let needs = match config.source {
            Source::Approximate => Needs { blocks: Some(config.cut()), ..Needs::default() },
            Source::Precise => Needs { tokens: true, ..Needs::default() },
        };
        let scorer = PrefixMatch {
            source: config.source,
            length_weight: config.match_length_weight.clamp(0.0, 1.0) as f32,
            whole_length: config.match_length_scale_tokens.max(1) as f32,
        };
        Ok(Instance::scorer(scorer).needs(needs))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct PrefixMatch {
    source: Source,
    length_weight: f32,
    whole_length: f32,
}

impl Scorer for PrefixMatch {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let blocks = match self.source {
            Source::Approximate => &cx.ask.prompt.text,
            Source::Precise => &cx.ask.prompt.ids,
        };
        if blocks.is_empty() {
            return;
        }
        for (candidate, out) in candidates.iter().zip(out) {
            let depth = match self.source {
                Source::Approximate => Some(candidate.held.text),
                Source::Precise => candidate.held.precise,
            };
            let Some(depth) = depth else { continue };
            let share = depth as f32 / blocks.len() as f32;
            let length = (blocks.tokens(depth) as f32 / self.whole_length).min(1.0);
            *out = (1.0 - self.length_weight) * share + self.length_weight * length * length;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::{Blocks, Namespace, Prepared};
    use serde_json::json;

    #[test]
    fn the_share_and_the_square_of_the_length_are_mixed() {
        let needs = Config::default().cut();
        let text = Blocks::of_text(needs, "m", None, |sink| sink(&[b'x'; 2_560]));
        let prompt = Prepared { text, tokens: 640, ..Prepared::default() };
        let score = |length_weight, whole_length| {
            cycle(&pool(1), &ask(&prompt, "m"), |cx, candidates| {
                candidates[0].held.text = 5;
                let mut out = [f32::NAN];
                PrefixMatch { source: Source::Approximate, length_weight, whole_length }
                    .score(cx, candidates, &mut out);
                out[0]
            })
        };
        assert_eq!(score(0.0, 8_192.0), 0.5);
        assert_eq!(score(0.5, 640.0), 0.5 * 0.5 + 0.5 * 0.25);
        assert_eq!(score(1.0, 100.0), 1.0);
    }

    #[test]
    fn the_precise_source_abstains_where_events_are_not_followed() {
        let ids = Blocks::of_tokens(&(0..65).collect::<Vec<_>>(), 16, Namespace::default());
        let prompt = Prepared { ids, tokens: 65, counted: true, ..Prepared::default() };
        cycle(&pool(2), &ask(&prompt, "m"), |cx, candidates| {
            candidates[0].held.precise = Some(2);
            let mut out = [f32::NAN; 2];
            PrefixMatch { source: Source::Precise, length_weight: 0.0, whole_length: 1.0 }
                .score(cx, candidates, &mut out);
            assert_eq!(out[0], 0.5);
            assert!(out[1].is_nan());
        });
    }

    #[test]
    fn prompts_are_cut_as_llm_d_cuts_them() {
        let cut = |given| serde_json::from_value::<Config>(given).unwrap().cut();
        let default = cut(json!({}));
        assert_eq!((default.block_bytes, default.max_blocks, default.capacity), (256, 2_048, 31_250));
        assert!(default.follows_engine && !cut(json!({"autoTune": false})).follows_engine);
        assert_eq!(cut(json!({"blockSizeTokens": 16, "maxPrefixTokensToMatch": 1_600})).max_blocks, 100);
        assert_eq!(cut(json!({"maxPrefixBlocksToMatch": 7, "lruCapacityPerServer": 0})).max_blocks, 7);
    }
}
