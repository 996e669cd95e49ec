//! From a parsed request to the tokens of its answer, the same for every API.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::HeaderMap;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::EngineState;
use super::error::ApiError;
use super::scheduler::{Event, Finish, Work};
use super::tokenizer::decode;
use crate::prompt::tokenizer::Around;
use crate::request::Api;

/// Tokens of an answer when the request sets no limit.
const DEFAULT_MAX_TOKENS: u64 = 16;

/// One prompt in tokens.
pub(super) struct Prompt {
    pub tokens: Arc<[u32]>,
    stop_after: Option<u32>,
}

impl Prompt {
    /// The prompt of a completion.
    pub fn text(state: &EngineState, text: &str) -> Result<Self, ApiError> {
        Ok(Self::new(text, state.vocabulary.text(text, Around::Added)?))
    }

    /// The prompt of a conversation: its body, and the text that stands for it without a chat template.
    pub fn conversation(state: &EngineState, api: Api, body: &[u8], text: &str) -> Result<Self, ApiError> {
        Ok(Self::new(text, state.vocabulary.conversation(api, body, text)?))
    }

    /// `STOP_AFTER=n` anywhere in the text makes the answer end by itself after n tokens.
    fn new(text: &str, tokens: Vec<u32>) -> Self {
        const MARK: &str = "STOP_AFTER=";
        let stop_after = text.find(MARK).and_then(|at| {
            let digits = &text[at + MARK.len()..];
            let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
            digits[..end].parse().ok().filter(|stop| *stop > 0)
        });
        Self { tokens: tokens.into(), stop_after }
    }

    pub fn tokens(tokens: Vec<u32>) -> Self {
        Self { tokens: tokens.into(), stop_after: None }
    }
}

/// What every API says about an answer.
pub(super) struct Demand {
    pub model: Option<String>,
    pub salt: Option<String>,
    /// Longest answer, 16 tokens when absent.
    pub max_tokens: Option<u64>,
    /// Answers per prompt.
    pub choices: u32,
    /// Compute the prompt only.
    pub prompt_only: bool,
}

/// Token counts so far.
#[derive(Clone, Copy, Default)]
pub(super) struct Usage {
    pub prompt: u32,
    pub completion: u32,
    pub cached: u32,
}

impl Usage {
    pub fn total(&self) -> u32 {
        self.prompt + self.completion
    }
}

/// A request under way. Dropping it cancels it.
pub(super) struct Generation {
    /// Unique part of the response id: the request id of the client when it sent one.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    pub model: String,
    pub usage: Usage,
    pub prompts: Vec<Arc<[u32]>>,
    pub sequences: u32,
    choices: u32,
    open: u32,
    seen: Vec<bool>,
    events: mpsc::UnboundedReceiver<Event>,
    state: Arc<EngineState>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.state.in_flight.fetch_sub(1, Relaxed);
    }
}

/// One finished answer.
#[derive(Default)]
pub(super) struct Choice {
    pub tokens: Vec<u32>,
    pub text: String,
    pub stopped: bool,
}

impl Choice {
    /// OpenAI's word for the end.
    pub fn finish_reason(&self) -> &'static str {
        if self.stopped { "stop" } else { "length" }
    }
}

/// Reads the body of a request.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|error| ApiError::from_json(&error, body))
}

/// Sixteen hexadecimal digits that no other request of this engine has.
pub(super) fn unique(state: &EngineState) -> String {
    let number = state.ids.fetch_add(1, Relaxed);
    format!("{:016x}", xxh3_64_with_seed(&number.to_le_bytes(), state.id_seed))
}

pub(super) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// The served name and the adapter ("" for a base model) of a requested model.
pub(super) fn resolve(state: &EngineState, model: Option<&str>) -> Result<(String, Arc<str>), ApiError> {
    let config = &state.config;
    let Some(model) = model else { return Ok((config.models[0].clone(), "".into())) };
    if config.models.iter().any(|name| name == model) {
        Ok((model.to_owned(), "".into()))
    } else if config.loras.iter().any(|name| name == model) {
        Ok((model.to_owned(), model.into()))
    } else {
        Err(ApiError::UnknownModel { model: model.to_owned(), served: config.models.join(", ") })
    }
}

