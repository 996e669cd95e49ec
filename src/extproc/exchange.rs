//! The state machine of one ext_proc stream: a message in, replies and a step out. No IO, no clock but what it is told.
//!
//! ```text
//! Start -> Receiving -> Deciding -> Responding -> Done
//!   \________ no body _____/ \______ refused ______/
//! ```
//!
//! Every message of Envoy gets exactly the replies its mode asks for; a reply that Envoy does not expect would fail the
//! request. In the buffered modes headers are let go at once and the decision rides on the body reply; in full duplex the
//! header reply waits for the decision and the body follows it.

mod response;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use tokio::time::Instant;

use super::budget::{Budget, Held};
use super::mode::{BodyMode, Modes};
use super::{Options, message, reply};
use crate::admission::identity::Attributes;
use crate::admission::limits::Limiting;
use crate::decide::{Arrived, Body, Chunks, Served};
use crate::decision::Record;
use crate::prefill::Relayed;
use crate::refusal::{Reason, Refusal, Standing};
use crate::request::Edits;
use crate::request::head::Head;
use crate::schedule::Subset;
use crate::session::Issuer;
use crate::settle::Progress;
use crate::state::ObjectName;
use crate::usage::{Attribute, Scanner};

/// Most bytes in one piece of a body that we send: two chained full-duplex filters lose the end of larger ones.
pub const MAX_PIECE: usize = 62_000;

/// How long Envoy is asked to wait for a request that may wait for any time: `max_message_timeout` of the shipped files.
const LONGEST_HOLD: Duration = Duration::from_secs(599);
/// What is left of the wait for the decision itself, or for the refusal to arrive before Envoy gives up.
const AFTER_HOLD: Duration = Duration::from_secs(1);

/// The request header by which conformance tests choose endpoints: a comma list of `ip` and `ip:port`.
const TEST_SELECTION: &str = "test-epp-endpoint-selection";

/// Replies on their way to Envoy.
pub type Outbox = VecDeque<ProcessingResponse>;

/// What the driver must do after a message.
#[derive(Debug)]
pub enum Step {
    /// Wait for the next message.
    Wait,
    /// Decide the request, then call [`Exchange::serve`], [`Exchange::answer`] or [`Exchange::refuse`].
    Decide(Box<Arrived>),
    /// The request cannot be decided: refuse it.
    Refuse(Refusal),
    /// The first byte of the response body has come.
    FirstByte,
    /// Response headers have come.
    ResponseHeaders,
    /// Envoy has answered the request itself: stop deciding.
    Abandon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Start,
    Receiving,
    Deciding,
    Responding,
    Done,
}

/// One stream.
#[derive(Debug)]
pub struct Exchange {
    modes: Modes,
    phase: Phase,
    head: Head,
    pool: Option<ObjectName>,
    attributes: Attributes,
    subset: Option<Subset>,
    /// Whether a header has restricted the candidates, which no metadata changes.
    chosen_by_test: bool,
    options: Options,
    body: Chunks,
    /// Whether the request has a body, and whether its end has been marked by trailers.
    has_body: bool,
    ended_by_trailers: bool,
    /// Whether Envoy has been asked to wait longer.
    holds: bool,
    held: Held,
    max_body: usize,
    started: Instant,
    scanner: Option<Scanner>,
    withhold_usage: bool,
    tokens: Option<Box<Issuer>>,
    reports: Arc<[Arc<Attribute>]>,
    /// What the client has left of a limit.
    standing: Option<Standing>,
    /// Whether Envoy charges by what it is told.
    charged_by_envoy: bool,
    /// What has been seen of the response.
    pub progress: Progress,
}

