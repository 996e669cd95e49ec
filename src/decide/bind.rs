//! The last step of a decision: the endpoint is picked and booked, and what its engine will be sent is written down.
//!
//! It waits for nothing. A request that had to wait for its turn comes here when it leaves the queue.

use std::sync::Arc;

use tokio::time::Instant;

use super::body::{self, Text};
use super::split::{Halves, Parted};
use super::{Arrived, Body, Chunks, Decider, Served, UsageInjection};
use crate::admission::Permit;
use crate::admission::limits::Limiting;
use crate::decision::Record;
use crate::metrics::Stage;
use crate::prompt::Prepared;
use crate::refusal::Refusal;
use crate::request::head::Head;
use crate::request::{Edits, LlmRequest};
use crate::schedule::{Ask, Pipeline};
use crate::session::Issuer;
use crate::snapshot::Routed;

/// Endpoints that Envoy's retries can use: `d1`, `d2`, `d3` of the shipped composite cluster.
const RANKED: usize = 3;
/// Candidates beside the picked that a record keeps.
const BEST_KEPT: usize = 8;
/// Pools up to this size are kept whole.
const KEPT_WHOLE: usize = 64;

/// A request of which everything is known but its endpoint.
#[derive(Debug)]
pub(super) struct Ready {
    pub arrived: Arrived,
    pub request: LlmRequest,
    /// Its body, if it had to be decoded and is still at hand.
    pub decoded: Option<Vec<u8>>,
    pub routed: Routed,
    /// What its prompt was prepared for.
    pub pipeline: Arc<Pipeline>,
    pub prompt: Prepared,
    pub seed: u64,
    /// Given back if no endpoint is found.
    pub limiting: Limiting,
}

impl Decider {
    /// Picks and books the endpoint of a request.
    pub(super) fn bind(
        &self,
        record: &mut Record,
        ready: Ready,
        mut permit: Option<Permit>,
    ) -> Result<Served, Refusal> {
        let Ready { mut arrived, request, mut decoded, routed, pipeline, prompt, seed, limiting } = ready;
        let began = Instant::now();
        let detail = self.detail(seed, &routed);
        let sessions = self.sessions(&pipeline, &arrived.head, &routed.pool);
        let text = match &routed.pool.disaggregation {
            Some(_) => body::whole(&arrived.head, &arrived.body, decoded.take(), self.settings.max_body)?,
            None => None,
        };
        let path = arrived.head.path();
        let halves = text.as_ref().and_then(|text| self.halves(path, &request, &routed, text.bytes()));
        self.refuse_unsearched(&arrived, &routed, halves.is_some())?;
        let ask = Ask {
            subset: arrived.subset.as_ref(),
            sessions: &sessions,
            only_if_cached: arrived.head.only_if_cached(),
            may_be_split: halves.as_ref().is_some_and(Halves::may_be_split),
            ..ask(&routed, &request, &prompt, seed, detail)
        };
        let picked = self.scheduler.pick(&pipeline, &routed.pool, &ask)?;
        if let Some(permit) = &mut permit {
            permit.bound();
        }
        record.stages.schedule = began.elapsed();
        self.metrics.stage(Stage::Schedule, record.stages.schedule);

        let mut edits = Edits::new();
        if request.model.as_deref().unwrap_or_default() != &*routed.target_model {
            request.rename_model(&routed.target_model, &mut edits);
        }
        let withhold_usage = self.ask_for_usage(&request, &arrived, &routed, &mut edits);
        record.predict(&prompt, picked.held);
        record.session = picked.session;
        record.split = picked.split;
        if let Some(split) = picked.split {
            routed.pool.memory.metrics.disaggregation.decided(split);
        }
        record.legs.extend(picked.records);
        let parted = match halves {
            Some(halves) => halves.part(picked.prefill, &arrived.head, (&record.id, seed), &mut edits),
            None => Parted::default(),
        };
        let will_change = !edits.is_empty() || parted.handoff.is_some();
        let decoded = match text.and_then(Text::into_decoded).or(decoded) {
            _ if !will_change => None,
            Some(decoded) => Some(decoded),
            None => body::decoded(&arrived.head, &arrived.body, self.settings.max_body)?,
        };
        let is_decoded = decoded.is_some();
        if let Some(decoded) = decoded {
            arrived.body = Body::Whole(Chunks::of(decoded));
        }
        let uncached = record.prompt_tokens - record.predicted_cached_tokens;
        let key = &self.settings.session_key;
        let tokens = Issuer::of(&pipeline.affinities, key, &routed.pool, &picked.ranked);
        Ok(Served {
            tokens,
            sessions,
            limiting,
            reports: Arc::clone(&pipeline.reports),
            ranked: picked.ranked,
            leg: picked.leg,
            handoff: parted.handoff,
            by_sidecar: parted.by_sidecar,
            alone: parted.alone,
            permit,
            head: arrived.head,
            body: arrived.body,
            decoded: is_decoded,
            edits,
            withhold_usage,
            traffic: routed.pool.traffic,
            expected_output: picked.output,
            forecast: picked.forecast,
            prefill: routed.pool.memory.learned.expected_prefill(uncached),
            stream: request.stream,
            answers: request.n,
            most_output: request.most_output(),
        })
    }

