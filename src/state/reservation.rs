//! The load booked on an endpoint at the moment of the pick, given back exactly once however the request ends.
//!
//! A reservation is made of legs, released singly. A leg books one request and its tokens on one endpoint; its prompt tokens count as
//! prefill until the engine has shown its first token and as decode from then on. Dropping a leg releases it, so a
//! panic, a cancelled stream and a normal end need no code of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use super::endpoint::Booked;
use super::pool::{Member, Pool};

/// What a leg does for its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The whole request.
    Serve,
    /// The prompt only.
    Prefill,
    /// The output only.
    Decode,
}

impl Role {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Role::Serve => "serve",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

/// What a request asks of an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Prompt tokens to be computed.
    pub prefill_tokens: u64,
    /// Output tokens expected.
    pub decode_tokens: u64,
    /// Time the prompt takes at [unit speed](super::rates), seconds.
    pub prefill_seconds: f64,
}

/// The booking of one endpoint for one request.
#[derive(Debug)]
pub struct Leg {
    /// What it is for.
    pub role: Role,
    /// Keeps the labels of the pool alive as long as the booking.
    pub pool: Arc<Pool>,
    /// Where it is booked.
    pub member: Arc<Member>,
    booked: Change,
    /// The endpoint that this request probes.
    probes: Option<Arc<Member>>,
}

impl Leg {
    /// Books one request with its tokens.
    pub fn book(role: Role, pool: Arc<Pool>, member: Arc<Member>, work: Work) -> Self {
        let probes = member.endpoint.health.begin_probe().then(|| Arc::clone(&member));
        let booked = Change { absent: i64::from(role == Role::Decode), ..Change::of(work) };
        let leg = Self { role, pool, member, booked, probes };
        leg.change(booked);
        leg
    }

    /// The request is at its engine, which a decode leg is not while its prompt is computed elsewhere.
    pub fn arrived(&mut self) {
        let arrives = Change { absent: -self.booked.absent, ..Change::default() };
        self.change(arrives);
        self.booked = self.booked.plus(arrives);
    }

    /// The engine has begun to decode: what was to be prefilled is now held.
    pub fn prefill_done(&mut self) {
        self.arrived();
        if self.booked.decoding > 0 {
            return;
        }
        let moved = Change {
            prefill_tokens: -self.booked.prefill_tokens,
            decode_tokens: self.booked.prefill_tokens,
            decoding: 1,
            prefill_micros: -self.booked.prefill_micros,
            ..Change::default()
        };
        self.change(moved);
        self.booked = self.booked.plus(moved);
    }

    /// Books other work in the place of what was booked: the endpoint does the whole request after all.
    pub fn takes_all(&mut self, work: Work) {
        let change = Change::of(work);
        self.change(self.booked.reversed());
        self.change(change);
        (self.role, self.booked) = (Role::Serve, change);
    }

    /// Moves the booking to the endpoint that really served the request, if that is another one.
    pub fn served_by(&mut self, member: &Arc<Member>) {
        if !Arc::ptr_eq(&self.member, member) {
            self.change(self.booked.reversed());
            self.member = Arc::clone(member);
            self.change(self.booked);
        }
    }

    fn change(&self, by: Change) {
        let add = |booked: &Booked| {
            let add = |value: &AtomicI64, by: i64| {
                if by != 0 {
                    value.fetch_add(by, Ordering::AcqRel);
                }
            };
            add(&booked.requests, by.requests);
            add(&booked.prefill_tokens, by.prefill_tokens);
            add(&booked.decode_tokens, by.decode_tokens);
            add(&booked.decoding, by.decoding);
            add(&booked.prefill_micros, by.prefill_micros);
            add(&booked.absent, by.absent);
        };
        add(&self.member.booked);
        add(&self.member.endpoint.booked);
    }
}

impl Drop for Leg {
    fn drop(&mut self) {
        if let Some(probed) = &self.probes {
            probed.endpoint.health.end_probe();
        }
        self.change(self.booked.reversed());
    }
}

/// A change of what is booked.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    requests: i64,
    prefill_tokens: i64,
    decode_tokens: i64,
    decoding: i64,
    prefill_micros: i64,
    absent: i64,
}

impl Change {
    fn of(work: Work) -> Self {
        Self {
            requests: 1,
            prefill_tokens: clamp(work.prefill_tokens),
            decode_tokens: clamp(work.decode_tokens),
            decoding: 0,
            prefill_micros: clamp((work.prefill_seconds * 1e6) as u64),
            absent: 0,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests + other.requests,
            prefill_tokens: self.prefill_tokens + other.prefill_tokens,
            decode_tokens: self.decode_tokens + other.decode_tokens,
            decoding: self.decoding + other.decoding,
            prefill_micros: self.prefill_micros + other.prefill_micros,
            absent: self.absent + other.absent,
        }
    }

    fn reversed(self) -> Self {
        Self {
            requests: -self.requests,
            prefill_tokens: -self.prefill_tokens,
            decode_tokens: -self.decode_tokens,
            decoding: -self.decoding,
            prefill_micros: -self.prefill_micros,
            absent: -self.absent,
        }
    }
}

