//! Prefers endpoints with less work booked, in tokens.

use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::share_of_max;
use crate::schedule::plugin::{Instance, Kind, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `(max - t) / max` over the tokens booked on each endpoint and not yet done: uncached prompt tokens still to prefill, and
/// the prompts and expected outputs of requests that decode, divided by the endpoint's weight. Needs nothing from the
/// engine, so it holds when every metric is stale.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "outstanding-tokens",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::scorer(OutstandingTokens))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct OutstandingTokens;

impl Scorer for OutstandingTokens {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(&mut *out) {
            *out = (candidate.load.prefill_tokens + candidate.load.decode_tokens)
                / cx.endpoint(candidate).weight;
        }
        share_of_max(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{pool, scores};
    use crate::state::reservation::tests::work;
    use crate::state::reservation::{Leg, Role};
    use std::sync::Arc;

    #[test]
    fn fewer_tokens_score_higher() {
        let pool = pool(3);
        let book = |at: usize, prefill, decode| {
            Leg::book(Role::Serve, Arc::clone(&pool), Arc::clone(&pool.members[at]), work(prefill, decode))
        };
        let _legs = [book(0, 300, 100), book(1, 50, 50)];
        assert_eq!(scores(&OutstandingTokens, &pool), [0.0, 0.75, 1.0]);
    }
}
