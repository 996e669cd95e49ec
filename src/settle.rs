//! What became of a request: its booking released, its tokens counted once, its record finished.
//!
//! Three witnesses speak at different moments: the ext_proc stream, Envoy's access log, and nobody. A stream that ends
//! with everything known is settled at once. Otherwise its record is parked for a short while, until the access-log entry
//! of its decision comes or time is up; an entry that comes first waits for its stream. Either way it is settled once.

mod conclude;
mod learn;
mod log;
mod progress;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use parking_lot::Mutex;
use smallvec::SmallVec;
use tokio::time::Instant;

pub use progress::{AccessLogFacts, Progress, UpstreamFacts};

use crate::admission::limits::Charge;
use crate::admission::{Bill, Permit};
use crate::decision::{Outcome, Record, Ring};
use crate::index::TokenIndexes;
use crate::metrics::{Degraded, Metrics};
use crate::refusal::Refusal;
use crate::session::Session;
use crate::state::rates::Forecast;
use crate::state::reservation::Leg;
use crate::state::{Endpoint, Pool};

/// How long a record waits for its access-log entry, where such entries come at all. Envoy sends them within milliseconds.
const WAIT_FOR_LOG: Duration = Duration::from_secs(2);
/// Records and early entries kept at most; beyond that the oldest is settled as if its time were up.
const MOST_PARKED: usize = 16_384;
/// A stream that ends this soon after our last word, with no word of a response, was ended by Envoy's configuration.
const EARLY_END: Duration = Duration::from_millis(20);
/// Later than any deadline.
const FAR: Duration = Duration::from_hours(24);
/// Seconds per output token in the prediction of a response's end, before anything is known: vLLM's order of magnitude.
const SECONDS_PER_TOKEN: f64 = 0.02;

/// A request whose stream has ended.
#[derive(Debug)]
pub struct Closing {
    /// The record so far.
    pub record: Box<Record>,
    /// The booking.
    pub leg: Option<Leg>,
    /// Its leave to go, given back after the booking.
    pub permit: Option<Permit>,
    /// What its flow owes, once the leave is given back.
    pub bill: Option<Bill>,
    /// The pool.
    pub pool: Arc<Pool>,
    /// The choice and its alternatives.
    pub ranked: SmallVec<[Arc<Endpoint>; 3]>,
    /// What was seen.
    pub progress: Progress,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// Uncached prompt tokens booked.
    pub uncached: u64,
    /// Output tokens expected.
    pub expected_output: u64,
    /// Answers asked for.
    pub answers: u32,
    /// How long the pick expected it to take.
    pub forecast: Forecast,
    /// What the request says of its sessions.
    pub sessions: SmallVec<[Session; 1]>,
    /// What it was charged.
    pub charge: Option<Box<Charge>>,
    /// Most output tokens it asked for, over all answers.
    pub most_output: Option<u64>,
    /// Whether Envoy shows us response bodies, so that the stream cannot end before them.
    pub sees_response_body: bool,
    /// When the stream began.
    pub started: Instant,
    /// From the decision to the end of the response, if that was seen.
    pub lasted: Option<Duration>,
}

impl Closing {
    /// Makes room for the next, once the booking is released.
    fn end_turn(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.bill = permit.end();
        }
    }

    /// Settles what is owed as soon as it is known, whatever is still to be learned of the request.
    fn pay_what_is_known(&mut self) {
        let Some(usage) = self.progress.usage().filter(|_| self.progress.complete) else { return };
        if let Some(charge) = self.charge.take() {
            conclude::settle_charge(*charge, Some(usage), self.progress.status);
        }
        if let Some(mut bill) = self.bill.take() {
            bill.used(usage.prompt, usage.completion);
            bill.completed();
        }
    }
}

/// Called with an endpoint when an engine says it does not serve a model.
pub type OnUnknownModel = Arc<dyn Fn(&Arc<Endpoint>) + Send + Sync>;

