//! What a scheduling cycle allocates does not grow with the number of endpoints.

#![allow(clippy::unwrap_used, reason = "a test fails where it stands")]

#[path = "kit/crowd.rs"]
mod crowd;

use std::sync::Arc;

use crowd::Crowd;
use pilotfish::prompt::{Blocks, Namespace};
use pilotfish::state::cache::Events;
use pilotfish::state::reservation::{Leg, Role, Work};
use pilotfish::state::signals::Millis;

/// Allocations of one pick once scratch space has its size.
fn allocations(crowd: &Crowd) -> u64 {
    let pipeline = crowd.scheduler.pipeline();
    let pick = || {
        crowd.scheduler.explain(&pipeline, &crowd.pool, &crowd.ask(7)).unwrap();
    };
    pick();
    pick();
    allocation_counter::measure(pick).count_total
}

#[test]
fn a_pick_among_a_thousand_allocates_no_more_than_one_among_twenty() {
    let few = allocations(&Crowd::new(20, 1_024));
    assert!(few > 0, "the record itself is allocated: the counter works");
    assert_eq!(allocations(&Crowd::new(1_000, 1_024)), few);
}

/// Every endpoint follows events, announces nothing and computes the prompt, which its memory holds in 31 runs.
#[test]
fn what_is_in_computation_is_looked_up_without_allocations() {
    let still = Crowd::new(20, 1_024);
    let busy = Crowd::new(20, 1_024);
    let mut legs = Vec::new();
    for member in &busy.pool.members {
        for forked in 1..32 {
            let ids: Vec<u32> = (0..forked * 16).chain([u32::MAX; 16]).collect();
            let blocks = Blocks::of_tokens(&ids, 16, Namespace::default());
            let holder = member.endpoint.holder();
            busy.scheduler.tokens.routed.routed(&blocks, holder, 100_000, Millis::now());
        }
        let work = Work { prefill_tokens: 512, decode_tokens: 1, prefill_seconds: 0.1 };
        legs.push(Leg::book(Role::Serve, Arc::clone(&busy.pool), Arc::clone(member), work));
    }
    for member in still.pool.members.iter().chain(&busy.pool.members) {
        member.endpoint.cache.set_events(Events::Following);
    }
    assert_eq!(allocations(&busy), allocations(&still));
}
