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
use super::transfer::{Ended, Fields, Part, Shape};
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
    /// What stands before the unique part of the id of the response.
    pub prefix: &'static str,
    pub model: Option<String>,
    pub salt: Option<String>,
    /// Longest answer, 16 tokens when absent.
    pub max_tokens: Option<u64>,
    /// Shortest answer, which only has to fit into the longest.
    pub min_tokens: Option<u64>,
    /// Answers per prompt.
    pub choices: u32,
    /// Whether the prompts came as a list.
    pub listed: bool,
    /// Compute the prompt only.
    pub prompt_only: bool,
    pub transfer: Fields,
}

impl Default for Demand {
    fn default() -> Self {
        Self {
            prefix: "",
            model: None,
            salt: None,
            max_tokens: None,
            min_tokens: None,
            choices: 1,
            listed: false,
            prompt_only: false,
            transfer: Fields::default(),
        }
    }
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
    finishes: Vec<Finish>,
    part: Part,
    transfer_params: String,
    events: mpsc::UnboundedReceiver<Event>,
    state: Arc<EngineState>,
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.state.in_flight.fetch_sub(1, Relaxed);
        // Sequences that wait for KV have no step to notice it in.
        self.events.close();
        self.state.scheduler.wake();
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

/// An identity that no other start of an engine has.
pub(super) fn uuid(state: &EngineState) -> String {
    let (a, b) = (unique(state), unique(state));
    format!("{}-{}-4{}-a{}-{}", &a[..8], &a[8..12], &a[13..], &b[1..4], &b[4..])
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

/// What is checked of every request before it is queued: served name, adapter and longest answer.
fn check(
    state: &EngineState,
    demand: &Demand,
    prompts: &[Prompt],
) -> Result<(String, Arc<str>, u64), ApiError> {
    let (model, adapter) = resolve(state, demand.model.as_deref())?;
    let max_tokens = if demand.prompt_only { 0 } else { demand.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) };
    if max_tokens == 0 && !demand.prompt_only {
        return Err(ApiError::invalid("max_tokens", "max_tokens must be at least 1, got 0."));
    }
    // Without a limit of its own a request has room for any shortest answer.
    if let (Some(least), Some(most)) = (demand.min_tokens, demand.max_tokens)
        && least > most
    {
        return Err(ApiError::BadRequest {
            message: format!("min_tokens must be less than or equal to max_tokens={most}, got {least}."),
            parameter: None,
        });
    }
    if demand.choices == 0 || demand.choices > 1024 {
        return Err(ApiError::invalid("n", format!("n must be between 1 and 1024, got {}.", demand.choices)));
    }
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt", "At least one prompt is needed."));
    }
    prompts.iter().try_for_each(|prompt| check_length(state, prompt.tokens.len(), max_tokens))?;
    Ok((model, adapter, max_tokens))
}

/// Queues a request.
pub(super) fn start(
    state: &Arc<EngineState>,
    headers: &HeaderMap,
    demand: &Demand,
    prompts: Vec<Prompt>,
) -> Result<Generation, ApiError> {
    let id = headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .map_or_else(|| unique(state), str::to_owned);
    let response_id = format!("{}{id}", demand.prefix);
    let shape = Shape { id: &response_id, prompts: &prompts, listed: demand.listed };
    let part = Part::plan(state, &demand.transfer, &shape);
    let (checked, mut part) = match (check(state, demand, &prompts), part) {
        (Ok(checked), part) => (checked, part?),
        (Err(error), part) => {
            part.unwrap_or_default().reject(state);
            return Err(error);
        }
    };
    let works = works(state, demand, &prompts, &checked, &mut part);
    let sequences = works.len() as u32;
    let Ok(events) = state.scheduler.submit(works) else {
        part.reject(state);
        return Err(ApiError::QueueFull);
    };
    state.in_flight.fetch_add(1, Relaxed);
    let prompt = prompts.iter().map(|prompt| prompt.tokens.len() as u32).sum();
    Ok(Generation {
        id,
        created: unix_seconds() as u64,
        model: checked.0,
        usage: Usage { prompt, ..Usage::default() },
        prompts: prompts.into_iter().map(|prompt| prompt.tokens).collect(),
        sequences,
        choices: demand.choices,
        open: sequences,
        seen: vec![false; sequences as usize],
        finishes: vec![Finish::Error; sequences as usize],
        part,
        transfer_params: "null".to_owned(),
        events,
        state: state.clone(),
    })
}

/// One sequence for every choice of every prompt.
fn works(
    state: &EngineState,
    demand: &Demand,
    prompts: &[Prompt],
    (_, adapter, max_tokens): &(String, Arc<str>, u64),
    part: &mut Part,
) -> Vec<Work> {
    let salt: Arc<str> = demand.salt.as_deref().unwrap_or_default().into();
    let prefill_only = part.ends_with_prefill();
    let mut works = Vec::with_capacity(prompts.len() * demand.choices as usize);
    for prompt in prompts {
        let seed = prompt_seed(state.config.seed, &prompt.tokens);
        for choice in 0..demand.choices {
            let mut work = Work {
                tokens: prompt.tokens.clone(),
                adapter: adapter.clone(),
                salt: salt.clone(),
                max_tokens: if prefill_only { 1 } else { *max_tokens as u32 },
                stop_after: prompt.stop_after.filter(|_| !prefill_only),
                seed: seed ^ u64::from(choice),
                choices: demand.choices,
                arrival: None,
                kept: None,
            };
            part.attach(state, &mut work);
            works.push(work);
        }
    }
    works
}

fn prompt_seed(seed: u64, tokens: &[u32]) -> u64 {
    // The last tokens tell prompts apart well enough for words, whatever the length of the prompt.
    let tail = &tokens[tokens.len().saturating_sub(256)..];
    let bytes: Vec<u8> = tail.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, seed)
}

impl Generation {
    /// The next event, or nothing once every sequence has ended. `usage` then includes it.
    pub async fn next(&mut self) -> Result<Option<Event>, ApiError> {
        if self.open == 0 {
            return Ok(None);
        }
        self.part.load(&self.state).await?;
        let Some(event) = self.events.recv().await else { return Ok(None) };
        self.usage.completion += u32::from(event.token.is_some());
        let seen = &mut self.seen[event.choice as usize];
        if !std::mem::replace(seen, true) && event.choice % self.choices == 0 {
            self.usage.cached += event.cached;
        }
        if let Some(finish) = event.finish {
            if finish == Finish::Error {
                return Err(ApiError::Dead);
            }
            self.finishes[event.choice as usize] = finish;
            self.open -= 1;
            if self.open == 0 {
                self.finish().await?;
            }
        }
        Ok(Some(event))
    }

    async fn finish(&mut self) -> Result<(), ApiError> {
        let ended = Ended {
            prompts: &self.prompts,
            choices: self.choices,
            finishes: &self.finishes,
            cached: self.usage.cached,
        };
        self.transfer_params = self.part.finish(&self.state, &ended).await?;
        Ok(())
    }

    /// The member `kv_transfer_params` of a whole answer, as JSON.
    pub fn transfer_params(&self) -> &str {
        &self.transfer_params
    }

    /// Waits for the whole answer.
    pub async fn collect(&mut self) -> Result<Vec<Choice>, ApiError> {
        let mut choices: Vec<Choice> = (0..self.sequences).map(|_| Choice::default()).collect();
        while let Some(event) = self.next().await? {
            let choice = &mut choices[event.choice as usize];
            if let Some(token) = event.token {
                choice.tokens.push(token);
                choice.text.push_str(&decode(token));
            }
            choice.stopped |= event.finish == Some(Finish::Stop);
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
