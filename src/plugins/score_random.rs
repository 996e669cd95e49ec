//! Rates every candidate at random.

use schemars::JsonSchema;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::schedule::plugin::{Instance, Kind, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// A uniform score for every endpoint and request, the same again for the same request seed. For comparisons; alone it
/// spreads requests at random.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "random",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::scorer(Random))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct Random;

impl Scorer for Random {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(out) {
            let drawn = xxh3_64_with_seed(&cx.endpoint(candidate).slot.to_le_bytes(), cx.ask.seed);
            // The upper 24 bits fill an f32's mantissa.
            *out = (drawn >> 40) as f32 / (1u32 << 24) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let (pool, prompt) = (pool(4), Prepared::default());
        let draw = |seed| {
            let mut ask = ask(&prompt, "m");
            ask.seed = seed;
            cycle(&pool, &ask, |cx, candidates| {
                let mut out = vec![f32::NAN; 4];
                Random.score(cx, candidates, &mut out);
                out
            })
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }
}
