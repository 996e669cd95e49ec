//! `/v1/responses`.

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
use super::generation::{Demand, Generation, Prompt, Usage, parse, quoted, start, unique};
use super::scheduler::{Event, Finish};
use super::sse::{ConnectionReset, Dialect, respond};
use super::tokenizer::{ChatEnding, Content, Message, decode, render_chat};
use super::transfer::Fields;
use crate::request::Api;

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Message>),
}

#[derive(Deserialize)]
struct Request {
    model: Option<String>,
    instructions: Option<String>,
    input: Input,
    max_output_tokens: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    stream: Option<bool>,
    cache_salt: Option<String>,
}

fn message(role: &str, text: String) -> Message {
    Message { role: Some(role.to_owned()), content: Some(Content::Text(text)) }
}

pub(super) async fn handle(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    let mut messages: Vec<Message> =
        request.instructions.iter().map(|instructions| message("system", instructions.clone())).collect();
    match request.input {
        Input::Text(text) => messages.push(message("user", text)),
        Input::Items(items) => messages.extend(items),
    }
    let demand = Demand {
        prefix: "resp_",
        model: request.model,
        salt: request.cache_salt,
        max_tokens: request.max_output_tokens,
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    let text = render_chat(&messages, ChatEnding::GenerationPrompt);
    let prompt = Prompt::conversation(&state, Api::Responses, &body, &text)?;
    drop(body);
    let mut generation = start(&state, &headers, &demand, vec![prompt])?;
    let envelope = Envelope {
        id: quoted(&format!("resp_{}", generation.id)),
        item: quoted(&format!("msg_{}", unique(&state))),
        created: generation.created,
        model: quoted(&generation.model),
        instructions: request.instructions.as_deref().map_or_else(|| "null".to_owned(), quoted),
        temperature: request.temperature.unwrap_or(1.0),
        top_p: request.top_p.unwrap_or(1.0),
        max_output_tokens: request
            .max_output_tokens
            .map_or_else(|| "null".to_owned(), |limit| limit.to_string()),
        whole_blocks: generation.newly_cached(),
    };
    if request.stream.unwrap_or(false) {
        let events = Events { envelope, sequence: 0, text: String::new(), stopped: false };
        return Ok(respond(generation, events, reset));
    }
    let choices = generation.collect().await?;
    let choice = choices.first().ok_or(ApiError::Dead)?;
    Ok(json_response(StatusCode::OK, envelope.finished(&choice.text, choice.stopped, &generation)))
}

/// The fields that frame every response object. Strings are JSON already.
struct Envelope {
    id: String,
    item: String,
    created: u64,
    model: String,
    instructions: String,
    temperature: f64,
    top_p: f64,
    max_output_tokens: String,
    whole_blocks: u32,
}

impl Envelope {
    fn object(&self, incomplete: &str, output: &str, status: &str, usage: &str, transfer: &str) -> String {
        let Self { id, created, model, instructions, temperature, top_p, max_output_tokens, .. } = self;
        format!(
            r#"{{"id":{id},"created_at":{created},"incomplete_details":{incomplete},"instructions":{instructions},"metadata":null,"model":{model},"object":"response","output":[{output}],"parallel_tool_calls":true,"temperature":{temperature:?},"tool_choice":"none","tools":[],"top_p":{top_p:?},"background":false,"max_output_tokens":{max_output_tokens},"max_tool_calls":null,"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto","status":"{status}","text":null,"top_logprobs":null,"truncation":"disabled","usage":{usage},"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,"kv_transfer_params":{transfer},"ec_transfer_params":null,"input_messages":null,"output_messages":null}}"#
        )
    }

    fn in_progress(&self) -> String {
        self.object("null", "", "in_progress", "null", "null")
    }

    fn output(&self, text: &str) -> String {
        format!(
            r#"{{"id":{},"content":[{{"annotations":[],"text":{text},"type":"output_text","logprobs":null}}],"role":"assistant","status":"completed","type":"message","phase":null}}"#,
            self.item
        )
    }

    fn finished(&self, text: &str, stopped: bool, generation: &Generation) -> String {
        self.done(&quoted(text), stopped, &generation.usage, generation.transfer_params())
    }

    fn done(&self, text: &str, stopped: bool, usage: &Usage, transfer: &str) -> String {
        let Usage { prompt, completion, cached } = *usage;
        let (total, written) = (usage.total(), self.whole_blocks.saturating_sub(cached));
        let usage = format!(
            r#"{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":{written},"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}},"output_tokens":{completion},"output_tokens_details":{{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}},"total_tokens":{total}}}"#
        );
        let (incomplete, status) =
            if stopped { ("null", "completed") } else { (r#"{"reason":"max_output_tokens"}"#, "incomplete") };
        self.object(incomplete, &self.output(text), status, &usage, transfer)
    }
}

struct Events {
    envelope: Envelope,
    sequence: u32,
    text: String,
    stopped: bool,
}

impl Events {
    /// Writes one event: its fields before and after `sequence_number`, in vLLM's (alphabetical) order.
    fn write(&mut self, kind: &str, before: &str, after: &str, out: &mut String) {
        let sequence = self.sequence;
        self.sequence += 1;
        let _ = write!(
            out,
            "event: {kind}\ndata: {{{before},\"sequence_number\":{sequence}{after},\"type\":\"{kind}\"}}\n\n"
        );
    }
}

impl Dialect for Events {
    fn open(&mut self, _usage: &Usage, out: &mut String) {
        let response = format!(r#""response":{}"#, self.envelope.in_progress());
        self.write("response.created", &response, "", out);
        self.write("response.in_progress", &response, "", out);
    }

    fn token(&mut self, event: &Event, _usage: &Usage, out: &mut String) {
        let item = self.envelope.item.clone();
        if self.text.is_empty() {
            let added = format!(
                r#""item":{{"id":{item},"content":[],"role":"assistant","status":"in_progress","type":"message","phase":null}},"output_index":0"#
            );
            self.write("response.output_item.added", &added, "", out);
            let part = format!(
                r#""content_index":0,"item_id":{item},"output_index":0,"part":{{"annotations":[],"text":"","type":"output_text","logprobs":[]}}"#
            );
            self.write("response.content_part.added", &part, "", out);
        }
        let word = decode(event.token.unwrap_or_default());
        let delta = format!(
            r#""content_index":0,"delta":{},"item_id":{item},"logprobs":[],"output_index":0"#,
            quoted(&word)
        );
        self.write("response.output_text.delta", &delta, "", out);
        self.text.push_str(&word);
        self.stopped |= event.finish == Some(Finish::Stop);
    }

    fn close(&mut self, usage: &Usage, out: &mut String) {
        let item = self.envelope.item.clone();
        let text = quoted(&self.text);
        let done = format!(r#""content_index":0,"item_id":{item},"logprobs":[],"output_index":0"#);
        self.write("response.output_text.done", &done, &format!(r#","text":{text}"#), out);
        let part = format!(
            r#""content_index":0,"item_id":{item},"output_index":0,"part":{{"annotations":[],"text":{text},"type":"output_text","logprobs":null}}"#
        );
        self.write("response.content_part.done", &part, "", out);
        let output = format!(r#""item":{},"output_index":0"#, self.envelope.output(&text));
        self.write("response.output_item.done", &output, "", out);
        let response = format!(r#""response":{}"#, self.envelope.done(&text, self.stopped, usage, "null"));
        self.write("response.completed", &response, "", out);
    }
}
