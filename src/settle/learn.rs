//! What a whole response teaches about the endpoint that gave it: how fast it is, and whether what was believed of its
//! cache was true.

use std::time::Duration;

use super::Closing;
use crate::index::TokenIndexes;
use crate::state::Member;
use crate::state::cache::Turn;
use crate::state::rates::{Pace, Speed};
use crate::state::signals::Millis;
use crate::usage::Usage;

/// Fewer output tokens than this measure a pace too coarsely.
const LEAST_OUTPUT: u64 = 8;

/// Shorter than this, the network and the scheduling of processes are most of what is measured.
const LEAST_TIME: Duration = Duration::from_millis(20);

/// Speed, from the time to the first token and the pace of those after it.
pub fn rates(closing: &Closing, member: &Member, first_token: Option<Duration>, usage: Usage) {
    let endpoint = &member.endpoint;
    if !was_chosen(closing, member) {
        return;
    }
    let learned = &closing.pool.memory.learned;
    let split = closing.record.was_split();
    if !split {
        learned.uncached_tokens.learn(usage.prompt.saturating_sub(usage.cached.unwrap_or(0)) as f64);
    }
    let pool = &learned.rates;
    let forecast = match usage.cached {
        Some(cached) => closing.forecast.knowing(usage.prompt, cached),
        None => closing.forecast,
    };
    let now = Millis::now();
    let learners = [(&endpoint.rates, Speed::default()), (pool, endpoint.speed())];
    let measurable = |lasted: &Duration| usage.completion >= LEAST_OUTPUT && *lasted >= LEAST_TIME;
    let lasted = closing.lasted.filter(measurable).map(|lasted| lasted.as_secs_f64());
    match (first_token.map(|first| first.as_secs_f64()), lasted) {
        (Some(first), lasted) => {
            let token = lasted.map(|lasted| (lasted - first).max(0.0) / (usage.completion - 1) as f64);
            // The time to the first token is that of the transfer, where the prompt was computed elsewhere.
            let seen = Pace { first_token: Some(first).filter(|_| !split), token };
            for (rates, speed) in learners {
                rates.learn(&forecast, &seen, speed, now);
            }
        }
        (None, Some(lasted)) if !closing.stream && !split => {
            for (rates, speed) in learners {
                rates.learn_whole(&forecast, lasted, usage.completion, speed, now);
            }
        }
        _ => {}
    }
}

fn was_chosen(closing: &Closing, member: &Member) -> bool {
    closing.ranked.first().is_some_and(|chosen| chosen.slot == member.endpoint.slot)
}

/// The truth of what each rung had predicted, where the engine reports its cached tokens.
pub fn truth(closing: &Closing, member: &Member, usage: Usage) {
    let Some(cached) = usage
        .cached
        .filter(|_| usage.prompt > 0 && was_chosen(closing, member) && !closing.record.was_split())
    else {
        return;
    };
    let reported = (cached as f64 / usage.prompt as f64).min(1.0);
    let endpoint = &member.endpoint;
    for (rung, predicted) in closing.record.predictions.each() {
        let Some(truth) = endpoint.cache.truth(rung) else { continue };
        let tolerance = f64::from(closing.record.predictions.tolerance);
        let turn = truth.observe(f64::from(predicted), reported, tolerance);
        let error = truth.error().unwrap_or_default();
        let destination = &*endpoint.destination;
        match turn {
            Some(Turn::Doubted) => tracing::warn!(
                endpoint = destination,
                rung = rung.name(),
                error,
                "cache predictions are wrong: picks there go by the next rung; check the block size, the tokenizer and \
                 that prefix caching is on"
            ),
            Some(Turn::Trusted) => {
                tracing::info!(
                    endpoint = destination,
                    rung = rung.name(),
                    error,
                    "cache predictions are right again"
                );
            }
            None => {}
        }
    }
    endpoint.cache.follow_bias();
}

/// The answer is in the engine's cache too, where the next turn will find it.
pub fn answer(closing: &Closing, member: &Member, usage: Usage, tokens: &TokenIndexes) {
    if let Some(ending) =
        closing.record.ending.filter(|_| closing.answers == 1 && was_chosen(closing, member))
    {
        let answer = u32::try_from(usage.completion).unwrap_or(u32::MAX / 2);
        tokens.routed.answered(member.endpoint.slot, ending, answer);
    }
}
