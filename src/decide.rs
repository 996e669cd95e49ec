//! One request from its headers and body to a decision: parse, route, hash, schedule.
//!
//! No IO and no gRPC: the ext_proc server and `/debug/explain` both call it. Dropping the future of [`Decider::decide`]
//! cancels the request: whatever it has booked is released with it.

mod bind;
mod body;
mod holders;
mod joined;
mod limit;
mod models;
mod prepare;
mod shared;
mod split;
mod turn;

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use bind::Ready;
pub use body::{Body, Chunks};
pub use holders::{Holders, Holding};
pub use prepare::{Tokenizing, Wait};
use split::Halves;
pub use turn::Held;

use crate::admission::identity::{Asks, Attributes};
use crate::admission::limits::{Limiter, Limiting};
use crate::admission::{Admission, Identity, Permit, Source};
use crate::decision::{Record, cut};
use crate::disagg::Handoff;
use crate::index::shared::SharedIndex;
use crate::metrics::{Metrics, Stage};
use crate::refusal::{Reason, Refusal};
use crate::request::head::Head;
use crate::request::{Edits, LlmRequest};
use crate::route::Question;
use crate::schedule::{Ask, Explained, Pipeline, PrefillPick, Scheduler, Subset};
use crate::session::{Issuer, Key, Session};
use crate::snapshot::{Routed, Store};
use crate::state::pool::TrafficPolicy;
use crate::state::rates::Forecast;
use crate::state::reservation::{Leg, Work};
use crate::state::{Endpoint, ObjectName, Pool};
use crate::usage::Attribute;

/// Whether to ask engines for token usage that clients did not ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum UsageInjection {
    /// Where response bodies are streamed through the picker, the extra event withheld from the client; and where the route
    /// limits output tokens: clients get the event if response bodies are not seen.
    #[default]
    Auto,
    /// Everywhere; where response bodies are not seen, clients get the extra event.
    Always,
    /// Never.
    Off,
}

/// What decisions are configured by.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Largest body, encoded and decoded, bytes.
    pub max_body: usize,
    /// The pool of requests that no route claims.
    pub default_pool: Option<ObjectName>,
    /// Whether privileged hints are obeyed.
    pub trust_hints: bool,
    /// Whether clients may tell engines where KV blocks are.
    pub allow_transfer_fields: bool,
    /// Usage injection.
    pub usage_injection: UsageInjection,
    /// Whether the whole candidate table is kept of 1 decision in so many; the best 8 always are.
    pub decision_detail: u32,
    /// Whether the whole candidate table is kept of every decision, since Envoy is told it.
    pub whole_tables: bool,
    /// Where requests' identities stand, the best first.
    pub identity: Arc<[Source]>,
    /// What session tokens are signed with.
    pub session_key: Arc<Key>,
    /// Name of this process in decision ids.
    pub replica: Box<str>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_body: 64 << 20,
            default_pool: None,
            trust_hints: false,
            allow_transfer_fields: false,
            usage_injection: UsageInjection::Auto,
            decision_detail: 1_000,
            whole_tables: false,
            identity: Arc::default(),
            session_key: Arc::default(),
            replica: "local".into(),
        }
    }
}

/// A request as it arrived.
#[derive(Debug)]
pub struct Arrived {
    /// Its headers.
    pub head: Head,
    /// Its body.
    pub body: Body,
    /// Attributes of Envoy that identities may stand in, by name.
    pub attributes: Attributes,
    /// The pool that the gateway names.
    pub pool: Option<ObjectName>,
    /// Candidate restriction.
    pub subset: Option<Subset>,
    /// Whether the response body will pass through us.
    pub sees_response: bool,
    /// When its headers came.
    pub started: Instant,
    /// When its last body byte came.
    pub complete: Instant,
}

/// A decided request: its record so far, and what to do.
#[derive(Debug)]
pub struct Decided {
    /// The record, to be completed.
    pub record: Box<Record>,
    /// What to do.
    pub verdict: Verdict,
}

/// What a request is answered with.
#[derive(Debug)]
pub enum Verdict {
    /// An endpoint serves it.
    Serve(Box<Served>),
    /// It waits for its turn: [`Decider::resume`] or [`Decider::give_up`] ends that.
    Wait(Box<Held>),
    /// The picker serves it: a JSON body with status 200.
    Answer(String),
    /// Nobody serves it; the pool if one was found.
    Refuse(Refusal, Option<Arc<Pool>>),
}