fn check_length(state: &EngineState, prompt: usize, max_tokens: u64) -> Result<(), ApiError> {
    let limit = u64::from(state.max_model_len);
    if max_tokens > limit {
        return Err(ApiError::invalid(
            "max_tokens",
            format!(
                "max_tokens={max_tokens} cannot be greater than max_model_len={limit}. Please request fewer output tokens. \
                 (parameter=max_tokens, value={max_tokens})"
            ),
        ));
    }
    if prompt as u64 + max_tokens > limit {
        return Err(ApiError::invalid(
            "input_tokens",
            format!(
                "The context of this model is {limit} tokens, but {prompt} input tokens and {max_tokens} output tokens were \
                 requested. (parameter=input_tokens, value={prompt})"
            ),
        ));
    }
    if prompt == 0 {
        return Err(ApiError::invalid("prompt", "The prompt is empty: it must have at least one token."));
    }
    Ok(())
}

/// Queues a request.
pub(super) fn start(
    state: &Arc<EngineState>,
    headers: &HeaderMap,
    demand: &Demand,
    prompts: Vec<Prompt>,
) -> Result<Generation, ApiError> {
    let (model, adapter) = resolve(state, demand.model.as_deref())?;
    let max_tokens = if demand.prompt_only { 0 } else { demand.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) };
    if max_tokens == 0 && !demand.prompt_only {
        return Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1, got 0."));
    }
    if demand.choices == 0 || demand.choices > 1024 {
        return Err(ApiError::invalid("n", format!("n must be between 1 and 1024, got {}.", demand.choices)));
    }
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "At least one prompt is needed."));
    }
    let salt: Arc<str> = demand.salt.as_deref().unwrap_or_default().into();
    let mut works = Vec::with_capacity(prompts.len() * demand.choices as usize);
    let mut usage = Usage::default();
    for prompt in &prompts {
        check_length(state, prompt.tokens.len(), max_tokens)?;
        usage.prompt += prompt.tokens.len() as u32;
        let seed = prompt_seed(state.config.seed, &prompt.tokens);
        works.extend((0..demand.choices).map(|choice| Work {
            tokens: prompt.tokens.clone(),
            adapter: adapter.clone(),
            salt: salt.clone(),
            max_tokens: max_tokens as u32,
            stop_after: prompt.stop_after,
            seed: seed ^ u64::from(choice),
            choices: demand.choices,
        }));
    }
    let sequences = works.len() as u32;
    let events = state.scheduler.submit(works).map_err(|_| ApiError::QueueFull)?;
    state.in_flight.fetch_add(1, Relaxed);
    let id = headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .map_or_else(|| unique(state), str::to_owned);
    Ok(Generation {
        id,
        created: unix_seconds() as u64,
        model,
        usage,
        prompts: prompts.into_iter().map(|prompt| prompt.tokens).collect(),
        sequences,
        choices: demand.choices,
        open: sequences,
        seen: vec![false; sequences as usize],
        events,
        state: state.clone(),
    })
}

fn prompt_seed(seed: u64, tokens: &[u32]) -> u64 {
    // The last tokens tell prompts apart well enough for words, whatever the length of the prompt.
    let tail = &tokens[tokens.len().saturating_sub(256)..];
    let bytes: Vec<u8> = tail.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, seed)
}

impl Generation {
    /// The next event, or nothing once every sequence has ended. `usage` then includes it.
    pub async fn next(&mut self) -> Option<Event> {
        if self.open == 0 {
            return None;
        }
        let event = self.events.recv().await?;
        self.usage.completion += u32::from(event.token.is_some());
        let seen = &mut self.seen[event.choice as usize];
        if !std::mem::replace(seen, true) && event.choice % self.choices == 0 {
            self.usage.cached += event.cached;
        }
        self.open -= u32::from(event.finish.is_some());
        Some(event)
    }

    /// Waits for the whole answer.
    pub async fn collect(&mut self) -> Result<Vec<Choice>, ApiError> {
        let mut choices: Vec<Choice> = (0..self.sequences).map(|_| Choice::default()).collect();
        while let Some(event) = self.next().await {
            let choice = &mut choices[event.choice as usize];
            if let Some(token) = event.token {
                choice.tokens.push(token);
                choice.text.push_str(&decode(token));
            }
            match event.finish {
                Some(Finish::Error) => return Err(ApiError::Dead),
                Some(finish) => choice.stopped = finish == Finish::Stop,
                None => {}
            }
        }
        if self.open > 0 {
            return Err(ApiError::Dead);
        }
        Ok(choices)
    }

    /// Whole blocks of the prompts that were not cached before, in tokens.
    pub fn newly_cached(&self) -> u32 {
        let block = self.state.config.block_size;
        let whole: u32 = self.prompts.iter().map(|prompt| prompt.len() as u32 / block * block).sum();
        whole.saturating_sub(self.usage.cached)
    }

    pub fn state(&self) -> &Arc<EngineState> {
        &self.state
    }
}

/// A text as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
