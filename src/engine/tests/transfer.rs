//! Prefill and decode engines that hand KV to each other, and every way in which that fails.

use axum::http::StatusCode;
use serde_json::{Value, json};

use super::super::{EngineConfig, EngineRole, KvConnector};
use super::support::{Answer, TestEngine, config, within};

mod mooncake;
mod nixl;
mod sglang;

/// 160 bytes: 40 tokens, two whole blocks of 16 and a half.
const PROMPT: &str = "The quick brown fox jumps over the lazy dog and runs on into the old deep woods. \
                      There it meets a hen, two geese and a very old man with a sack of wet hay and m";

/// Slow enough that no transfer fails because the machine is busy.
const PATIENT: f64 = 2.0;

/// Fast enough that a test may wait for a failure.
const HASTY: f64 = 100.0;

fn engine(connector: KvConnector, role: EngineRole, speed: f64) -> EngineConfig {
    let bootstrap = (connector != KvConnector::Nixl).then_some(0);
    EngineConfig { connector: Some(connector), role, bootstrap, speed, ..config() }
}

struct Pair {
    prefill: TestEngine,
    decode: TestEngine,
}

impl Pair {
    async fn start(connector: KvConnector, speed: f64) -> Self {
        Self::with(engine(connector, EngineRole::Decode, speed), speed).await
    }

    async fn with(decode: EngineConfig, speed: f64) -> Self {
        let connector = decode.connector.unwrap();
        let prefill = TestEngine::start(engine(connector, EngineRole::Prefill, speed)).await;
        Self { prefill, decode: TestEngine::start(decode).await }
    }
}

/// The request with further members.
fn with(request: &Value, members: &Value) -> String {
    let mut request = request.clone();
    for (name, value) in members.as_object().unwrap() {
        request[name] = value.clone();
    }
    request.to_string()
}

async fn complete(engine: &TestEngine, body: String) -> Answer {
    within(engine.post("/v1/completions", body)).await
}

/// The message of an error with this status.
fn error(answer: &Answer, status: StatusCode) -> String {
    assert_eq!(answer.status, status, "{}", answer.text);
    answer.json()["error"]["message"].as_str().unwrap().to_owned()
}

async fn nothing_pinned(engine: &TestEngine) {
    engine.until(|_| engine.state.pinned() == 0).await;
    engine.until(|metrics| metrics.kv_cache_usage.abs() < 1e-9).await;
}

#[tokio::test]
async fn without_a_connector_transfer_fields_are_ignored() {
    let engine = TestEngine::start(EngineConfig { role: EngineRole::Decode, ..config() }).await;
    for members in [
        json!({"kv_transfer_params": {"do_remote_decode": true}}),
        json!({"kv_transfer_params": {"do_remote_prefill": true}}),
        json!({"kv_transfer_params": 7, "bootstrap_room": "x"}),
    ] {
        let answer = complete(&engine, with(&json!({"prompt": PROMPT, "max_tokens": 1}), &members)).await;
        assert_eq!(answer.status, StatusCode::OK);
        assert_eq!(answer.json()["kv_transfer_params"], Value::Null);
    }
    assert_eq!(engine.state.pinned(), 0);
    assert_eq!(engine.state.metrics().external_cache_queries, 0);
}

#[tokio::test]
async fn a_bootstrap_port_is_opened_by_prefill_engines_with_a_connector_that_has_one() {
    let open = async |connector, role| {
        let config = EngineConfig { bootstrap: Some(0), ..engine(connector, role, 1.0) };
        super::super::Engine::bind(config).await.map(|engine| engine.state().bootstrap_address().is_some())
    };
    assert!(open(KvConnector::Mooncake, EngineRole::Prefill).await.unwrap());
    assert!(open(KvConnector::Sglang, EngineRole::Both).await.unwrap());
    assert!(!open(KvConnector::Sglang, EngineRole::Decode).await.unwrap());
    let refused = open(KvConnector::Nixl, EngineRole::Prefill).await.unwrap_err();
    assert!(refused.to_string().contains("bootstrap port"), "{refused}");
}
