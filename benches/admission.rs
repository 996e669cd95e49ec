//! What a request pays for its turn: while there is room, and out of a long queue.

#[path = "../tests/kit/crowd.rs"]
#[allow(dead_code, reason = "only its pool is wanted here")]
mod crowd;

use std::sync::Arc;
use std::time::Duration;

use crowd::Crowd;
use divan::Bencher;
use divan::counter::ItemsCount;
use futures::FutureExt;
use pilotfish::admission::fairness::{Arrival, Bound, FairQueue, USUAL_WEIGHT};
use pilotfish::admission::{Admission, Entered, Gate, Identity, QueueSettings, Want};

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler<mimalloc::MiMalloc> = divan::AllocProfiler::new(mimalloc::MiMalloc);

fn main() {
    divan::main();
}

fn gate(endpoints: usize, settings: QueueSettings) -> Arc<Gate> {
    Admission::new(settings, Duration::from_secs(2), u64::MAX).gate(&Crowd::new(endpoints, 16).pool)
}

fn want(flow: &Identity) -> Want {
    Want { flow: flow.clone(), tokens: (1_000, 200), bytes: 4_000, ..Want::default() }
}

/// A request that goes at once, is booked, and ends.
#[divan::bench(args = [8, 100, 1_000])]
fn goes_at_once(bencher: Bencher<'_, '_>, endpoints: usize) {
    let gate = gate(endpoints, QueueSettings::default());
    let flow = Identity::named("alice");
    bencher.bench_local(|| match gate.enter(want(&flow)) {
        Entered::Now(mut permit) => {
            permit.bound();
            permit.end().is_none()
        }
        other => panic!("{other:?}"),
    });
}

/// 10,000 requests of 100 flows that wait and leave one after the other, each end letting the next go.
#[divan::bench]
fn ten_thousand_leave_the_queue(bencher: Bencher<'_, '_>) {
    const WAITING: usize = 10_000;
    let bound = Bound { requests: WAITING + 1, bytes: u64::MAX };
    let flows: Vec<Identity> = (0..100).map(|at| Identity::named(&format!("user-{at}"))).collect();
    bencher
        .counter(ItemsCount::new(WAITING))
        .with_inputs(|| {
            let settings = QueueSettings { most_at_once: Some(1), band: bound, ..QueueSettings::default() };
            let gate = gate(8, settings);
            let Entered::Now(permit) = gate.enter(want(&flows[0])) else { panic!("there is room") };
            let tickets: Vec<_> = (0..WAITING)
                .map(|at| match gate.enter(want(&flows[at % flows.len()])) {
                    Entered::Wait(ticket) => ticket,
                    other => panic!("{other:?}"),
                })
                .collect();
            (permit, tickets)
        })
        .bench_local_values(|(first, mut tickets)| {
            // Turns come flow after flow, as the tickets do.
            let mut permit = Some(first);
            for ticket in &mut tickets {
                drop(permit.take());
                permit = ticket.turn().now_or_never().and_then(Result::ok);
                let Some(next) = &mut permit else { panic!("its turn has come") };
                next.bound();
            }
        });
}

/// The queue alone: one in, one out, 10,000 waiting.
#[divan::bench(args = [1, 100, 10_000])]
fn in_and_out(bencher: Bencher<'_, '_>, flows: usize) {
    let flows: Vec<Identity> = (0..flows).map(|at| Identity::named(&format!("user-{at}"))).collect();
    let mut queue = FairQueue::default();
    let mut at = 0;
    let mut push = |queue: &mut FairQueue<usize>| {
        at += 1;
        let flow = flows[at % flows.len()].clone();
        let arrival = Arrival { priority: 0, flow, weight: USUAL_WEIGHT, rank: 0, cost: 1_400, bytes: 4_000 };
        queue.push(arrival, Bound::NONE, Bound::NONE, at).is_ok()
    };
    for _ in 0..10_000 {
        push(&mut queue);
    }
    bencher.bench_local(|| {
        push(&mut queue);
        let Some((at, charged)) = queue.pop() else { panic!("one waits") };
        queue.settle(charged, 1_200);
        at
    });
}
