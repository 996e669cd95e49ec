//! A request in a pool with roles: whether its prompt may be computed elsewhere, and what both engines are told then.

use super::{Arrived, Body, Decider};
use crate::disagg::{self, Connector, Handoff, Order, Original};
use crate::refusal::{Reason, Refusal};
use crate::request::head::Head;
use crate::request::{Edits, LlmRequest, Outline};
use crate::schedule::PrefillPick;
use crate::snapshot::Routed;
use crate::state::disaggregation::Disaggregation;
use crate::state::reservation::Work;

/// A request in a pool with roles.
pub(super) struct Halves<'a> {
    request: &'a LlmRequest,
    roles: &'a Disaggregation,
    target_model: &'a str,
    text: Outline<'a>,
    allow_transfer_fields: bool,
    /// Whether its prompt is only rendered: vLLM's `/render` twins.
    renders: bool,
}

/// What becomes of the prefill leg.
#[derive(Default)]
pub(super) struct Parted {
    /// The picker runs it.
    pub handoff: Option<Box<Handoff>>,
    /// The destination's sidecar does.
    pub by_sidecar: Option<PrefillPick>,
    /// What the destination has to do without it, if it can.
    pub alone: Option<Work>,
}

impl Decider {
    /// Refuses what cannot be searched for transfer fields in a pool where engines would obey them.
    pub(super) fn refuse_unsearched(
        &self,
        arrived: &Arrived,
        routed: &Routed,
        halves: bool,
    ) -> Result<(), Refusal> {
        if routed.pool.disaggregation.is_none() || self.settings.allow_transfer_fields || halves {
            return Ok(());
        }
        match &arrived.body {
            Body::CutOff(_) => {
                let why = "the body is larger than Envoy's buffer, and this pool's engines must not be told what stands in its \
                           rest: raise request_body_buffer_limit";
                Err(Refusal::new(Reason::BodyTooLarge, why))
            }
            Body::Whole(chunks) if chunks.len > 0 && may_be_json(&arrived.head) => {
                let why = "the body is not a JSON object that can be read, as requests to this pool must be";
                Err(Refusal::new(Reason::MalformedBody, why))
            }
            Body::Whole(_) | Body::Absent | Body::Unseen => Ok(()),
        }
    }

    /// A request in a pool with roles, if its body is JSON.
    pub(super) fn halves<'a>(
        &self,
        path: &str,
        request: &'a LlmRequest,
        routed: &'a Routed,
        body: &'a [u8],
    ) -> Option<Halves<'a>> {
        let roles = routed.pool.disaggregation.as_ref()?;
        let text = Outline::of(body)?;
        let allow_transfer_fields = self.settings.allow_transfer_fields;
        let renders = path.trim_end_matches('/').ends_with("/render");
        Some(Halves {
            request,
            roles,
            target_model: &routed.target_model,
            text,
            allow_transfer_fields,
            renders,
        })
    }
}

fn may_be_json(head: &Head) -> bool {
    head.get("content-type").is_none_or(|value| !value.trim_start().starts_with("multipart/"))
}

impl Halves<'_> {
    fn connector(&self) -> &'static dyn Connector {
        disagg::of(self.roles.connector)
    }

    /// Whether it may be split: what generates nothing, what its connector cannot hand over, and what says itself where its
    /// blocks are, may not.
    pub fn may_be_split(&self) -> bool {
        let (request, connector) = (self.request, self.connector());
        let answers = request.n.max(request.best_of);
        request.n > 0
            && !(self.allow_transfer_fields && disagg::has_transfer_fields(&self.text))
            && request.max_tokens != Some(0)
            && !self.renders
            && disagg::may_be_split(request.api, &self.text)
            && (connector.takes_batches() || !disagg::is_batch(&self.text))
            && (connector.takes_several_answers() || answers == 1)
    }

    /// Prepares the prefill leg, if somebody was picked for it, and takes out of the body what clients must not say.
    /// `unique` names the request: its decision and random bits.
    pub fn part(
        self,
        pick: Option<PrefillPick>,
        head: &Head,
        (decision, seed): (&str, u64),
        edits: &mut Edits,
    ) -> Parted {
        if !self.allow_transfer_fields || pick.is_some() {
            disagg::without_transfer_fields(&self.text, edits);
        }
        let Some(pick) = pick else { return Parted::default() };
        let alone = self.roles.connector.decode_serves_alone().then_some(pick.alone);
        let connector = self.connector();
        if connector.order() == Order::BySidecar {
            return Parted { by_sidecar: Some(pick), alone, ..Parted::default() };
        }
        let Self { request, target_model, text, .. } = &self;
        let original = Original { request, target_model, head, text };
        let handoff = Some(Box::new(Handoff::new(connector, pick, original, decision, seed)));
        Parted { handoff, alone, ..Parted::default() }
    }
}
