//! A request that waits while its prompt is computed elsewhere, and what follows.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinError;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::Driver;
use super::serving::Serving;
use crate::decide::Served;
use crate::decision::Record;
use crate::disagg::{Fallback, Handoff, Report};
use crate::extproc::budget::Held;
use crate::prefill::{End, Outcome};
use crate::refusal::{Reason, Refusal};

/// How long prefill engines keep blocks that nobody fetches: vLLM's `kv_lease_duration`.
const LEASE: Duration = Duration::from_secs(30);

/// The end of a prefill leg that goes on beside the decode leg.
pub type LegEnd = Pin<Box<dyn Future<Output = End> + Send>>;

/// A request whose prompt is being computed elsewhere. Dropping it ends that, and releases what is booked.
pub struct Prefilling {
    pub served: Box<Served>,
    pub record: Box<Record>,
    /// A task of its own: an answer is taken, and its time noted, whether or not Envoy reads our replies.
    pub run: AbortOnDropHandle<(Outcome, Instant)>,
    /// Where the body takes what the prefill endpoint says.
    front: usize,
    began: Instant,
}

impl Driver {
    /// Begins the prefill leg. Its time is none of the decision's.
    pub(super) fn hand_off(&mut self, served: Box<Served>, record: Box<Record>, handoff: Handoff) {
        let mut held = Held::new(Arc::clone(&self.shared.budget));
        if !held.grow(handoff.size()) {
            return self.serve_alone(served, record, Fallback::Buffers);
        }
        let prefiller = Arc::clone(&self.shared.prefiller);
        self.exchange.hold(Some(prefiller.longest()), &mut self.outbox);
        let front = handoff.front;
        let run = async move {
            let outcome = match prefiller.run(handoff).await {
                // Its body is held as long as the leg.
                Outcome::Together(fields, end) => Outcome::Together(fields, Box::pin(holding(held, end))),
                outcome => outcome,
            };
            (outcome, Instant::now())
        };
        let run = AbortOnDropHandle::new(tokio::spawn(run));
        self.prefilling = Some(Prefilling { served, record, run, front, began: Instant::now() });
    }

    pub(super) fn prefilled(&mut self, outcome: Result<(Outcome, Instant), JoinError>) {
        let Some(Prefilling { mut served, mut record, front, began, .. }) = self.prefilling.take() else {
            return;
        };
        record.stages.prefill = began.elapsed();
        let (outcome, answered) = match outcome {
            Ok(outcome) => outcome,
            Err(error) => {
                tracing::error!(%error, "a prefill leg failed in the picker");
                return self.serve_alone(served, record, Fallback::Broken);
            }
        };
        match outcome {
            Outcome::HandedOver(_, report) if answered.elapsed() > LEASE => {
                record.prefill = Some(Report { failure: Some(Fallback::Late), ..report });
                self.serve_alone(served, record, Fallback::Late);
            }
            Outcome::HandedOver(fields, report) => {
                served.edits.insert(front, fields.into_bytes());
                note_success(&served, &record, &report);
                record.prefill = Some(report);
                self.serve(served, record);
            }
            Outcome::Together(fields, end) => {
                served.edits.insert(front, fields.into_bytes());
                self.leg_end = Some(end);
                self.serve(served, record);
            }
            Outcome::Answered(relayed, report) => {
                let status = relayed.status;
                record.prefill = Some(report);
                self.exchange.relay(relayed, &mut self.outbox);
                record.stages.total = self.started.elapsed();
                self.shared.ledger.relayed(record, &served.leg.pool, status);
            }
            Outcome::Failed(reason, report) => {
                record.prefill = Some(report);
                self.serve_alone(served, record, reason);
            }
        }
    }

    /// The destination computes the prompt itself, if it can.
    fn serve_alone(&mut self, mut served: Box<Served>, mut record: Box<Record>, why: Fallback) {
        served.leg.pool.memory.metrics.disaggregation.fell_back(why);
        let Some(alone) = served.alone else {
            let message = format!(
                "the prompt was to be computed by a prefill endpoint of pool {}, and that failed: {}",
                served.leg.pool.label,
                why.name()
            );
            let refusal = Refusal::new(Reason::PrefillFailed, message).retry_after(Duration::from_secs(1));
            return self.refuse_served(&served, record, &refusal);
        };
        served.leg.takes_all(alone);
        served.forecast.own = alone.prefill_seconds;
        if let Some(leg) = record.legs.first_mut() {
            leg.takes_all(alone);
        }
        self.serve(served, record);
    }

    /// A prefill leg beside the decode leg has ended. If it failed before the decode engine has shown that it has the blocks,
    /// it waits for what never comes: better an end now than its timeout.
    pub(super) fn leg_ended(&mut self, end: End) {
        self.leg_end = None;
        let Some(Serving { mut record, mut served }) = self.serving.take() else { return };
        served.leg.arrived();
        let End { report, relayed } = end;
        let failure = report.failure;
        match failure {
            Some(why) => served.leg.pool.memory.metrics.disaggregation.fell_back(why),
            None if relayed.is_none() => note_success(&served, &record, &report),
            None => {}
        }
        record.prefill = Some(report);
        let unanswered = !self.has_output();
        match (failure, relayed) {
            (_, Some(relayed)) if unanswered => {
                let status = relayed.status;
                self.exchange.relay(relayed, &mut self.outbox);
                record.stages.total = self.started.elapsed();
                self.shared.ledger.relayed(record, &served.leg.pool, status);
            }
            (Some(why), _) if unanswered => {
                let message =
                    format!("the prefill endpoint failed after its request was sent: {}", why.name());
                let refusal =
                    Refusal::new(Reason::PrefillFailed, message).retry_after(Duration::from_secs(1));
                self.refuse_served(&served, record, &refusal);
            }
            _ => self.serving = Some(Serving { served, record }),
        }
    }

    /// Whether output was seen. Engines send the headers of a stream before they have its prompt; where bodies do not pass
    /// here, headers are all there is to go by.
    fn has_output(&self) -> bool {
        let progress = &self.exchange.progress;
        if self.exchange.sees_response_body() {
            progress.complete || progress.first_byte.is_some()
        } else {
            progress.response_begun
        }
    }
}

/// Keeps the bytes of a leg's body counted until it ends.
async fn holding(held: Held, end: LegEnd) -> End {
    let ended = end.await;
    drop(held);
    ended
}

fn note_success(served: &Served, record: &Record, report: &Report) {
    let prompt = report.usage.map_or(record.prompt_tokens, |usage| usage.prompt);
    let fetched = prompt.saturating_sub(record.predicted_cached_tokens);
    served.leg.pool.memory.metrics.disaggregation.handed_over(report.took, fetched);
}
