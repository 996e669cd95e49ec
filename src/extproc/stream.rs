//! The plumbing of one ext_proc stream: messages, timers and the open decision, in one place that ends when Envoy does.
//!
//! The reply stream is polled by the connection itself: no task and no channel stand between, and when Envoy resets the
//! stream this is dropped, and with it every booking. A panic is answered 503, never by a clean close: after a body,
//! Envoy takes a clean close for "go on with what you have" and sends an empty body upstream.

mod prefilling;
mod serving;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures::{FutureExt, Stream, StreamExt, stream};
use tokio::task::JoinError;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Status, Streaming};

use super::exchange::{Exchange, Outbox, Step};
use super::{Reply, Shared};
use crate::admission::Permit;
use crate::admission::limits::Limiting;
use crate::decide::{Arrived, Decided, Held, Served, Verdict};
use crate::decision::Record;
use crate::prefill;
use crate::refusal::{Reason, Refusal};
use crate::state::ObjectName;
use prefilling::{LegEnd, Prefilling};
use serving::Serving;

/// Longer than any request waits.
const FAR: Duration = Duration::from_hours(24 * 365);

/// The replies of one stream.
pub type Replies = Pin<Box<dyn Stream<Item = Reply> + Send>>;

/// The replies to `incoming`.
pub fn replies(
    shared: Arc<Shared>,
    pool: Option<ObjectName>,
    incoming: Streaming<ProcessingRequest>,
) -> Replies {
    replies_to(shared, pool, incoming.boxed())
}

/// The replies to any stream of messages.
pub fn replies_to(
    shared: Arc<Shared>,
    pool: Option<ObjectName>,
    incoming: Pin<Box<dyn Stream<Item = Result<ProcessingRequest, Status>> + Send>>,
) -> Replies {
    let driver = Driver::new(shared, pool, incoming);
    stream::unfold(Some(driver), |driver| async move {
        let mut driver = driver?;
        match AssertUnwindSafe(driver.next()).catch_unwind().await {
            Ok(Some(reply)) => Some((Ok(reply), Some(driver))),
            Ok(None) => driver.failure.take().map(|status| (Err(status), None)),
            Err(_) => {
                tracing::error!(
                    request_id = driver.request_id(),
                    "a panic while serving a request; it is answered 503"
                );
                Some((Ok(driver.after_panic()), None))
            }
        }
    })
    .boxed()
}

struct Driver {
    shared: Arc<Shared>,
    incoming: Pin<Box<dyn Stream<Item = Result<ProcessingRequest, Status>> + Send>>,
    exchange: Exchange,
    outbox: Outbox,
    deciding: Option<Pin<Box<dyn Future<Output = Decided> + Send>>>,
    waiting: Option<Waiting>,
    prefilling: Option<Prefilling>,
    leg_end: Option<LegEnd>,
    timer: Option<(Timer, Pin<Box<Sleep>>)>,
    serving: Option<Serving>,
    started: Instant,
    complete: Instant,
    ended: bool,
    /// How the stream must end if not cleanly.
    failure: Option<Status>,
    /// Registered once a stream: every wait would take the token's lock anew.
    drain_over: Pin<Box<WaitForCancellationFutureOwned>>,
}

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timer {
    BodyIdle,
    Decision,
    Queue,
    Prefill,
}

/// A request that waits for its turn.
struct Waiting {
    held: Box<Held>,
    record: Box<Record>,
}

impl Waiting {
    async fn turn(&mut self) -> Result<Permit, Refusal> {
        self.held.ticket.turn().await
    }
}

enum Event {
    Message(Box<ProcessingRequest>),
    Decided(Box<Decided>),
    Turn(Result<Permit, Refusal>),
    Prefilled(Result<(prefill::Outcome, Instant), JoinError>),
    LegEnded(prefill::End),
    Timer(Timer),
    DrainOver,
    /// Envoy reset the stream, or sent a message that cannot be taken.
    Failed(Status),
    End,
}

