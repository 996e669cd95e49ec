//! A rate-limit service that keeps what it was asked, and answers as it is told.

use std::net::SocketAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::Code;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status};

/// What a call asked: for each descriptor its entries, as `key=value` joined by blanks, and its hits.
pub type Asked = Vec<(String, Option<u64>)>;

/// A running service.
#[derive(Debug)]
pub struct RateLimits {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

/// How it answers.
#[derive(Clone, Copy, Debug, Default)]
pub enum Verdict {
    /// Within the limit.
    #[default]
    Ok,
    /// Beyond it.
    Limited,
    /// Not at all.
    Hang,
}

#[derive(Debug, Default)]
struct Shared {
    asked: Mutex<Vec<Asked>>,
    verdict: Mutex<Verdict>,
}

impl RateLimits {
    /// Starts one that says yes.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let service = RateLimitServiceServer::from_arc(Arc::clone(&shared));
        let server = tonic::transport::Server::builder().add_service(service);
        let task = tokio::spawn(async move {
            server.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self { address, shared, _task: AbortOnDropHandle::new(task) }
    }

    /// Answers so from now on.
    pub fn answer(&self, verdict: Verdict) {
        *self.shared.verdict.lock() = verdict;
    }

    /// All calls so far, in their order.
    pub fn asked(&self) -> Vec<Asked> {
        self.shared.asked.lock().clone()
    }
}

#[tonic::async_trait]
impl RateLimitService for Shared {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let request = request.into_inner();
        assert_eq!(request.hits_addend, 0, "hits stand in descriptors");
        let asked = request.descriptors.iter().map(|descriptor| {
            let entries = descriptor.entries.iter().map(|entry| format!("{}={}", entry.key, entry.value));
            let entries: Vec<String> = std::iter::once(request.domain.clone()).chain(entries).collect();
            (entries.join(" "), descriptor.hits_addend.as_ref().map(|hits| hits.value))
        });
        self.asked.lock().push(asked.collect());
        let verdict = *self.verdict.lock();
        let code = match verdict {
            Verdict::Ok => Code::Ok,
            Verdict::Limited => Code::OverLimit,
            Verdict::Hang => std::future::pending().await,
        };
        let remaining = HeaderValue {
            key: "x-ratelimit-remaining".to_owned(),
            value: "7".to_owned(),
            ..HeaderValue::default()
        };
        Ok(Response::new(RateLimitResponse {
            overall_code: code.into(),
            response_headers_to_add: vec![remaining],
            ..RateLimitResponse::default()
        }))
    }
}
