//! The way into one pool: straight on while it has room, through its queue while it has none.
//!
//! Nobody owns the queue: whoever comes, leaves or looks lets go as many as there is room for. A request that waits holds
//! a [`Ticket`], one that may go a [`Permit`]; dropping either gives up what it stands for, so that a client that goes away
//! needs no code of its own.

mod state;
#[cfg(test)]
mod tests;
mod ticket;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use ticket::{Bill, Permit, Ticket};

use super::Identity;
use super::fairness::{Arrival, Waiting};
use super::saturation::Room;
use super::settings::{Order, QueueSettings, ShareBy};
use crate::refusal::{Reason, Refusal};
use crate::session::Bindings;
use crate::state::Pool;
use crate::state::signals::Millis;
use state::{Passed, State};
use ticket::Waiter;

/// When a refused client may try again: by then something has ended.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// How long sessions that went on are remembered.
const SESSION: Duration = Duration::from_hours(1);
/// How many, where nobody says: as in Kthena.
pub const SESSIONS: usize = 4_096;

/// What all gates go by.
#[derive(Debug)]
pub struct Rules {
    /// Settings, replaced as a whole.
    pub settings: ArcSwap<QueueSettings>,
    /// Age from which signals are unknown.
    pub staleness: Duration,
    /// Bytes of bodies that may wait in front of all pools together: what waits for one must not take the room of all.
    pub most_bytes: u64,
    /// Bytes that wait.
    pub bytes: AtomicU64,
    /// Told when a queue is no longer empty.
    pub waiting: Notify,
}

/// What a request asks of its turn.
#[derive(Clone, Debug, Default)]
pub struct Want {
    /// Higher is earlier; below 0 it may be shed.
    pub priority: i32,
    /// Whose turn it takes.
    pub flow: Identity,
    /// Prompt tokens, and output tokens expected.
    pub tokens: (u64, u64),
    /// Bytes of its body.
    pub bytes: u64,
    /// Time to the first token that it asks for.
    pub first_token: Option<Duration>,
    /// Digest of its session.
    pub session: Option<u128>,
    /// The ModelRoute that led it here.
    pub route: Option<Arc<str>>,
}

/// What a gate says.
#[derive(Debug)]
pub enum Entered {
    /// Go.
    Now(Permit),
    /// Wait.
    Wait(Ticket),
    /// Neither.
    Refused(Refusal),
}

/// How a gate does, for metrics and debug pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateStatus {
    /// What waits, by priority, highest first.
    pub bands: Vec<(i32, Waiting)>,
    /// Flows that something is known of.
    pub flows: usize,
    /// Requests let go that have not ended.
    pub open: u32,
    /// The pool's room.
    pub room: Room,
    /// Whether requests wait for a first endpoint.
    pub holds: bool,
}

/// The gate of one pool.
#[derive(Debug)]
pub struct Gate {
    rules: Arc<Rules>,
    state: Mutex<State>,
    /// Sessions that went on.
    sessions: Bindings,
}

impl Gate {
    /// An open gate with nobody before it.
    pub fn new(rules: Arc<Rules>, pool: Arc<Pool>) -> Self {
        let sessions = match &rules.settings.load().order {
            Order::Session { sessions, .. } => *sessions,
            Order::Arrival | Order::Deadline => SESSIONS,
        };
        Self { sessions: Bindings::new(SESSION, sessions), state: Mutex::new(State::new(pool)), rules }
    }

    /// A gate to a pool that is no more.
    pub fn closed(rules: Arc<Rules>, pool: Arc<Pool>) -> Self {
        let gate = Self::new(rules, pool);
        gate.state.lock().closed = true;
        gate
    }

    /// Asks to go in.
    pub fn enter(self: &Arc<Self>, want: Want) -> Entered {
        let settings = self.rules.settings.load_full();
        let mut passed = Passed::default();
        let mut state = self.state.lock();
        let entered = self.entered(&mut state, &settings, want, &mut passed);
        state.count(&self.rules);
        drop(state);
        passed.go(self);
        entered
    }

