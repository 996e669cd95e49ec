//! `/v1/completions`.

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
use super::generation::{Choice, Demand, Generation, Prompt, Usage, parse, quoted, resolve, start, unique};
use super::scheduler::Event;
use super::sse::{ConnectionReset, Dialect, finish_reason, respond};
use super::tokenizer::decode;
use super::transfer::Fields;

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl PromptField {
    /// Whether the prompts came as a list, be it of one.
    pub fn is_list(&self) -> bool {
        matches!(self, Self::Texts(_) | Self::TokenLists(_))
    }

    pub fn prompts(self, state: &EngineState) -> Result<Vec<Prompt>, ApiError> {
        Ok(match self {
            Self::Text(text) => vec![Prompt::text(state, &text)?],
            Self::Tokens(tokens) => vec![Prompt::tokens(tokens)],
            Self::Texts(texts) => {
                texts.iter().map(|text| Prompt::text(state, text)).collect::<Result<Vec<_>, _>>()?
            }
            Self::TokenLists(lists) => lists.into_iter().map(Prompt::tokens).collect(),
        })
    }
}

#[derive(Deserialize)]
struct GivenStreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// When a stream reports usage.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(from = "GivenStreamOptions")]
pub(super) struct StreamOptions {
    pub include_usage: bool,
    pub continuous_usage_stats: bool,
    empty: bool,
}

impl From<GivenStreamOptions> for StreamOptions {
    fn from(given: GivenStreamOptions) -> Self {
        Self {
            include_usage: given.include_usage.unwrap_or(false),
            continuous_usage_stats: given.continuous_usage_stats.unwrap_or(false),
            empty: given.include_usage.is_none() && given.continuous_usage_stats.is_none(),
        }
    }
}

