//! Prefers endpoints with free KV blocks.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `1 - usage` of the KV blocks held by live requests, by the engine's gauge (Kthena's name for it; the GPU itself is not
/// looked at). An endpoint whose usage is unknown abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "gpu-usage",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::scorer(FreeKv).needs(Needs { metrics: true, ..Needs::default() }))
    },
};

/// The scorer, which llm-d's `kv-cache-utilization-scorer` shares.
#[derive(Debug)]
pub struct FreeKv;

impl Scorer for FreeKv {
    fn score(&self, _: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(out) {
            if let Some(usage) = candidate.load.kv_usage {
                *out = (1.0 - usage).clamp(0.0, 1.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{pool, scores, signal};
    use crate::state::SignalKind::KvUsage;

    #[test]
    fn free_blocks_score_and_the_unknown_is_not_full_nor_empty() {
        let pool = pool(3);
        signal(&pool, 0, KvUsage, 0.25);
        signal(&pool, 1, KvUsage, 1.5);
        let found = scores(&FreeKv, &pool);
        assert_eq!(&found[..2], [0.75, 0.0]);
        assert!(found[2].is_nan());
    }
}
