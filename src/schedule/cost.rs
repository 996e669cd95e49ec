//! What a request costs everybody at an endpoint, in seconds: its own time there, and the delay of those who are there.

use super::{Candidate, Cycle};
use crate::state::rates::{self, Factors};
use crate::state::reservation::Role;

/// The rates that costs go by until responses show better ones, and what the delay of others weighs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// Weight of the delay of others, 0 to 2.
    pub externality: f64,
    /// How fast an endpoint of weight 1 is, as the operator says.
    pub given: Factors,
}

impl Default for CostModel {
    fn default() -> Self {
        Self { externality: 0.5, given: Factors::UNIT }
    }
}

impl CostModel {
    /// The costs of one cycle.
    pub fn costs<'a>(&self, cx: &'a Cycle<'a>) -> Costs<'a> {
        let request = Request { prompt: cx.ask.prompt.tokens as f64, output: cx.output_tokens as f64 };
        Costs {
            cx,
            request,
            pool: cx.pool.memory.learned.rates.factors(self.given),
            externality: self.externality,
        }
    }
}

/// Where nothing is known of a request it costs nothing, and costs are divided by each other.
const LEAST: f64 = 1e-9;

/// What one request costs, whoever serves it.
#[derive(Clone, Copy, Debug)]
pub struct Costs<'a> {
    cx: &'a Cycle<'a>,
    request: Request,
    pool: Factors,
    externality: f64,
}

impl Costs<'_> {
    /// Tokens of the prompt.
    pub fn prompt(&self) -> f64 {
        self.request.prompt
    }

    /// Seconds that the request costs at a candidate that holds so many tokens of its prompt; above 0. Whoever only decodes is
    /// sent all of it.
    pub fn seconds(&self, candidate: &Candidate, cached: f64) -> f64 {
        let cached = if self.cx.role == Role::Decode { self.request.prompt } else { cached };
        let endpoint = self.cx.endpoint(candidate);
        let factors = endpoint.rates.among(self.pool.at_speed(endpoint.speed()), self.cx.now);
        let cost = cost(self.request, cached, work_of(self.cx, candidate), factors);
        (cost.own + self.externality * cost.others).max(LEAST)
    }
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
    use proptest::prelude::*;

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
