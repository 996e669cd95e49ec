//! Takes the highest total.

use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::push_best;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Takes the endpoint with the highest total, equals at random, and ranks the next best as alternatives for retries. The
/// picker of a profile that lists none.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Endpoints offered to Envoy, the choice included; default: as many as its retries can use.
    pub max_num_of_endpoints: Option<u32>,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "max-score-picker",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let max_num_of_endpoints = parameters::<Config>(given)?.max_num_of_endpoints;
        Ok(Instance::picker(MaxScore { max_num_of_endpoints }))
    },
};

/// The picker.
#[derive(Debug)]
pub struct MaxScore {
    /// Bound on the endpoints offered.
    pub max_num_of_endpoints: Option<u32>,
}

/// The endpoints to rank when a picker's own bound is `most`.
pub fn bounded(wanted: usize, most: Option<u32>) -> usize {
    most.map_or(wanted, |most| wanted.min(most.max(1) as usize))
}

impl Picker for MaxScore {
    fn pick(
        &self,
        _: &Cycle<'_>,
        candidates: &[Candidate],
        totals: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        push_best(candidates.len(), bounded(wanted, self.max_num_of_endpoints), rng, ranked, |at| totals[at]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool};

    #[test]
    fn the_highest_wins_and_equals_share() {
        let picker = MaxScore { max_num_of_endpoints: None };
        assert_eq!(first_choices(&picker, &pool(3), &[0.1, 0.9, 0.5], 50), [0, 50, 0]);
        let shared = first_choices(&picker, &pool(4), &[1.0; 4], 4_000);
        assert!(shared.iter().all(|n| (900..1_100).contains(n)), "{shared:?}");
    }
}
