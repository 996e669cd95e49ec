//! APIs that compute a prompt and generate nothing: embeddings, pooling, score and rerank, with invented numbers.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use super::EngineState;
use super::completions::PromptField;
use super::error::{ApiError, json_response};
use super::generation::{Demand, Generation, Prompt, parse, start};

/// Numbers in an embedding.
const DIMENSIONS: u64 = 8;

#[derive(Deserialize)]
struct EmbeddingRequest {
    model: Option<String>,
    input: PromptField,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Texts {
    One(String),
    Many(Vec<String>),
}

impl Texts {
    fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

#[derive(Deserialize)]
struct ScoreRequest {
    model: Option<String>,
    #[serde(alias = "queries", alias = "query")]
    text_1: Texts,
    #[serde(alias = "items", alias = "documents")]
    text_2: Texts,
}

async fn compute(
    state: &Arc<EngineState>,
    headers: &HeaderMap,
    model: Option<String>,
    prompts: Vec<Prompt>,
) -> Result<Generation, ApiError> {
    let demand = Demand { model, prompt_only: true, ..Demand::default() };
    let mut generation = start(state, headers, &demand, prompts)?;
    generation.collect().await?;
    Ok(generation)
}

fn usage(generation: &Generation) -> Value {
    let prompt = generation.usage.prompt;
    json!({"prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": null})
}

/// A number from 0 to 1 that depends on the tokens and `index`.
fn invented(tokens: &[u32], index: u64) -> f64 {
    let sum =
        tokens.iter().fold(index + 1, |sum, token| sum.wrapping_mul(31).wrapping_add(u64::from(*token)));
    (sum % 1000) as f64 / 1000.0
}

fn answer(value: &Value) -> Response {
    json_response(StatusCode::OK, value.to_string())
}

pub(super) async fn embeddings(
    State(state): State<Arc<EngineState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: EmbeddingRequest = parse(&body)?;
    let generation = compute(&state, &headers, request.model, request.input.prompts(&state)?).await?;
    let data: Vec<Value> = generation
        .prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| {
            let embedding: Vec<f64> = (0..DIMENSIONS).map(|dimension| invented(tokens, dimension)).collect();
            json!({"index": index, "object": "embedding", "embedding": embedding})
        })
        .collect();
    Ok(answer(&json!({
        "id": format!("embd-{}", generation.id), "object": "list", "created": generation.created,
        "model": generation.model, "data": data, "usage": usage(&generation),
    })))
}

pub(super) async fn pooling(
    State(state): State<Arc<EngineState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: EmbeddingRequest = parse(&body)?;
    let generation = compute(&state, &headers, request.model, request.input.prompts(&state)?).await?;
    let data: Vec<Value> = generation
        .prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| json!({"index": index, "object": "pooling", "data": [invented(tokens, 0)]}))
        .collect();
    Ok(answer(&json!({
        "id": format!("pool-{}", generation.id), "object": "list", "created": generation.created,
        "model": generation.model, "data": data, "usage": usage(&generation),
    })))
}

fn pairs(state: &EngineState, first: &[String], second: &[String]) -> Result<Vec<Prompt>, ApiError> {
    second
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let query = first.get(index).or_else(|| first.first()).map_or("", String::as_str);
            Prompt::text(state, &format!("{query}\n{text}"))
        })
        .collect()
}

pub(super) async fn score(
    State(state): State<Arc<EngineState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: ScoreRequest = parse(&body)?;
    let prompts = pairs(&state, &request.text_1.into_vec(), &request.text_2.into_vec())?;
    let generation = compute(&state, &headers, request.model, prompts).await?;
    let data: Vec<Value> = generation
        .prompts
        .iter()
        .enumerate()
        .map(|(index, tokens)| json!({"index": index, "object": "score", "score": invented(tokens, 0)}))
        .collect();
    Ok(answer(&json!({
        "id": format!("score-{}", generation.id), "object": "list", "created": generation.created,
        "model": generation.model, "data": data, "usage": usage(&generation),
    })))
}

pub(super) async fn rerank(
    State(state): State<Arc<EngineState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let request: ScoreRequest = parse(&body)?;
    let documents = request.text_2.into_vec();
    let prompts = pairs(&state, &request.text_1.into_vec(), &documents)?;
    let generation = compute(&state, &headers, request.model, prompts).await?;
    let mut results: Vec<(usize, f64)> =
        generation.prompts.iter().enumerate().map(|(index, tokens)| (index, invented(tokens, 0))).collect();
    results.sort_by(|a, b| b.1.total_cmp(&a.1));
    let results: Vec<Value> = results
        .into_iter()
        .map(|(index, score)| json!({"index": index, "document": {"text": documents[index]}, "relevance_score": score}))
        .collect();
    Ok(answer(&json!({
        "id": format!("rerank-{}", generation.id), "model": generation.model,
        "usage": {"prompt_tokens": generation.usage.prompt, "total_tokens": generation.usage.prompt}, "results": results,
    })))
}