impl Driver {
    fn new(
        shared: Arc<Shared>,
        pool: Option<ObjectName>,
        incoming: Pin<Box<dyn Stream<Item = Result<ProcessingRequest, Status>> + Send>>,
    ) -> Self {
        let now = Instant::now();
        shared.metrics.streams.fetch_add(1, Ordering::Relaxed);
        Self {
            exchange: Exchange::new(
                Arc::clone(&shared.budget),
                shared.decider.settings.max_body,
                shared.options.clone(),
                pool,
                now,
            ),
            drain_over: Box::pin(shared.drain_over.clone().cancelled_owned()),
            shared,
            incoming,
            outbox: Outbox::new(),
            deciding: None,
            waiting: None,
            prefilling: None,
            leg_end: None,
            timer: None,
            serving: None,
            started: now,
            complete: now,
            ended: false,
            failure: None,
        }
    }

    /// The next reply; `None` ends the stream.
    async fn next(&mut self) -> Option<ProcessingResponse> {
        loop {
            if let Some(reply) = self.outbox.pop_front() {
                self.exchange.progress.last_word = Some(Instant::now());
                return Some(reply);
            }
            self.exchange.sent();
            if self.exchange.is_done() || self.ended {
                return None;
            }
            match self.event().await {
                Event::Message(message) => self.message(*message),
                Event::Decided(decided) => {
                    self.deciding = None;
                    self.decided(*decided);
                }
                Event::Turn(turn) => self.turn(turn),
                Event::Prefilled(outcome) => self.prefilled(outcome),
                Event::LegEnded(end) => self.leg_ended(end),
                Event::Timer(timer) => self.timeout(timer),
                Event::DrainOver => self.drain_over(),
                Event::Failed(status) => self.failed(&status),
                Event::End => self.ended = true,
            }
        }
    }

    async fn event(&mut self) -> Event {
        tokio::select! {
            biased;
            message = self.incoming.next() => match message {
                Some(Ok(message)) => Event::Message(Box::new(message)),
                Some(Err(status)) => Event::Failed(status),
                None => Event::End,
            },
            decided = poll_option(self.deciding.as_mut()) => Event::Decided(Box::new(decided)),
            turn = poll_turn(self.waiting.as_mut()) => Event::Turn(turn),
            outcome = poll_option(self.prefilling.as_mut().map(|p| &mut p.run)) => Event::Prefilled(outcome),
            end = poll_option(self.leg_end.as_mut()) => Event::LegEnded(end),
            timer = poll_timer(&mut self.timer) => Event::Timer(timer),
            () = &mut self.drain_over => Event::DrainOver,
        }
    }

