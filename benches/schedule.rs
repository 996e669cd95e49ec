//! One scheduling cycle over a large pool: lookups, scores, pick, booking.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divan::Bencher;
use pilotfish::plugins;
use pilotfish::prompt::{Blocks, Namespace, Prepared};
use pilotfish::schedule::{Ask, Pipeline, Scheduler};
use pilotfish::state::endpoint::{EndpointSpec, EngineKind};
use pilotfish::state::pool::{PoolMemory, TrafficPolicy};
use pilotfish::state::signals::Millis;
use pilotfish::state::{Endpoint, Member, ObjectName, Pool, PoolKind, PoolName};

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler<mimalloc::MiMalloc> = divan::AllocProfiler::new(mimalloc::MiMalloc);

fn main() {
    divan::main();
}

fn pool(endpoints: usize) -> Arc<Pool> {
    let members = (0..endpoints).map(|at| {
        let endpoint = Arc::new(Endpoint::new(EndpointSpec {
            name: ObjectName::new("default", format!("e{at}")),
            address: format!("10.0.{}.{}:8000", at / 250, at % 250 + 1)
                .parse()
                .unwrap_or_else(|_| unreachable!()),
            weight: 1.0,
            gpu: pilotfish::state::rates::Speed::default(),
            labels: BTreeMap::new(),
            engine: EngineKind::Vllm,
            event_ports: pilotfish::state::endpoint::EventPorts::default(),
            drain: false,
        }));
        endpoint.health.accepted();
        Arc::new(Member::new(endpoint))
    });
    let name = PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", "bench") };
    Arc::new(Pool::new(
        name,
        None,
        members.collect(),
        TrafficPolicy::default(),
        Arc::new(PoolMemory::default()),
    ))
}

/// A prompt of 8,192 tokens of which every endpoint was sent the first half.
#[divan::bench(args = [8, 100, 1_000])]
fn pick_by_marginal_cost(bencher: Bencher<'_, '_>, endpoints: usize) {
    let pool = pool(endpoints);
    let Ok(pipeline) = Pipeline::assemble("default", plugins::default_parts(), None) else {
        unreachable!("built in")
    };
    let scheduler = Scheduler::new(pipeline, Arc::default(), Duration::from_secs(2));
    let pipeline = scheduler.pipeline();
    let ids: Vec<u32> = (0..8_192).collect();
    let half = Blocks::of_tokens(&ids[..4_096], 16, Namespace::default());
    for member in &pool.members {
        scheduler.tokens.routed.routed(&half, member.endpoint.holder(), 100_000, Millis::now());
    }
    let prompt = Prepared {
        tokens: 8_192,
        counted: true,
        engine_block: Some(16),
        ids: Blocks::of_tokens(&ids, 16, Namespace::default()),
        ..Prepared::default()
    };
    let mut seed = 0;
    bencher.bench_local(|| {
        seed += 1;
        let ask = Ask {
            model: "m",
            prompt: &prompt,
            max_tokens: Some(100),
            answers: 1,
            sessions: &[],
            subset: None,
            only_if_cached: false,
            wanted: 3,
            seed,
            detail: 11,
        };
        scheduler.pick(&pipeline, &pool, &ask).is_ok()
    });
}
