//! Takes candidates in turn, in proportion to their weights.

use ahash::AHashMap;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::push_best;
use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Smooth weighted round robin over the endpoints' `weight`: every cycle each candidate gains its weight in credit, the
/// one with the most is taken and pays the sum of all, so a heavy endpoint's turns are spread out. Alternatives are those
/// with the most credit left.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "weighted-round-robin",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::picker(WeightedRoundRobin::default()))
    },
};

/// The picker.
#[derive(Debug, Default)]
pub struct WeightedRoundRobin {
    /// Credit by endpoint slot. Entries of endpoints that left are few and dropped when they outnumber the candidates.
    credit: Mutex<AHashMap<u64, f32>>,
}

impl Picker for WeightedRoundRobin {
    fn pick(
        &self,
        cx: &Cycle<'_>,
        candidates: &[Candidate],
        _: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        let mut credit = self.credit.lock();
        if credit.len() > 1_024.max(4 * candidates.len()) {
            credit.clear();
        }
        let mut sum = 0.0;
        for candidate in candidates {
            let endpoint = cx.endpoint(candidate);
            sum += endpoint.weight;
            *credit.entry(endpoint.slot).or_default() += endpoint.weight;
        }
        push_best(candidates.len(), wanted, rng, ranked, |at| credit[&cx.endpoint(&candidates[at]).slot]);
        if let Some(&first) = ranked.first() {
            *credit.entry(cx.endpoint(&candidates[first as usize]).slot).or_default() -= sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::first_choices;
    use crate::state::disaggregation::TransferSpec;
    use crate::state::endpoint::{EndpointSpec, EngineKind};
    use crate::state::reservation::tests::pool_of;
    use crate::state::{Endpoint, ObjectName};
    use std::sync::Arc;

    #[test]
    fn turns_follow_weights_exactly() {
        let endpoint = |at: u8, weight| {
            Arc::new(Endpoint::new(EndpointSpec {
                name: ObjectName::new("default", format!("e{at}")),
                address: ([10, 0, 0, at], 80).into(),
                weight,
                labels: std::collections::BTreeMap::new(),
                engine: EngineKind::Vllm,
                gpu: crate::state::rates::Speed::default(),
                event_ports: crate::state::endpoint::EventPorts::default(),
                transfer: TransferSpec::default(),
                drain: false,
                pod: None,
            }))
        };
        let pool = pool_of(&[endpoint(1, 3.0), endpoint(2, 1.0)]);
        assert_eq!(first_choices(&WeightedRoundRobin::default(), &pool, &[0.0, 0.0], 400), [300, 100]);
    }
}
