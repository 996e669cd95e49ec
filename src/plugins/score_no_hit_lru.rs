//! Spreads prompts that nobody holds over the endpoints that have gone longest without one.

use schemars::JsonSchema;
use serde::Deserialize;
use smallvec::SmallVec;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// For a prompt of which no candidate holds anything: `1 - rank / (candidates - 1)`, where rank 0 is the endpoint that has
/// gone longest without such a prompt; those that never had one come first and are equal. For any other prompt: 0.5 for all.
/// `lruSize` is accepted and has no effect: every endpoint is remembered.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Has no effect.
    pub lru_size: Option<u32>,
    /// Accepted as llm-d has it; has no effect.
    pub prefix_match_info_producer_name: Option<String>,
    /// Accepted as llm-d has it; has no effect.
    pub prefix_plugin_name: Option<String>,
    /// Accepted as llm-d has it; has no effect.
    pub prefix_plugin_type: Option<String>,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "no-hit-lru-scorer",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::scorer(NoHitLru).needs(Needs { held: true, ..Needs::default() }))
    },
};

/// The scorer. When an endpoint was last given a cold prompt is kept with the endpoint.
#[derive(Debug)]
pub struct NoHitLru;

impl Scorer for NoHitLru {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        if candidates.iter().any(|candidate| candidate.held.tokens > 0) {
            return out.fill(0.5);
        }
        let turn = |candidate: &Candidate| cx.endpoint(candidate).cache.last_cold();
        let mut turns: SmallVec<[u64; 128]> = candidates.iter().map(turn).collect();
        turns.sort_unstable();
        let last = (candidates.len().max(2) - 1) as f32;
        for (candidate, out) in candidates.iter().zip(out) {
            let rank = turns.partition_point(|&other| other < turn(candidate));
            *out = 1.0 - rank as f32 / last;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::state::Pool;

    fn scores(pool: &Pool, held: u32) -> Vec<f32> {
        let prompt = Prepared { tokens: 100, ..Prepared::default() };
        cycle(pool, &ask(&prompt, "m"), |cx, candidates| {
            candidates[0].held.tokens = held;
            let mut out = vec![f32::NAN; candidates.len()];
            NoHitLru.score(cx, candidates, &mut out);
            out
        })
    }

    #[test]
    fn cold_prompts_go_round_and_hits_do_not_count() {
        let pool = pool(3);
        assert_eq!(scores(&pool, 0), [1.0, 1.0, 1.0]);
        pool.members[1].endpoint.cache.note_cold();
        assert_eq!(scores(&pool, 0), [1.0, 0.0, 1.0]);
        pool.members[0].endpoint.cache.note_cold();
        pool.members[2].endpoint.cache.note_cold();
        assert_eq!(scores(&pool, 0), [0.5, 1.0, 0.0]);
        assert_eq!(scores(&pool, 16), [0.5, 0.5, 0.5]);
    }
}