    fn entered(
        self: &Arc<Self>,
        state: &mut State,
        settings: &Arc<QueueSettings>,
        want: Want,
        passed: &mut Passed,
    ) -> Entered {
        if state.closed {
            return Entered::Refused(removed(&state.pool));
        }
        let (session, route) = (want.session, want.route.clone());
        if state.lets_pass(settings, want.priority, self.rules.staleness) {
            state.let_go();
            return Entered::Now(Permit::new(Arc::clone(self), None, session));
        }
        let holds = state.holds(settings);
        let Some(bound) = settings.bound(want.priority) else {
            if holds {
                let why = "and requests of low priority do not wait for its first";
                return Entered::Refused(no_endpoints(state, why));
            }
            let why = format!("pool {} is full, and requests of low priority do not wait", state.pool.label);
            return Entered::Refused(Refusal::new(Reason::Shed, why).retry_after(TRY_AGAIN));
        };
        let mut all = settings.all;
        let elsewhere = self.rules.bytes.load(Ordering::Relaxed).saturating_sub(state.queue.waiting().bytes);
        all.bytes = all.bytes.min(self.rules.most_bytes.saturating_sub(elsewhere));
        if holds {
            all.requests = all.requests.min(settings.hold_requests);
        }
        let arrival = self.arrival(settings, want);
        let longest = if holds { Some(settings.hold) } else { settings.timeout };
        let (mut ticket, waiter) = Ticket::new(Arc::clone(self), longest, session, route);
        match state.queue.push(arrival, all, bound, waiter) {
            Ok(place) => {
                ticket.takes(place);
                state.dispatch(settings, self.rules.staleness, passed);
                self.rules.waiting.notify_one();
                Entered::Wait(ticket)
            }
            Err(_) if holds => {
                Entered::Refused(no_endpoints(state, "and no more requests are held for its first"))
            }
            Err(_) => {
                let why = format!("pool {} is full, and so is its queue", state.pool.label);
                Entered::Refused(Refusal::new(Reason::QueueFull, why).retry_after(TRY_AGAIN))
            }
        }
    }

    fn arrival(&self, settings: &QueueSettings, want: Want) -> Arrival {
        let rank = self.rank(settings, &want);
        let weight = settings.weight(want.flow.name());
        let flow = if settings.share_by == ShareBy::Nothing { Identity::default() } else { want.flow };
        let cost = settings.cost(want.tokens.0, want.tokens.1);
        Arrival { priority: want.priority, flow, weight, rank, cost, bytes: want.bytes }
    }

    /// Its place among the requests of its flow.
    fn rank(&self, settings: &QueueSettings, want: &Want) -> u64 {
        let now = Millis::now();
        match &settings.order {
            Order::Arrival => 0,
            Order::Deadline => now.plus(want.first_token.or(settings.timeout).unwrap_or(SESSION)).0,
            Order::Session { boost, .. } => {
                let goes_on = want.session.is_some_and(|session| self.sessions.get(session, now).is_some());
                // Moments stay above 0 however early they are.
                now.plus(SESSION).0 - if goes_on { (*boost).min(SESSION).as_millis() as u64 } else { 0 }
            }
        }
    }

    /// Looks at the pool anew and lets go whoever has room.
    pub fn look(self: &Arc<Self>) {
        let settings = self.rules.settings.load_full();
        let mut passed = Passed::default();
        let mut state = self.state.lock();
        state.look(&settings, self.rules.staleness);
        state.dispatch(&settings, self.rules.staleness, &mut passed);
        state.count(&self.rules);
        drop(state);
        passed.go(self);
    }

    /// The pool as it is described now, and which ModelRoutes are there: who came by another is refused.
    pub fn follow(self: &Arc<Self>, pool: &Arc<Pool>, is_there: &dyn Fn(&str) -> bool) {
        let mut state = self.state.lock();
        state.pool = Arc::clone(pool);
        let is_gone = |waiter: &Waiter| waiter.route.as_deref().is_some_and(|route| !is_there(route));
        let stranded = state.queue.take(&is_gone);
        drop(state);
        for waiter in stranded {
            let route = waiter.route.as_deref().unwrap_or_default();
            let why = format!("ModelRoute {route} was removed while the request waited");
            waiter.refuse(Refusal::new(Reason::UnknownModel, why));
        }
        self.look();
    }

    /// The pool is no more: whoever waits is told, and so is whoever comes.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        let refusal = removed(&state.pool);
        let waiters = state.queue.drain();
        state.count(&self.rules);
        drop(state);
        for waiter in waiters {
            waiter.refuse(refusal.clone());
        }
    }

    /// How it does.
    pub fn status(&self) -> GateStatus {
        let settings = self.rules.settings.load();
        let mut state = self.state.lock();
        let room = state.look(&settings, self.rules.staleness);
        GateStatus {
            bands: state.queue.bands().collect(),
            flows: state.queue.flows(),
            open: state.open,
            room,
            holds: state.queue.waiting().requests > 0 && state.holds(&settings),
        }
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.state.lock().queue.waiting().requests
    }
}

/// The pool of a request is no more.
pub fn removed(pool: &Pool) -> Refusal {
    Refusal::new(Reason::NoEndpoints, format!("pool {} was removed", pool.label)).retry_after(TRY_AGAIN)
}

fn no_endpoints(state: &State, why: &str) -> Refusal {
    let why = format!("pool {} has no endpoint that is up, {why}", state.pool.label);
    Refusal::new(Reason::NoEndpoints, why).retry_after(TRY_AGAIN)
}
