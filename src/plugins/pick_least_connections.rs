//! Takes the candidate with the fewest requests.

use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::push_best;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Takes the endpoint with the fewest requests by weight (our bookings and what scrapes show of others), equals at random;
/// the next fewest are the alternatives. Scores do not matter.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "least-connections",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::picker(LeastConnections))
    },
};

/// The picker.
#[derive(Debug)]
pub struct LeastConnections;

impl Picker for LeastConnections {
    fn pick(
        &self,
        cx: &Cycle<'_>,
        candidates: &[Candidate],
        _: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        push_best(candidates.len(), wanted, rng, ranked, |at| {
            -candidates[at].load.requests() / cx.endpoint(&candidates[at]).weight
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool, signal};
    use crate::state::SignalKind::Foreign;

    #[test]
    fn the_least_loaded_is_taken_and_equals_share() {
        let pool = pool(3);
        signal(&pool, 1, Foreign, 4.0);
        let found = first_choices(&LeastConnections, &pool, &[0.0; 3], 1_000);
        assert!(found[1] == 0 && found[0] > 400 && found[2] > 400, "{found:?}");
    }
}