/// A request on its way to an endpoint.
#[derive(Debug)]
pub struct Served {
    /// The choice and its alternatives, best first.
    pub ranked: SmallVec<[Arc<Endpoint>; 3]>,
    /// The booking.
    pub leg: Leg,
    /// The prefill leg to be run before the body goes out.
    pub handoff: Option<Box<Handoff>>,
    /// The prefill leg that the destination's sidecar runs.
    pub by_sidecar: Option<PrefillPick>,
    /// What the destination has to do if it must compute the prompt after all; `None` if it does, or cannot.
    pub alone: Option<Work>,
    /// Its leave to go, where it needed one.
    pub permit: Option<Permit>,
    /// The request's headers.
    pub head: Head,
    /// The body to forward: the one that came, or its decoded form where an edit asks for it.
    pub body: Body,
    /// Whether `body` was decoded, so that `content-encoding` must go.
    pub decoded: bool,
    /// Changes to the body.
    pub edits: Edits,
    /// Whether we asked for a usage event that the client must not see.
    pub withhold_usage: bool,
    /// Timeout and retries of the pool.
    pub traffic: TrafficPolicy,
    /// Output tokens expected.
    pub expected_output: u64,
    /// How long the endpoint was expected to take.
    pub forecast: Forecast,
    /// When the engine should have prefilled the prompt.
    pub prefill: Duration,
    /// Whether the client asked for a stream.
    pub stream: bool,
    /// Answers it asked for.
    pub answers: u32,
    /// Most output tokens it asked for, over all answers.
    pub most_output: Option<u64>,
    /// Tells the client where its session is bound, where tokens do.
    pub tokens: Option<Box<Issuer>>,
    /// What it says of its sessions.
    pub sessions: SmallVec<[Session; 1]>,
    /// What it was charged.
    pub limiting: Limiting,
    /// What Envoy is told of its response.
    pub reports: Arc<[Arc<Attribute>]>,
}

/// Decides requests.
#[derive(Debug)]
pub struct Decider {
    /// Topology.
    pub store: Arc<Store>,
    /// Who may go, and when.
    pub admission: Arc<Admission>,
    /// Pipeline.
    pub scheduler: Arc<Scheduler>,
    /// How prompts become token ids.
    pub tokenizing: Arc<Tokenizing>,
    /// Charges requests; none where Envoy's filter does.
    pub limiter: Option<Arc<Limiter>>,
    /// The block index that others write, if there is one.
    pub shared: Option<Arc<dyn SharedIndex>>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Configuration.
    pub settings: Settings,
}

impl Decider {
    /// Decides one request.
    pub async fn decide(&self, arrived: Arrived) -> Decided {
        let request_id = arrived.head.get("x-request-id").unwrap_or_default();
        let mut record = Box::new(Record::begin(self.decision_id(), request_id));
        record.stages.receive = arrived.complete.duration_since(arrived.started);
        self.metrics.stage(Stage::Receive, record.stages.receive);
        let mut pool = None;
        let verdict = self.verdict(&mut record, arrived, &mut pool).await;
        Decided { record, verdict: verdict.unwrap_or_else(|refusal| Verdict::Refuse(refusal, pool)) }
    }

    /// The decision table for a request, with nothing booked.
    pub async fn explain(&self, arrived: &Arrived) -> Result<Record, Refusal> {
        let mut record = Record::begin(self.decision_id(), "");
        let (request, text) = self.parse(&mut record, &arrived.head, &arrived.body)?;
        let (routed, seed) = self.route(&mut record, arrived, &request)?;
        let pipeline = self.scheduler.pipeline();
        let path = arrived.head.path();
        let prompt = self.prepare(&mut record, &pipeline, &routed, &request, path, text.bytes()).await;
        let sessions = self.sessions(&pipeline, &arrived.head, &routed.pool);
        let halves = self.halves(path, &request, &routed, text.bytes());
        let ask = Ask {
            subset: arrived.subset.as_ref(),
            sessions: &sessions,
            may_be_split: halves.as_ref().is_some_and(Halves::may_be_split),
            ..bind::ask(&routed, &request, &prompt, seed, usize::MAX)
        };
        let Explained { records, held, session, split } =
            self.scheduler.explain(&pipeline, &routed.pool, &ask)?;
        record.legs.extend(records);
        record.predict(&prompt, held);
        record.session = session;
        record.split = split;
        Ok(record)
    }