impl Exchange {
    /// A stream that has said nothing yet.
    ///
    /// `pool` is the one that the connection is for, if it is for one.
    pub fn new(
        budget: Arc<Budget>,
        max_body: usize,
        options: Options,
        pool: Option<ObjectName>,
        now: Instant,
    ) -> Self {
        Self {
            modes: Modes::learn(None),
            phase: Phase::Start,
            head: Head::default(),
            pool,
            attributes: Attributes::new(),
            subset: None,
            chosen_by_test: false,
            options,
            body: Chunks::default(),
            has_body: true,
            ended_by_trailers: false,
            holds: false,
            held: Held::new(budget),
            max_body,
            started: now,
            scanner: None,
            withhold_usage: false,
            tokens: None,
            reports: Arc::default(),
            standing: None,
            charged_by_envoy: false,
            progress: Progress::default(),
        }
    }

    /// Whether body pieces are awaited, which may stop coming.
    pub fn awaits_body(&self) -> bool {
        self.phase == Phase::Receiving && self.modes.request == BodyMode::FullDuplex
    }

    /// Whether the request has begun and is not answered yet.
    pub fn is_unanswered(&self) -> bool {
        matches!(self.phase, Phase::Receiving | Phase::Deciding)
    }

    /// Whether nothing more will be said.
    pub fn is_done(&self) -> bool {
        self.phase == Phase::Done
    }

    /// Whether response bodies pass through.
    pub fn sees_response_body(&self) -> bool {
        self.modes.response != BodyMode::None
    }

    /// `x-request-id`, while the request is not decided.
    pub fn request_id(&self) -> &str {
        self.head.get("x-request-id").unwrap_or_default()
    }

    /// Takes one message.
    pub fn receive(&mut self, incoming: ProcessingRequest, now: Instant, out: &mut Outbox) -> Step {
        if self.phase == Phase::Start {
            self.modes = Modes::learn(incoming.protocol_config.as_ref());
        }
        let metadata = incoming.metadata_context.as_ref();
        match incoming.request {
            Some(Request::RequestHeaders(headers)) => {
                self.restrict(metadata);
                self.attributes = message::attributes(&incoming.attributes, &self.options.attributes);
                self.request_headers(headers, now, out)
            }
            Some(Request::RequestBody(body)) => {
                self.restrict(metadata);
                self.request_body(body, now)
            }
            Some(Request::RequestTrailers(_)) => self.request_trailers(now, out),
            Some(Request::ResponseHeaders(headers)) => {
                let facts = message::upstream(&incoming.attributes, metadata);
                let told = metadata.filter(|_| self.options.conformance).and_then(message::served);
                self.response_headers(headers, &facts, told, out)
            }
            Some(Request::ResponseBody(body)) => self.response_body(body, now, out),
            Some(Request::ResponseTrailers(_)) => {
                let facts = message::upstream(&incoming.attributes, metadata);
                self.progress.learn(&facts);
                self.progress.usage_in_trailers = message::usage(metadata);
                self.response_trailers(out)
            }
            None => Step::Wait,
        }
    }

    /// Learns which pool and which endpoints the gateway allows; it may say so with any message of the request.
    fn restrict(&mut self, metadata: Option<&Metadata>) {
        if let Some(pool) = metadata.and_then(message::pool) {
            self.pool = Some(pool);
        }
        if self.chosen_by_test || self.options.ignore_subset {
            return;
        }
        if let Some(subset) = message::subset(metadata) {
            self.subset = Some(subset);
        }
    }

    fn let_a_test_choose(&mut self) {
        let given = self.head.get(TEST_SELECTION).filter(|list| !list.trim().is_empty());
        if let Some(list) = given {
            self.subset = Some(Subset::from_entries([list]));
            self.chosen_by_test = true;
        }
    }

    fn request_headers(&mut self, headers: HttpHeaders, now: Instant, out: &mut Outbox) -> Step {
        if self.phase != Phase::Start {
            return Step::Wait;
        }
        self.head = message::head(headers.headers);
        if self.options.conformance {
            self.let_a_test_choose();
        }
        self.has_body = !headers.end_of_stream;
        self.phase = Phase::Receiving;
        if !self.has_body {
            return self.decide(Body::Absent, now);
        }
        if self.modes.request == BodyMode::None {
            return self.decide(Body::Unseen, now);
        }
        if self.modes.request == BodyMode::Streamed {
            let why = "request_body_mode STREAMED cannot route by body: set FULL_DUPLEX_STREAMED, BUFFERED or \
                       BUFFERED_PARTIAL in Envoy's ext_proc filter";
            return Step::Refuse(Refusal::new(Reason::UnsupportedMode, why));
        }
        // A length announced is refused before the first byte.
        if self.head.content_length().is_some_and(|length| length > self.max_body as u64) {
            return Step::Refuse(self.too_large());
        }
        if self.modes.request != BodyMode::FullDuplex {
            out.push_back(reply::continue_request_headers());
        }
        Step::Wait
    }

