//! How much room a pool has: what is booked there against what its engines have shown they can hold.
//!
//! Bookings count at once, readings of engines correct them. What is not known is not full: an endpoint that reports nothing
//! is held to its own bookings beside endpoints that do, and a pool of which nothing is known always has room.

use std::time::Duration;

use crate::state::health::State;
use crate::state::signals::Millis;
use crate::state::{Endpoint, Pool};

/// When an endpoint is full.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saturation {
    /// Requests that may wait in its own queue, so that it never runs dry.
    pub queue_depth: f32,
    /// Use of its KV cache, 0 to 1.
    pub kv_usage: f32,
    /// Requests in flight on an endpoint of weight 1; `None`: as many as it has shown it runs at once.
    pub most_requests: Option<f32>,
    /// Tokens in flight on an endpoint of weight 1: prompts to be prefilled and sequences that decode.
    pub most_tokens: Option<f32>,
}

impl Default for Saturation {
    /// llm-d's queue depth; a cache filled by running sequences leaves no room for another.
    fn default() -> Self {
        Self { queue_depth: 5.0, kv_usage: 0.98, most_requests: None, most_tokens: None }
    }
}

/// Requests that a pool can hold, and that it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Room {
    /// Endpoints that take requests.
    pub endpoints: u32,
    /// Requests that fit; infinite if nothing is known.
    pub capacity: f64,
    /// Requests that are there, at most what fits of each endpoint.
    pub used: f64,
    /// Requests that are too many where they are: their ends make no room.
    pub excess: f64,
}

impl Room {
    /// Whether one more fits if no more than a share of the pool may be used.
    pub fn has_room(&self, ceiling: f64) -> bool {
        self.used < self.capacity * ceiling && self.used + 1.0 <= self.capacity
    }

    /// One more is there.
    pub fn take(&mut self) {
        self.used += 1.0;
    }

    /// One has ended, nobody says where.
    pub fn give_back(&mut self) {
        if self.excess >= 1.0 {
            self.excess -= 1.0;
        } else {
            self.used = (self.used - 1.0).max(0.0);
        }
    }

    /// Share of the pool that is used, 0 to 1.
    pub fn saturation(&self) -> f64 {
        if self.capacity > 0.0 { self.used / self.capacity } else { 0.0 }
    }

    /// The room of a pool.
    pub fn of(pool: &Pool, full: &Saturation, now: Millis, staleness: Duration) -> Self {
        // Who only computes prompts for others holds no request for long: where outputs are generated is where there is no room.
        let generating = || pool.members.iter().enumerate().filter(|(at, _)| pool.generates(*at));
        let up = || generating().map(|(_, m)| &*m.endpoint).filter(|e| e.health.state() == State::Up);
        // Picks pass over engines that stand still as long as others move.
        let others_move = up().any(|endpoint| !endpoint.health.is_wedged());
        let mut room = Self::default();
        let mut reports = false;
        for endpoint in up() {
            let seen = Seen::of(endpoint, full, now, staleness);
            let stands_still = others_move && endpoint.health.is_wedged();
            room.endpoints += 1;
            room.capacity += seen.capacity;
            if seen.is_full || stands_still {
                room.used += seen.capacity;
                room.excess += seen.requests;
            } else {
                room.used += seen.requests.min(seen.capacity);
                room.excess += (seen.requests - seen.capacity).max(0.0);
            }
            reports |= seen.reports;
        }
        let is_known = reports || full.most_requests.is_some() || full.most_tokens.is_some();
        // Where nobody is there, waiting makes no room.
        if room.endpoints == 0 || !is_known {
            room.capacity = f64::INFINITY;
        }
        room
    }
}

struct Seen {
    capacity: f64,
    requests: f64,
    is_full: bool,
    reports: bool,
}

