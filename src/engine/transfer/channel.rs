//! The simulated side channel: how a decode engine asks a prefill engine for the KV of one prompt.
//!
//! It is HTTP with `PUT`: faults of inference, which is `POST`, do not touch it.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::pins::{Content, Fetch};
use super::{EngineRole, KvConnector, LEASE};
use crate::engine::error::json_response;
use crate::engine::{EngineState, Fault};

/// Where prompts are asked for.
pub(in super::super) const PATH: &str = "/kv_transfer";

/// A question for one prompt.
#[derive(Debug, Deserialize, Serialize)]
pub(in super::super) struct Question {
    /// The engine that must have it; none where the connector does not say.
    pub engine_id: Option<String>,
    pub key: String,
    pub content: Content,
    pub blocks: Option<Vec<Vec<u64>>>,
}

/// A question and whom to ask.
#[derive(Debug)]
pub(super) struct Pull {
    /// `http://host:port`
    pub address: String,
    pub question: Question,
}

/// `http://host:port`, for an IPv6 address too.
pub(super) fn address(host: &str, port: u16) -> String {
    let bare_v6 = host.contains(':') && !host.starts_with('[');
    if bare_v6 { format!("http://[{host}]:{port}") } else { format!("http://{host}:{port}") }
}

/// What came of a pull.
pub(super) enum Pulled {
    Here,
    /// Nobody there, or nobody who has it.
    Missing,
    /// What is there does not fit the request.
    Refused(String),
}

pub(super) struct Channel {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Default for Channel {
    fn default() -> Self {
        Self { client: Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http() }
    }
}

impl Channel {
    pub async fn pull(&self, pull: &Pull) -> Pulled {
        let body = json!(pull.question).to_string();
        let request = Request::builder()
            .method(Method::PUT)
            .uri(format!("{}{PATH}", pull.address.trim_end_matches('/')))
            .header("content-type", "application/json")
            .body(Full::from(body));
        let Ok(request) = request else { return Pulled::Missing };
        let Ok(response) = self.client.request(request).await else { return Pulled::Missing };
        match response.status() {
            StatusCode::OK => Pulled::Here,
            StatusCode::CONFLICT => match response.into_body().collect().await {
                Ok(body) => Pulled::Refused(String::from_utf8_lossy(&body.to_bytes()).into_owned()),
                Err(_) => Pulled::Missing,
            },
            _ => Pulled::Missing,
        }
    }
}

fn verdict(fetch: &Fetch) -> Response {
    match fetch {
        Fetch::Done => StatusCode::OK.into_response(),
        Fetch::Unknown => StatusCode::NOT_FOUND.into_response(),
        Fetch::Differs(member) => {
            (StatusCode::CONFLICT, format!("{member} is not what the prefill engine computed"))
                .into_response()
        }
    }
}

/// False for questions that this engine cannot answer, or that are meant for another one.
fn is_asked(state: &EngineState, question: &Question) -> bool {
    state.config.role != EngineRole::Decode
        && !state.faults.borrow().has(Fault::Die)
        && question.engine_id.as_deref().is_none_or(|id| id == &*state.transfers.identity())
}

/// The side channel of Nixl, on the port of the API.
pub(in super::super) async fn fetch(
    State(state): State<Arc<EngineState>>,
    Json(question): Json<Question>,
) -> Response {
    if state.config.connector != Some(KvConnector::Nixl) || !is_asked(&state, &question) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let blocks = question.blocks.as_deref();
    verdict(&state.transfers.pins.fetch(&question.key, &question.content, blocks))
}

/// The bootstrap server's answer, which waits for a prompt that is still to be computed.
async fn fetch_when_there(State(state): State<Arc<EngineState>>, Json(question): Json<Question>) -> Response {
    still_running(&state).await;
    if !is_asked(&state, &question) {
        return StatusCode::NOT_FOUND.into_response();
    }
    let limit: Duration = LEASE.div_f64(state.config.speed);
    let fetch = state.transfers.pins.fetch_when_there(&question.key, &question.content);
    verdict(&tokio::time::timeout(limit, fetch).await.unwrap_or(Fetch::Unknown))
}

/// Mooncake's registry: the engine of each data-parallel rank, and its workers by rank.
async fn query(State(state): State<Arc<EngineState>>) -> Response {
    still_running(&state).await;
    let worker = state.bootstrap.map(|address| format!("tcp://{address}"));
    let rank = state.config.data_parallel.map_or(0, |(rank, _)| rank);
    let entry = json!({"engine_id": *state.transfers.identity(), "worker_addr": {"0": {"0": worker}}});
    json_response(StatusCode::OK, json!({rank.to_string(): entry}).to_string())
}

async fn still_running(state: &EngineState) {
    // The sender lives in the state, so that waiting cannot fail.
    let _ = state.faults.subscribe().wait_for(|faults| !faults.has(Fault::SilentShutdown)).await;
}

/// What the second port of a prefill engine serves.
pub(in super::super) fn bootstrap(state: &Arc<EngineState>) -> Router {
    Router::new()
        .route("/health", get(|| async { "OK" }))
        .route("/query", get(query))
        .route(PATH, put(fetch_when_there))
        .with_state(state.clone())
}