    fn request_body(&mut self, body: HttpBody, now: Instant) -> Step {
        if self.phase != Phase::Receiving {
            // Envoy 1.35 to 1.37 may deliver the last piece of a body twice behind another full-duplex filter.
            return Step::Wait;
        }
        if self.body.len + body.body.len() > self.max_body {
            return Step::Refuse(self.too_large());
        }
        if !self.held.grow(body.body.len()) {
            return Step::Refuse(overloaded());
        }
        self.body.push(body.body);
        match self.modes.request {
            BodyMode::FullDuplex if !body.end_of_stream => Step::Wait,
            BodyMode::BufferedPartial if !body.end_of_stream && self.was_cut_off() => {
                self.decide_with(Body::CutOff, now)
            }
            _ => self.decide_with(Body::Whole, now),
        }
    }

    /// Whether a partial body ends before the announced length. Without one it may be whole and followed by trailers,
    /// which Envoy does not tell apart: a whole body ends with a closing bracket, the beginning of one hardly ever.
    fn was_cut_off(&self) -> bool {
        if let Some(length) = self.head.content_length() {
            return (self.body.len as u64) < length;
        }
        let last = self.body.pieces.last().and_then(|piece| piece.trim_ascii_end().last());
        last != Some(&b'}') || crate::request::parse(self.head.path(), None, &self.body.contiguous()).is_err()
    }

    fn request_trailers(&mut self, now: Instant, out: &mut Outbox) -> Step {
        match self.phase {
            Phase::Receiving => {
                self.ended_by_trailers = true;
                self.decide_with(Body::Whole, now)
            }
            // The reply follows the body's.
            Phase::Deciding => {
                self.ended_by_trailers = true;
                Step::Wait
            }
            Phase::Responding => {
                out.push_back(reply::continue_request_trailers());
                Step::Wait
            }
            Phase::Start | Phase::Done => Step::Wait,
        }
    }

    fn decide_with(&mut self, body: fn(Chunks) -> Body, now: Instant) -> Step {
        let chunks = std::mem::take(&mut self.body);
        self.decide(body(chunks), now)
    }

    fn decide(&mut self, body: Body, now: Instant) -> Step {
        self.phase = Phase::Deciding;
        Step::Decide(Box::new(Arrived {
            head: std::mem::take(&mut self.head),
            body,
            attributes: std::mem::take(&mut self.attributes),
            pool: self.pool.take(),
            subset: self.subset.take(),
            sees_response: self.modes.sees_response(),
            started: self.started,
            complete: now,
        }))
    }

    fn too_large(&self) -> Refusal {
        let why = format!("the request body is larger than {} bytes", self.max_body);
        Refusal::new(Reason::BodyTooLarge, why)
    }

    /// The decision takes longer: the request waits for its turn, or for its prompt to be computed elsewhere. In full duplex
    /// Envoy waits as long as we do; else it takes the first word only.
    pub fn hold(&mut self, longest: Option<Duration>, out: &mut Outbox) {
        if self.modes.request != BodyMode::FullDuplex && !std::mem::replace(&mut self.holds, true) {
            out.push_back(reply::wait(longest.unwrap_or(LONGEST_HOLD).min(LONGEST_HOLD) + AFTER_HOLD));
        }
    }

