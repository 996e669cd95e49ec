//! vLLM's MooncakeConnector.

use axum::http::StatusCode;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::super::super::{EngineConfig, EngineRole, Fault, KvConnector};
use super::super::support::{TestEngine, hangs, within};
use super::{HASTY, PATIENT, PROMPT, Pair, complete, engine, error, nothing_pinned};

async fn pair(speed: f64) -> Pair {
    Pair::start(KvConnector::Mooncake, speed).await
}

fn address(engine: &TestEngine) -> String {
    format!("http://{}", engine.state.bootstrap_address().unwrap())
}

fn prefill_body(params: &Value) -> String {
    json!({"prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}).to_string()
}

fn params(prefill: &TestEngine) -> Value {
    json!({
        "do_remote_prefill": true,
        "remote_engine_id": *prefill.state.engine_id(),
        "remote_bootstrap_addr": address(prefill),
        "transfer_id": "xfer-1",
    })
}

fn decode_body(params: &Value) -> String {
    json!({"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}).to_string()
}

fn remote_decode() -> Value {
    json!({"do_remote_decode": true, "transfer_id": "xfer-1"})
}

#[tokio::test]
async fn the_decode_waits_for_a_prefill_that_comes_later() {
    let pair = pair(PATIENT).await;
    let params = params(&pair.prefill);
    let mut decode = Box::pin(pair.decode.post("/v1/completions", decode_body(&params)));
    hangs(&mut decode).await;
    assert_eq!(pair.decode.state.metrics().waiting_deferred, 1);
    let prefilled = complete(&pair.prefill, prefill_body(&remote_decode())).await;
    assert_eq!((prefilled.status, &prefilled.json()["kv_transfer_params"]), (StatusCode::OK, &Value::Null));
    assert_eq!(within(decode).await.status, StatusCode::OK);
    assert_eq!(pair.decode.state.transferred(), 1);
    assert_eq!(pair.decode.state.metrics().external_cache_hits, 40);
    nothing_pinned(&pair.prefill).await;
}

#[tokio::test]
async fn a_prefill_is_pinned_until_its_decode_comes() {
    let pair = pair(PATIENT).await;
    complete(&pair.prefill, prefill_body(&remote_decode())).await;
    assert_eq!(pair.prefill.state.pinned(), 1);
    assert_eq!(complete(&pair.decode, decode_body(&params(&pair.prefill))).await.status, StatusCode::OK);
    nothing_pinned(&pair.prefill).await;
}

#[tokio::test]
async fn the_bootstrap_server_tells_engine_and_worker() {
    let config = EngineConfig {
        data_parallel: Some((1, 2)),
        ..engine(KvConnector::Mooncake, EngineRole::Prefill, 1.0)
    };
    let prefill = TestEngine::start(config).await;
    let told = prefill.get_from(&format!("{}/query", address(&prefill))).await;
    let bootstrap = prefill.state.bootstrap_address().unwrap();
    let expected = json!({"1": {
        "engine_id": *prefill.state.engine_id(),
        "worker_addr": {"0": {"0": format!("tcp://{bootstrap}")}},
    }});
    assert_eq!(told.json(), expected);
}

#[rstest::rstest]
#[case("remote_engine_id")]
#[case("remote_bootstrap_addr")]
#[case("transfer_id")]
#[tokio::test]
async fn without_a_member_the_prompt_is_computed_here(#[case] member: &str) {
    let pair = pair(PATIENT).await;
    let mut params = params(&pair.prefill);
    params.as_object_mut().unwrap().remove(member);
    assert_eq!(complete(&pair.decode, decode_body(&params)).await.status, StatusCode::OK);
    assert_eq!(pair.decode.state.transferred(), 0);
    assert_eq!(pair.decode.state.metrics().external_cache_hits, 0);
    let prefilled = complete(&pair.prefill, prefill_body(&json!({"do_remote_decode": true}))).await;
    assert_eq!((prefilled.status, pair.prefill.state.pinned()), (StatusCode::OK, 0));
}

#[rstest::rstest]
#[case("remote_engine_id", "another")]
#[case("remote_bootstrap_addr", "http://127.0.0.1:1")]
#[case("remote_bootstrap_addr", "no address at all")]
#[case("transfer_id", "another")]
#[tokio::test]
async fn what_is_not_there_fails_or_is_computed(#[case] member: &str, #[case] value: &str) {
    let pair = pair(HASTY).await;
    complete(&pair.prefill, prefill_body(&remote_decode())).await;
    let mut params = params(&pair.prefill);
    params[member] = value.into();
    let failed = complete(&pair.decode, decode_body(&params)).await;
    assert_eq!(error(&failed, StatusCode::INTERNAL_SERVER_ERROR), "Internal server error");
    let recomputing =
        EngineConfig { kv_load_recompute: true, ..engine(KvConnector::Mooncake, EngineRole::Decode, HASTY) };
    let decode = TestEngine::start(recomputing).await;
    assert_eq!(complete(&decode, decode_body(&params)).await.status, StatusCode::OK);
    assert_eq!((decode.state.transferred(), decode.state.metrics().external_cache_hits), (0, 0));
}

#[tokio::test]
async fn a_prefill_that_stops_is_not_pinned() {
    let pair = pair(PATIENT).await;
    let body = json!({"prompt": "STOP_AFTER=1", "max_tokens": 2, "kv_transfer_params": remote_decode()});
    assert_eq!(complete(&pair.prefill, body.to_string()).await.status, StatusCode::OK);
    assert_eq!(pair.prefill.state.pinned(), 0);
}

#[rstest::rstest]
#[case(EngineRole::Prefill, json!({"do_remote_prefill": true}))]
#[case(EngineRole::Decode, json!({"do_remote_decode": true}))]
#[tokio::test]
async fn the_wrong_role_is_an_error(#[case] role: EngineRole, #[case] params: Value) {
    let engine = TestEngine::start(engine(KvConnector::Mooncake, role, PATIENT)).await;
    let message = error(&complete(&engine, decode_body(&params)).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(message.contains("do_remote_"), "{message}");
}

#[tokio::test]
async fn the_bootstrap_port_refuses_when_the_engine_does() {
    let pair = pair(HASTY).await;
    complete(&pair.prefill, prefill_body(&remote_decode())).await;
    pair.prefill.state.set_fault(Fault::Refuse(None));
    let bootstrap = pair.prefill.state.bootstrap_address().unwrap();
    let connects = async |accepted| {
        while TcpStream::connect(bootstrap).await.is_ok() != accepted {
            tokio::task::yield_now().await;
        }
    };
    within(connects(false)).await;
    let failed = complete(&pair.decode, decode_body(&params(&pair.prefill))).await;
    assert_eq!(failed.status, StatusCode::INTERNAL_SERVER_ERROR);
    pair.prefill.state.clear_faults();
    within(connects(true)).await;
}
