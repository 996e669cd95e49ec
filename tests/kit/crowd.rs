//! A pool as large as wished, whose endpoints all hold half of one prompt: for what is counted and timed in one process.

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

/// The pool, the built-in profile over it, and the prompt.
pub struct Crowd {
    pub pool: Arc<Pool>,
    pub scheduler: Scheduler,
    pub prompt: Prepared,
}

impl Crowd {
    /// So many endpoints, a prompt of so many tokens.
    pub fn new(endpoints: usize, tokens: u32) -> Self {
        let pipeline = Pipeline::assemble("default", plugins::default_parts(), None).unwrap();
        let scheduler = Scheduler::new(pipeline, Arc::default(), Duration::from_secs(2));
        let pool = pool(endpoints);
        let cut = |tokens: u32| Blocks::of_tokens(&(0..tokens).collect::<Vec<_>>(), 16, Namespace::default());
        for member in &pool.members {
            let holder = member.endpoint.holder();
            scheduler.tokens.routed.routed(&cut(tokens / 2), holder, 100_000, Millis::now());
        }
        let prompt = Prepared {
            tokens: u64::from(tokens),
            counted: true,
            engine_block: Some(16),
            ids: cut(tokens),
            ..Prepared::default()
        };
        Self { pool, scheduler, prompt }
    }

    /// A request for the prompt.
    pub fn ask(&self, seed: u64) -> Ask<'_> {
        Ask {
            model: "m",
            prompt: &self.prompt,
            max_tokens: Some(100),
            answers: 1,
            sessions: &[],
            subset: None,
            only_if_cached: false,
            may_be_split: false,
            wanted: 3,
            seed,
            detail: 11,
        }
    }
}

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
            transfer: pilotfish::state::disaggregation::TransferSpec::default(),
            drain: false,
            pod: None,
        }));
        endpoint.health.accepted();
        Arc::new(Member::new(endpoint))
    });
    let name = PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", "pool") };
    let memory = Arc::new(PoolMemory::default());
    Arc::new(Pool::new(name, None, members.collect(), TrafficPolicy::default(), memory))
}
