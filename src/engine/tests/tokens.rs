//! An engine with a real tokenizer, and what the picker's two ways to tokens make of the same requests.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use super::super::EngineConfig;
use super::support::{TestEngine, config};
use crate::feed::render::{RenderConfig, Renderer};
use crate::prompt::tokenize::{Ask, Options};
use crate::prompt::{Origin, Skipped, TokenizerSource, Tokenizers};
use crate::request::parse;
use crate::state::endpoint::EngineKind;

const DIR: &str = "tests/data/tokenizers";

fn tokenizing(scale_out: bool) -> EngineConfig {
    EngineConfig { tokenizer: Some(format!("{DIR}/small").into()), scale_out, ..config() }
}

#[tokio::test]
async fn the_chat_template_counts_and_special_tokens_are_added_to_completions_only() {
    let engine = TestEngine::start(tokenizing(false)).await;
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    let tokenized = engine.post("/tokenize", chat.to_string()).await.json();
    let text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n";
    let bare = json!({"model": "tiny", "prompt": text, "add_special_tokens": false});
    assert_eq!(tokenized["tokens"], engine.post("/tokenize", bare.to_string()).await.json()["tokens"]);
    let added = json!({"model": "tiny", "prompt": text});
    let added = engine.post("/tokenize", added.to_string()).await.json();
    assert_eq!(added["count"].as_u64().unwrap(), tokenized["count"].as_u64().unwrap() + 1);
    let answer = engine.post("/v1/chat/completions", chat.to_string()).await.json();
    assert_eq!(answer["usage"]["prompt_tokens"], tokenized["count"]);
}

#[tokio::test]
async fn rendering_is_refused_without_scale_out() {
    let engine = TestEngine::start(tokenizing(false)).await;
    for path in ["/v1/completions/render", "/v1/chat/completions/render"] {
        let body = json!({"model": "tiny", "prompt": "x", "messages": []});
        assert_eq!(engine.post(path, body.to_string()).await.status, 403);
    }
}

/// Requests whose tokens every way must agree on.
fn golden() -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}});
    vec![
        ("/v1/completions", json!({"model": "alias", "prompt": "Tell me about rivers, Zażółć."})),
        ("/v1/completions", json!({"model": "alias", "prompt": ["first of two", "second"]})),
        (
            "/v1/chat/completions",
            json!({"model": "alias", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi 🐟"}]}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "alias", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "tools": [tool]}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "alias", "messages": [{"role": "user", "content": "q"}], "add_generation_prompt": false}),
        ),
        (
            "/v1/chat/completions",
            json!({"model": "alias", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "I am"}], "continue_final_message": true}),
        ),
    ]
}

async fn tokens(
    service: &Tokenizers,
    engine: &TestEngine,
    source: &TokenizerSource,
    path: &str,
    body: &Value,
) -> Result<crate::prompt::Tokens, Skipped> {
    let body = Bytes::from(body.to_string());
    let request = parse(path, None, &body).unwrap();
    let ask = Ask {
        source: Some(source),
        pool: "default/p",
        request: &request,
        path,
        body: &body,
        model: "tiny",
        engine: Some((engine.state.address(), EngineKind::Vllm)),
        budget: Duration::from_secs(20),
    };
    service.tokens(ask).await
}

#[tokio::test]
async fn in_process_rendered_and_tokenized_ids_are_the_same() {
    let options = || Options { dir: Some(DIR.into()), threads: 1, ..Options::default() };
    let remote =
        || Some(Arc::new(Renderer::new(RenderConfig::default())) as Arc<dyn crate::prompt::tokenize::Remote>);
    let local = Tokenizers::new(options(), None).unwrap();
    let file = TokenizerSource::File("small".into());
    local.follow([&file]);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !local.is_ready("small") {
        assert!(tokio::time::Instant::now() < deadline, "it never got ready");
        tokio::task::yield_now().await;
    }
    for scale_out in [true, false] {
        let engine = TestEngine::start(tokenizing(scale_out)).await;
        let far = Tokenizers::new(options(), remote()).unwrap();
        for (path, body) in golden() {
            let here = tokens(&local, &engine, &file, path, &body).await.unwrap();
            let there = tokens(&far, &engine, &TokenizerSource::Engine, path, &body).await.unwrap();
            assert_eq!((here.origin(), there.origin()), (Origin::Local, Origin::Remote));
            assert_eq!(here[..], there[..], "{path} {body}");
        }
        let paths: Vec<String> =
            engine.state.requests().iter().map(|request| request.uri.path().to_owned()).collect();
        assert_eq!(paths.iter().filter(|path| *path == "/tokenize").count(), if scale_out { 0 } else { 6 });
    }
}
