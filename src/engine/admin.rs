//! Everything that is not inference: models, health, metrics, tokenize, sleep, faults and the record of requests.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;

use super::EngineState;
use super::chat::ending;
use super::error::{ApiError, json_response};
use super::fault::Fault;
use super::generation::{parse, quoted, resolve, unique};
use super::page::CONTENT_TYPE as PAGE_TYPE;
use super::tokenizer::{Message, decode, render_chat};
use crate::prompt::tokenizer::Around;
use crate::request::Api;

type Parameters = Query<Vec<(String, String)>>;

fn ok(text: String) -> Response {
    json_response(StatusCode::OK, text)
}

pub(super) async fn models(State(state): State<Arc<EngineState>>) -> Response {
    let created = state.started as u64;
    let base = quoted(&state.config.models[0]);
    let model = |name: &str, parent: &str, length: &str| {
        format!(
            r#"{{"id":{id},"object":"model","created":{created},"owned_by":"vllm","root":{root},"parent":{parent},"max_model_len":{length},"permission":[{{"id":"modelperm-{}","object":"model_permission","created":{created},"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*","group":null,"is_blocking":false}}]}}"#,
            unique(&state),
            id = quoted(name),
            root = quoted(&format!("/models/{name}")),
        )
    };
    let length = state.max_model_len.to_string();
    let bases = state.config.models.iter().map(|name| model(name, "null", &length));
    let adapters = state.config.loras.iter().map(|name| model(name, &base, "null"));
    let data: Vec<String> = bases.chain(adapters).collect();
    ok(format!(r#"{{"object":"list","data":[{}]}}"#, data.join(",")))
}

pub(super) async fn health(State(state): State<Arc<EngineState>>) -> StatusCode {
    if state.faults.borrow().has(Fault::Die) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

pub(super) async fn version() -> Response {
    ok(r#"{"version":"0.32.0"}"#.to_owned())
}

pub(super) async fn load(State(state): State<Arc<EngineState>>) -> Response {
    ok(format!(r#"{{"server_load":{}}}"#, state.in_flight()))
}

pub(super) async fn metrics(
    State(state): State<Arc<EngineState>>,
    Query(parameters): Parameters,
) -> Response {
    let names: Vec<String> =
        parameters.into_iter().filter_map(|(key, name)| (key == "name[]").then_some(name)).collect();
    let names = (!names.is_empty() && !state.config.whole_pages).then_some(&names[..]);
    ([(CONTENT_TYPE, PAGE_TYPE)], state.page.render(&state.metrics(), names)).into_response()
}

pub(super) async fn kv_event_sources(State(state): State<Arc<EngineState>>) -> Response {
    ok(state.publisher.as_ref().map_or_else(|| json!({}), |publisher| publisher.sources()).to_string())
}

pub(super) async fn is_sleeping(State(state): State<Arc<EngineState>>) -> Response {
    ok(format!(r#"{{"is_sleeping":{}}}"#, state.faults.borrow().sleep_level() > 0))
}

pub(super) async fn sleep(
    State(state): State<Arc<EngineState>>,
    Query(parameters): Parameters,
) -> StatusCode {
    let level = parameters.iter().find(|(key, _)| key == "level").map_or("1", |(_, level)| level);
    match level {
        "1" => state.set_fault(Fault::Sleep(1)),
        "2" => state.set_fault(Fault::Sleep(2)),
        _ => return StatusCode::BAD_REQUEST,
    }
    StatusCode::OK
}

pub(super) async fn wake_up(State(state): State<Arc<EngineState>>) -> StatusCode {
    state.clear_fault(Fault::Sleep(1));
    StatusCode::OK
}

pub(super) async fn reset_prefix_cache(State(state): State<Arc<EngineState>>) -> StatusCode {
    state.scheduler.clear_cache();
    StatusCode::OK
}

pub(super) async fn faults(State(state): State<Arc<EngineState>>) -> Response {
    let faults: Vec<String> = state.faults.borrow().iter().map(|fault| fault.to_string()).collect();
    ok(json!({"faults": faults}).to_string())
}

#[derive(Deserialize)]
struct FaultRequest {
    fault: Option<String>,
    #[serde(default)]
    clear: bool,
}

/// `{"fault":"kind[:argument]"}` begins a fault, `"clear":true` ends it, without `fault` all of them.
pub(super) async fn set_fault(
    State(state): State<Arc<EngineState>>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: FaultRequest = parse(&body)?;
    let fault = request.fault.map(|text| text.parse::<Fault>()).transpose();
    let fault = fault.map_err(|error| ApiError::invalid("fault", error.to_string()))?;
    match (fault, request.clear) {
        (Some(fault), false) => state.set_fault(fault),
        (Some(fault), true) => state.clear_fault(fault),
        (None, true) => state.clear_faults(),
        (None, false) => {
            return Err(ApiError::invalid("fault", "Name a fault, or set clear to end all of them."));
        }
    }
    Ok(faults(State(state)).await)
}

pub(super) async fn requests(State(state): State<Arc<EngineState>>) -> Response {
    ok(state.records.json())
}

pub(super) async fn clear_requests(State(state): State<Arc<EngineState>>) -> StatusCode {
    state.records.clear();
    StatusCode::OK
}

#[derive(Deserialize)]
struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

pub(super) async fn tokenize(
    State(state): State<Arc<EngineState>>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: TokenizeRequest = parse(&body)?;
    resolve(&state, request.model.as_deref())?;
    let tokens = match (request.prompt, request.messages) {
        (Some(prompt), _) => {
            let bare = request.add_special_tokens == Some(false);
            state.vocabulary.text(&prompt, if bare { Around::NotAdded } else { Around::Added })?
        }
        (None, Some(messages)) => {
            let ending = ending(request.add_generation_prompt, request.continue_final_message);
            state.vocabulary.conversation(Api::Chat, &body, &render_chat(&messages, ending))?
        }
        (None, None) => return Err(ApiError::invalid("prompt", "Either prompt or messages is needed.")),
    };
    let strings = if request.return_token_strs.unwrap_or(false) {
        json!(tokens.iter().map(|token| decode(*token)).collect::<Vec<_>>())
    } else {
        serde_json::Value::Null
    };
    Ok(ok(format!(
        r#"{{"count":{},"max_model_len":{},"tokens":{},"token_strs":{strings}}}"#,
        tokens.len(),
        state.max_model_len,
        serde_json::Value::from(tokens.as_slice())
    )))
}
