//! Whether an endpoint can take a request, learned from scrapes and from what became of earlier requests.
//!
//! The rules are those of the design: two refused connections in a row mean down, three 500/502 in a row mean draining,
//! a 503 means full for a second and never ill, a 4xx says nothing.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use super::signals::Millis;

/// Refused scrapes or connects in a row after which an endpoint is down.
const REFUSALS_UNTIL_DOWN: u8 = 2;
/// Answers 500 or 502 in a row after which an endpoint counts as draining: vLLM answers so during its own drain.
const FAILURES_UNTIL_DRAINING: u8 = 3;
/// How long after its last 500 or 502 a failing endpoint is given one request to show that it is well again.
const PROBE_AFTER: Duration = Duration::from_secs(10);
/// How long a connection taken shows that the port still takes them: ten scrapes.
const HEARD_LATELY: Duration = Duration::from_secs(2);
/// How long a 503 keeps an endpoint full: vLLM's admission overflow clears within scheduler steps.
const FULL_FOR: Duration = Duration::from_secs(1);

/// The state of an endpoint, as shown and as filtered by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Its port has not accepted a connection yet.
    Starting,
    /// Takes requests.
    Up,
    /// Refuses connections.
    Down,
    /// The engine sleeps: it would accept a request and let it hang.
    Asleep,
    /// Wants no new requests.
    Draining,
}

impl State {
    /// Every state, for metrics.
    pub const ALL: [State; 5] = [State::Starting, State::Up, State::Down, State::Asleep, State::Draining];

    /// The name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Up => "up",
            State::Down => "down",
            State::Asleep => "asleep",
            State::Draining => "draining",
        }
    }
}

/// What is known of an endpoint's health. All counters saturate.
#[derive(Debug, Default)]
pub struct Health {
    accepted: AtomicBool,
    accepted_at: AtomicU64,
    refused: AtomicU8,
    failed: AtomicU8,
    failed_at: AtomicU64,
    asleep: AtomicBool,
    drain: AtomicBool,
    wedged: AtomicBool,
    probing: AtomicBool,
    full_until: AtomicU64,
}

impl Health {
    /// The state now.
    pub fn state(&self) -> State {
        if self.drain.load(Ordering::Relaxed) {
            State::Draining
        } else if self.refused.load(Ordering::Relaxed) >= REFUSALS_UNTIL_DOWN {
            if self.accepted.load(Ordering::Relaxed) { State::Down } else { State::Starting }
        } else if !self.accepted.load(Ordering::Relaxed) {
            State::Starting
        } else if self.asleep.load(Ordering::Relaxed) {
            State::Asleep
        } else if self.failed.load(Ordering::Relaxed) >= FAILURES_UNTIL_DRAINING {
            State::Draining
        } else {
            State::Up
        }
    }

    /// Whether a 503 was seen within the last second.
    pub fn is_full(&self, now: Millis) -> bool {
        self.full_until.load(Ordering::Relaxed) > now.0
    }

    /// Whether requests are open while the engine's token counters stand still.
    pub fn is_wedged(&self) -> bool {
        self.wedged.load(Ordering::Relaxed)
    }

    /// Whether a request to it is a probe: it is wedged, or has failed three times in a row.
    fn is_on_probation(&self) -> bool {
        self.is_wedged() || self.failed.load(Ordering::Relaxed) >= FAILURES_UNTIL_DRAINING
    }

    /// Whether one request may show that it is well again: none is under way, it is not the operator's wish that none
    /// come, and if it failed, that was a while ago.
    pub fn may_be_probed(&self, now: Millis) -> bool {
        let failed = self.failed.load(Ordering::Relaxed) >= FAILURES_UNTIL_DRAINING;
        let rested = now.since(Millis(self.failed_at.load(Ordering::Relaxed))) >= PROBE_AFTER;
        !self.drain.load(Ordering::Relaxed) && !self.is_probing() && !self.is_full(now) && (!failed || rested)
    }

    /// A request is booked here: true if it is the one probe, which then must be given back.
    pub fn begin_probe(&self) -> bool {
        self.is_on_probation() && !self.probing.swap(true, Ordering::AcqRel)
    }

    /// Gives the probe back.
    pub fn end_probe(&self) {
        self.probing.store(false, Ordering::Release);
    }

    /// Whether a probe is under way.
    pub fn is_probing(&self) -> bool {
        self.probing.load(Ordering::Acquire)
    }

    /// The port took a connection: whatever the answer, something listens.
    pub fn accepted(&self) {
        self.accepted.store(true, Ordering::Relaxed);
        self.accepted_at.store(Millis::now().0, Ordering::Relaxed);
        self.refused.store(0, Ordering::Relaxed);
    }

    /// The port refused a connection or the host could not be reached. True if this made the endpoint go down.
    pub fn refused(&self) -> bool {
        let before = saturating_increment(&self.refused);
        before.saturating_add(1) == REFUSALS_UNTIL_DOWN && self.accepted.load(Ordering::Relaxed)
    }