/// Tokens as booked: a client may ask for 2^64, a sum of many bookings must still fit.
fn clamp(tokens: u64) -> i64 {
    const MOST: u64 = 1 << 32;
    tokens.min(MOST) as i64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::state::endpoint::tests::endpoint;
    use crate::state::pool::{PoolKind, PoolMemory, PoolName, TrafficPolicy};
    use crate::state::{Endpoint, ObjectName};
    use proptest::prelude::*;

    /// Work of so many tokens, for tests.
    pub(crate) fn work(prefill_tokens: u64, decode_tokens: u64) -> Work {
        Work { prefill_tokens, decode_tokens, prefill_seconds: prefill_tokens as f64 * 1e-4 }
    }

    /// A pool of those endpoints, for tests.
    pub(crate) fn pool_of(endpoints: &[Arc<Endpoint>]) -> Arc<Pool> {
        Arc::new(Pool::new(
            PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", "pool") },
            None,
            endpoints.iter().map(|e| Arc::new(Member::new(Arc::clone(e)))).collect(),
            TrafficPolicy::default(),
            Arc::new(PoolMemory::default()),
        ))
    }

    /// Requests that decode and microseconds to prefill.
    fn phases(member: &Member) -> (i64, i64) {
        let get = |value: &AtomicI64| value.load(Ordering::Relaxed);
        (get(&member.endpoint.booked.decoding), get(&member.endpoint.booked.prefill_micros))
    }

    #[test]
    fn prompt_tokens_move_to_decode_once_and_all_is_released_on_drop() {
        let pool = pool_of(&[endpoint("a", "10.0.0.1:1")]);
        let member = &pool.members[0];
        let mut leg = Leg::book(Role::Serve, Arc::clone(&pool), Arc::clone(member), work(100, 20));
        assert_eq!(phases(member), (0, 10_000));
        assert_eq!(member.booked.read(), (1, 100, 20));
        leg.prefill_done();
        leg.prefill_done();
        assert_eq!(member.endpoint.booked.read(), (1, 0, 120));
        assert_eq!(phases(member), (1, 0));
        drop(leg);
        assert_eq!(phases(member), (0, 0));
        assert_eq!(member.booked.read(), (0, 0, 0));
        assert_eq!(member.endpoint.booked.read(), (0, 0, 0));
    }

    /// Requests that are booked there and not there yet.
    fn absent(member: &Member) -> u64 {
        let booked = &member.endpoint.booked;
        booked.read().0 - booked.at_engine()
    }

    #[test]
    fn a_decode_leg_is_at_its_engine_once_it_is_sent() {
        let pool = pool_of(&[endpoint("a", "10.0.0.1:1"), endpoint("b", "10.0.0.2:1")]);
        let book = |role| Leg::book(role, Arc::clone(&pool), Arc::clone(&pool.members[0]), work(0, 1));
        let absent = || absent(&pool.members[0]);
        let (_whole, mut sent, mut answered, mut alone) =
            (book(Role::Serve), book(Role::Decode), book(Role::Decode), book(Role::Decode));
        assert_eq!(absent(), 3);
        sent.arrived();
        sent.arrived();
        answered.prefill_done();
        alone.takes_all(work(1, 1));
        assert_eq!((absent(), pool.members[0].endpoint.booked.at_engine()), (0, 4));
        drop(book(Role::Decode));
        assert_eq!(absent(), 0);
    }

    #[test]
    fn a_wedged_endpoint_gets_one_request_at_a_time() {
        let pool = pool_of(&[endpoint("a", "10.0.0.1:1")]);
        let health = &pool.members[0].endpoint.health;
        health.set_wedged(true);
        let book = || Leg::book(Role::Serve, Arc::clone(&pool), Arc::clone(&pool.members[0]), work(1, 1));
        let (probe, other) = (book(), book());
        drop(other);
        assert!(health.is_probing(), "only the probe itself ends it");
        drop(probe);
        assert!(!health.is_probing());
    }

    proptest! {
        #[test]
        fn any_order_of_events_ends_at_zero(
            steps in prop::collection::vec((0u8..4, 0usize..3, any::<u64>(), any::<u64>()), 0..60)
        ) {
            let pool = pool_of(&[endpoint("a", "10.0.0.1:1"), endpoint("b", "10.0.0.2:1"), endpoint("c", "10.0.0.3:1")]);
            let mut open: Vec<Leg> = Vec::new();
            for (step, at, prefill, decode) in steps {
                let member = &pool.members[at];
                match step {
                    0 => open.push(Leg::book(Role::Serve, Arc::clone(&pool), Arc::clone(member), work(prefill, decode))),
                    1 => { if let Some(leg) = open.first_mut() { leg.prefill_done(); } }
                    2 => { if let Some(leg) = open.last_mut() { leg.served_by(member); } }
                    _ => { open.pop(); }
                }
                let total: u64 = pool.members.iter().map(|m| m.booked.read().0).sum();
                prop_assert_eq!(total, open.len() as u64);
            }
            drop(open);
            for member in &pool.members {
                prop_assert_eq!(member.booked.read(), (0, 0, 0));
                prop_assert_eq!(member.endpoint.booked.read(), (0, 0, 0));
                prop_assert_eq!(phases(member), (0, 0));
            }
        }
    }
}