/// Settles requests.
pub struct Ledger {
    metrics: Arc<Metrics>,
    ring: Arc<Ring>,
    tokens: Arc<TokenIndexes>,
    replica: Box<str>,
    on_unknown_model: OnUnknownModel,
    parked: Mutex<Parked>,
    /// Whether an access-log entry ever joined a decision.
    log_comes: AtomicBool,
    /// Whether trailers ever came, or a stream outlived what was last said on it: Envoy keeps streams open.
    trailers_come: AtomicBool,
    /// Whether Envoy shows response headers; then only after them can an early end be told from a client that left.
    headers_come: AtomicBool,
    /// Whether any source of token usage ever spoke.
    usage_comes: AtomicBool,
    /// Streams that ended before any response, for `requests_total`.
    pub aborted: AtomicU64,
}

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ledger").field("parked", &self.parked.lock().by_id.len()).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Parked {
    by_id: AHashMap<Box<str>, Waiting>,
    /// Deadlines with their ids, the earliest on top. An id may have been settled since.
    deadlines: BinaryHeap<Reverse<(Instant, Box<str>)>>,
}

impl Parked {
    fn insert(&mut self, id: &str, deadline: Instant, waiting: Waiting) {
        self.by_id.insert(id.into(), waiting);
        self.deadlines.push(Reverse((deadline, id.into())));
    }

    /// Takes what is due, or the most urgent while more than `most` wait.
    fn take_due(&mut self, now: Instant, most: usize) -> Due {
        match self.deadlines.peek() {
            Some(Reverse((deadline, _))) if *deadline <= now || self.deadlines.len() > most => {}
            _ => return Due::Nothing,
        }
        let next = self.deadlines.pop().and_then(|Reverse((_, id))| self.by_id.remove(&id));
        match next {
            Some(Waiting::Stream(closing)) => Due::Stream(closing),
            _ => Due::Settled,
        }
    }
}

enum Due {
    Stream(Box<Closing>),
    /// Settled meanwhile, or an entry whose stream never ended here.
    Settled,
    Nothing,
}

enum Waiting {
    /// A stream that ended, waiting for its entry.
    Stream(Box<Closing>),
    /// An entry whose stream has not ended.
    Entry(Box<AccessLogFacts>),
}

impl Ledger {
    /// A ledger that writes finished records into `ring`.
    pub fn new(
        metrics: Arc<Metrics>,
        ring: Arc<Ring>,
        tokens: Arc<TokenIndexes>,
        replica: &str,
        on_unknown_model: OnUnknownModel,
    ) -> Self {
        Self {
            metrics,
            ring,
            tokens,
            replica: replica.into(),
            on_unknown_model,
            parked: Mutex::default(),
            log_comes: AtomicBool::new(false),
            trailers_come: AtomicBool::new(false),
            headers_come: AtomicBool::new(false),
            usage_comes: AtomicBool::new(false),
            aborted: AtomicU64::new(0),
        }
    }

    /// A refused request: counted, logged, recorded.
    pub fn refused(&self, mut record: Box<Record>, pool: Option<&Pool>, refusal: &Refusal) {
        match pool {
            Some(pool) => pool.memory.metrics.refused.add(refusal.reason),
            None => self.metrics.refused.add(refusal.reason),
        }
        record.outcome = Outcome::Refused(refusal.reason);
        record.status = refusal.reason.status();
        log::refusal(&record, refusal);
        self.ring.push(Arc::from(record));
    }

    /// A request that a prefill endpoint answered: what it said has gone to the client.
    pub fn relayed(&self, mut record: Box<Record>, pool: &Pool, status: u16) {
        pool.memory.metrics.served.add(status);
        record.outcome = Outcome::Complete;
        record.status = status;
        record.served = record.prefill.as_ref().map(|report| Arc::clone(&report.endpoint));
        log::served(&record);
        self.ring.push(Arc::from(record));
    }

    /// The stream of a served request has ended.
    pub fn close(&self, mut closing: Closing) {
        let now = Instant::now();
        closing.record.stages.total = now.duration_since(closing.started);
        let decided = closing.progress.decided.filter(|_| closing.progress.complete);
        closing.lasted = decided.map(|decided| now.duration_since(decided));
        if let Some(leg) = self.keep_booked(&mut closing, now) {
            let predicted = predicted_end(&closing, now);
            closing.leg = Some(leg);
            return self.park(closing, predicted, now);
        }
        closing.end_turn();
        closing.pay_what_is_known();
        let waits = self.log_comes.load(Ordering::Relaxed) || closing.progress.usage().is_none();
        if waits { self.park(closing, now + WAIT_FOR_LOG, now) } else { self.conclude(closing, None) }
    }

