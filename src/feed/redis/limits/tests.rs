use super::*;
use crate::admission::limits::store::Name;
use crate::admission::limits::{Rate, Unit};

fn store() -> RedisStore {
    RedisStore::new("redis://nowhere:6379".parse().unwrap(), "r", Arc::new(|_, _| {}))
}

#[test]
fn one_good_answer_among_bad_ones_is_no_recovery() {
    let store = store();
    for _ in 0..3 {
        store.inner.fail("late");
        store.inner.succeed();
        assert!(!store.is_well());
    }
    store.inner.succeed();
    assert!(store.is_well());
}

#[test]
fn the_first_good_answer_is_enough_and_a_hiccup_is_no_failure() {
    let store = store();
    store.inner.succeed();
    assert!(store.is_well());
    for _ in 0..5 {
        store.inner.late();
        store.inner.late();
        assert!(store.is_well(), "two in a row");
        store.inner.succeed();
    }
    (0..3).for_each(|_| store.inner.late());
    assert!(!store.is_well());
}

#[test]
fn settlements_without_room_are_counted() {
    let store = store();
    for n in 0..65_546 {
        let name = Name(n.to_string().into());
        store.add(Spent { name, rate: Rate { tokens: 1, unit: Unit::Second }, tokens: 1 });
    }
    assert_eq!(store.inner.lost.load(Ordering::Relaxed), 10);
}
