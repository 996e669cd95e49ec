//! Computes prompts at a prefill endpoint if enough of them is not cached where the output would be generated.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, PdDecider, parameters};

/// A request is split in two if the best endpoint for the whole of it would have to compute at least `nonCachedTokens` of
/// its prompt. llm-d's decider of that name.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Uncached prompt tokens from which on a request is split; 0: none is.
    pub non_cached_tokens: u64,
    /// Prompt tokens below which none is, whatever is cached.
    pub prompt_tokens: u64,
    /// Accepted from llm-d without effect: what endpoints hold is taken from the best source there is.
    pub prefix_match_info_producer_name: Option<String>,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "prefix-based-pd-decider",
    schema: || schemars::schema_for!(Config),
    build: |given| Ok(Instance::decider(PrefixBased(parameters(given)?))),
};

/// The decider.
#[derive(Debug, Default)]
pub struct PrefixBased(Config);

impl PdDecider for PrefixBased {
    fn is_long_enough(&self, uncached: u64, prompt: u64) -> bool {
        let least = self.0.non_cached_tokens;
        least > 0 && uncached >= least && prompt >= self.0.prompt_tokens
    }

    fn prefers_pair(&self, _uncached: u64, _whole_seconds: f64, _pair_seconds: f64) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(16, 0, 15, 1_000, false)]
    #[case(16, 0, 16, 16, true)]
    #[case(16, 512, 100, 511, false)]
    #[case(0, 0, 1_000, 1_000, false)]
    fn the_uncached_suffix_decides(
        #[case] non_cached_tokens: u64,
        #[case] prompt_tokens: u64,
        #[case] uncached: u64,
        #[case] prompt: u64,
        #[case] expected: bool,
    ) {
        let decider = PrefixBased(Config { non_cached_tokens, prompt_tokens, ..Config::default() });
        assert_eq!(decider.is_long_enough(uncached, prompt), expected);
    }
}