    /// The booking, if the stream ended before its response: only where Envoy closes streams at the response headers.
    /// Everywhere else the booking is released here.
    fn keep_booked(&self, closing: &mut Closing, now: Instant) -> Option<Leg> {
        let leg = closing.leg.take()?;
        let progress = &closing.progress;
        if closing.sees_response_body {
            return None;
        }
        if progress.complete {
            self.trailers_come.fetch_or(progress.trailers, Ordering::Relaxed);
            return None;
        }
        let after = now.duration_since(progress.last_word.or(progress.decided)?);
        if progress.response_begun {
            self.headers_come.store(true, Ordering::Relaxed);
        } else if self.headers_come.load(Ordering::Relaxed) {
            // Envoy shows response headers, and none came: the client left before them.
            return None;
        }
        if after > EARLY_END {
            self.trailers_come.store(true, Ordering::Relaxed);
            if self.metrics.set_degraded(Degraded::StreamEnd, false) {
                tracing::info!("ext_proc streams stay open until the response ends");
            }
        }
        if self.trailers_come.load(Ordering::Relaxed) {
            return None;
        }
        if self.metrics.set_degraded(Degraded::StreamEnd, true) {
            tracing::warn!(
                "Envoy ends ext_proc streams before the response: bookings end by access log or prediction; \
                 set response_trailer_mode: SEND"
            );
        }
        Some(leg)
    }

    fn park(&self, closing: Closing, deadline: Instant, now: Instant) {
        let mut parked = self.parked.lock();
        if let Some(Waiting::Entry(facts)) = parked.by_id.remove(&closing.record.id) {
            drop(parked);
            return self.conclude(closing, Some(&facts));
        }
        let id = closing.record.id.clone();
        parked.insert(&id, deadline, Waiting::Stream(Box::new(closing)));
        drop(parked);
        self.sweep_until(now);
    }

    /// An access-log entry; `id` is the decision it names.
    pub fn access_log(&self, id: &str, facts: AccessLogFacts) {
        let ours = id.rsplit_once('-').is_some_and(|(replica, _)| *replica == *self.replica);
        if !ours {
            self.metrics.access_log_foreign.fetch_add(1, Ordering::Relaxed);
            return;
        }
        self.metrics.access_log_joined.fetch_add(1, Ordering::Relaxed);
        self.log_comes.store(true, Ordering::Relaxed);
        let mut parked = self.parked.lock();
        match parked.by_id.remove(id) {
            Some(Waiting::Stream(closing)) => {
                drop(parked);
                self.conclude(*closing, Some(&facts));
            }
            _ => parked.insert(id, Instant::now() + WAIT_FOR_LOG, Waiting::Entry(Box::new(facts))),
        }
    }

    /// Settles whatever has waited long enough. Called a few times a second.
    pub fn sweep(&self) {
        self.sweep_until(Instant::now());
    }

    /// Settles everything: the process ends.
    pub fn settle_all(&self) {
        self.sweep_until(Instant::now() + FAR);
    }

    fn sweep_until(&self, now: Instant) {
        loop {
            // Taken one by one, so that the lock is not held while a request is concluded.
            let due = self.parked.lock().take_due(now, MOST_PARKED);
            match due {
                Due::Stream(closing) => self.conclude(*closing, None),
                Due::Settled => {}
                Due::Nothing => return,
            }
        }
    }
}

/// When a response whose end nobody will tell should have ended.
fn predicted_end(closing: &Closing, now: Instant) -> Instant {
    let learned = &closing.pool.memory.learned;
    let decode = Duration::from_secs_f64(closing.expected_output as f64 * SECONDS_PER_TOKEN);
    now + (learned.expected_prefill(closing.uncached) + decode).min(Duration::from_mins(10))
}