    /// Asks the engine for usage where configured; true if the client must not see the extra event.
    fn ask_for_usage(
        &self,
        request: &LlmRequest,
        arrived: &Arrived,
        routed: &Routed,
        edits: &mut Edits,
    ) -> bool {
        let withhold = arrived.sees_response && accepts_identity(&arrived.head);
        let wanted = match self.settings.usage_injection {
            UsageInjection::Off => false,
            // A stream without usage would cost a limit a guess.
            UsageInjection::Auto => withhold || routed.limits_output(),
            UsageInjection::Always => true,
        };
        wanted && request.ask_for_usage(edits) && withhold
    }

    /// Candidates to keep in the record.
    fn detail(&self, seed: u64, routed: &Routed) -> usize {
        let members = routed.pool.members.len();
        let whole = members <= KEPT_WHOLE
            || self.settings.whole_tables
            || (self.settings.decision_detail > 0
                && seed.is_multiple_of(u64::from(self.settings.decision_detail)));
        if whole { members } else { RANKED + BEST_KEPT }
    }
}

pub(super) fn ask<'a>(
    routed: &'a Routed,
    request: &LlmRequest,
    prompt: &'a Prepared,
    seed: u64,
    detail: usize,
) -> Ask<'a> {
    Ask {
        model: &routed.target_model,
        prompt,
        max_tokens: request.max_tokens,
        answers: request.n,
        sessions: &[],
        subset: None,
        only_if_cached: false,
        may_be_split: false,
        wanted: routed.pool.traffic.attempts.map_or(RANKED, |attempts| attempts as usize + 1),
        seed,
        detail,
    }
}

/// Whether the client takes an uncompressed response, as all do that do not forbid it.
fn accepts_identity(head: &Head) -> bool {
    head.get("accept-encoding").is_none_or(|value| {
        !value.split(',').any(|coding| {
            let mut parts = coding.split(';').map(str::trim);
            matches!(parts.next(), Some("identity" | "*"))
                && parts.any(|p| p.strip_prefix("q=").is_some_and(|q| q.parse::<f32>() == Ok(0.0)))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(None, true)]
    #[case(Some("gzip, br"), true)]
    #[case(Some("identity;q=0"), false)]
    #[case(Some("gzip, *;q=0"), false)]
    #[case(Some("*;q=0.5"), true)]
    fn identity_is_accepted_unless_forbidden(#[case] value: Option<&str>, #[case] accepted: bool) {
        let head = Head::new(value.map(|value| ("accept-encoding".to_owned(), value.to_owned())));
        assert_eq!(accepts_identity(&head), accepted);
    }
}
