//! Token-level APIs: vLLM's `/inference/v1/generate` and SGLang's `/generate`.

use std::fmt::Write;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::EngineState;
use super::completions::PromptField;
use super::error::{ApiError, json_response};
use super::generation::{Choice, Demand, Generation, Prompt, Usage, parse, quoted, start};
use super::scheduler::Event;
use super::sse::{ConnectionReset, Dialect, finish_reason, respond};
use super::tokenizer::decode;
use super::transfer::Fields;

#[derive(Default, Deserialize)]
struct SamplingParams {
    max_tokens: Option<u64>,
    max_new_tokens: Option<u64>,
    min_tokens: Option<u64>,
    n: Option<u32>,
}

#[derive(Deserialize)]
struct Request {
    model: Option<String>,
    token_ids: Vec<u32>,
    #[serde(default)]
    sampling_params: SamplingParams,
    stream: Option<bool>,
    cache_salt: Option<String>,
}

pub(super) async fn handle(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    let demand = Demand {
        prefix: "generate-tokens-",
        model: request.model,
        salt: request.cache_salt,
        max_tokens: request.sampling_params.max_tokens.or(request.sampling_params.max_new_tokens),
        min_tokens: request.sampling_params.min_tokens,
        choices: request.sampling_params.n.unwrap_or(1),
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    drop(body);
    let mut generation = start(&state, &headers, &demand, vec![Prompt::tokens(request.token_ids)])?;
    if request.stream.unwrap_or(false) {
        let chunks = Chunks {
            id: quoted(&format!("generate-tokens-{}", generation.id)),
            lengths: vec![0; generation.sequences as usize],
        };
        return Ok(respond(generation, chunks, reset));
    }
    let choices = generation.collect().await?;
    Ok(json_response(StatusCode::OK, whole(&generation, &choices)))
}

fn choice_json(index: usize, reason: &str, tokens: &str, end: Option<usize>) -> String {
    let versions = end.map_or_else(
        || "null".to_owned(),
        |end| format!(r#"[{{"version":"default","start":0,"end":{end}}}]"#),
    );
    format!(
        r#"{{"index":{index},"finish_reason":{reason},"stop_reason":null,"token_ids":{tokens},"routed_experts":null,"sampling_mask":null,"weight_versions":{versions},"logprobs":null}}"#
    )
}

fn whole(generation: &Generation, choices: &[Choice]) -> String {
    let Usage { prompt, completion, cached } = generation.usage;
    let (total, transfer) = (generation.usage.total(), generation.transfer_params());
    let texts: Vec<String> = choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            let reason = quoted(choice.finish_reason());
            choice_json(index, &reason, &json!(choice.tokens).to_string(), Some(choice.tokens.len()))
        })
        .collect();
    format!(
        r#"{{"request_id":{},"model":{},"created":{},"usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":null,"multimodal_tokens":null}},"completion_tokens_details":null}},"prompt_logprobs":null,"prompt_token_id_logprobs":null,"prompt_token_ids":null,"mm_placeholders":null,"metrics":null,"kv_transfer_params":{transfer},"ec_transfer_params":null,"output_mode":"tokens","choices":[{}]}}"#,
        quoted(&format!("generate-tokens-{}", generation.id)),
        quoted(&generation.model),
        generation.created,
        texts.join(",")
    )
}

struct Chunks {
    id: String,
    lengths: Vec<usize>,
}

impl Dialect for Chunks {
    fn token(&mut self, event: &Event, _usage: &Usage, out: &mut String) {
        let index = event.choice as usize;
        self.lengths[index] += 1;
        let end = event.finish.map(|_| self.lengths[index]);
        let tokens = format!("[{}]", event.token.unwrap_or_default());
        let choice = choice_json(index, finish_reason(event), &tokens, end);
        let _ = write!(
            out,
            "data: {{\"request_id\":{},\"usage\":null,\"output_mode\":\"tokens\",\"choices\":[{choice}]}}\n\n",
            self.id
        );
    }

    fn close(&mut self, _usage: &Usage, out: &mut String) {
        out.push_str("data: [DONE]\n\n");
    }
}

#[derive(Deserialize)]
struct SglangRequest {
    text: Option<String>,
    input_ids: Option<PromptField>,
    #[serde(default)]
    sampling_params: SamplingParams,
    stream: Option<bool>,
}

pub(super) async fn handle_sglang(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: SglangRequest = parse(&body)?;
    let listed = request.text.is_none() && request.input_ids.as_ref().is_some_and(PromptField::is_list);
    let prompts = match (&request.text, request.input_ids) {
        (Some(text), _) => vec![Prompt::text(&state, text)?],
        (None, Some(ids)) => ids.prompts(&state)?,
        (None, None) => return Err(ApiError::invalid("text", "Either text or input_ids is needed.")),
    };
    let demand = Demand {
        max_tokens: request.sampling_params.max_new_tokens.or(request.sampling_params.max_tokens),
        listed,
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    drop(body);
    let mut generation = start(&state, &headers, &demand, prompts)?;
    let started = Instant::now();
    if request.stream.unwrap_or(false) {
        let id = generation.id.clone();
        return Ok(respond(generation, SglangChunks { id, started, answer: Choice::default() }, reset));
    }
    let choices = generation.collect().await?;
    let choice = choices.first().ok_or(ApiError::Dead)?;
    let text =
        sglang_object(&generation.id, choice, Some(choice.finish_reason()), &generation.usage, started);
    Ok(json_response(StatusCode::OK, text))
}

fn sglang_object(id: &str, answer: &Choice, finish: Option<&str>, usage: &Usage, started: Instant) -> String {
    let finish = finish.map(|kind| json!({"type": kind, "length": answer.tokens.len()}));
    json!({
        "text": answer.text,
        "output_ids": answer.tokens,
        "meta_info": {
            "id": id,
            "finish_reason": finish,
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "cached_tokens": usage.cached,
            "e2e_latency": started.elapsed().as_secs_f64(),
        },
    })
    .to_string()
}

struct SglangChunks {
    id: String,
    started: Instant,
    answer: Choice,
}

impl Dialect for SglangChunks {
    fn token(&mut self, event: &Event, usage: &Usage, out: &mut String) {
        let token = event.token.unwrap_or_default();
        self.answer.tokens.push(token);
        self.answer.text.push_str(&decode(token));
        let reason = finish_reason(event).trim_matches('"');
        let finish = event.finish.map(|_| reason);
        let _ =
            write!(out, "data: {}\n\n", sglang_object(&self.id, &self.answer, finish, usage, self.started));
    }

    fn close(&mut self, _usage: &Usage, out: &mut String) {
        out.push_str("data: [DONE]\n\n");
    }
}
