//! Prefers the endpoint where a request costs everybody the least time, its own and that of those already there.

use schemars::JsonSchema;
use serde::Deserialize;

use super::rendezvous;
use crate::schedule::cost::CostModel;
use crate::schedule::plugin::{Instance, Kind, Needs, ParameterError, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::cache::Rung;
use crate::state::rates::Factors;

/// `cheapest / cost`, where an endpoint's cost in seconds is
/// `W + P + O x step(n + q + 1) + overflow + x (n x P + (n + q) x O x growth)`:
/// W the prefill of prompts already queued there, P the prefill of this prompt's tokens that its cache does not hold
/// (linear, plus attention's quadratic part), O the expected output tokens, `step` the time of a decode step with n decoding
/// and q waiting requests and this one, `growth` by how much this request prolongs such a step, and `externality` x the
/// weight of the delay that the others suffer. `overflow` is the wait for KV memory where the work booked exceeds it, at most
/// O steps. A selfish cost (x = 0) spreads every prefix as soon as another endpoint looks faster and so destroys the caches
/// for all.
///
/// What an endpoint holds of the prompt is taken from the best source there is: its own events, a shared index, what was
/// sent there. Where none can be trusted for any
/// endpoint, the endpoint that a hash of the prompt's beginning chooses counts as holding half
/// of it, unless its load is above 1.25 x the mean. How fast an endpoint is comes from its `weight` and from what its
/// responses show. With nothing known of prompt, cache, or speed, what remains is least outstanding work.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Weight of the delay of others, 0 to 2. Higher keeps more hits and lengthens the tail of times to first token.
    pub externality: f64,
    /// Uncached prompt tokens that an endpoint of weight 1 prefills in a second, until responses show it.
    pub prefill_tokens_per_second: Option<f64>,
    /// Milliseconds between output tokens of a lone request at an endpoint of weight 1, until responses show it.
    pub step_milliseconds: Option<f64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            externality: CostModel::default().externality,
            prefill_tokens_per_second: None,
            step_milliseconds: None,
        }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "marginal-cost",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let above_zero = |name: &str, value: Option<f64>| match value {
            Some(value) if !(value.is_finite() && value > 0.0) => {
                Err(ParameterError(format!("{name} must be above 0, not {value}")))
            }
            _ => Ok(()),
        };
        above_zero("prefillTokensPerSecond", config.prefill_tokens_per_second)?;
        above_zero("stepMilliseconds", config.step_milliseconds)?;
        if !(0.0..=2.0).contains(&config.externality) {
            return Err(ParameterError(format!(
                "externality must be from 0 to 2, not {}",
                config.externality
            )));
        }
        let model = CostModel {
            externality: config.externality,
            given: Factors::given(
                config.prefill_tokens_per_second,
                config.step_milliseconds.map(|milliseconds| milliseconds * 1e-3),
            ),
        };
        Ok(Instance::scorer(MarginalCost(model)).needs(Needs {
            held: true,
            metrics: true,
            ..Needs::default()
        }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct MarginalCost(CostModel);

impl Scorer for MarginalCost {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let nobody_knows = candidates.iter().all(|candidate| candidate.held.rung == Rung::Hash);
        let hashed = if nobody_knows { rendezvous::choice(cx, candidates) } else { None };
        let costs = self.0.costs(cx);
        let mut cheapest = f64::INFINITY;
        for (at, (candidate, out)) in candidates.iter().zip(&mut *out).enumerate() {
            let cached =
                if hashed == Some(at) { costs.prompt() / 2.0 } else { f64::from(candidate.held.tokens) };
            let seconds = costs.seconds(candidate, cached);
            cheapest = cheapest.min(seconds);
            *out = seconds as f32;
        }
        for out in out {
            *out = (cheapest as f32 / *out).min(1.0);
        }
    }

    fn cost_model(&self) -> Option<CostModel> {
        Some(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::state::Pool;

    fn scores(pool: &Pool, tokens: u64, set: impl FnOnce(&mut [Candidate])) -> Vec<f32> {
        let prompt = Prepared { tokens, ..Prepared::default() };
        let mut ask = ask(&prompt, "m");
        ask.max_tokens = Some(100);
        cycle(pool, &ask, |cx, candidates| {
            set(candidates);
            let mut out = vec![f32::NAN; candidates.len()];
            MarginalCost(CostModel::default()).score(cx, candidates, &mut out);
            out
        })
    }

    #[test]
    fn a_held_prefix_is_worth_a_short_queue_and_not_a_long_one() {
        let busy = |requests: f32, prefill_seconds: f32| {
            scores(&pool(2), 8_000, |candidates| {
                candidates[0].held.tokens = 7_500;
                candidates[0].load.own = requests;
                candidates[0].load.decoding = requests;
                candidates[0].load.prefill_seconds = prefill_seconds;
            })
        };
        let idle = busy(0.0, 0.0);
        assert!(idle[0] == 1.0 && idle[1] < 0.8, "{idle:?}");
        assert_eq!(busy(4.0, 0.0)[0], 1.0);
        assert_eq!(busy(4.0, 3.0)[1], 1.0, "a queue of 3 s costs more than 0.6 s of prefill");
    }

    #[test]
    fn a_long_prompt_goes_where_it_stalls_few() {
        let scores = scores(&pool(2), 30_000, |candidates| {
            candidates[0].load.own = 20.0;
            candidates[0].load.decoding = 20.0;
            candidates[1].load.own = 1.0;
            candidates[1].load.prefill_seconds = 2.0;
        });
        assert!(scores[1] > scores[0], "{scores:?}");
    }

    #[test]
    fn with_nothing_known_the_least_outstanding_work_wins_and_equals_are_equal() {
        let scores = scores(&pool(3), 0, |candidates| {
            candidates[0].load.own = 2.0;
            candidates[0].load.decoding = 2.0;
        });
        assert!(scores[0] < 1.0 && scores[1] == 1.0 && scores[2] == 1.0, "{scores:?}");
    }
}
