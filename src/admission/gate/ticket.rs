//! What a request holds that waits, and what it holds that may go.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::state::Passed;
use super::{Gate, no_endpoints};
use crate::admission::fairness::{Charged, Place};
use crate::refusal::{Reason, Refusal};
use crate::state::signals::Millis;

/// The gate's side of a [`Ticket`].
#[derive(Debug)]
pub(super) struct Waiter {
    turn: oneshot::Sender<Result<Permit, Refusal>>,
    pub session: Option<u128>,
    /// The ModelRoute that led it here.
    pub route: Option<Arc<str>>,
}

impl Waiter {
    pub fn go(self, permit: Permit) {
        // Nobody there any more: the permit is dropped, which makes room.
        let _ = self.turn.send(Ok(permit));
    }

    pub fn refuse(self, refusal: Refusal) {
        let _ = self.turn.send(Err(refusal));
    }
}

/// A place in a queue, given up when dropped.
#[derive(Debug)]
pub struct Ticket {
    gate: Arc<Gate>,
    place: Option<Place>,
    turn: oneshot::Receiver<Result<Permit, Refusal>>,
    since: Instant,
    longest: Option<Duration>,
}

impl Ticket {
    pub(super) fn new(
        gate: Arc<Gate>,
        longest: Option<Duration>,
        session: Option<u128>,
        route: Option<Arc<str>>,
    ) -> (Self, Waiter) {
        let (sender, turn) = oneshot::channel();
        let ticket = Self { gate, place: None, turn, since: Instant::now(), longest };
        (ticket, Waiter { turn: sender, session, route })
    }

    pub(super) fn takes(&mut self, place: Place) {
        self.place = Some(place);
    }

    /// The longest wait; `None` is as long as the client waits.
    pub fn longest(&self) -> Option<Duration> {
        self.longest
    }

    /// How long it has waited.
    pub fn waited(&self) -> Duration {
        self.since.elapsed()
    }

    /// Waits for the turn.
    ///
    /// # Errors
    ///
    /// The pool or the route was removed.
    pub async fn turn(&mut self) -> Result<Permit, Refusal> {
        let turn = (&mut self.turn).await;
        self.place = None;
        turn.unwrap_or_else(|_| Err(Refusal::new(Reason::Internal, "the place in the queue was lost")))
    }

    /// Why the wait was in vain, once its time is up.
    pub fn expired(&self) -> Refusal {
        let state = self.gate.state.lock();
        let waited = self.longest.unwrap_or_default();
        if state.is_up() {
            let why = format!("pool {} had no room within {waited:?}", state.pool.label);
            Refusal::new(Reason::QueueTimeout, why)
        } else {
            no_endpoints(&state, &format!("and none came within {waited:?}"))
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(place) = &self.place {
            let mut state = self.gate.state.lock();
            let waiter = state.queue.remove(place);
            state.count(&self.gate.rules);
            drop(state);
            drop(waiter);
        }
    }
}

/// Leave to go. Dropped when the request has left its endpoint.
#[derive(Debug)]
pub struct Permit {
    gate: Arc<Gate>,
    bound: bool,
    bill: Option<Bill>,
}

impl Permit {
    pub(super) fn new(gate: Arc<Gate>, charged: Option<Charged>, session: Option<u128>) -> Self {
        let has_bill = charged.is_some() || session.is_some();
        let bill = has_bill.then(|| Bill { gate: Arc::clone(&gate), charged, session, cost: 0 });
        Self { gate, bound: false, bill }
    }

    /// The request is booked: from now on its booking is what takes room, and its flow pays.
    pub fn bound(&mut self) {
        if !std::mem::replace(&mut self.bound, true) {
            self.gate.state.lock().bound();
            if let Some(bill) = &mut self.bill {
                bill.cost = bill.charged.as_ref().map_or(0, Charged::cost);
            }
        }
    }

    /// Makes room, and leaves what is still to be said of the request.
    pub fn end(mut self) -> Option<Bill> {
        self.bill.take()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // Nobody has taken the bill: the request went nowhere.
        if let Some(mut bill) = self.bill.take() {
            bill.cost = 0;
        }
        let settings = self.gate.rules.settings.load_full();
        let mut passed = Passed::default();
        let mut state = self.gate.state.lock();
        state.ended(self.bound);
        state.dispatch(&settings, self.gate.rules.staleness, &mut passed);
        state.count(&self.gate.rules);
        drop(state);
        passed.go(&self.gate);
    }
}

/// What a flow owes for a request, settled when dropped: as predicted, if nobody says more.
#[derive(Debug)]
pub struct Bill {
    gate: Arc<Gate>,
    charged: Option<Charged>,
    session: Option<u128>,
    cost: u64,
}

impl Bill {
    /// Tokens that the request has cost.
    pub fn used(&mut self, input: u64, output: u64) {
        self.cost = self.gate.rules.settings.load().cost(input, output);
    }

    /// Nothing was generated, and nothing is owed.
    pub fn waive(&mut self) {
        self.cost = 0;
    }

    /// The request was served to its end: its session goes on.
    pub fn completed(&mut self) {
        if let Some(session) = self.session.take() {
            self.gate.sessions.bind(session, 0, Millis::now());
        }
    }
}

impl Drop for Bill {
    fn drop(&mut self) {
        if let Some(charged) = self.charged.take() {
            self.gate.state.lock().queue.settle(charged, self.cost);
        }
    }
}
