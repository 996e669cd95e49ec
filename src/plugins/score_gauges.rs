//! llm-d's scorers over single engine gauges.

use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::share_of_range;
use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};

/// `(max - q) / (max - min)` over the engines' waiting requests, 1 for all if they are equal. An endpoint whose queue is
/// unknown abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Queue {}

/// `(max - r) / (max - min)` over the engines' running requests, 1 for all if they are equal. An endpoint whose count is
/// unknown abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Running {}

/// `1 - usage` of the KV blocks held by live requests. An endpoint whose usage is unknown abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct KvCache {}

/// The plugin type `queue-scorer`.
pub const QUEUE: Kind = Kind {
    name: "queue-scorer",
    schema: || schemars::schema_for!(Queue),
    build: |given| parameters::<Queue>(given).map(|_| gauge(|c| c.load.waiting)),
};

/// The plugin type `running-requests-size-scorer`.
pub const RUNNING: Kind = Kind {
    name: "running-requests-size-scorer",
    schema: || schemars::schema_for!(Running),
    build: |given| parameters::<Running>(given).map(|_| gauge(|c| c.load.running)),
};

/// The plugin type `kv-cache-utilization-scorer`.
pub const KV_CACHE: Kind = Kind {
    name: "kv-cache-utilization-scorer",
    schema: || schemars::schema_for!(KvCache),
    build: |given| {
        parameters::<KvCache>(given)?;
        Ok(Instance::scorer(super::score_gpu_usage::FreeKv).needs(METRICS))
    },
};

const METRICS: Needs = Needs {
    blocks: None,
    tokens: false,
    shared: None,
    held: false,
    head_bytes: None,
    metrics: true,
    lora: false,
    session: None,
};

fn gauge(read: fn(&Candidate) -> Option<f32>) -> Instance {
    Instance::scorer(LowestGauge { read }).needs(METRICS)
}

/// Prefers the lowest value of one gauge.
#[derive(Debug)]
struct LowestGauge {
    read: fn(&Candidate) -> Option<f32>,
}

impl Scorer for LowestGauge {
    fn score(&self, _: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(&mut *out) {
            *out = (self.read)(candidate).unwrap_or(f32::NAN);
        }
        share_of_range(out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{pool, scores, signal};
    use crate::state::SignalKind;
    use serde_json::Value;

    #[test]
    fn the_lowest_gauge_scores_one_and_the_unknown_abstains() {
        for (kind, signal_kind) in [(&QUEUE, SignalKind::Waiting), (&RUNNING, SignalKind::Running)] {
            let pool = pool(4);
            for (at, value) in [3.0, 0.0, 10.0].into_iter().enumerate() {
                signal(&pool, at, signal_kind, value);
            }
            let scorer = (kind.build)(Value::Null).unwrap().scorer.unwrap();
            let found = scores(&*scorer, &pool);
            assert_eq!(&found[..3], [0.7, 1.0, 0.0]);
            assert!(found[3].is_nan());
        }
    }
}
