//! What a scheduling cycle allocates does not grow with the number of endpoints.

#![allow(clippy::unwrap_used, reason = "a test fails where it stands")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pilotfish::plugins;
use pilotfish::prompt::{Blocks, Namespace, Prepared};
use pilotfish::schedule::{Ask, Pipeline, Scheduler};
use pilotfish::state::endpoint::{EndpointSpec, EngineKind, EventPorts};
use pilotfish::state::pool::{PoolMemory, TrafficPolicy};
use pilotfish::state::signals::Millis;
use pilotfish::state::{Endpoint, Member, ObjectName, Pool, PoolKind, PoolName};

fn pool(endpoints: usize) -> Arc<Pool> {
    let members = (0..endpoints).map(|at| {
        let endpoint = Arc::new(Endpoint::new(EndpointSpec {
            name: ObjectName::new("default", format!("e{at}")),
            address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1).parse().unwrap(),
            weight: 1.0,
            gpu: pilotfish::state::rates::Speed::default(),
            labels: BTreeMap::new(),
            engine: EngineKind::Vllm,
            event_ports: EventPorts::default(),
            drain: false,
        }));
        endpoint.health.accepted();
        Arc::new(Member::new(endpoint))
    });
    let name = PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", "pool") };
    Arc::new(Pool::new(
        name,
        None,
        members.collect(),
        TrafficPolicy::default(),
        Arc::new(PoolMemory::default()),
    ))
}

/// Allocations of one pick among `endpoints` that all hold half of the prompt, once scratch space has its size.
fn allocations(endpoints: usize) -> u64 {
    let pool = pool(endpoints);
    let pipeline = Pipeline::assemble("default", plugins::default_parts(), None).unwrap();
    let scheduler = Scheduler::new(pipeline, Arc::default(), Duration::from_secs(2));
    let pipeline = scheduler.pipeline();
    let ids: Vec<u32> = (0..1_024).collect();
    let half = Blocks::of_tokens(&ids[..512], 16, Namespace::default());
    for member in &pool.members {
        scheduler.tokens.routed.routed(&half, member.endpoint.holder(), 10_000, Millis::now());
    }
    let prompt = Prepared {
        tokens: 1_024,
        counted: true,
        engine_block: Some(16),
        ids: Blocks::of_tokens(&ids, 16, Namespace::default()),
        ..Prepared::default()
    };
    let pick = || {
        let ask = Ask {
            model: "m",
            prompt: &prompt,
            max_tokens: Some(100),
            answers: 1,
            sessions: &[],
            subset: None,
            only_if_cached: false,
            wanted: 3,
            seed: 7,
            detail: 11,
        };
        scheduler.explain(&pipeline, &pool, &ask).unwrap();
    };
    pick();
    pick();
    allocation_counter::measure(pick).count_total
}

#[test]
fn a_pick_among_a_thousand_allocates_no_more_than_one_among_twenty() {
    let few = allocations(20);
    assert!(few > 0, "the record itself is allocated: the counter works");
    assert_eq!(allocations(1_000), few);
}
