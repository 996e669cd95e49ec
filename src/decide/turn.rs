//! A request's turn: how important it is, whose it is and what it will cost, and the wait for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::bind::Ready;
use super::{Arrived, Body, Decided, Decider, Verdict};
use crate::admission::settings::Order;
use crate::admission::{Entered, Identity, Permit, Ticket, Want, gate};
use crate::decision::Record;
use crate::refusal::Refusal;
use crate::request::head::Head;
use crate::snapshot::Routed;
use crate::state::{ObjectName, PoolKind};

/// A request that waits for its turn. Dropping it gives up its place.
#[derive(Debug)]
pub struct Held {
    /// Its place.
    pub ticket: Ticket,
    ready: Ready,
}

impl Held {
    /// Whether its prompt may be computed elsewhere once its turn has come.
    pub fn may_be_split(&self) -> bool {
        self.ready.routed.pool.disaggregation.is_some()
    }
}

impl Decider {
    /// Lets a request go to its endpoint, or wait.
    pub(super) fn take_turn(&self, record: &mut Record, mut ready: Ready) -> Result<Verdict, Refusal> {
        // What has no prompt and generates nothing takes no room.
        if ready.request.n == 0 {
            return self.serve(record, ready, None);
        }
        let want = self.want(record, &ready);
        match self.admission.gate(&ready.routed.pool).enter(want) {
            Entered::Now(permit) => self.serve(record, ready, Some(permit)),
            Entered::Wait(ticket) => {
                // It may be a thousand times as large as what came, and is decoded again in a moment.
                ready.decoded = None;
                Ok(Verdict::Wait(Box::new(Held { ticket, ready })))
            }
            Entered::Refused(refusal) => Err(refusal),
        }
    }

    /// A request's turn has come: its endpoint is picked from those that are there now.
    pub fn resume(&self, mut record: Box<Record>, held: Held, permit: Permit) -> Decided {
        let Held { ticket, mut ready } = held;
        note_wait(&mut record, &ticket, &ready);
        drop(ticket);
        let Some(pool) = self.store.load().pool(&ready.routed.pool.name).cloned() else {
            let refusal = gate::removed(&ready.routed.pool);
            return Decided { record, verdict: Verdict::Refuse(refusal, Some(ready.routed.pool)) };
        };
        ready.routed.pool = Arc::clone(&pool);
        let verdict = self.serve(&mut record, ready, Some(permit));
        Decided { record, verdict: verdict.unwrap_or_else(|refusal| Verdict::Refuse(refusal, Some(pool))) }
    }

    /// A request waits no longer.
    pub fn give_up(&self, mut record: Box<Record>, held: Held, refusal: Refusal) -> Decided {
        note_wait(&mut record, &held.ticket, &held.ready);
        Decided { record, verdict: Verdict::Refuse(refusal, Some(held.ready.routed.pool)) }
    }

    fn serve(&self, record: &mut Record, ready: Ready, permit: Option<Permit>) -> Result<Verdict, Refusal> {
        Ok(Verdict::Serve(Box::new(self.bind(record, ready, permit)?)))
    }

    fn want(&self, record: &mut Record, ready: &Ready) -> Want {
        let Ready { arrived, request, routed, prompt, .. } = ready;
        let head = &arrived.head;
        record.priority = self.priority(head, routed);
        let fairness_id = head.fairness_id().filter(|_| self.settings.trust_hints);
        let each = routed.pool.memory.learned.expected_output(request.max_tokens);
        let session = match &self.admission.settings().order {
            Order::Session { header, .. } => head.get(header).filter(|id| !id.is_empty()),
            Order::Arrival | Order::Deadline => None,
        };
        Want {
            priority: record.priority,
            flow: fairness_id.map_or_else(|| record.identity.clone(), Identity::named),
            tokens: (prompt.tokens, each.saturating_mul(u64::from(request.n))),
            bytes: bytes(arrived),
            first_token: head.first_token_goal(),
            session: session.map(|id| self.settings.session_key.digest(&routed.pool, id)),
            // What leads to an InferencePool is a rewrite or nothing.
            route: routed.route.clone().filter(|_| routed.pool.name.kind == PoolKind::ModelServer),
        }
    }

    /// The priority of the objective that a trusted caller names; 0 without one, and of one that the pool does not have.
    fn priority(&self, head: &Head, routed: &Routed) -> i32 {
        let Some(name) = head.objective().filter(|_| self.settings.trust_hints) else { return 0 };
        if head.names_several_objectives()
            && self.metrics.several_objectives.fetch_add(1, Ordering::Relaxed) == 0
        {
            tracing::warn!(
                "a request names several objectives, and the first counts; said once: let the gateway set the header \
                 instead of adding it"
            );
        }
        let pool = &routed.pool.name.object;
        let snapshot = self.store.load();
        let objective = snapshot.objectives.get(&ObjectName::new(&*pool.namespace, name));
        let found = objective.filter(|objective| objective.pool == *pool).map(|objective| objective.priority);
        if found.is_none() {
            self.metrics.unknown_objectives.fetch_add(1, Ordering::Relaxed);
        }
        found.unwrap_or(0)
    }
}

fn note_wait(record: &mut Record, ticket: &Ticket, ready: &Ready) {
    let waited = ticket.waited();
    record.stages.queue = waited;
    ready.routed.pool.memory.metrics.queued.observe(waited.as_secs_f64());
}

fn bytes(arrived: &Arrived) -> u64 {
    match &arrived.body {
        Body::Whole(chunks) | Body::CutOff(chunks) => chunks.len as u64,
        Body::Absent | Body::Unseen => 0,
    }
}
