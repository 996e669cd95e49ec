//! A request in a pool with roles: whether its prompt may be computed elsewhere, and what both engines are told then.

use super::Decider;
use crate::disagg::{self, Connector, Handoff, Order, Original};
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
    /// A request in a pool with roles, if its body is JSON.
    pub(super) fn halves<'a>(
        &self,
        request: &'a LlmRequest,
        routed: &'a Routed,
        body: &'a [u8],
    ) -> Option<Halves<'a>> {
        let roles = routed.pool.disaggregation.as_ref()?;
        let text = Outline::of(body)?;
        let allow_transfer_fields = self.settings.allow_transfer_fields;
        Some(Halves { request, roles, target_model: &routed.target_model, text, allow_transfer_fields })
    }
}

impl Halves<'_> {
    fn connector(&self) -> &'static dyn Connector {
        disagg::of(self.roles.connector)
    }

    /// Whether it may be split: what generates nothing, what its connector cannot hand over, and what says itself where its
    /// blocks are, may not.
    pub fn may_be_split(&self) -> bool {
        let request = self.request;
        request.n > 0
            && !(self.allow_transfer_fields && disagg::has_transfer_fields(&self.text))
            && request.max_tokens != Some(0)
            && disagg::may_be_split(request.api, &self.text)
            && (self.connector().takes_batches() || !disagg::is_batch(&self.text))
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
        if !self.allow_transfer_fields {
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
