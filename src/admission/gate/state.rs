//! What a gate knows under its lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use super::ticket::{Permit, Waiter};
use super::{Gate, Rules};
use crate::admission::TICK;
use crate::admission::fairness::{Charged, FairQueue};
use crate::admission::saturation::Room;
use crate::admission::settings::QueueSettings;
use crate::state::Pool;
use crate::state::health::State as Health;
use crate::state::signals::Millis;

/// How long a look at a pool's endpoints lasts: they are scraped a few times a second, and what is booked and released
/// meanwhile is counted along.
const LOOK: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct State {
    pub pool: Arc<Pool>,
    pub queue: FairQueue<Waiter>,
    /// Requests let go that have not ended.
    pub open: u32,
    /// Requests let go that are not booked yet.
    unbound: u32,
    pub closed: bool,
    room: Room,
    looked: Option<Instant>,
    /// When the next may go, where a rate limits them.
    next: Option<Instant>,
    /// Bytes that wait, as they were last counted.
    counted: u64,
}

/// Requests let go, to be told once the lock is released.
#[derive(Default)]
pub(super) struct Passed(SmallVec<[(Waiter, Charged); 4]>);

impl Passed {
    /// Tells them. Who gave up meanwhile leaves room, and so does the next.
    pub fn go(self, gate: &Arc<Gate>) {
        for (waiter, charged) in self.0 {
            let session = waiter.session;
            waiter.go(Permit::new(Arc::clone(gate), Some(charged), session));
        }
    }
}

impl State {
    pub fn new(pool: Arc<Pool>) -> Self {
        Self {
            pool,
            queue: FairQueue::default(),
            open: 0,
            unbound: 0,
            closed: false,
            room: Room::default(),
            looked: None,
            next: None,
            counted: 0,
        }
    }

    /// Whether an endpoint of the pool is up.
    pub fn is_up(&self) -> bool {
        self.pool.members.iter().any(|member| member.endpoint.health.state() == Health::Up)
    }

    /// Whether requests wait for the first endpoint of the pool. One at a time goes on to an endpoint that is to be tried
    /// whether it is well again: nothing else would find out.
    pub fn holds(&self, settings: &QueueSettings) -> bool {
        if !settings.waits || settings.hold.is_zero() || self.is_up() {
            return false;
        }
        self.unbound > 0 || !self.may_be_tried()
    }

    fn may_be_tried(&self) -> bool {
        let now = Millis::now();
        let tried = |health: &crate::state::health::Health| {
            health.state() == Health::Draining && health.may_be_probed(now)
        };
        self.pool.members.iter().any(|member| tried(&member.endpoint.health))
    }

    /// Whether a request that has just come may go at once: nobody waits, and there is room.
    pub fn lets_pass(&mut self, settings: &QueueSettings, priority: i32, staleness: Duration) -> bool {
        self.queue.waiting().requests == 0 && self.lets_go(settings, priority, staleness)
    }

    /// Takes out all that may go.
    pub fn dispatch(&mut self, settings: &QueueSettings, staleness: Duration, passed: &mut Passed) {
        while let Some(priority) = self.queue.highest() {
            if !self.lets_go(settings, priority, staleness) {
                return;
            }
            let Some(next) = self.queue.pop() else { return };
            self.let_go();
            passed.0.push(next);
        }
    }

    fn lets_go(&mut self, settings: &QueueSettings, priority: i32, staleness: Duration) -> bool {
        if !settings.waits && priority >= 0 {
            return true;
        }
        if self.pool.members.is_empty() && settings.hold.is_zero() {
            // Nobody to wait for: it goes, and is told so.
            return true;
        }
        !self.holds(settings) && self.has_room(settings, priority, staleness) && self.is_in_time(settings)
    }

    /// Counts what waits along with what waits elsewhere.
    pub fn count(&mut self, rules: &Rules) {
        let now = self.queue.waiting().bytes;
        let before = std::mem::replace(&mut self.counted, now);
        // Wrapping: a difference below zero takes away.
        rules.bytes.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
    }

    /// One goes in; it will be booked in a moment.
    pub fn let_go(&mut self) {
        self.open += 1;
        self.unbound += 1;
        self.room.take();
    }

    /// One that was let go is booked.
    pub fn bound(&mut self) {
        self.unbound -= 1;
    }

    /// One has ended.
    pub fn ended(&mut self, was_bound: bool) {
        self.open -= 1;
        if !was_bound {
            self.unbound -= 1;
        }
        self.room.give_back();
    }

    fn has_room(&mut self, settings: &QueueSettings, priority: i32, staleness: Duration) -> bool {
        if settings.most_at_once.is_some_and(|most| self.open >= most) {
            return false;
        }
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK) {
            self.look(settings, staleness);
        }
        self.room.has_room(f64::from(settings.ceiling(priority)))
    }

    /// Looks at the pool's endpoints.
    pub fn look(&mut self, settings: &QueueSettings, staleness: Duration) -> Room {
        self.looked = Some(Instant::now());
        self.room = Room::of(&self.pool, &settings.saturation, Millis::now(), staleness);
        self.room.used += f64::from(self.unbound);
        self.room
    }

    /// Whether the rate of the pool lets another go; its turn is taken then.
    fn is_in_time(&mut self, settings: &QueueSettings) -> bool {
        let Some(rate) = settings.most_per_second else { return true };
        let now = Instant::now();
        let next = self.next.unwrap_or(now);
        if next > now {
            return false;
        }
        // Turns that were not used are saved up no longer than it takes until somebody looks again.
        let earliest = now.checked_sub(TICK).unwrap_or(now);
        self.next = Some(next.max(earliest) + Duration::from_secs_f64(1.0 / rate));
        true
    }
}
