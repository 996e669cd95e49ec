//! The ext_proc server: Envoy's streams in, decisions out.
//!
//! [`exchange`] is the pure state machine, [`stream`] the plumbing round it, [`access_log`] the second witness of how
//! requests end, [`rate_limit`] the token limits for Envoy's own filter. Everything here speaks Envoy's messages; nothing behind it does.

pub mod access_log;
pub mod budget;
pub mod exchange;
pub mod message;
pub mod mode;
pub mod rate_limit;
pub mod reply;
pub mod stream;

use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessor;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::decide::Decider;
use crate::metrics::Metrics;
use crate::prefill::Prefiller;
use crate::settle::Ledger;
use crate::state::ObjectName;

pub use budget::Budget;

/// What streams do beyond the usual.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Whether the restriction to a subset that the gateway sends is ignored.
    pub ignore_subset: bool,
    /// Whether clients choose endpoints and are told who served, as gateways' conformance tests ask.
    pub conformance: bool,
    /// Whether Envoy is told the score of every candidate.
    pub emit_scores: bool,
    /// Attributes of Envoy that are kept: identities stand in them.
    pub attributes: Arc<[Arc<str>]>,
}

/// Everything a stream needs.
#[derive(Debug)]
pub struct Shared {
    /// Decides requests.
    pub decider: Decider,
    /// Calls prefill endpoints.
    pub prefiller: Arc<Prefiller>,
    /// Settles them.
    pub ledger: Arc<Ledger>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Bound on the bytes held.
    pub budget: Arc<Budget>,
    /// What streams do beyond the usual.
    pub options: Options,
    /// How long a body piece may be awaited.
    pub body_idle_timeout: Duration,
    /// How long a decision may take.
    pub decision_timeout: Duration,
    /// Cancelled when the drain's time is up: what is still held is refused.
    pub drain_over: CancellationToken,
}

/// The service.
#[derive(Clone, Debug)]
pub struct ExtProc {
    shared: Arc<Shared>,
    pool: Option<ObjectName>,
}

/// The gRPC metadata by which a gateway names the pool of a stream, `NAMESPACE/NAME`: `initial_metadata` of Envoy's
/// `grpc_service`, or `grpc_initial_metadata` of one of its routes.
pub const POOL_METADATA: &str = "x-pilotfish-pool";

impl ExtProc {
    /// A service over `shared`, for the requests of one pool if one is given.
    pub fn new(shared: Arc<Shared>, pool: Option<ObjectName>) -> Self {
        Self { shared, pool }
    }
}

#[tonic::async_trait]
impl ExternalProcessor for ExtProc {
    type ProcessStream = stream::Replies;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let named = request.metadata().get(POOL_METADATA);
        let named = named.map(|name| message::named_pool(&String::from_utf8_lossy(name.as_bytes())));
        let pool = named.or_else(|| self.pool.clone());
        Ok(Response::new(stream::replies(Arc::clone(&self.shared), pool, request.into_inner())))
    }
}

/// The type of a stream's replies.
pub type Reply = Result<ProcessingResponse, Status>;
