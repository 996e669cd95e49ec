//! A prompt on its way from one engine to another: who computes it, what both are told, and what both have to do.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::body;
use super::connector::{Connector, Fields, Meeting, Order, Prefilled, Useless};
use crate::request::head::Head;
use crate::request::{LlmRequest, Outline};
use crate::schedule::PrefillPick;
use crate::state::Member;
use crate::usage::Usage;

/// Why a prompt is computed where its output is generated although another engine was to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// No connection.
    Refused,
    /// No answer in time.
    Timeout,
    /// The connection broke, or the answer was no answer.
    Broken,
    /// The engine failed: a status of 500 or more.
    Engine,
    /// The answer says nothing of where the blocks are.
    NoFields,
    /// The bootstrap server did not say who the engine is.
    Bootstrap,
    /// The decode leg would go out after the blocks are given up.
    Late,
    /// No room for another copy of the body.
    Buffers,
}

impl Fallback {
    /// Every reason.
    pub const ALL: [Fallback; 8] = [
        Fallback::Refused,
        Fallback::Timeout,
        Fallback::Broken,
        Fallback::Engine,
        Fallback::NoFields,
        Fallback::Bootstrap,
        Fallback::Late,
        Fallback::Buffers,
    ];

    /// The name in metrics and logs.
    pub fn name(self) -> &'static str {
        match self {
            Fallback::Refused => "refused",
            Fallback::Timeout => "timeout",
            Fallback::Broken => "broken",
            Fallback::Engine => "engine-error",
            Fallback::NoFields => "no-fields",
            Fallback::Bootstrap => "bootstrap",
            Fallback::Late => "late",
            Fallback::Buffers => "buffers",
        }
    }
}

impl From<Useless> for Fallback {
    fn from(useless: Useless) -> Self {
        match useless {
            Useless::NoFields => Fallback::NoFields,
            Useless::Bootstrap => Fallback::Bootstrap,
        }
    }
}

/// What became of a prefill leg.
#[derive(Clone, Debug)]
pub struct Report {
    /// Where it ended, `ip:port`.
    pub endpoint: Arc<str>,
    /// Attempts made.
    pub attempts: u32,
    /// From its beginning to its end.
    pub took: Duration,
    /// Tokens by the engine's count.
    pub usage: Option<Usage>,
    /// Why it is of no use.
    pub failure: Option<Fallback>,
}

/// Everything a prefill leg needs.
#[derive(Debug)]
pub struct Handoff {
    /// Who computes the prompt, booked.
    pub pick: PrefillPick,
    /// Path and query.
    pub path: Box<str>,
    /// Request headers, without those that speak of this connection or of the body.
    pub headers: Vec<(String, String)>,
    /// Where the decode body takes its fields.
    pub front: usize,
    connector: &'static dyn Connector,
    transfer_id: Box<str>,
    room_seed: u64,
    batch: Option<usize>,
    body: Bytes,
    /// Where the fields for the first choice stand in `body`.
    fields: Range<usize>,
}

/// Headers of one connection, or of a body that is another in the prefill leg.
const NOT_FORWARDED: [&str; 13] = [
    "host",
    "content-length",
    "content-encoding",
    "transfer-encoding",
    "accept-encoding",
    "connection",
    "keep-alive",
    "proxy-connection",
    "proxy-authorization",
    "upgrade",
    "te",
    "trailer",
    "expect",
];

/// A request as its client sent it.
#[derive(Clone, Copy, Debug)]
pub struct Original<'a> {
    /// What it asks for.
    pub request: &'a LlmRequest,
    /// The model name that engines know.
    pub target_model: &'a str,
    /// Its headers.
    pub head: &'a Head,
    /// Its body.
    pub text: &'a Outline<'a>,
}

impl Handoff {
    /// The leg of a request for the endpoints of `pick`. `transfer_id` and `room_seed` must be of this request alone.
    pub fn new(
        connector: &'static dyn Connector,
        pick: PrefillPick,
        original: Original<'_>,
        transfer_id: &str,
        room_seed: u64,
    ) -> Self {
        let Original { request, target_model, head, text } = original;
        let batch = body::is_batch(text).then(|| body::prompts(text));
        let meeting = Meeting { prefill: &pick.ranked[0].endpoint, transfer_id, room_seed, batch };
        let fields = connector.prefill(&meeting);
        let mut edits = body::prefill(request.api, text, &fields);
        request.rename_model(target_model, &mut edits);
        let front = text.front();
        Self {
            connector,
            path: head.target().into(),
            headers: head.forwarded().filter(|(name, _)| is_forwarded(name)).map(owned).collect(),
            transfer_id: transfer_id.into(),
            room_seed,
            batch,
            body: edits.apply(text.body()).into(),
            fields: front..front + fields.len(),
            front,
            pick,
        }
    }

    /// How the legs follow each other.
    pub fn order(&self) -> Order {
        self.connector.order()
    }

    /// Bytes of its body.
    pub fn size(&self) -> usize {
        self.body.len()
    }

    /// Path that the bootstrap server of the endpoint is asked for.
    pub fn bootstrap_path(&self) -> Option<&'static str> {
        self.connector.bootstrap_path()
    }

    fn meeting<'a>(&'a self, prefill: &'a Arc<Member>) -> Meeting<'a> {
        Meeting {
            prefill: &prefill.endpoint,
            transfer_id: &self.transfer_id,
            room_seed: self.room_seed,
            batch: self.batch,
        }
    }

    /// The body for an endpoint of the ranked. Only where fields name the endpoint is it another than for the first.
    pub fn body(&self, prefill: &Arc<Member>) -> Bytes {
        let fields = self.connector.prefill(&self.meeting(prefill));
        if self.body[self.fields.clone()] == *fields.as_bytes() {
            return self.body.clone();
        }
        let (before, after) = (&self.body[..self.fields.start], &self.body[self.fields.end..]);
        [before, fields.as_bytes(), after].concat().into()
    }

    /// What the decode body gets after `prefill` answered.
    pub fn decode_fields(&self, prefill: &Arc<Member>, prefilled: Prefilled<'_>) -> Result<Fields, Useless> {
        self.connector.decode(&self.meeting(prefill), prefilled)
    }
}

fn is_forwarded(name: &str) -> bool {
    !NOT_FORWARDED.contains(&name) && !name.starts_with("x-envoy-")
}

fn owned((name, value): (&str, &str)) -> (String, String) {
    (name.to_owned(), value.to_owned())
}
