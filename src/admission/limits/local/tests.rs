use super::*;
use crate::admission::limits::Unit;

const RATES: Rates = Both {
    input: Some(Rate { tokens: 100, unit: Unit::Minute }),
    output: Some(Rate { tokens: 10, unit: Unit::Minute }),
};
const NOW: Duration = Duration::ZERO;

fn key(owner: &str) -> Key {
    Key::new(&"default/r".into(), Identity::named(owner), false)
}

fn ask(input: u64) -> Both<Option<u64>> {
    Both { input: Some(input), output: Some(0) }
}

#[test]
fn both_kinds_are_taken_or_none() {
    let buckets = Buckets::default();
    let spent = Both { input: 0.0, output: 20.0 };
    buckets.spend(&key("a"), RATES, &spent, NOW);
    let (_, answer) = buckets.take(key("a"), RATES, &ask(60), NOW);
    assert_eq!((answer.taken, answer.levels), (None, Both { input: 100.0, output: -10.0 }));
    let (_, answer) = buckets.take(key("b"), RATES, &ask(60), NOW);
    assert_eq!(answer.taken, Some(Both { input: 60, output: 0 }));
    assert_eq!(buckets.levels(&key("b"), RATES, NOW), Both { input: 40.0, output: 10.0 });
}

#[test]
fn a_limit_that_changes_keeps_levels_and_one_that_goes_is_gone() {
    let buckets = Buckets::default();
    buckets.take(key("a"), RATES, &ask(60), NOW);
    let wider = Both { input: Some(Rate { tokens: 1_000, unit: Unit::Minute }), output: None };
    buckets.follow(|_| Some(wider), NOW);
    assert_eq!(buckets.levels(&key("a"), wider, NOW), Both { input: 40.0, output: 0.0 });
    buckets.follow(|_| Some(RATES), NOW);
    assert_eq!(buckets.levels(&key("a"), RATES, NOW), Both { input: 40.0, output: 10.0 });
    buckets.follow(|_| None, NOW);
    assert!(buckets.is_empty());
}

#[test]
fn what_settles_at_the_rates_of_its_charge_takes_nothing_from_a_limit_that_was_raised() {
    let buckets = Buckets::default();
    let (charged, _) = buckets.take(key("a"), RATES, &ask(60), NOW);
    let raised = Both { input: Some(Rate { tokens: 1_000, unit: Unit::Minute }), ..RATES };
    buckets.follow(|_| Some(raised), NOW);
    let later = Duration::from_secs(30);
    buckets.spend(&charged, RATES, &Both { input: 40.0, output: 0.0 }, later);
    assert_eq!(buckets.levels(&charged, raised, later).input, 500.0);
}

#[test]
fn full_buckets_are_not_kept() {
    let buckets = Buckets::default();
    let (key_a, _) = buckets.take(key("a"), RATES, &ask(60), NOW);
    assert_eq!(buckets.len(), 1);
    buckets.spend(&key_a, RATES, &Both { input: -60.0, output: 0.0 }, NOW);
    for _ in 0..SHARDS {
        buckets.sweep(NOW);
    }
    assert!(buckets.is_empty());
    buckets.take(key("a"), RATES, &ask(60), NOW);
    for _ in 0..SHARDS {
        buckets.sweep(Duration::from_secs(36));
    }
    assert!(buckets.is_empty());
}

#[test]
fn beyond_the_bound_identities_share_one_bucket_and_are_counted() {
    let buckets = Buckets::new(100);
    for n in 0..10_000 {
        buckets.take(key(&n.to_string()), RATES, &ask(1), NOW);
    }
    assert_eq!(buckets.len(), 101);
    assert_eq!(buckets.overflowed(), 9_900);
    let (crowd, answer) = buckets.take(key("x"), RATES, &ask(1), NOW);
    assert_eq!(answer.taken, None, "what the crowd may spend together is spent");
    assert_eq!(crowd.hash, key("y").overflow().hash);
    let (_, answer) = buckets.take(key("7"), RATES, &ask(1), NOW);
    assert!(answer.taken.is_some(), "who has a bucket keeps it");
    for n in 10_000..20_000 {
        buckets.spend(&key(&n.to_string()), RATES, &Both { input: 1.0, output: -5.0 }, NOW);
    }
    assert_eq!(buckets.len(), 101, "whoever reports what was spent begins no bucket either");
    assert_eq!(buckets.levels(&crowd, RATES, NOW).input, -10_000.0);
}