    /// Notes the pool in `found`, so that a refusal behind it is counted there.
    async fn verdict(
        &self,
        record: &mut Record,
        arrived: Arrived,
        found: &mut Option<Arc<Pool>>,
    ) -> Result<Verdict, Refusal> {
        if let Some(list) = models::answer(&self.store.load(), &arrived) {
            return Ok(Verdict::Answer(list));
        }
        let (request, text) = self.parse(record, &arrived.head, &arrived.body)?;
        let (routed, seed) = self.route(record, &arrived, &request)?;
        *found = Some(Arc::clone(&routed.pool));
        record.identity = self.identity(&arrived, &request);
        let pipeline = self.scheduler.pipeline();
        let path = arrived.head.path();
        let prompt = self.prepare(record, &pipeline, &routed, &request, path, text.bytes()).await;
        let limiting = self.limit(record, &routed, &request, &prompt).await?;
        let decoded = text.into_decoded();
        let ready = Ready { arrived, request, decoded, routed, pipeline, prompt, seed, limiting };
        self.take_turn(record, ready)
    }

    fn identity(&self, arrived: &Arrived, request: &LlmRequest) -> Identity {
        let asks = Asks { head: &arrived.head, request, attributes: &arrived.attributes };
        Identity::of(&self.settings.identity, &asks)
    }

    /// What the request says of its session, for each affinity of the profile.
    fn sessions(&self, pipeline: &Pipeline, head: &Head, pool: &Pool) -> SmallVec<[Session; 1]> {
        let read = |affinity| Session::read(affinity, head, pool, &self.settings.session_key);
        pipeline.affinities.iter().map(read).collect()
    }

    fn parse<'a>(
        &self,
        record: &mut Record,
        head: &Head,
        body: &'a Body,
    ) -> Result<(LlmRequest, body::Text<'a>), Refusal> {
        let began = Instant::now();
        let parsed = body::parse(head, body, self.settings.max_body)?;
        record.stages.parse = began.elapsed();
        self.metrics.stage(Stage::Parse, record.stages.parse);
        record.model = cut(parsed.0.model.as_deref().unwrap_or_default());
        Ok(parsed)
    }

    fn route(
        &self,
        record: &mut Record,
        arrived: &Arrived,
        request: &LlmRequest,
    ) -> Result<(Routed, u64), Refusal> {
        let head = &arrived.head;
        let began = Instant::now();
        let seed: u64 = rand::random();
        let question = Question {
            model: request.model.as_deref(),
            pool: arrived.pool.as_ref(),
            path: head.path(),
            header: &|name| head.get(name),
            draw: seed,
            forced_model: head.model_rewrite().filter(|_| self.settings.trust_hints),
            takes_model: request.takes_model(),
        };
        let snapshot = self.store.load();
        let routed = snapshot.route(self.settings.default_pool.as_ref(), &question);
        let named = |routed: &Routed| !routed.target_model.is_empty();
        let filled_in = request.takes_model() && routed.as_ref().is_ok_and(named);
        if request.lacks_model() && !filled_in {
            let why = "the request body has no `model`: name the model to use";
            return Err(Refusal::new(Reason::MalformedBody, why));
        }
        let routed = routed?;
        let by_default = arrived.pool.is_none() && routed.route.is_none() && request.model.is_none();
        let has_body = !matches!(arrived.body, Body::Absent);
        if by_default && has_body && snapshot.has_limits(&routed.pool.name) {
            let why =
                "name the model: this pool's routes have limits, and a request without `model` has no route";
            return Err(Refusal::new(Reason::MalformedBody, why));
        }
        record.pool = Some(Arc::clone(&routed.pool.label));
        record.route.clone_from(&routed.route);
        record.target_model = Some(Arc::clone(&routed.target_model));
        record.stages.route = began.elapsed();
        self.metrics.stage(Stage::Route, record.stages.route);
        Ok((routed, seed))
    }

    /// An id unique to one stream: an access-log entry that bears it belongs to this decision.
    pub fn decision_id(&self) -> Box<str> {
        format!("{}-{:032x}", self.settings.replica, rand::random::<u128>()).into()
    }
}
