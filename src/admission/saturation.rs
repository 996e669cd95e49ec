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
    pub capacity: f32,
    /// Requests that are there, at most what fits of each endpoint.
    pub used: f32,
}

impl Room {
    /// Requests that still fit if no more than a share of the pool may be used.
    pub fn free(&self, ceiling: f32) -> f32 {
        (self.capacity * ceiling - self.used).max(0.0)
    }

    /// Share of the pool that is used, 0 to 1.
    pub fn saturation(&self) -> f32 {
        if self.capacity > 0.0 { self.used / self.capacity } else { 0.0 }
    }

    /// The room of a pool.
    pub fn of(pool: &Pool, full: &Saturation, now: Millis, staleness: Duration) -> Self {
        let mut room = Self::default();
        let mut reports = false;
        for member in &pool.members {
            let endpoint = &*member.endpoint;
            if endpoint.health.state() != State::Up {
                continue;
            }
            let seen = Seen::of(endpoint, full, now, staleness);
            room.endpoints += 1;
            room.capacity += seen.capacity;
            room.used += seen.used.min(seen.capacity);
            reports |= seen.reports || full.most_requests.is_some();
        }
        if !reports {
            room.capacity = f32::INFINITY;
        }
        room
    }
}

struct Seen {
    capacity: f32,
    used: f32,
    reports: bool,
}

impl Seen {
    fn of(endpoint: &Endpoint, full: &Saturation, now: Millis, staleness: Duration) -> Self {
        let load = endpoint.load(now, staleness);
        let reports = load.running.is_some() && load.waiting.is_some();
        let batch = endpoint.capacity.batch() as f32;
        let capacity =
            full.most_requests.map_or(batch + full.queue_depth, |most| most * endpoint.weight).max(1.0);
        let tokens = load.prefill_tokens + load.decode_tokens;
        let holds = endpoint.cache_tokens().map_or(f32::INFINITY, |tokens| tokens as f32);
        let most_tokens = full.most_tokens.map_or(holds, |most| most * endpoint.weight);
        let presses =
            endpoint.capacity.is_pressed() && load.waiting.is_some_and(|n| n >= full.queue_depth.max(1.0));
        let is_full = endpoint.health.is_full(now)
            || presses
            || load.kv_usage.is_some_and(|usage| usage >= full.kv_usage)
            || tokens > 0.0 && tokens >= most_tokens;
        Self { capacity, used: if is_full { capacity } else { load.requests() }, reports }
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

    #[test]
    fn nothing_known_is_room_and_nobody_there_is_none() {
        let none = room(&pool(0), NOW);
        assert_eq!((none.endpoints, none.free(1.0)), (0, f32::INFINITY));
        let two = pool(2);
        two.members[0].endpoint.booked.requests.store(10_000, Ordering::Relaxed);
        assert_eq!(room(&two, NOW).free(1.0), f32::INFINITY);
    }

    #[test]
    fn an_engine_that_lets_requests_wait_is_full_until_its_readings_are_stale() {
        let pool = pool(1);
        let endpoint = &pool.members[0].endpoint;
        report(endpoint, 8.0, 50.0);
        assert!(room(&pool, NOW).free(1.0) > 0.0, "once is chance");
        report(endpoint, 8.0, 50.0);
        assert_eq!(room(&pool, NOW).free(1.0), 0.0);
        assert_eq!(room(&pool, NOW).saturation(), 1.0);
        assert_eq!(room(&pool, Millis(20_000)).free(1.0), f32::INFINITY);
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
        assert_eq!(room(&pool, NOW).free(1.0), 6.0, "8 at once and 5 in the queue of each");
        pool.members[0].endpoint.booked.requests.store(99, Ordering::Relaxed);
        assert_eq!(room(&pool, NOW).free(1.0), 3.0, "what is too much in one place takes no room in another");
        assert_eq!((room(&pool, NOW).free(0.9) * 10.0).round(), 4.0);
    }

    #[test]
    fn an_endpoint_that_fell_silent_takes_no_more_than_it_could() {
        let pool = pool(2);
        for _ in 0..3 {
            report(&pool.members[0].endpoint, 8.0, 9.0);
        }
        let silent = &pool.members[1].endpoint;
        silent.booked.requests.store(261, Ordering::Relaxed);
        assert_eq!(room(&pool, NOW).free(1.0), 0.0);
        silent.booked.requests.store(260, Ordering::Relaxed);
        assert_eq!(room(&pool, NOW).free(1.0), 1.0);
    }

    #[test]
    fn a_cache_filled_by_running_or_booked_sequences_is_full() {
        let pool = pool(1);
        let endpoint = &pool.members[0].endpoint;
        report(endpoint, 1.0, 0.0);
        endpoint.signals.set(SignalKind::Blocks, 100.0, NOW);
        endpoint.signals.set(SignalKind::BlockSize, 16.0, NOW);
        endpoint.booked.decode_tokens.store(1_599, Ordering::Relaxed);
        assert!(room(&pool, NOW).free(1.0) > 0.0);
        endpoint.booked.decode_tokens.store(1_600, Ordering::Relaxed);
        assert_eq!(room(&pool, NOW).free(1.0), 0.0);
        endpoint.booked.decode_tokens.store(0, Ordering::Relaxed);
        endpoint.signals.set(SignalKind::KvUsage, 0.99, NOW);
        assert_eq!(room(&pool, NOW).free(1.0), 0.0);
    }

    #[test]
    fn limits_of_the_operator_go_before_what_was_learned() {
        let pool = pool(2);
        let full = Saturation { most_requests: Some(3.0), most_tokens: Some(100.0), ..Saturation::default() };
        let free = || Room::of(&pool, &full, NOW, STALENESS).free(1.0);
        assert_eq!(free(), 6.0, "although nothing is reported");
        pool.members[0].endpoint.booked.requests.store(2, Ordering::Relaxed);
        assert_eq!(free(), 4.0);
        pool.members[0].endpoint.booked.prefill_tokens.store(100, Ordering::Relaxed);
        assert_eq!(free(), 3.0);
    }
}
