/// Pools that come, go, or have nobody.
mod pools;

use std::sync::atomic::Ordering;

use futures::FutureExt;

use super::*;
use crate::admission::Admission;
use crate::admission::fairness::Bound;
use crate::admission::saturation::Saturation;
use crate::plugins::testing::pool;
use crate::state::signals::{Millis, SignalKind};

const STALENESS: Duration = Duration::from_secs(2);

/// A gate to a pool of one endpoint that takes so many requests.
fn gate(most: f32, change: impl FnOnce(&mut QueueSettings)) -> (Arc<Pool>, Arc<Gate>) {
    let mut settings = QueueSettings {
        saturation: Saturation { most_requests: Some(most), ..Saturation::default() },
        ..QueueSettings::default()
    };
    change(&mut settings);
    let pool = pool(1);
    let gate = Admission::new(settings, STALENESS, u64::MAX).gate(&pool);
    (pool, gate)
}

fn want(flow: &str) -> Want {
    Want { flow: Identity::named(flow), tokens: (10, 10), bytes: 100, ..Want::default() }
}

fn waits(gate: &Arc<Gate>, want: Want) -> Ticket {
    match gate.enter(want) {
        Entered::Wait(ticket) => ticket,
        other => panic!("{other:?}"),
    }
}

fn goes(gate: &Arc<Gate>, want: Want) -> Permit {
    match gate.enter(want) {
        Entered::Now(permit) => permit,
        other => panic!("{other:?}"),
    }
}

/// One that was let go when there was room.
fn open(gate: &Arc<Gate>) -> Permit {
    gate.state.lock().let_go();
    let mut permit = Permit::new(Arc::clone(gate), None, None);
    permit.bound();
    permit
}