    /// What the engine answered to a request of a client.
    pub fn answered(&self, status: u16, now: Millis) {
        self.accepted();
        match status {
            500 | 502 => {
                self.failed_at.store(now.0, Ordering::Relaxed);
                saturating_increment(&self.failed);
            }
            503 => self.full_until.store(now.plus(FULL_FOR).0, Ordering::Relaxed),
            200..=399 => self.failed.store(0, Ordering::Relaxed),
            _ => {}
        }
    }

    /// An attempt of Envoy's did not succeed here, and it does not tell why: overload, a reset, a refusal. Avoided for a
    /// second. It counts as a refusal only if nothing has shown for a while that the port takes connections: scrapes know
    /// better. True if this made the endpoint go down.
    pub fn missed(&self, now: Millis) -> bool {
        self.full_until.store(now.plus(FULL_FOR).0, Ordering::Relaxed);
        let heard = Millis(self.accepted_at.load(Ordering::Relaxed));
        now.since(heard) > HEARD_LATELY && self.refused()
    }

    /// A request of ours was refused the connection: it counts, and the next are kept away for a second.
    pub fn turned_away(&self, now: Millis) {
        self.full_until.store(now.plus(FULL_FOR).0, Ordering::Relaxed);
        self.refused();
    }

    /// Sets whether the engine sleeps.
    pub fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::Relaxed);
    }

    /// Sets whether the operator drains the endpoint.
    pub fn set_drain(&self, drain: bool) {
        self.drain.store(drain, Ordering::Relaxed);
    }

    /// Sets whether the engine stands still with requests open.
    pub fn set_wedged(&self, wedged: bool) {
        self.wedged.store(wedged, Ordering::Relaxed);
    }

    /// A new engine process: nothing learned of the old one holds.
    pub fn restarted(&self) {
        self.failed.store(0, Ordering::Relaxed);
        self.full_until.store(0, Ordering::Relaxed);
        self.wedged.store(false, Ordering::Relaxed);
    }
}

fn saturating_increment(counter: &AtomicU8) -> u8 {
    counter
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(n.saturating_add(1)))
        .unwrap_or_else(|n| n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_starts_until_its_port_accepts() {
        let health = Health::default();
        assert_eq!(health.state(), State::Starting);
        assert!(!health.refused());
        assert!(!health.refused(), "an endpoint that never accepted does not go down, it still starts");
        assert_eq!(health.state(), State::Starting);
        health.accepted();
        assert_eq!(health.state(), State::Up);
        assert!(!health.refused());
        assert_eq!(health.state(), State::Up, "one refusal proves nothing");
        assert!(health.refused());
        assert_eq!(health.state(), State::Down);
        health.accepted();
        assert_eq!(health.state(), State::Up);
    }

    #[test]
    fn an_engine_that_takes_long_to_start_comes_up() {
        let health = Health::default();
        for _ in 0..=u16::from(u8::MAX) {
            assert!(!health.refused());
        }
        assert_eq!(health.state(), State::Starting);
        health.accepted();
        assert_eq!(health.state(), State::Up);
    }

    #[test]
    fn errors_drain_overload_fills_and_client_errors_say_nothing() {
        let health = Health::default();
        let now = Millis(10);
        for status in [500, 502, 404, 500] {
            health.answered(status, now);
        }
        assert_eq!(health.state(), State::Draining);
        health.answered(200, now);
        assert_eq!(health.state(), State::Up, "one success ends it");
        for _ in 0..10 {
            health.answered(503, now);
        }
        assert_eq!(health.state(), State::Up, "overload is not illness");
        assert!(health.is_full(now) && health.is_full(Millis(1_009)) && !health.is_full(Millis(1_010)));
    }

    #[test]
    fn one_probe_at_a_time() {
        let health = Health::default();
        assert!(!health.begin_probe(), "a well endpoint needs none");
        health.set_wedged(true);
        assert!(health.may_be_probed(Millis(1)) && health.begin_probe());
        assert!(!health.may_be_probed(Millis(1)) && !health.begin_probe());
        health.end_probe();
        assert!(health.begin_probe());
    }

    #[test]
    fn attempts_that_fail_mean_down_only_where_no_scrape_knows_better() {
        let health = Health::default();
        health.accepted();
        let now = Millis::now();
        for _ in 0..10 {
            assert!(!health.missed(now));
        }
        assert_eq!(health.state(), State::Up);
        assert!(health.is_full(now));
        let later = now.plus(Duration::from_secs(3));
        assert!(!health.missed(later) && health.missed(later));
        assert_eq!(health.state(), State::Down);
    }

    #[test]
    fn a_failing_endpoint_is_tried_again_after_a_while_but_not_one_that_the_operator_drains() {
        let health = Health::default();
        for _ in 0..3 {
            health.answered(500, Millis(1_000));
        }
        assert!(!health.may_be_probed(Millis(10_999)));
        assert!(health.may_be_probed(Millis(11_000)));
        health.set_drain(true);
        assert!(!health.may_be_probed(Millis(11_000)));
        health.set_drain(false);
        health.refused();
        health.refused();
        assert_eq!(
            health.state(),
            State::Down,
            "an engine that drained and exited is down, not to be probed"
        );
        health.answered(200, Millis(11_001));
        assert_eq!(health.state(), State::Up);
    }
}