    fn message(&mut self, message: ProcessingRequest) {
        let now = Instant::now();
        if !self.exchange.is_unanswered() {
            self.exchange.progress.last_word = Some(now);
        }
        let step = self.exchange.receive(message, now, &mut self.outbox);
        match step {
            Step::Wait => {
                if self.exchange.awaits_body() {
                    self.arm(Timer::BodyIdle, now + self.shared.body_idle_timeout);
                }
            }
            Step::Decide(arrived) => {
                self.complete = now;
                self.decide(*arrived, now);
            }
            Step::Refuse(refusal) => self.refuse_early(&refusal),
            Step::FirstByte => self.prefill_done(),
            Step::ResponseHeaders => self.served_elsewhere(),
            Step::Abandon => {
                self.deciding = None;
                self.waiting = None;
                self.prefilling = None;
                self.timer = None;
                self.shared.ledger.aborted.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Decides at once if nothing has to be waited for, which is nearly always.
    fn decide(&mut self, arrived: Arrived, now: Instant) {
        let shared = Arc::clone(&self.shared);
        let mut decision = Box::pin(async move { shared.decider.decide(arrived).await });
        if let Some(decided) = decision.as_mut().now_or_never() {
            self.decided(decided);
        } else {
            self.deciding = Some(decision);
            self.arm(Timer::Decision, now + self.shared.decision_timeout);
        }
    }

    fn decided(&mut self, decided: Decided) {
        self.timer = None;
        let Decided { record, verdict } = decided;
        match verdict {
            Verdict::Serve(served) => self.serve(served, record),
            Verdict::Wait(held) => self.wait(held, record),
            Verdict::Answer(body) => {
                self.shared.metrics.answered.fetch_add(1, Ordering::Relaxed);
                self.exchange.answer(body, &mut self.outbox);
            }
            Verdict::Refuse(refusal, pool) => {
                self.exchange.refuse(&refusal, &mut self.outbox);
                self.shared.ledger.refused(record, pool.as_deref(), &refusal);
            }
        }
    }

    /// Lets the request wait for its turn, which takes none of the time for its decision.
    fn wait(&mut self, held: Box<Held>, record: Box<Record>) {
        let longest = held.ticket.longest();
        let after = if held.may_be_split() { self.shared.prefiller.longest() } else { Duration::ZERO };
        self.exchange.hold(longest.map(|longest| longest.saturating_add(after)), &mut self.outbox);
        if let Some(longest) = longest {
            self.arm(Timer::Queue, Instant::now() + longest.min(FAR));
        }
        self.waiting = Some(Waiting { held, record });
    }

    fn turn(&mut self, turn: Result<Permit, Refusal>) {
        let Some(Waiting { held, record }) = self.waiting.take() else { return };
        let decided = match turn {
            Ok(permit) => self.shared.decider.resume(record, *held, permit),
            Err(refusal) => self.shared.decider.give_up(record, *held, refusal),
        };
        self.decided(decided);
    }

    fn serve(&mut self, mut served: Box<Served>, mut record: Box<Record>) {
        if let Some(handoff) = served.handoff.take() {
            return self.hand_off(served, record, *handoff);
        }
        let now = Instant::now();
        if let Err(refusal) = self.exchange.serve(&mut served, &record, now, &mut self.outbox) {
            return self.refuse_served(&served, record, &refusal);
        }
        // Beside a prefill leg the engine waits for blocks, and is not to be taken for one that stands still.
        if self.leg_end.is_none() && served.by_sidecar.is_none() {
            served.leg.arrived();
        }
        if matches!(served.limiting, Limiting::ByEnvoy { .. }) {
            self.shared.metrics.limit_filter.told();
        }
        record.stages.decision =
            now.duration_since(self.complete).saturating_sub(record.stages.queue + record.stages.prefill);
        self.shared.metrics.decision.observe(record.stages.decision.as_secs_f64());
        served.leg.member.picks.fetch_add(1, Ordering::Relaxed);
        let endpoint = &served.leg.member.endpoint;
        endpoint.predicted_cached_tokens.fetch_add(record.predicted_cached_tokens, Ordering::Relaxed);
        if !self.exchange.sees_response_body() {
            let prefill = if record.was_split() { Duration::ZERO } else { served.prefill };
            self.arm(Timer::Prefill, now + prefill);
        }
        self.serving = Some(Serving { served, record });
    }

    /// Refuses a request for which an endpoint was booked.
    fn refuse_served(&mut self, served: &Served, record: Box<Record>, refusal: &Refusal) {
        self.exchange.refuse(refusal, &mut self.outbox);
        self.shared.ledger.refused(record, Some(&served.leg.pool), refusal);
    }

    fn timeout(&mut self, timer: Timer) {
        self.timer = None;
        let refusal = match timer {
            Timer::Prefill => return self.prefill_done(),
            Timer::Queue => match &self.waiting {
                Some(waiting) => waiting.held.ticket.expired(),
                None => return,
            },
            Timer::BodyIdle => {
                let limit = self.shared.body_idle_timeout;
                Refusal::new(Reason::BodyTimeout, format!("no more of the request body came for {limit:?}"))
            }
            Timer::Decision => {
                let limit = self.shared.decision_timeout;
                Refusal::new(Reason::DecisionTimeout, format!("no decision within {limit:?}"))
            }
        };
        self.refuse_early(&refusal);
    }

    /// A message larger than any body may be is a body that is too large; whatever else fails ends the stream, and never
    /// cleanly before an answer.
    fn failed(&mut self, status: &Status) {
        if self.exchange.is_unanswered() && status.code() == tonic::Code::OutOfRange {
            let limit = self.shared.decider.settings.max_body;
            return self.refuse_early(&Refusal::new(
                Reason::BodyTooLarge,
                format!("the request body is larger than {limit} bytes"),
            ));
        }
        if self.exchange.is_unanswered() {
            self.failure = Some(Status::unavailable("the stream failed before its request was answered"));
        }
        self.ended = true;
    }

    fn drain_over(&mut self) {
        if !self.exchange.is_unanswered() {
            self.ended = true;
            return;
        }
        let refusal = Refusal::new(Reason::ShuttingDown, "the picker is shutting down");
        self.refuse_early(&refusal.retry_after(Duration::from_secs(1)));
    }

    /// Refuses a request before it is decided.
    fn refuse_early(&mut self, refusal: &Refusal) {
        if self.waiting.is_some() {
            return self.turn(Err(refusal.clone()));
        }
        if let Some(Prefilling { served, record, .. }) = self.prefilling.take() {
            return self.refuse_served(&served, record, refusal);
        }
        self.timer = None;
        self.deciding = None;
        let mut record =
            Box::new(Record::begin(self.shared.decider.decision_id(), self.exchange.request_id()));
        self.exchange.refuse(refusal, &mut self.outbox);
        record.stages.total = self.started.elapsed();
        self.shared.ledger.refused(record, None, refusal);
    }

    fn prefill_done(&mut self) {
        self.timer = None;
        if let Some(serving) = &mut self.serving {
            serving.prefill_done();
        }
    }

    fn served_elsewhere(&mut self) {
        if let (Some(serving), Some(address)) = (&mut self.serving, self.exchange.progress.served) {
            serving.served_by(address);
        }
    }

    fn arm(&mut self, timer: Timer, at: Instant) {
        match &mut self.timer {
            Some((armed, sleep)) => {
                *armed = timer;
                sleep.as_mut().reset(at);
            }
            None => self.timer = Some((timer, Box::pin(sleep_until(at)))),
        }
    }

    fn request_id(&self) -> &str {
        self.serving.as_ref().map_or("", |serving| &serving.record.request_id)
    }

    /// The answer to a request on which we failed; its booking is released and it is counted once, as refused.
    fn after_panic(&mut self) -> ProcessingResponse {
        self.serving = None;
        self.waiting = None;
        self.prefilling = None;
        self.leg_end = None;
        let refusal = Refusal::new(Reason::Internal, "the picker failed on this request");
        self.refuse_early(&refusal);
        self.outbox.pop_front().unwrap_or_else(|| super::reply::refused(&refusal))
    }
}

/// The stream is over, however it ended: what was served is settled, what was not is counted as aborted.
impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.metrics.streams.fetch_sub(1, Ordering::Relaxed);
        if self.exchange.is_unanswered() {
            self.shared.ledger.aborted.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(serving) = self.serving.take() {
            self.exchange.note_scanned();
            let progress = std::mem::take(&mut self.exchange.progress);
            let sees_response_body = self.exchange.sees_response_body();
            self.shared.ledger.close(serving.closing(progress, sees_response_body, self.started));
        }
    }
}

async fn poll_option<F: Future + Unpin>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

async fn poll_turn(waiting: Option<&mut Waiting>) -> Result<Permit, Refusal> {
    match waiting {
        Some(waiting) => waiting.turn().await,
        None => std::future::pending().await,
    }
}

async fn poll_timer(timer: &mut Option<(Timer, Pin<Box<Sleep>>)>) -> Timer {
    match timer {
        Some((timer, sleep)) => {
            sleep.await;
            *timer
        }
        None => std::future::pending().await,
    }
}
