//! Takes the less loaded of two candidates drawn at random.

use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::push_random;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Draws two endpoints at random and takes the one with fewer requests by weight (our bookings and what scrapes show of
/// others); the other is the first alternative. Scores do not matter. Spreads well even where load is known late.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "two-choices",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::picker(TwoChoices))
    },
};

/// The picker.
#[derive(Debug)]
pub struct TwoChoices;

impl Picker for TwoChoices {
    fn pick(
        &self,
        cx: &Cycle<'_>,
        candidates: &[Candidate],
        _: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        push_random(candidates.len(), wanted.max(2), rng, ranked);
        let load = |at: u32| {
            let candidate = &candidates[at as usize];
            candidate.load.requests() / cx.endpoint(candidate).weight
        };
        if let [first, second, ..] = ranked[..]
            && load(second) < load(first)
        {
            ranked.swap(0, 1);
        }
        ranked.truncate(wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool, signal};
    use crate::state::SignalKind::Foreign;

    #[test]
    fn the_most_loaded_of_three_is_never_taken() {
        let pool = pool(3);
        for (at, load) in [1.0, 2.0, 3.0].into_iter().enumerate() {
            signal(&pool, at, Foreign, load);
        }
        let found = first_choices(&TwoChoices, &pool, &[0.0; 3], 3_000);
        assert!((1_850..2_150).contains(&found[0]) && found[2] == 0, "{found:?}");
    }
}
