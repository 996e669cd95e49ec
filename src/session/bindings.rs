//! Session ids, as digests, and the endpoints they are bound to: bounded in number and in age.

use std::collections::BTreeMap;
use std::time::Duration;

use ahash::AHashMap;
use parking_lot::Mutex;

use crate::state::signals::Millis;

/// Bindings of ids to endpoints, by slot.
#[derive(Debug)]
pub struct Bindings {
    ttl: Duration,
    capacity: usize,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    by_id: AHashMap<u128, Bound>,
    /// Ids by their last turn. All bindings live equally long, so the first to go by age is the first to expire.
    by_age: BTreeMap<u64, u128>,
    turn: u64,
}

#[derive(Clone, Copy, Debug)]
struct Bound {
    slot: u64,
    used: Millis,
    turn: u64,
}

impl Bindings {
    /// None yet; each lives `ttl` beyond its last use, and of more than `capacity` the oldest go.
    pub fn new(ttl: Duration, capacity: usize) -> Self {
        Self { ttl, capacity, table: Mutex::default() }
    }

    /// Ids bound, expired ones among them until the next is bound.
    pub fn len(&self) -> usize {
        self.table.lock().by_id.len()
    }

    /// Whether nobody is bound.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot that an id is bound to.
    pub fn get(&self, id: u128, now: Millis) -> Option<u64> {
        let bound = *self.table.lock().by_id.get(&id)?;
        (!self.has_expired(bound, now)).then_some(bound.slot)
    }

    /// Binds an id, or makes its binding young again.
    pub fn bind(&self, id: u128, slot: u64, now: Millis) {
        let mut table = self.table.lock();
        table.turn += 1;
        let turn = table.turn;
        if let Some(before) = table.by_id.insert(id, Bound { slot, used: now, turn }) {
            table.by_age.remove(&before.turn);
        }
        table.by_age.insert(turn, id);
        while let Some((&oldest, &id)) = table.by_age.first_key_value() {
            let expired = table.by_id.get(&id).is_none_or(|bound| self.has_expired(*bound, now));
            if !expired && table.by_id.len() <= self.capacity {
                break;
            }
            table.by_age.remove(&oldest);
            table.by_id.remove(&id);
        }
    }

    fn has_expired(&self, bound: Bound, now: Millis) -> bool {
        now.since(bound.used) >= self.ttl
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_millis(100);

    #[test]
    fn a_binding_lives_as_long_as_it_is_used_and_a_ttl_more() {
        let bindings = Bindings::new(TTL, 10);
        bindings.bind(1, 7, Millis(0));
        assert_eq!((bindings.get(1, Millis(99)), bindings.get(1, Millis(100))), (Some(7), None));
        bindings.bind(1, 7, Millis(99));
        assert_eq!(bindings.get(1, Millis(198)), Some(7));
        bindings.bind(2, 8, Millis(199));
        assert_eq!((bindings.len(), bindings.get(1, Millis(199))), (1, None), "the expired one is gone");
    }

    #[test]
    fn of_too_many_the_oldest_go() {
        let bindings = Bindings::new(TTL, 3);
        for id in 1..=3 {
            bindings.bind(id, 10, Millis(0));
        }
        bindings.bind(1, 10, Millis(1));
        bindings.bind(4, 10, Millis(2));
        let held = |id| bindings.get(id, Millis(3)).is_some();
        assert_eq!([held(1), held(2), held(3), held(4)], [true, false, true, true]);
        for id in 0..10_000 {
            bindings.bind(id, 10, Millis(3));
        }
        let table = bindings.table.lock();
        assert_eq!((table.by_id.len(), table.by_age.len()), (3, 3));
    }
}
