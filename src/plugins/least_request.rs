//! Prefers endpoints with fewer requests, and leaves out those whose queue is long.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Filter, Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// As a scorer: `(max - base) / max` over the candidates, 1 for all if every base is 0. As a filter: keeps endpoints whose
/// engine reports fewer than `maxWaitingRequests` waiting requests; an unknown queue is kept. With `formula: onFlight`
/// (Kthena's code) base = requests + 100 x max(requests - running, 0), where requests are our bookings and what scrapes
/// show of others; if any engine's running count is unknown, base = requests for all, so that nobody gains by silence.
/// With `formula: published` (Kthena's article) base = running + 100 x waiting, and an endpoint with either unknown
/// abstains. Bases are divided by the endpoint's weight.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Waiting requests from which the filter leaves an endpoint out; 0 means 10.
    pub max_waiting_requests: i64,
    /// Which of the two published formulas scores.
    pub formula: Formula,
}

impl Default for Config {
    fn default() -> Self {
        Self { max_waiting_requests: DEFAULT_MAX_WAITING, formula: Formula::default() }
    }
}

const DEFAULT_MAX_WAITING: i64 = 10;

/// The published formulas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Formula {
    /// requests + 100 x max(requests - running, 0).
    #[default]
    OnFlight,
    /// running + 100 x waiting.
    Published,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "least-request",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let max_waiting =
            if config.max_waiting_requests == 0 { DEFAULT_MAX_WAITING } else { config.max_waiting_requests };
        Ok(Instance {
            filter: Some(std::sync::Arc::new(ShortQueue { max_waiting: max_waiting as f32 })),
            ..Instance::scorer(LeastRequest { formula: config.formula })
        }
        .needs(Needs { metrics: true, ..Needs::default() }))
    },
};

/// What a request that the engine has not started counts for, beside one it runs.
const NOT_STARTED: f32 = 100.0;

/// The scorer.
#[derive(Debug)]
pub struct LeastRequest {
    formula: Formula,
}

impl Scorer for LeastRequest {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let running_is_known = candidates.iter().all(|candidate| candidate.load.running.is_some());
        for (candidate, base) in candidates.iter().zip(&mut *out) {
            let load = &candidate.load;
            let requests = load.requests();
            let raw = match (self.formula, load.running, load.waiting) {
                (Formula::OnFlight, Some(running), _) if running_is_known => {
                    requests + NOT_STARTED * (requests - running).max(0.0)
                }
                (Formula::OnFlight, ..) => requests,
                (Formula::Published, Some(running), Some(waiting)) => running + NOT_STARTED * waiting,
                (Formula::Published, ..) => continue,
            };
            *base = raw / cx.endpoint(candidate).weight;
        }
        super::ranking::share_of_max(out);
    }
}

/// The filter.
#[derive(Debug)]
pub struct ShortQueue {
    max_waiting: f32,
}

impl Filter for ShortQueue {
    fn filter(&self, _: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        for (candidate, dropped) in candidates.iter().zip(dropped) {
            if candidate.load.waiting.is_some_and(|waiting| waiting >= self.max_waiting) {
                *dropped = Some("too many requests wait there");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, pool, scores, signal, verdicts};
    use crate::prompt::Prepared;
    use crate::state::SignalKind::{Foreign, Running, Waiting};

    #[test]
    fn kthenas_example_comes_out() {
        let pool = pool(3);
        for at in 0..3 {
            signal(&pool, at, Running, at as f64 + 1.0);
            signal(&pool, at, Foreign, at as f64 + 1.0);
        }
        let scores = scores(&LeastRequest { formula: Formula::OnFlight }, &pool);
        assert_eq!(scores.iter().map(|s| (s * 100.0) as i32).collect::<Vec<_>>(), [66, 33, 0]);
    }

    #[test]
    fn a_request_not_started_weighs_a_hundred_and_silence_gains_nothing() {
        let pool = pool(2);
        signal(&pool, 0, Running, 4.0);
        signal(&pool, 0, Foreign, 5.0);
        signal(&pool, 1, Foreign, 5.0);
        let scorer = LeastRequest { formula: Formula::OnFlight };
        assert_eq!(scores(&scorer, &pool), [0.0, 0.0], "running unknown at one: requests count at both");
        signal(&pool, 1, Running, 5.0);
        assert_eq!(scores(&scorer, &pool), [0.0, 1.0 - 5.0 / 105.0]);
    }

    #[test]
    fn the_published_formula_abstains_where_a_gauge_is_unknown() {
        let pool = pool(2);
        signal(&pool, 0, Running, 1.0);
        signal(&pool, 0, Waiting, 1.0);
        signal(&pool, 1, Running, 1.0);
        let scores = scores(&LeastRequest { formula: Formula::Published }, &pool);
        assert_eq!(scores[0], 0.0);
        assert!(scores[1].is_nan());
    }

    #[test]
    fn the_filter_is_strict_and_keeps_the_unknown() {
        let (pool, prompt) = (pool(3), Prepared::default());
        signal(&pool, 0, Waiting, 9.0);
        signal(&pool, 1, Waiting, 10.0);
        let found = verdicts(&ShortQueue { max_waiting: 10.0 }, &pool, &ask(&prompt, "m"));
        assert_eq!(found.iter().map(Option::is_none).collect::<Vec<_>>(), [true, false, true]);
    }
}
