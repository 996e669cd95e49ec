//! `POST /debug/cache`: who is believed to hold a prompt.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Admin, error};
use crate::admission::identity::Attributes;
use crate::decide::{Arrived, Body, Chunks, Holding};
use crate::index::Tier;
use crate::request::head::Head;

/// A prompt, in one of three forms.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    model: String,
    prompt: Option<String>,
    messages: Option<Value>,
    token_ids: Option<Vec<u32>>,
    cache_salt: Option<String>,
}

impl Question {
    /// The request that would bring this prompt.
    fn arrived(self) -> Result<Arrived, &'static str> {
        let (path, prompt) = match (self.prompt, self.messages, self.token_ids) {
            (Some(text), None, None) => ("/v1/completions", json!({"prompt": text})),
            (None, Some(messages), None) => ("/v1/chat/completions", json!({"messages": messages})),
            (None, None, Some(ids)) => ("/v1/completions", json!({"prompt": ids})),
            _ => return Err("give one of `prompt`, `messages` and `token_ids`"),
        };
        let mut body = prompt;
        body["model"] = self.model.into();
        if let Some(salt) = self.cache_salt {
            body["cache_salt"] = salt.into();
        }
        let now = Instant::now();
        let headers = [(":method", "POST"), (":path", path), ("content-type", "application/json")];
        Ok(Arrived {
            pool: None,
            head: Head::new(headers.map(|(name, value)| (name.to_owned(), value.to_owned()))),
            body: Body::Whole(Chunks::of(body.to_string().into_bytes())),
            attributes: Attributes::new(),
            subset: None,
            sees_response: false,
            started: now,
            complete: now,
        })
    }
}

/// Answers who holds a prompt.
pub async fn holders(State(admin): State<Arc<Admin>>, body: axum::body::Bytes) -> Response {
    let question: Result<Question, _> = serde_json::from_slice(&body);
    let arrived =
        match question.map_err(|error| error.to_string()).and_then(|q| q.arrived().map_err(str::to_owned)) {
            Ok(arrived) => arrived,
            Err(why) => return error(StatusCode::BAD_REQUEST, &format!("not a question: {why}")),
        };
    match admin.shared.decider.holders(&arrived).await {
        Ok(found) => Json(json!({
            "blocks": found.blocks,
            "block_size": found.block_tokens,
            "counted": found.counted,
            "prompt_tokens": found.prompt_tokens,
            "holders": found.holders.iter().map(row).collect::<Vec<_>>(),
        }))
        .into_response(),
        Err(refusal) => error(StatusCode::BAD_REQUEST, &refusal.message),
    }
}

fn row(holding: &Holding) -> Value {
    json!({
        "endpoint": holding.endpoint.destination,
        "depth": holding.depth,
        "tier": holding.tier.map(Tier::name),
        "source": holding.source.name(),
        "unit": if holding.text { "text" } else { "tokens" },
        "cached_tokens": holding.cached_tokens,
    })
}
