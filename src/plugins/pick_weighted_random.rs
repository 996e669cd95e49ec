//! Takes a candidate at random, in proportion to its total.

use rand::RngExt;
use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::pick_max_score::bounded;
use super::ranking::push_best;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Takes an endpoint with a chance proportional to its total, alternatives likewise without replacement. Endpoints that
/// total 0 are taken only when no other is left.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Endpoints offered to Envoy, the choice included.
    pub max_num_of_endpoints: Option<u32>,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "weighted-random-picker",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let max_num_of_endpoints = parameters::<Config>(given)?.max_num_of_endpoints;
        Ok(Instance::picker(WeightedRandom { max_num_of_endpoints }))
    },
};

/// The picker.
#[derive(Debug)]
pub struct WeightedRandom {
    max_num_of_endpoints: Option<u32>,
}

impl Picker for WeightedRandom {
    fn pick(
        &self,
        _: &Cycle<'_>,
        candidates: &[Candidate],
        totals: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        let wanted = bounded(wanted, self.max_num_of_endpoints).min(candidates.len());
        while ranked.len() < wanted {
            let left = |at: &usize| !ranked.contains(&(*at as u32)) && totals[*at] > 0.0;
            let sum: f32 = (0..candidates.len()).filter(left).map(|at| totals[at]).sum();
            let mut drawn = rng.random::<f32>() * sum;
            let chosen = (0..candidates.len()).filter(left).find(|&at| {
                drawn -= totals[at];
                drawn < 0.0
            });
            // Rounding may leave the draw just above the last weight.
            match chosen.or_else(|| (0..candidates.len()).rfind(|at| left(at))) {
                Some(at) => ranked.push(at as u32),
                None => return push_best(candidates.len(), wanted, rng, ranked, |_| 0.0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool};

    #[test]
    fn chances_follow_totals() {
        let picker = WeightedRandom { max_num_of_endpoints: None };
        let found = first_choices(&picker, &pool(3), &[3.0, 1.0, 0.0], 4_000);
        assert!((2_850..3_150).contains(&found[0]) && found[2] == 0, "{found:?}");
        let zero = first_choices(&picker, &pool(2), &[0.0, 0.0], 1_000);
        assert!(zero.iter().all(|n| *n > 400), "{zero:?}");
    }
}