    /// The decision: an endpoint serves the request. Takes the body and its edits out of `served`. Refused if a body that
    /// had to be decoded does not fit beside all others.
    pub fn serve(
        &mut self,
        served: &mut Served,
        record: &Record,
        now: Instant,
        out: &mut Outbox,
    ) -> Result<(), Refusal> {
        if served.decoded
            && let Body::Whole(chunks) = &served.body
            && !self.held.grow(chunks.len)
        {
            return Err(overloaded());
        }
        let metadata = reply::metadata(served, record, self.options.emit_scores);
        let body = std::mem::replace(&mut served.body, Body::Absent);
        let edits = std::mem::take(&mut served.edits);
        let new_length = new_length(&served.head, &body, served.decoded, &edits);
        let mutation = reply::mutation(served, new_length);
        match body {
            Body::Absent | Body::Unseen => out.push_back(reply::routed_headers(mutation, metadata)),
            Body::Whole(chunks) | Body::CutOff(chunks) if self.modes.request == BodyMode::FullDuplex => {
                out.push_back(reply::routed_headers(mutation, metadata));
                self.request_pieces(edits.apply_pieces(chunks.pieces, MAX_PIECE), out);
            }
            Body::Whole(chunks) | Body::CutOff(chunks) => {
                let changed = served.decoded || !edits.is_empty();
                let body = changed.then(|| edits.apply(&chunks.contiguous()));
                out.push_back(reply::routed_body(mutation, metadata, body));
            }
        }
        if self.ended_by_trailers {
            out.push_back(reply::continue_request_trailers());
        }
        self.withhold_usage = served.withhold_usage;
        self.tokens = served.tokens.take();
        self.reports = Arc::clone(&served.reports);
        self.standing = served.limiting.standing();
        self.charged_by_envoy = matches!(served.limiting, Limiting::ByEnvoy { .. });
        self.progress.decided = Some(now);
        self.phase = Phase::Responding;
        Ok(())
    }

    /// The body in full duplex: exactly one piece marks the end, unless trailers do.
    fn request_pieces(&self, mut pieces: Vec<Vec<u8>>, out: &mut Outbox) {
        pieces.retain(|piece| !piece.is_empty());
        if pieces.is_empty() && !self.ended_by_trailers {
            pieces.push(Vec::new());
        }
        let last = pieces.len().saturating_sub(1);
        let pieces = pieces.into_iter().enumerate();
        out.extend(
            pieces.map(|(at, piece)| reply::request_piece(piece, at == last && !self.ended_by_trailers)),
        );
    }

    /// The decision: the picker answers with a JSON body.
    pub fn answer(&mut self, body: String, out: &mut Outbox) {
        out.push_back(reply::answered(body));
        self.finish();
    }

    /// The decision: a prefill endpoint has answered.
    pub fn relay(&mut self, relayed: Relayed, out: &mut Outbox) {
        out.push_back(reply::relayed(relayed));
        self.finish();
    }

    /// The decision: the request is refused.
    pub fn refuse(&mut self, refusal: &Refusal, out: &mut Outbox) {
        out.clear();
        out.push_back(reply::refused(refusal));
        self.finish();
    }

    fn finish(&mut self) {
        self.phase = Phase::Done;
        self.body = Chunks::default();
        self.held.release();
    }

    /// The replies have gone out: the body is no longer held.
    pub fn sent(&mut self) {
        if self.phase == Phase::Responding {
            self.held.release();
        }
    }
}

fn overloaded() -> Refusal {
    let why = "too many request bodies are being received: try again shortly";
    Refusal::new(Reason::Overloaded, why).retry_after(std::time::Duration::from_secs(1))
}

/// The length to announce, if the body changes and the client announced one: none came, none goes out. A body cut off is
/// announced by its whole length.
fn new_length(head: &Head, body: &Body, decoded: bool, edits: &Edits) -> Option<usize> {
    let announced = head.content_length()?;
    if edits.is_empty() && !decoded {
        return None;
    }
    let before = match body {
        Body::Whole(chunks) => chunks.len as u64,
        Body::CutOff(_) => announced,
        Body::Absent | Body::Unseen => return None,
    };
    usize::try_from(before as i64 + edits.delta()).ok()
}
