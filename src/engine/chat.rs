//! `/v1/chat/completions`.

use std::fmt::Write;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;

use super::EngineState;
use super::completions::{StreamOptions, ids, rendering};
use super::error::{ApiError, json_response};
use super::generation::{Choice, Demand, Generation, Prompt, Usage, parse, quoted, resolve, start, unique};
use super::scheduler::Event;
use super::sse::{ConnectionReset, Dialect, finish_reason, respond};
use super::tokenizer::{ChatEnding, Message, decode, render_chat};
use super::transfer::Fields;
use crate::request::Api;

#[derive(Deserialize)]
struct Request {
    model: Option<String>,
    messages: Vec<Message>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    min_tokens: Option<u64>,
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    return_token_ids: Option<bool>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

impl Request {
    fn prompt(&self, state: &EngineState, body: &[u8]) -> Result<Prompt, ApiError> {
        let ending = ending(self.add_generation_prompt, self.continue_final_message);
        Prompt::conversation(state, Api::Chat, body, &render_chat(&self.messages, ending))
    }
}

/// `/v1/chat/completions/render`.
pub(super) async fn render(State(state): State<Arc<EngineState>>, body: Bytes) -> Result<Response, ApiError> {
    state.check_scale_out()?;
    let request: Request = parse(&body)?;
    let (model, _) = resolve(&state, request.model.as_deref())?;
    let prompt = request.prompt(&state, &body)?;
    let id = format!("chatcmpl-{}", unique(&state));
    let text = rendering(&id, &prompt.tokens, &model, request.cache_salt.as_deref());
    Ok(json_response(StatusCode::OK, text))
}

/// How a chat ends, from vLLM's two request fields.
pub(super) fn ending(
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
) -> ChatEnding {
    match (continue_final_message, add_generation_prompt) {
        (Some(true), _) => ChatEnding::OpenLastMessage,
        (_, Some(false)) => ChatEnding::Closed,
        _ => ChatEnding::GenerationPrompt,
    }
}

pub(super) async fn handle(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    StreamOptions::check(request.stream_options, request.stream)?;
    let prompt = request.prompt(&state, &body)?;
    let demand = Demand {
        prefix: "chatcmpl-",
        model: request.model,
        salt: request.cache_salt,
        max_tokens: request.max_completion_tokens.or(request.max_tokens),
        min_tokens: request.min_tokens,
        choices: request.n.unwrap_or(1),
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    drop(body);
    let mut generation = start(&state, &headers, &demand, vec![prompt])?;
    let with_ids = request.return_token_ids.unwrap_or(false);
    if request.stream.unwrap_or(false) {
        let options = request.stream_options.unwrap_or_default();
        let chunks = Chunks::new(&generation, &state.fingerprint, options, with_ids);
        return Ok(respond(generation, chunks, reset));
    }
    let choices = generation.collect().await?;
    Ok(json_response(StatusCode::OK, whole(&generation, &choices, &state.fingerprint, with_ids)))
}

fn whole(generation: &Generation, choices: &[Choice], fingerprint: &str, with_ids: bool) -> String {
    let mut out = format!(
        r#"{{"id":{},"object":"chat.completion","created":{},"model":{},"choices":["#,
        quoted(&format!("chatcmpl-{}", generation.id)),
        generation.created,
        quoted(&generation.model)
    );
    for (index, choice) in choices.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(
            out,
            r#"{comma}{{"index":{index},"message":{{"role":"assistant","content":{},"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null}},"logprobs":null,"finish_reason":"{}","stop_reason":null,"token_ids":{},"routed_experts":null}}"#,
            quoted(&choice.text),
            choice.finish_reason(),
            ids(&choice.tokens, with_ids)
        );
    }
    let Usage { prompt, completion, cached } = generation.usage;
    let (total, created) = (generation.usage.total(), generation.newly_cached());
    let transfer = generation.transfer_params();
    let prompt_ids = ids(&generation.prompts[0], with_ids);
    let _ = write!(
        out,
        r#"],"service_tier":null,"system_fingerprint":"{fingerprint}","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":{created},"multimodal_tokens":null}},"completion_tokens_details":null}},"prompt_logprobs":null,"prompt_token_ids":{prompt_ids},"prompt_text":null,"kv_transfer_params":{transfer},"ec_transfer_params":null,"metrics":null}}"#
    );
    out
}

struct Chunks {
    /// Everything before `choices`.
    head: String,
    fingerprint: String,
    options: StreamOptions,
    with_ids: bool,
    sequences: u32,
    open: u32,
    started: bool,
    whole_blocks: u32,
}

impl Chunks {
    fn new(generation: &Generation, fingerprint: &str, options: StreamOptions, with_ids: bool) -> Self {
        let head = format!(
            r#"data: {{"id":{},"object":"chat.completion.chunk","created":{},"model":{},"choices":["#,
            quoted(&format!("chatcmpl-{}", generation.id)),
            generation.created,
            quoted(&generation.model)
        );
        Self {
            head,
            fingerprint: fingerprint.to_owned(),
            options,
            with_ids,
            sequences: generation.sequences,
            open: generation.sequences,
            started: false,
            whole_blocks: generation.newly_cached(),
        }
    }

    fn running_usage(&self, prompt: u32, completion: u32, out: &mut String) {
        if self.options.include_usage && self.options.continuous_usage_stats {
            let total = prompt + completion;
            let _ = write!(
                out,
                r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"completion_tokens_details":null}}"#
            );
        }
    }
}

impl Dialect for Chunks {
    fn token(&mut self, event: &Event, usage: &Usage, out: &mut String) {
        if !self.started {
            self.started = true;
            for choice in 0..self.sequences {
                let _ = write!(
                    out,
                    r#"{}{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]"#,
                    self.head
                );
                self.running_usage(usage.prompt, 0, out);
                out.push_str(r#","prompt_token_ids":null,"prompt_text":null}"#);
                out.push_str("\n\n");
            }
        }
        let token = event.token.unwrap_or_default();
        let _ = write!(
            out,
            r#"{}{{"index":{},"delta":{{"content":{}}},"logprobs":null,"finish_reason":{},{}"token_ids":{}}}]"#,
            self.head,
            event.choice,
            quoted(&decode(token)),
            finish_reason(event),
            if event.finish.is_some() { r#""stop_reason":null,"# } else { "" },
            ids(&[token], self.with_ids)
        );
        self.running_usage(usage.prompt, usage.completion, out);
        self.open -= u32::from(event.finish.is_some());
        if self.open == 0 && !self.options.include_usage {
            let _ = write!(out, r#","system_fingerprint":"{}""#, self.fingerprint);
        }
        out.push_str("}\n\n");
    }

    fn close(&mut self, usage: &Usage, out: &mut String) {
        if self.options.include_usage {
            let Usage { prompt, completion, cached } = *usage;
            let (total, created) = (usage.total(), self.whole_blocks.saturating_sub(cached));
            let _ = write!(
                out,
                r#"{}],"usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":{created}}}}},"system_fingerprint":"{}"}}"#,
                self.head, self.fingerprint
            );
            out.push_str("\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }
}
