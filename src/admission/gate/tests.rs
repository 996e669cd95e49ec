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
async fn who_waits_for_a_pool_that_is_removed_is_told_and_who_comes_too() {
    let admission = Admission::new(
        QueueSettings { most_at_once: Some(1), ..QueueSettings::default() },
        STALENESS,
        u64::MAX,
    );
    let pool = pool(1);
    admission.follow(std::slice::from_ref(&pool), &|_| true);
    let gate = admission.gate(&pool);
    let running = goes(&gate, want("a"));
    let mut ticket = waits(&gate, want("a"));
    admission.follow(&[], &|_| true);
    let told = turn(&mut ticket).unwrap().unwrap_err();
    assert_eq!((told.reason, refused(&gate, want("b")).reason), (Reason::NoEndpoints, Reason::NoEndpoints));
    drop(running);
    assert_eq!(gate.status().open, 0);
}

#[tokio::test(start_paused = true)]
async fn who_came_by_a_route_that_is_removed_is_told_and_others_stay() {
    let (pool, gate) = gate(1.0, |_| {});
    let _running = goes(&gate, want("a"));
    let by = |route: &str| waits(&gate, Want { route: Some(route.into()), ..want("a") });
    let (mut gone, mut stays, mut other) = (by("ns/gone"), by("ns/stays"), waits(&gate, want("b")));
    gate.follow(&pool, &|route| route == "ns/stays");
    let told = turn(&mut gone).unwrap().unwrap_err();
    assert_eq!(told.reason, Reason::UnknownModel);
    assert!(told.message.contains("ns/gone"));
    assert!(turn(&mut stays).is_none() && turn(&mut other).is_none());
    assert_eq!(gate.waiting(), 2);
}

#[tokio::test(start_paused = true)]
async fn requests_are_held_for_the_first_endpoint_where_the_operator_wants_that() {
    let hold = Duration::from_secs(30);
    let (empty, full) = (pool(0), pool(2));
    let settings = QueueSettings { hold, hold_requests: 2, ..QueueSettings::default() };
    let gate = Admission::new(settings, STALENESS, u64::MAX).gate(&empty);
    let (mut first, second) = (waits(&gate, want("a")), waits(&gate, want("b")));
    assert!(gate.status().holds);
    assert_eq!(refused(&gate, want("c")).reason, Reason::NoEndpoints);
    assert_eq!((second.longest(), second.expired().reason), (Some(hold), Reason::NoEndpoints));
    gate.follow(&full, &|_| true);
    assert!(turn(&mut first).unwrap().is_ok());
    assert_eq!(second.expired().reason, Reason::QueueTimeout, "an endpoint is there");
}

#[tokio::test(start_paused = true)]
async fn without_an_endpoint_nobody_waits_by_default() {
    let gate = Admission::default().gate(&pool(0));
    drop(goes(&gate, want("a")));
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
async fn a_held_pool_tries_an_endpoint_that_failed_with_one_request_at_a_time() {
    let pool = pool(1);
    let settings = QueueSettings { hold: Duration::from_secs(30), ..QueueSettings::default() };
    let gate = Admission::new(settings, STALENESS, u64::MAX).gate(&pool);
    let health = &pool.members[0].endpoint.health;
    health.accepted();
    (0..3).for_each(|_| health.answered(500, Millis::now()));
    let mut tickets: Vec<Ticket> = (0..3).map(|_| waits(&gate, want("a"))).collect();
    tokio::time::advance(Duration::from_secs(11)).await;
    gate.look();
    let gone: Vec<Permit> = tickets.iter_mut().filter_map(turn).flatten().collect();
    assert_eq!(gone.len(), 1);
    assert!(health.begin_probe());
    gate.look();
    assert_eq!(gate.waiting(), 2, "until the answer is there");
    health.end_probe();
    health.answered(200, Millis::now());
    gate.look();
    assert_eq!(gate.waiting(), 0);
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

#[tokio::test(start_paused = true)]
async fn nobody_opens_a_gate_to_a_pool_that_is_gone() {
    let admission = Admission::default();
    let pool = pool(1);
    admission.follow(&[], &|_| true);
    assert_eq!(refused(&admission.gate(&pool), want("a")).reason, Reason::NoEndpoints);
    assert!(admission.gates().is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_pool_that_loses_its_endpoints_goes_at_once_to_be_told() {
    let (_pool, gate) = gate(1.0, |settings| settings.most_at_once = Some(1));
    let _running = goes(&gate, want("a"));
    let mut tickets: Vec<Ticket> = (0..50).map(|_| waits(&gate, want("a"))).collect();
    gate.follow(&pool(0), &|_| true);
    assert_eq!(tickets.iter_mut().filter_map(turn).flatten().count(), 50);
}
