//! Prefers the endpoint where a request costs everybody the least time, its own and that of those already there.

use schemars::JsonSchema;
use serde::Deserialize;

use super::rendezvous;
use crate::schedule::plugin::{Instance, Kind, Needs, ParameterError, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::cache::Rung;
use crate::state::rates::{self, Factors};

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
        Self { externality: 0.5, prefill_tokens_per_second: None, step_milliseconds: None }
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
        let scorer = MarginalCost {
            externality: config.externality,
            given: Factors::given(
                config.prefill_tokens_per_second,
                config.step_milliseconds.map(|milliseconds| milliseconds * 1e-3),
            ),
        };
        Ok(Instance::scorer(scorer).needs(Needs { held: true, metrics: true, ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct MarginalCost {
    externality: f64,
    given: Factors,
}

/// What one candidate's cost is made of; seconds at the candidate's own speed.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    own: f64,
    others: f64,
}

/// What a request brings, whoever serves it.
#[derive(Clone, Copy, Debug)]
struct Request {
    prompt: f64,
    output: f64,
}

/// What an endpoint is at work on.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// Requests that decode.
    decoding: f64,
    /// Requests whose first token is still to come.
    waiting: f64,
    /// Seconds at unit speed that their prompts take.
    prefill: f64,
    /// Tokens of the decoding requests.
    context: f64,
    /// Tokens of all requests.
    tokens: f64,
    /// Tokens its KV memory holds.
    capacity: Option<f64>,
}

fn cost(request: Request, cached: f64, work: Work, factors: Factors) -> Cost {
    let uncached = (request.prompt - cached).max(0.0);
    let prefill = factors.prefill(uncached, cached);
    let batch = work.decoding + work.waiting;
    let step = factors.step(batch + 1.0, work.context + request.prompt);
    let decode = request.output * step;
    let needed = work.tokens + request.prompt + request.output;
    let overflow =
        work.capacity.map_or(0.0, |capacity| (needed - capacity).max(0.0) / needed.max(1.0) * decode);
    let growth = factors.step_growth(batch + 1.0, request.prompt);
    Cost {
        own: factors.prefill * work.prefill + prefill + decode + overflow,
        others: work.decoding * prefill + batch * request.output * growth,
    }
}

impl Scorer for MarginalCost {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let pool = cx.pool.memory.learned.rates.factors(self.given);
        let request = Request { prompt: cx.ask.prompt.tokens as f64, output: cx.output_tokens as f64 };
        let nobody_knows = candidates.iter().all(|candidate| candidate.held.rung == Rung::Hash);
        let hashed = if nobody_knows { rendezvous::choice(cx, candidates) } else { None };
        let mut cheapest = f64::INFINITY;
        for (at, (candidate, out)) in candidates.iter().zip(&mut *out).enumerate() {
            let endpoint = cx.endpoint(candidate);
            let factors = endpoint.rates.among(pool.at_speed(endpoint.speed()), cx.now);
            let cached =
                if hashed == Some(at) { request.prompt / 2.0 } else { f64::from(candidate.held.tokens) };
            let cost = cost(request, cached, work_of(cx, candidate), factors);
            let sum = cost.own + self.externality * cost.others;
            cheapest = cheapest.min(sum);
            *out = sum as f32;
        }
        for out in out {
            *out = (cheapest as f32 / *out).min(1.0);
        }
    }
}

fn work_of(cx: &Cycle<'_>, candidate: &Candidate) -> Work {
    let load = &candidate.load;
    // Requests of others: of their prompts and progress nothing is known but how many wait.
    let others_waiting = f64::from(load.waiting.unwrap_or(0.0).min(load.foreign));
    let others_decoding = f64::from(load.foreign) - others_waiting;
    let usual = cx.pool.memory.learned.uncached_tokens.get().unwrap_or(0.0);
    let decode_tokens = f64::from(load.decode_tokens);
    Work {
        decoding: f64::from(load.decoding) + others_decoding,
        waiting: f64::from(load.own - load.decoding).max(0.0) + others_waiting,
        prefill: f64::from(load.prefill_seconds) + others_waiting * rates::prefill(usual, 0.0),
        context: decode_tokens,
        tokens: decode_tokens + f64::from(load.prefill_tokens),
        capacity: cx.endpoint(candidate).cache_tokens().map(|tokens| tokens as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::state::Pool;
    use proptest::prelude::*;

    fn scores(pool: &Pool, tokens: u64, set: impl FnOnce(&mut [Candidate])) -> Vec<f32> {
        let prompt = Prepared { tokens, ..Prepared::default() };
        let mut ask = ask(&prompt, "m");
        ask.max_tokens = Some(100);
        cycle(pool, &ask, |cx, candidates| {
            set(candidates);
            let mut out = vec![f32::NAN; candidates.len()];
            MarginalCost { externality: 0.5, given: Factors::UNIT }.score(cx, candidates, &mut out);
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

    #[test]
    fn twice_the_weight_takes_twice_the_prefill_for_the_same_cost() {
        let factors = Factors::UNIT.at_speed(crate::state::rates::Speed::of_weight(2.0));
        let request = Request { prompt: 4_000.0, output: 0.0 };
        let slow = cost(request, 2_000.0, Work::default(), Factors::UNIT).own;
        let fast = cost(request, 0.0, Work::default(), factors).own;
        assert!((fast / slow - 1.0).abs() < 0.1, "{fast} {slow}");
    }

    #[test]
    fn memory_that_is_full_costs_at_most_the_whole_decode() {
        let request = Request { prompt: 1_000.0, output: 100.0 };
        let full = Work { tokens: 1e9, capacity: Some(1_000.0), ..Work::default() };
        let (free, full) =
            (cost(request, 0.0, Work::default(), Factors::UNIT), cost(request, 0.0, full, Factors::UNIT));
        assert!(full.own > free.own && full.own < 2.0 * free.own);
    }

    proptest! {
        /// More held never costs more; more work never costs less.
        #[test]
        fn costs_are_monotonic(
            prompt in 0.0f64..200_000.0, cached in 0.0f64..1.0, output in 0.0f64..4_000.0,
            decoding in 0.0f64..300.0, waiting in 0.0f64..300.0, prefill in 0.0f64..100.0, context in 0.0f64..1e6
        ) {
            let request = Request { prompt, output };
            let work = Work { decoding, waiting, prefill, context, tokens: context, capacity: Some(5e5) };
            let sum = |cached: f64, work: Work| {
                let cost = cost(request, cached, work, Factors::UNIT);
                cost.own + 0.5 * cost.others
            };
            let base = sum(cached * prompt, work);
            prop_assert!(base.is_finite() && base >= 0.0);
            prop_assert!(sum(prompt, work) <= base * (1.0 + 1e-9));
            for more in [
                Work { decoding: decoding + 1.0, ..work }, Work { waiting: waiting + 1.0, ..work },
                Work { prefill: prefill + 1.0, ..work }, Work { context: context + 1e3, tokens: context + 1e3, ..work },
            ] {
                prop_assert!(sum(cached * prompt, more) >= base * (1.0 - 1e-9));
            }
        }
    }
}
