//! The HTTP side: metrics, probes and debug pages.

mod cache;
mod debug;
pub mod exposition;
mod limits;
mod queues;
pub mod view;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use parking_lot::RwLock;
use prometheus_client::registry::Registry;
use serde_json::json;

use crate::admission::limits::Doors;
use crate::decision::Ring;
use crate::document::Problem;
use crate::extproc::Shared;
use crate::feed::kv_events::EventFeed;
use crate::feed::scrape::Scraper;
use crate::readiness::Readiness;
use crate::resources::lower::{Dumped, Unroutable};

/// What the pages show.
#[derive(Debug)]
pub struct Admin {
    /// The data path.
    pub shared: Arc<Shared>,
    /// Token limits, and who charges by them.
    pub doors: Doors,
    /// Finished decisions.
    pub ring: Arc<Ring>,
    /// Series.
    pub registry: Registry,
    /// What scrapes found out about endpoints.
    pub scraper: Scraper,
    /// What engines announce of their KV caches.
    pub events: EventFeed,
    /// Whether new requests are wanted.
    pub readiness: Arc<Readiness>,
    /// Resources as written, and what is wrong with them and with the scheduler configuration.
    pub documents: Arc<RwLock<Documents>>,
    /// Whether everybody may read the debug pages.
    pub debug_for_all: bool,
}

/// What the operator wrote.
#[derive(Debug, Default)]
pub struct Documents {
    /// Resources.
    pub resources: Vec<Dumped>,
    /// Problems of resources.
    pub resource_problems: Vec<Problem>,
    /// Problems of pods.
    pub pod_problems: Vec<Problem>,
    /// Ready pods that a pool selects and cannot use.
    pub unroutable: Vec<Unroutable>,
    /// Problems of the scheduler configuration.
    pub config_problems: Vec<Problem>,
}

/// All pages.
pub fn router(admin: Arc<Admin>) -> Router {
    let most = admin.shared.decider.settings.max_body;
    let debug = Router::new()
        .route("/debug/decisions", get(debug::decisions))
        .route("/debug/endpoints", get(debug::endpoints))
        // The question holds a body, escaped once more.
        .route("/debug/explain", post(debug::explain).layer(DefaultBodyLimit::max(2 * most)))
        .route("/debug/cache", post(cache::holders).layer(DefaultBodyLimit::max(2 * most)))
        .route("/debug/queues", get(queues::queues))
        .route("/debug/limits", get(limits::limits))
        .route("/debug/config", get(debug::config))
        .route("/debug/config_dump/modelroutes", get(debug::model_routes))
        .route("/debug/config_dump/modelservers", get(debug::model_servers))
        .route("/debug/config_dump/pods", get(debug::pods))
        .route("/debug/config_dump/inferencemodelrewrites", get(debug::rewrites))
        .route("/debug/config_dump/inferenceobjectives", get(debug::objectives))
        .layer(middleware::from_fn_with_state(Arc::clone(&admin), only_from_here));
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .merge(debug)
        .fallback(|| async { error(StatusCode::NOT_FOUND, "no such page") })
        .with_state(admin)
}

/// Debug pages answer callers on this machine that also say so: a Host that is not loopback is a browser led here by
/// somebody else's page.
async fn only_from_here(
    State(admin): State<Arc<Admin>>,
    ConnectInfo(peer): ConnectInfo<SocketAddr>,
    headers: HeaderMap,
    request: Request,
    next: Next,
) -> Response {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    if admin.debug_for_all || (peer.ip().to_canonical().is_loopback() && is_loopback_host(host)) {
        return next.run(request).await;
    }
    error(StatusCode::FORBIDDEN, "debug pages answer this machine only; --debug-access any opens them")
}

fn is_loopback_host(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

async fn metrics(State(admin): State<Arc<Admin>>) -> Response {
    let mut text = String::with_capacity(16 << 10);
    match prometheus_client::encoding::text::encode(&mut text, &admin.registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(_) => error(StatusCode::INTERNAL_SERVER_ERROR, "the metrics could not be encoded"),
    }
}

async fn ready(State(admin): State<Arc<Admin>>) -> Response {
    let reasons = admin.readiness.reasons();
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, format!("not ready\n{}\n", reasons.join("\n"))).into_response()
}

fn error(status: StatusCode, message: &str) -> Response {
    let mut body = String::new();
    let _ = write!(body, "{}", json!({"error": {"message": message, "code": status.as_u16()}}));
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("localhost:9090", true)]
    #[case("127.0.0.1", true)]
    #[case("[::1]:9090", true)]
    #[case("evil.test:9090", false)]
    #[case("10.0.0.1:9090", false)]
    #[case("", false)]
    fn hosts(#[case] host: &str, #[case] loopback: bool) {
        assert_eq!(is_loopback_host(host), loopback);
    }
}