fn refused(gate: &Arc<Gate>, want: Want) -> Refusal {
    match gate.enter(want) {
        Entered::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

fn turn(ticket: &mut Ticket) -> Option<Result<Permit, Refusal>> {
    tokio::task::unconstrained(ticket.turn()).now_or_never()
}

#[tokio::test(start_paused = true)]
async fn while_there_is_room_nobody_waits_and_nothing_is_remembered() {
    let (_pool, gate) = gate(3.0, |_| {});
    let permits: Vec<Permit> = (0..3).map(|_| goes(&gate, want("a"))).collect();
    assert_eq!((gate.status().open, gate.status().flows), (3, 0));
    let ticket = waits(&gate, want("a"));
    drop(permits);
    drop(ticket);
    let status = gate.status();
    assert_eq!((status.open, status.bands.len(), status.flows, status.room.used), (0, 0, 0, 0.0));
}

#[tokio::test(start_paused = true)]
async fn every_end_lets_the_next_go_and_flows_take_turns() {
    let (_pool, gate) = gate(1.0, |_| {});
    let mut running = Some(goes(&gate, want("a")));
    let names = ["a", "a", "a", "b", "b"];
    let mut tickets: Vec<(usize, Ticket)> =
        names.iter().enumerate().map(|(at, name)| (at, waits(&gate, want(name)))).collect();
    let mut order = Vec::new();
    while let Some(permit) = running.take() {
        drop(permit.end());
        let mut ready = tickets.iter_mut().filter_map(|(at, ticket)| Some((*at, turn(ticket)?)));
        if let Some((at, permit)) = ready.next() {
            assert!(ready.next().is_none(), "one left, one goes");
            order.push(names[at]);
            let mut permit = permit.unwrap();
            permit.bound();
            running = Some(permit);
            tickets.retain(|(other, _)| *other != at);
        }
    }
    assert_eq!(order, ["a", "b", "a", "b", "a"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_goes_away_leaves_no_trace_wherever_it_is() {
    let (_pool, gate) = gate(1.0, |_| {});
    let first = goes(&gate, want("a"));
    let (second, mut third) = (waits(&gate, want("b")), waits(&gate, want("c")));
    drop(second);
    let fourth = waits(&gate, want("d"));
    drop(first);
    let third = turn(&mut third).unwrap().unwrap();
    // Its turn has come and nobody has told it yet.
    drop(third);
    drop(fourth);
    let status = gate.status();
    assert_eq!((status.open, status.bands.len(), status.flows), (0, 0, 0));
    drop(goes(&gate, want("e")));
}

#[tokio::test(start_paused = true)]
async fn a_booking_takes_the_place_of_the_leave_that_it_was_made_with() {
    let (pool, gate) = gate(2.0, |_| {});
    let booked = &pool.members[0].endpoint.booked.requests;
    let mut permit = goes(&gate, want("a"));
    booked.store(1, Ordering::Relaxed);
    assert_eq!(gate.status().room.used, 2.0, "counted twice for the moment between the two");
    permit.bound();
    assert_eq!(gate.status().room.used, 1.0);
    booked.store(0, Ordering::Relaxed);
    drop(permit);
    assert_eq!(gate.status().room.used, 0.0);
}

#[tokio::test(start_paused = true)]
async fn low_priority_is_shed_and_a_full_queue_says_so() {
    let (_pool, gate) = gate(1.0, |settings| settings.band = Bound { requests: 2, bytes: 250 });
    let _running = goes(&gate, Want { priority: -1, ..want("a") });
    let shed = refused(&gate, Want { priority: -1, ..want("a") });
    assert_eq!((shed.reason, shed.retry_after), (Reason::Shed, Some(TRY_AGAIN)));
    let _waiting = [waits(&gate, want("a")), waits(&gate, want("b"))];
    let full = refused(&gate, want("c"));
    assert_eq!((full.reason, full.retry_after), (Reason::QueueFull, Some(TRY_AGAIN)));
    let _vip = waits(&gate, Want { priority: 7, ..want("c") });
    assert_eq!(refused(&gate, Want { bytes: 200, priority: 7, ..want("c") }).reason, Reason::QueueFull);
    let bands: Vec<(i32, usize)> = gate.status().bands.iter().map(|(p, w)| (*p, w.requests)).collect();
    assert_eq!(bands, [(7, 1), (0, 2)]);
}

#[tokio::test(start_paused = true)]
async fn all_that_fit_go_at_once_when_the_engine_reports_room() {
    let (pool, gate) = gate(0.0, |settings| settings.saturation = Saturation::default());
    let endpoint = &pool.members[0].endpoint;
    let report = |waiting: f64| {
        let now = Millis::now();
        endpoint.signals.set(SignalKind::Running, 8.0, now);
        endpoint.signals.set(SignalKind::Waiting, waiting, now);
        endpoint.capacity.observe(8.0, waiting, 8.0 + waiting);
    };
    (0..2).for_each(|_| report(50.0));
    let mut tickets: Vec<Ticket> = (0..100).map(|_| waits(&gate, want("a"))).collect();
    report(0.0);
    gate.look();
    let gone: Vec<Permit> = tickets.iter_mut().filter_map(turn).flatten().collect();
    assert_eq!(gone.len(), 100);
}

#[tokio::test(start_paused = true)]
async fn stale_readings_hold_nobody() {
    let (pool, gate) = gate(0.0, |settings| settings.saturation = Saturation::default());
    let endpoint = &pool.members[0].endpoint;
    endpoint.signals.set(SignalKind::Running, 8.0, Millis::now());
    endpoint.signals.set(SignalKind::Waiting, 50.0, Millis::now());
    (0..2).for_each(|_| endpoint.capacity.observe(8.0, 50.0, 58.0));
    let mut ticket = waits(&gate, want("a"));
    tokio::time::advance(STALENESS + Duration::from_millis(1)).await;
    gate.look();
    assert!(turn(&mut ticket).unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_rate_lets_requests_go_evenly() {
    let (_pool, gate) = gate(1_000.0, |settings| settings.most_per_second = Some(100.0));
    let mut gone = Vec::new();
    let mut tickets = Vec::new();
    for _ in 0..50 {
        match gate.enter(want("a")) {
            Entered::Now(permit) => gone.push(permit),
            Entered::Wait(ticket) => tickets.push(ticket),
            Entered::Refused(refusal) => panic!("{refusal}"),
        }
    }
    assert_eq!(gone.len(), 1);
    for _ in 0..8 {
        tokio::time::advance(crate::admission::TICK).await;
        gate.look();
    }
    let after = tickets.iter_mut().filter_map(turn).count();
    assert!((18..=22).contains(&after), "{after} in 200 ms at 100 a second");
}

#[tokio::test(start_paused = true)]
async fn sessions_that_go_on_go_first_but_not_for_ever() {
    let order =
        Order::Session { header: "x-session-id".into(), boost: Duration::from_secs(10), sessions: 10 };
    let (_pool, gate) = gate(1.0, |settings| {
        settings.order = order;
        settings.share_by = ShareBy::Nothing;
    });
    let in_session = |session| Want { session: Some(session), ..want("a") };
    let mut running = goes(&gate, in_session(1));
    running.bound();
    let mut bill = running.end().unwrap();
    bill.completed();
    drop(bill);

    let running = goes(&gate, want("a"));
    let mut early = waits(&gate, want("stranger"));
    tokio::time::advance(Duration::from_secs(9)).await;
    let mut late = waits(&gate, want("stranger"));
    let mut goes_on = waits(&gate, in_session(1));
    drop(running);
    let running = turn(&mut goes_on).expect("boosted past both").unwrap();
    tokio::time::advance(Duration::from_secs(2)).await;
    let mut again = waits(&gate, in_session(1));
    drop(running);
    let running = turn(&mut early).expect("waited for longer than the head start").unwrap();
    drop(running);
    drop(turn(&mut again).expect("still before who came 8 s earlier").unwrap());
    assert!(turn(&mut late).unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_are_all_answered_and_leave_nothing() {
    let (_pool, gate) = gate(50.0, |settings| settings.band = Bound { requests: 9_000, bytes: u64::MAX });
    let (mut open, mut waiting, mut full) = (Vec::new(), Vec::new(), 0);
    for at in 0..10_000 {
        match gate.enter(want(&format!("u{}", at % 97))) {
            Entered::Now(permit) => open.push(permit),
            Entered::Wait(ticket) => waiting.push(ticket),
            Entered::Refused(_) => full += 1,
        }
    }
    assert_eq!((open.len(), waiting.len(), full), (50, 9_000, 950));
    let mut served = 0;
    while let Some(permit) = open.pop() {
        served += 1;
        drop(permit);
        waiting.retain_mut(|ticket| match turn(ticket) {
            Some(permit) => {
                open.push(permit.unwrap());
                false
            }
            None => true,
        });
        if served % 100 == 0 {
            waiting.pop();
        }
    }
    assert!(waiting.is_empty());
    let status = gate.status();
    assert_eq!((status.open, status.flows, status.bands.len()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_has_too_much_drains_first() {
    let (pool, gate) = gate(2.0, |_| {});
    let booked = &pool.members[0].endpoint.booked.requests;
    booked.store(4, Ordering::Relaxed);
    let mut open: Vec<Permit> = (0..4).map(|_| open(&gate)).collect();
    let mut ticket = waits(&gate, want("a"));
    for left in (2..4).rev() {
        open.pop();
        assert!(turn(&mut ticket).is_none(), "{left} are there");
    }
    open.pop();
    assert!(turn(&mut ticket).unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn what_waits_for_one_pool_leaves_room_for_another() {
    let settings = QueueSettings { most_at_once: Some(1), ..QueueSettings::default() };
    let admission = Admission::new(settings, STALENESS, 250);
    let pools = [pool(1), pool(1)];
    let gates: Vec<Arc<Gate>> = pools
        .iter()
        .map(|pool| Arc::new(Gate::new(Arc::clone(&admission.rules), Arc::clone(pool))))
        .collect();
    let _running: Vec<Permit> = gates.iter().map(|gate| goes(gate, want("a"))).collect();
    let first = [waits(&gates[0], want("a")), waits(&gates[0], want("b"))];
    assert_eq!(refused(&gates[1], want("a")).reason, Reason::QueueFull);
    drop(first);
    let second = waits(&gates[1], want("a"));
    assert_eq!(admission.rules.bytes.load(Ordering::Relaxed), 100);
    drop(second);
    assert_eq!(admission.rules.bytes.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_share_of_the_pool_is_kept_for_higher_bands() {
    let (_pool, gate) = gate(10.0, |settings| {
        settings.bands.insert(5, settings.band);
        settings.ceilings = crate::admission::settings::Ceilings::Falling { most: 1.0, least: 0.5 };
    });
    let low: Vec<Permit> = (0..5).map(|_| goes(&gate, want("a"))).collect();
    let mut sixth = waits(&gate, want("a"));
    let high = Want { priority: 5, ..want("b") };
    let mut vip = waits(&gate, high);
    assert!(turn(&mut vip).is_some(), "it goes past who waits");
    assert!(turn(&mut sixth).is_none());
    drop(low);
    assert!(turn(&mut sixth).is_some());
}
