//! Follows the longest match while queues are even and the match is worth it, and else the power of two choices or the
//! emptiest cache.

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// Ray Serve's rule, in this order: if the longest and the shortest queue differ by more than `imbalancedThreshold` requests,
/// two endpoints are drawn and the one with fewer requests gets 1, the other 0.5; else if the best match is below
/// `matchRateThreshold` of the prompt, the endpoints that remember the fewest blocks get 1; else the endpoints with the best
/// match get 1 less a small part of their share of the longest queue. Everybody else gets 0.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Requests between the longest and the shortest queue; unlimited if absent, as in Ray.
    pub imbalanced_threshold: Option<f32>,
    /// Share of the prompt, 0 to 1.
    pub match_rate_threshold: f32,
}

impl Default for Config {
    fn default() -> Self {
        Self { imbalanced_threshold: None, match_rate_threshold: 0.1 }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "prefix-or-two-choices",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let scorer = PrefixOrTwoChoices {
            imbalanced: config.imbalanced_threshold.unwrap_or(f32::INFINITY),
            match_rate: config.match_rate_threshold,
        };
        Ok(Instance::scorer(scorer).needs(Needs { held: true, ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct PrefixOrTwoChoices {
    imbalanced: f32,
    match_rate: f32,
}

impl Scorer for PrefixOrTwoChoices {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let queues = candidates.iter().map(|candidate| candidate.load.requests());
        let (shortest, longest) =
            queues.fold((f32::INFINITY, 0.0_f32), |(min, max), queue| (min.min(queue), max.max(queue)));
        out.fill(0.0);
        if longest - shortest > self.imbalanced {
            return two_choices(cx, candidates, out);
        }
        let best = candidates.iter().map(|candidate| candidate.held.tokens).max().unwrap_or(0);
        if (best as f32) < self.match_rate * cx.ask.prompt.tokens as f32 || best == 0 {
            let used = |candidate: &Candidate| cx.endpoint(candidate).cache.blocks();
            let least = candidates.iter().map(used).min().unwrap_or(0);
            for (candidate, out) in candidates.iter().zip(out) {
                *out = if used(candidate) == least { 1.0 } else { 0.0 };
            }
            return;
        }
        for (candidate, out) in
            candidates.iter().zip(out).filter(|(candidate, _)| candidate.held.tokens == best)
        {
            *out = 1.0 - 0.1 * candidate.load.requests() / longest.max(1.0);
        }
    }
}

fn two_choices(cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
    // Another stream of numbers than the picker's, from the same seed.
    let mut rng = SmallRng::seed_from_u64(!cx.ask.seed);
    let first = rng.random_range(0..candidates.len());
    let second = (first + rng.random_range(1..candidates.len().max(2))) % candidates.len();
    let (fewer, more) = if candidates[first].load.requests() <= candidates[second].load.requests() {
        (first, second)
    } else {
        (second, first)
    };
    out[more] = 0.5;
    out[fewer] = 1.0;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::state::Pool;

    fn scores(pool: &Pool, held: [u32; 3], open: [f32; 3]) -> Vec<f32> {
        let prompt = Prepared { tokens: 1_000, ..Prepared::default() };
        cycle(pool, &ask(&prompt, "m"), |cx, candidates| {
            for at in 0..3 {
                candidates[at].held.tokens = held[at];
                candidates[at].load.own = open[at];
            }
            let mut out = vec![f32::NAN; 3];
            PrefixOrTwoChoices { imbalanced: 10.0, match_rate: 0.1 }.score(cx, candidates, &mut out);
            out
        })
    }

    #[test]
    fn the_best_match_wins_and_among_equals_the_shorter_queue() {
        assert_eq!(scores(&pool(3), [500, 500, 400], [4.0, 2.0, 0.0]), [0.9, 0.95, 0.0]);
    }

    #[test]
    fn a_poor_match_goes_to_the_emptiest_cache() {
        let pool = pool(3);
        pool.members[0].endpoint.cache.set_blocks(10);
        pool.members[1].endpoint.cache.set_blocks(3);
        pool.members[2].endpoint.cache.set_blocks(3);
        assert_eq!(scores(&pool, [99, 0, 0], [0.0; 3]), [0.0, 1.0, 1.0]);
    }

    #[test]
    fn uneven_queues_mean_two_choices() {
        let scores = scores(&pool(3), [900, 0, 0], [20.0, 0.0, 5.0]);
        assert_eq!(scores.iter().filter(|score| **score > 0.0).count(), 2);
        assert!(scores[0] < 1.0, "of two that are drawn the longer queue never wins: {scores:?}");
    }
}
