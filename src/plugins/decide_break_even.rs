//! Computes prompts at a prefill endpoint where that costs everybody less time than it takes to move their KV blocks.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, ParameterError, PdDecider, parameters};

/// A request is split in two if that costs everybody less time: the cost in seconds (as `marginal-cost` has it, by the same
/// rates) of its prompt at the best prefill endpoint and of its output at the best decode endpoint, and the transfer between
/// them, `overheadMilliseconds + uncached tokens / transferTokensPerSecond`, is below its cost at the best endpoint for the
/// whole. A prompt that stalls many who decode is split early, one that meets an idle endpoint late. Pools with roles go by
/// this decider unless another is named.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Uncached prompt tokens below which no request is split.
    pub min_uncached_tokens: u64,
    /// What a second leg adds before any block is moved: another call, another step of another scheduler.
    pub overhead_milliseconds: f64,
    /// Tokens whose KV blocks move in a second; an 8-billion-parameter model's 128 KiB a token over 50 Gbit/s is 50,000.
    pub transfer_tokens_per_second: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self { min_uncached_tokens: 256, overhead_milliseconds: 10.0, transfer_tokens_per_second: 50_000.0 }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "break-even-pd-decider",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        if !(config.overhead_milliseconds.is_finite() && config.overhead_milliseconds >= 0.0) {
            return Err(ParameterError("overheadMilliseconds must be 0 or more".to_owned()));
        }
        if !(config.transfer_tokens_per_second.is_finite() && config.transfer_tokens_per_second > 0.0) {
            return Err(ParameterError("transferTokensPerSecond must be above 0".to_owned()));
        }
        Ok(Instance::decider(BreakEven(config)))
    },
};

/// The decider.
#[derive(Debug, Default)]
pub struct BreakEven(Config);

impl PdDecider for BreakEven {
    fn is_long_enough(&self, uncached: u64, _prompt: u64) -> bool {
        uncached >= self.0.min_uncached_tokens.max(1)
    }

    fn prefers_pair(&self, uncached: u64, whole_seconds: f64, pair_seconds: f64) -> bool {
        let transfer =
            self.0.overhead_milliseconds * 1e-3 + uncached as f64 / self.0.transfer_tokens_per_second;
        pair_seconds + transfer < whole_seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_must_save_more_than_its_transfer_takes() {
        let decider = BreakEven::default();
        assert!(!decider.is_long_enough(255, 10_000) && decider.is_long_enough(256, 256));
        // 5,000 tokens: 10 ms and 100 ms.
        assert!(!decider.prefers_pair(5_000, 1.0, 0.891));
        assert!(decider.prefers_pair(5_000, 1.0, 0.889));
    }
}