impl Seen {
    fn of(endpoint: &Endpoint, full: &Saturation, now: Millis, staleness: Duration) -> Self {
        let load = endpoint.load(now, staleness);
        let reports = load.running.is_some() && load.waiting.is_some();
        let batch = f64::from(endpoint.capacity.batch());
        let weight = f64::from(endpoint.weight);
        let capacity = match full.most_requests {
            Some(most) => f64::from(most) * weight,
            None => batch + f64::from(full.queue_depth),
        };
        let tokens = load.prefill_tokens + load.decode_tokens;
        let holds = endpoint.cache_tokens().map_or(f32::INFINITY, |tokens| tokens as f32);
        let most_tokens = full.most_tokens.map_or(holds, |most| most * endpoint.weight);
        // As many as may wait there are no sign of anything.
        let presses = endpoint.capacity.is_pressed() && load.waiting.is_some_and(|n| n > full.queue_depth);
        let is_full = endpoint.health.is_full(now)
            || presses
            || load.kv_usage.is_some_and(|usage| usage >= full.kv_usage)
            || tokens > 0.0 && tokens >= most_tokens;
        Self { capacity: capacity.max(1.0), requests: f64::from(load.requests()), is_full, reports }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::pool;
    use crate::state::signals::SignalKind;
    use std::sync::atomic::Ordering;

    const NOW: Millis = Millis(10_000);
    const STALENESS: Duration = Duration::from_secs(2);

    fn report(endpoint: &Endpoint, running: f64, waiting: f64) {
        endpoint.signals.set(SignalKind::Running, running, NOW);
        endpoint.signals.set(SignalKind::Waiting, waiting, NOW);
        endpoint.capacity.observe(running, waiting, running + waiting);
    }

    fn room(pool: &Pool, now: Millis) -> Room {
        Room::of(pool, &Saturation::default(), now, STALENESS)
    }

    /// How many fit one after the other.
    fn free(mut room: Room) -> usize {
        (0..1_000)
            .take_while(|_| {
                let fits = room.has_room(1.0);
                room.take();
                fits
            })
            .count()
    }

    const ANY: usize = 1_000;

    #[test]
    fn nothing_known_is_room_and_nobody_there_is_none() {
        let none = room(&pool(0), NOW);
        assert_eq!((none.endpoints, free(none)), (0, ANY));
        let two = pool(2);
        two.members[0].endpoint.booked.requests.store(10_000, Ordering::Relaxed);
        assert_eq!(free(room(&two, NOW)), ANY);
    }

    #[test]
    fn an_engine_that_lets_requests_wait_is_full_until_its_readings_are_stale() {
        let pool = pool(1);
        let endpoint = &pool.members[0].endpoint;
        report(endpoint, 8.0, 50.0);
        assert!(free(room(&pool, NOW)) > 0, "once is chance");
        report(endpoint, 8.0, 50.0);
        assert_eq!(free(room(&pool, NOW)), 0);
        assert_eq!(room(&pool, NOW).saturation(), 1.0);
        assert_eq!(free(room(&pool, Millis(20_000))), ANY);
    }

    #[test]
    fn bookings_fill_what_was_learned_at_once() {
        let pool = pool(2);
        for member in &pool.members {
            for _ in 0..3 {
                report(&member.endpoint, 8.0, 1.0);
            }
            member.endpoint.signals.set(SignalKind::Foreign, 0.0, NOW);
            member.endpoint.booked.requests.store(10, Ordering::Relaxed);
        }
        assert_eq!(free(room(&pool, NOW)), 6, "8 at once and 5 in the queue of each");
        pool.members[0].endpoint.booked.requests.store(99, Ordering::Relaxed);
        assert_eq!(free(room(&pool, NOW)), 3, "what is too much in one place takes no room in another");
        assert!(room(&pool, NOW).has_room(0.9) && !room(&pool, NOW).has_room(0.88), "23 of 26");
    }

    #[test]
    fn an_endpoint_that_fell_silent_takes_no_more_than_it_could() {
        let pool = pool(2);
        for _ in 0..3 {
            report(&pool.members[0].endpoint, 8.0, 9.0);
        }
        let silent = &pool.members[1].endpoint;
        silent.booked.requests.store(261, Ordering::Relaxed);
        assert_eq!(free(room(&pool, NOW)), 0);
        silent.booked.requests.store(260, Ordering::Relaxed);
        assert_eq!(free(room(&pool, NOW)), 1);
    }

    #[test]
    fn a_cache_filled_by_running_or_booked_sequences_is_full() {
        let pool = pool(1);
        let endpoint = &pool.members[0].endpoint;
        report(endpoint, 1.0, 0.0);
        endpoint.signals.set(SignalKind::Blocks, 100.0, NOW);
        endpoint.signals.set(SignalKind::BlockSize, 16.0, NOW);
        endpoint.booked.decode_tokens.store(1_599, Ordering::Relaxed);
        assert!(free(room(&pool, NOW)) > 0);
        endpoint.booked.decode_tokens.store(1_600, Ordering::Relaxed);
        assert_eq!(free(room(&pool, NOW)), 0);
        endpoint.booked.decode_tokens.store(0, Ordering::Relaxed);
        endpoint.signals.set(SignalKind::KvUsage, 0.99, NOW);
        assert_eq!(free(room(&pool, NOW)), 0);
    }

    #[test]
    fn limits_of_the_operator_go_before_what_was_learned() {
        let pool = pool(2);
        let full = Saturation { most_requests: Some(3.0), most_tokens: Some(100.0), ..Saturation::default() };
        let free = || free(Room::of(&pool, &full, NOW, STALENESS));
        assert_eq!(free(), 6, "although nothing is reported");
        assert_eq!(
            Room::of(&crate::plugins::testing::pool(0), &full, NOW, STALENESS).capacity,
            f64::INFINITY
        );
        pool.members[0].endpoint.booked.requests.store(2, Ordering::Relaxed);
        assert_eq!(free(), 4);
        pool.members[0].endpoint.booked.prefill_tokens.store(100, Ordering::Relaxed);
        assert_eq!(free(), 3);
    }

    #[test]
    fn a_share_of_a_pool_lets_one_go_however_small_it_is() {
        let room = Room { endpoints: 1, capacity: 1.0, ..Room::default() };
        assert!(room.has_room(0.1));
        assert!(!Room { used: 1.0, ..room }.has_room(1.0));
        assert!(!room.has_room(0.0));
        let half = Room { capacity: 10.0, used: 5.0, ..room };
        assert!(half.has_room(0.51) && !half.has_room(0.5));
    }

    #[test]
    fn what_is_too_much_drains_before_another_goes_in() {
        let pool = pool(2);
        let full = Saturation { most_requests: Some(3.0), ..Saturation::default() };
        pool.members[0].endpoint.booked.requests.store(5, Ordering::Relaxed);
        pool.members[1].endpoint.booked.requests.store(3, Ordering::Relaxed);
        let mut room = Room::of(&pool, &full, NOW, STALENESS);
        let ends = (0..4).map(|_| {
            room.give_back();
            free(room)
        });
        assert_eq!(ends.collect::<Vec<_>>(), [0, 0, 1, 2]);
        pool.members[1].endpoint.signals.set(SignalKind::KvUsage, 1.0, NOW);
        assert_eq!(Room::of(&pool, &full, NOW, STALENESS).excess, 2.0 + 3.0, "a full cache takes nobody");
    }

    #[test]
    fn an_engine_that_stands_still_offers_nothing_beside_one_that_moves() {
        let pool = pool(2);
        let full = Saturation { most_requests: Some(3.0), ..Saturation::default() };
        let free = || free(Room::of(&pool, &full, NOW, STALENESS));
        pool.members[0].endpoint.health.set_wedged(true);
        assert_eq!(free(), 3);
        pool.members[1].endpoint.health.set_wedged(true);
        assert_eq!(free(), 6, "then nobody knows better");
    }
}
