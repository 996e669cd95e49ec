//! gRPC health: the names that Envoy, gateways and kubelets ask for, answered by readiness.

use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, StreamExt, stream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::Health;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::readiness::Readiness;

/// Names whose answer follows readiness. The unnamed one and ext_proc's are what Envoy asks for, `inference-extension`
/// what the probes of the reference picker do.
const FOLLOWING: [&str; 4] =
    ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"];
/// The name that is served as long as the process runs.
const LIVENESS: &str = "liveness";

/// The service.
#[derive(Clone, Debug)]
pub struct HealthService {
    readiness: Arc<Readiness>,
    /// Cancelled when the server closes: a watch would keep it open for ever.
    closing: CancellationToken,
}

impl HealthService {
    /// A service that tells of `readiness` until `closing`.
    pub fn new(readiness: Arc<Readiness>, closing: CancellationToken) -> Self {
        Self { readiness, closing }
    }
}

fn answer(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

fn of(ready: bool) -> ServingStatus {
    if ready { ServingStatus::Serving } else { ServingStatus::NotServing }
}

#[tonic::async_trait]
impl Health for HealthService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        match request.get_ref().service.as_str() {
            LIVENESS => Ok(Response::new(answer(ServingStatus::Serving))),
            name if FOLLOWING.contains(&name) => Ok(Response::new(answer(of(self.readiness.is_ready())))),
            _ => Err(Status::not_found("no such service: ask for liveness, readiness or no name")),
        }
    }

    /// A name that is not known is told so and may become known later, says the protocol: its stream stays open.
    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let always = |status| stream::iter([status]).chain(stream::pending());
        let statuses = match request.get_ref().service.as_str() {
            LIVENESS => always(ServingStatus::Serving).boxed(),
            name if FOLLOWING.contains(&name) => self.readiness.changes().map(of).boxed(),
            _ => always(ServingStatus::ServiceUnknown).boxed(),
        };
        let until_closing = statuses.take_until(self.closing.clone().cancelled_owned());
        Ok(Response::new(until_closing.map(|status| Ok(answer(status))).boxed()))
    }
}
