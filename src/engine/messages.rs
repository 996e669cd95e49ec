//! `/v1/messages` and `/v1/messages/count_tokens`, Anthropic's API as vLLM serves it.

use std::fmt::Write;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;

use super::EngineState;
use super::error::{ApiError, json_response};
use super::generation::{Demand, Generation, Prompt, Usage, parse, quoted, resolve, start};
use super::scheduler::{Event, Finish};
use super::sse::{ConnectionReset, Dialect, respond};
use super::tokenizer::{ChatEnding, Content, Message, decode, render_chat};
use super::transfer::Fields;
use crate::request::Api;

#[derive(Deserialize)]
struct Request {
    model: Option<String>,
    system: Option<Content>,
    messages: Vec<Message>,
    max_tokens: Option<u64>,
    stream: Option<bool>,
    cache_salt: Option<String>,
}

/// The chat with its system text in front.
fn text(system: Option<Content>, mut messages: Vec<Message>) -> String {
    if let Some(content) = system {
        messages.insert(0, Message { role: Some("system".to_owned()), content: Some(content) });
    }
    render_chat(&messages, ChatEnding::GenerationPrompt)
}

pub(super) async fn handle(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    let text = text(request.system, request.messages);
    let prompt = Prompt::conversation(&state, Api::Messages, &body, &text)?;
    let demand = Demand {
        prefix: "chatcmpl-",
        model: request.model,
        salt: request.cache_salt,
        max_tokens: request.max_tokens,
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    drop(body);
    let mut generation = start(&state, &headers, &demand, vec![prompt])?;
    if request.stream.unwrap_or(false) {
        let id = quoted(&format!("chatcmpl-{}", generation.id));
        let events = Events { id, model: quoted(&generation.model), started: false, stopped: false };
        return Ok(respond(generation, events, reset));
    }
    let choices = generation.collect().await?;
    let choice = choices.first().ok_or(ApiError::Dead)?;
    Ok(json_response(StatusCode::OK, whole(&generation, &choice.text, choice.stopped)))
}

pub(super) async fn count_tokens(
    State(state): State<Arc<EngineState>>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    resolve(&state, request.model.as_deref())?;
    let text = text(request.system, request.messages);
    let count = Prompt::conversation(&state, Api::Messages, &body, &text)?.tokens.len();
    let text =
        format!(r#"{{"input_tokens":{count},"context_management":{{"original_input_tokens":{count}}}}}"#);
    Ok(json_response(StatusCode::OK, text))
}

fn stop_reason(stopped: bool) -> &'static str {
    if stopped { "end_turn" } else { "max_tokens" }
}

/// Only the uncached part of the prompt counts as input here.
fn final_usage(usage: &Usage) -> String {
    let Usage { prompt, completion, cached } = *usage;
    let uncached = prompt - cached;
    format!(
        r#"{{"input_tokens":{uncached},"output_tokens":{completion},"cache_creation_input_tokens":0,"cache_read_input_tokens":{cached}}}"#
    )
}

fn whole(generation: &Generation, text: &str, stopped: bool) -> String {
    // Alone among the APIs it leaves the member out when there is nothing to say.
    let transfer = match generation.transfer_params() {
        "null" => String::new(),
        params => format!(r#","kv_transfer_params":{params}"#),
    };
    format!(
        r#"{{"id":{},"type":"message","role":"assistant","content":[{{"type":"text","text":{}}}],"model":{},"stop_reason":"{}","usage":{}{transfer}}}"#,
        quoted(&format!("chatcmpl-{}", generation.id)),
        quoted(text),
        quoted(&generation.model),
        stop_reason(stopped),
        final_usage(&generation.usage)
    )
}

struct Events {
    id: String,
    model: String,
    started: bool,
    stopped: bool,
}

impl Dialect for Events {
    fn token(&mut self, event: &Event, usage: &Usage, out: &mut String) {
        if !self.started {
            self.started = true;
            let (id, model, prompt) = (&self.id, &self.model, usage.prompt);
            let _ = write!(
                out,
                "event: message_start\ndata: {{\"type\":\"message_start\",\"message\":{{\"id\":{id},\"type\":\"message\",\"role\":\"assistant\",\"content\":[],\"model\":{model},\"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{prompt},\"output_tokens\":0}}}}}}\n\n"
            );
            out.push_str("event: content_block_start\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\",\"text\":\"\"},\"index\":0}\n\n");
        }
        let _ = write!(
            out,
            "event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"type\":\"text_delta\",\"text\":{}}},\"index\":0}}\n\n",
            quoted(&decode(event.token.unwrap_or_default()))
        );
        self.stopped |= event.finish == Some(Finish::Stop);
    }

    fn close(&mut self, usage: &Usage, out: &mut String) {
        out.push_str("event: content_block_stop\ndata: {\"type\":\"content_block_stop\",\"index\":0}\n\n");
        let _ = write!(
            out,
            "event: message_delta\ndata: {{\"type\":\"message_delta\",\"delta\":{{\"stop_reason\":\"{}\",\"stop_sequence\":null}},\"usage\":{}}}\n\n",
            stop_reason(self.stopped),
            final_usage(usage)
        );
        out.push_str("event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n");
    }
}
