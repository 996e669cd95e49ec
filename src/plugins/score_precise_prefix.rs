//! Prefers endpoints whose own events say that they hold the beginning of the prompt.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `held tokens / prompt tokens`, by the events that engines publish about their KV caches. What lies beyond device memory
/// (host memory, disk) counts `lowerTierWeight`, since it has to be copied first. An endpoint whose events are not followed,
/// and every endpoint if the prompt's tokens are unknown, abstains.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Worth of a token held outside device memory, 0 to 1.
    pub lower_tier_weight: f32,
}

impl Default for Config {
    fn default() -> Self {
        Self { lower_tier_weight: 0.8 }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "precise-prefix",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let scorer = PrecisePrefix { lower_tier: config.lower_tier_weight.clamp(0.0, 1.0) };
        Ok(Instance::scorer(scorer).needs(Needs { tokens: true, ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct PrecisePrefix {
    lower_tier: f32,
}

impl Scorer for PrecisePrefix {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let ids = &cx.ask.prompt.ids;
        if ids.is_empty() {
            return;
        }
        for (candidate, out) in candidates.iter().zip(out) {
            let (Some(any), Some(device)) = (candidate.held.precise, candidate.held.device) else { continue };
            let (any, device) = (ids.tokens(any) as f32, ids.tokens(device) as f32);
            let held = device + self.lower_tier * (any - device);
            *out = held / cx.ask.prompt.tokens.max(1) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::{Blocks, Namespace, Prepared};

    #[test]
    fn device_memory_counts_whole_the_rest_less_and_silence_abstains() {
        let ids: Vec<u32> = (0..161).collect();
        let ids = Blocks::of_tokens(&ids, 16, Namespace::default());
        let prompt = Prepared { tokens: 160, counted: true, ids, ..Prepared::default() };
        cycle(&pool(3), &ask(&prompt, "m"), |cx, candidates| {
            candidates[0].held.precise = Some(10);
            candidates[0].held.device = Some(5);
            candidates[1].held.precise = Some(0);
            candidates[1].held.device = Some(0);
            let mut out = [f32::NAN; 3];
            PrecisePrefix { lower_tier: 0.8 }.score(cx, candidates, &mut out);
            assert_eq!(out[..2], [0.9, 0.0]);
            assert!(out[2].is_nan());
        });
    }
}
