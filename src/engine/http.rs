//! Routes, and what happens to every request before its handler: recording, decoding and faults.

use std::io::Read;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use bytes::Bytes;

use super::error::{ApiError, json_response};
use super::fault::{Fault, Faults};
use super::record::{RecordedRequest, hex};
use super::sse::ConnectionReset;
use super::transfer::channel;
use super::{EngineState, admin, chat, completions, generate, messages, pooling, responses};

pub(super) use axum::http::Request as HttpRequest;

/// Largest request body, bytes, and largest decoded one.
const MAX_BODY: usize = 128 << 20;

/// Paths whose requests are not recorded, because probes would push out what tests look for.
const UNRECORDED: [&str; 9] = [
    "/metrics",
    "/health",
    "/ping",
    "/load",
    "/is_sleeping",
    "/fault",
    "/debug/requests",
    "/kv_event_sources",
    channel::PATH,
];

/// Paths that work whatever fault is in force.
const CONTROL: [&str; 5] = ["/fault", "/sleep", "/wake_up", "/debug/requests", "/reset_prefix_cache"];

pub(super) fn router(state: &Arc<EngineState>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions::handle))
        .route("/v1/chat/completions", post(chat::handle))
        .route("/v1/completions/render", post(completions::render))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/responses", post(responses::handle))
        .route("/v1/messages", post(messages::handle))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(pooling::embeddings))
        .route("/pooling", post(pooling::pooling))
        .route("/score", post(pooling::score))
        .route("/v1/score", post(pooling::score))
        .route("/rerank", post(pooling::rerank))
        .route("/v1/rerank", post(pooling::rerank))
        .route("/v2/rerank", post(pooling::rerank))
        .route("/inference/v1/generate", post(generate::handle))
        .route("/generate", post(generate::handle_sglang))
        .route(channel::PATH, put(channel::fetch))
        .route("/tokenize", post(admin::tokenize))
        .route("/v1/models", get(admin::models))
        .route("/health", get(admin::health))
        .route("/ping", get(admin::health).post(admin::health))
        .route("/version", get(admin::version))
        .route("/load", get(admin::load))
        .route("/metrics", get(admin::metrics))
        .route("/kv_event_sources", get(admin::kv_event_sources))
        .route("/is_sleeping", get(admin::is_sleeping))
        .route("/sleep", post(admin::sleep))
        .route("/wake_up", post(admin::wake_up))
        .route("/reset_prefix_cache", post(admin::reset_prefix_cache))
        .route("/fault", get(admin::faults).post(admin::set_fault))
        .route("/debug/requests", get(admin::requests).delete(admin::clear_requests))
        .fallback(|| async { json_response(StatusCode::NOT_FOUND, r#"{"detail":"Not Found"}"#.to_owned()) })
        .layer(from_fn_with_state(state.clone(), receive))
        .layer(DefaultBodyLimit::disable())
        .with_state(state.clone())
}

/// Reads and records the request, plays the faults, and marks the response with what was received.
async fn receive(State(state): State<Arc<EngineState>>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let Ok(raw) = axum::body::to_bytes(body, MAX_BODY).await else {
        return StatusCode::PAYLOAD_TOO_LARGE.into_response();
    };
    let record = RecordedRequest::new(parts.method.clone(), parts.uri.clone(), parts.headers.clone(), &raw);
    let marks = marks(&state, &record);
    let path = parts.uri.path();
    if !UNRECORDED.contains(&path) {
        state.records.push(record, state.config.recorded);
    }
    let failure = if CONTROL.contains(&path) {
        None
    } else {
        let reset = parts.extensions.get::<ConnectionReset>().cloned().unwrap_or_default();
        play_faults(&state, &parts.method, path, &reset).await
    };
    let decoded = failure.map_or_else(|| decode(&parts.headers, raw), Err);
    let mut response = match decoded {
        Ok(body) => {
            parts.headers.remove(CONTENT_ENCODING);
            parts.headers.remove(CONTENT_LENGTH);
            next.run(Request::from_parts(parts, Body::from(body))).await
        }
        Err(error) => error.into_response(),
    };
    response.headers_mut().extend(marks);
    response
}

fn marks(state: &EngineState, record: &RecordedRequest) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(5);
    let mut insert = |name: &'static str, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    };
    insert("x-engine-name", &state.name);
    insert("x-received-bytes", &record.length.to_string());
    insert("x-received-xxh3", &hex(record.digest));
    if let Some(id) = record.header("x-request-id") {
        insert("x-request-id", id);
    }
    headers
}

async fn play_faults(
    state: &EngineState,
    method: &Method,
    path: &str,
    reset: &ConnectionReset,
) -> Option<ApiError> {
    let mut faults = state.faults.subscribe();
    // Waiting ends with the fault; the sender lives in the state and cannot go away meanwhile.
    let _ = faults.wait_for(|faults| !faults.has(Fault::SilentShutdown)).await;
    if path == "/metrics" {
        let _ = faults.wait_for(|faults| !faults.has(Fault::StallMetrics)).await;
    }
    if method != Method::POST {
        return None;
    }
    let resets = faults.borrow().has(Fault::ResetRequest);
    if resets {
        reset.0.notify_one();
        return std::future::pending().await;
    }
    let _ = faults.wait_for(|faults| !faults.has(Fault::StallBefore)).await;
    let now: Faults = faults.borrow().clone();
    if now.has(Fault::Status503) {
        Some(ApiError::QueueFull)
    } else if now.has(Fault::Status500) || now.has(Fault::Die) {
        Some(ApiError::Dead)
    } else {
        None
    }
}

/// The body as the handlers parse it.
fn decode(headers: &HeaderMap, raw: Bytes) -> Result<Bytes, ApiError> {
    let encoding = headers.get(CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or("identity");
    let mut decoded = Vec::new();
    let limit = MAX_BODY as u64;
    let read = match encoding {
        "identity" => return Ok(raw),
        "gzip" => flate2::read::MultiGzDecoder::new(&raw[..]).take(limit).read_to_end(&mut decoded),
        "zstd" => {
            zstd::Decoder::new(&raw[..]).and_then(|decoder| decoder.take(limit).read_to_end(&mut decoded))
        }
        _ => Err(std::io::ErrorKind::Unsupported.into()),
    };
    match read {
        Ok(_) => Ok(decoded.into()),
        Err(error) => Err(ApiError::BadRequest {
            message: format!("The body is not valid {encoding}: {error}."),
            parameter: Some("content-encoding"),
        }),
    }
}
