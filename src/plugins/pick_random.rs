//! Takes any candidate.

use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::pick_max_score::bounded;
use super::ranking::push_random;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Takes an endpoint uniformly at random, whatever the scores; alternatives likewise.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Endpoints offered to Envoy, the choice included.
    pub max_num_of_endpoints: Option<u32>,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "random-picker",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let max_num_of_endpoints = parameters::<Config>(given)?.max_num_of_endpoints;
        Ok(Instance::picker(Random { max_num_of_endpoints }))
    },
};

/// The picker.
#[derive(Debug)]
pub struct Random {
    max_num_of_endpoints: Option<u32>,
}

impl Picker for Random {
    fn pick(
        &self,
        _: &Cycle<'_>,
        candidates: &[Candidate],
        _: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        push_random(candidates.len(), bounded(wanted, self.max_num_of_endpoints), rng, ranked);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool};

    #[test]
    fn scores_do_not_matter() {
        let found = first_choices(&Random { max_num_of_endpoints: None }, &pool(2), &[0.0, 1.0], 2_000);
        assert!(found.iter().all(|n| (900..1_100).contains(n)), "{found:?}");
    }
}
