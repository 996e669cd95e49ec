use super::*;

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