impl StreamOptions {
    /// Refuses options without a stream, as vLLM does; an empty object counts as none.
    pub fn check(options: Option<Self>, stream: Option<bool>) -> Result<(), ApiError> {
        if options.is_some_and(|options| !options.empty) && stream != Some(true) {
            let message = "Stream options can only be defined when `stream=True`.";
            return Err(ApiError::invalid("stream_options", message));
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Request {
    model: Option<String>,
    prompt: PromptField,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    min_tokens: Option<u64>,
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    return_token_ids: Option<bool>,
}

pub(super) async fn handle(
    State(state): State<Arc<EngineState>>,
    Extension(reset): Extension<ConnectionReset>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: Request = parse(&body)?;
    StreamOptions::check(request.stream_options, request.stream)?;
    let demand = Demand {
        prefix: "cmpl-",
        model: request.model,
        salt: request.cache_salt,
        max_tokens: request.max_tokens.or(request.max_completion_tokens),
        min_tokens: request.min_tokens,
        choices: request.n.unwrap_or(1),
        listed: request.prompt.is_list(),
        transfer: Fields::read(&state, &body)?,
        ..Demand::default()
    };
    drop(body);
    let mut generation = start(&state, &headers, &demand, request.prompt.prompts(&state)?)?;
    let with_ids = request.return_token_ids.unwrap_or(false);
    if request.stream.unwrap_or(false) {
        let options = request.stream_options.unwrap_or_default();
        let chunks = Chunks::new(&generation, &state.fingerprint, options, with_ids);
        return Ok(respond(generation, chunks, reset));
    }
    let choices = generation.collect().await?;
    Ok(json_response(StatusCode::OK, whole(&generation, &choices, &state.fingerprint, with_ids)))
}

/// `/v1/completions/render`: one rendering a prompt.
pub(super) async fn render(State(state): State<Arc<EngineState>>, body: Bytes) -> Result<Response, ApiError> {
    state.check_scale_out()?;
    let request: Request = parse(&body)?;
    let (model, _) = resolve(&state, request.model.as_deref())?;
    let id = unique(&state);
    let prompts = request.prompt.prompts(&state)?;
    let salt = request.cache_salt.as_deref();
    let rendered: Vec<String> = prompts
        .iter()
        .enumerate()
        .map(|(at, prompt)| rendering(&format!("cmpl-{id}-{at}"), &prompt.tokens, &model, salt))
        .collect();
    Ok(json_response(StatusCode::OK, format!("[{}]", rendered.join(","))))
}

/// What `/render` says of one prompt; of the sampling parameters nothing.
pub(super) fn rendering(id: &str, tokens: &[u32], model: &str, salt: Option<&str>) -> String {
    format!(
        r#"{{"request_id":{},"token_ids":{},"token_offsets":null,"features":null,"content_parts":null,"sampling_params":{{}},"model":{},"output_mode":"tokens","stream":false,"stream_options":null,"cache_salt":{},"priority":0,"kv_transfer_params":null,"ec_transfer_params":null}}"#,
        quoted(id),
        ids(tokens, true),
        quoted(model),
        salt.map_or_else(|| "null".to_owned(), quoted)
    )
}

pub(super) fn ids(tokens: &[u32], shown: bool) -> String {
    if shown { serde_json::Value::from(tokens).to_string() } else { "null".to_owned() }
}

fn whole(generation: &Generation, choices: &[Choice], fingerprint: &str, with_ids: bool) -> String {
    let per_prompt = choices.len() / generation.prompts.len().max(1);
    let mut out = format!(
        r#"{{"id":{},"object":"text_completion","created":{},"model":{},"choices":["#,
        quoted(&format!("cmpl-{}", generation.id)),
        generation.created,
        quoted(&generation.model)
    );
    for (index, choice) in choices.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(
            out,
            r#"{comma}{{"index":{index},"text":{},"logprobs":null,"finish_reason":"{}","stop_reason":null,"token_ids":{},"prompt_logprobs":null,"prompt_token_ids":{},"routed_experts":null}}"#,
            quoted(&choice.text),
            choice.finish_reason(),
            ids(&choice.tokens, with_ids),
            ids(&generation.prompts[index / per_prompt.max(1)], with_ids)
        );
    }
    let Usage { prompt, completion, cached } = generation.usage;
    let (total, transfer) = (generation.usage.total(), generation.transfer_params());
    let _ = write!(
        out,
        r#"],"service_tier":null,"system_fingerprint":"{fingerprint}","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached},"created_cache_tokens":null,"multimodal_tokens":null}},"completion_tokens_details":null}},"kv_transfer_params":{transfer},"ec_transfer_params":null,"metrics":null}}"#
    );
    out
}

struct Chunks {
    /// Everything before `choices`.
    head: String,
    fingerprint: String,
    options: StreamOptions,
    with_ids: bool,
    open: u32,
}

impl Chunks {
    fn new(generation: &Generation, fingerprint: &str, options: StreamOptions, with_ids: bool) -> Self {
        let head = format!(
            r#"data: {{"id":{},"object":"text_completion","created":{},"model":{},"choices":["#,
            quoted(&format!("cmpl-{}", generation.id)),
            generation.created,
            quoted(&generation.model)
        );
        Self { head, fingerprint: fingerprint.to_owned(), options, with_ids, open: generation.sequences }
    }
}

impl Dialect for Chunks {
    fn token(&mut self, event: &Event, usage: &Usage, out: &mut String) {
        let token = event.token.unwrap_or_default();
        let _ = write!(
            out,
            r#"{}{{"index":{},"text":{},"logprobs":null,"finish_reason":{},"stop_reason":null,"prompt_token_ids":null,"token_ids":{}}}]"#,
            self.head,
            event.choice,
            quoted(&decode(token)),
            finish_reason(event),
            ids(&[token], self.with_ids)
        );
        if self.options.include_usage && self.options.continuous_usage_stats {
            let Usage { prompt, completion, .. } = *usage;
            let total = usage.total();
            let _ = write!(
                out,
                r#","usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion}}}"#
            );
        }
        self.open -= u32::from(event.finish.is_some());
        if self.open == 0 && !self.options.include_usage {
            let _ = write!(out, r#","system_fingerprint":"{}""#, self.fingerprint);
        }
        out.push_str("}\n\n");
    }

    fn close(&mut self, usage: &Usage, out: &mut String) {
        if self.options.include_usage {
            let Usage { prompt, completion, cached } = *usage;
            let total = usage.total();
            let _ = write!(
                out,
                r#"{}],"usage":{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{completion},"prompt_tokens_details":{{"cached_tokens":{cached}}}}},"system_fingerprint":"{}"}}"#,
                self.head, self.fingerprint
            );
            out.push_str("\n\n");
        }
        out.push_str("data: [DONE]\n\n");
    }
}
