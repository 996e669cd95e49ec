//! vLLM's NixlConnector.

use axum::http::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::super::super::tokenizer::encode;
use super::super::super::{EngineConfig, EngineRole, Fault, KvConnector};
use super::super::support::{TestEngine, answer, hangs, within};
use super::{HASTY, PATIENT, PROMPT, Pair, complete, engine, error, nothing_pinned, with};

/// vLLM 0.32 when KV does not arrive.
const FAILED: &str =
    r#"{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}"#;

/// The members of the captured answer, in their order.
const MEMBERS: [&str; 14] = [
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
    "remote_prefill_cached_tokens",
];

async fn pair(speed: f64) -> Pair {
    Pair::start(KvConnector::Nixl, speed).await
}

fn prefill_body(prompt: &str) -> String {
    json!({"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}).to_string()
}

/// The answered parameters of a prefill of `prompt`.
async fn prefilled(engine: &TestEngine, prompt: &str) -> Value {
    let answer = complete(engine, prefill_body(prompt)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text);
    answer.json()["kv_transfer_params"].clone()
}

fn decode_body(params: &Value) -> String {
    json!({"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params}).to_string()
}

#[tokio::test]
async fn a_prefill_answer_names_its_blocks_in_the_captured_members() {
    let engine = TestEngine::start(engine(KvConnector::Nixl, EngineRole::Both, PATIENT)).await;
    let headers = [("content-type", "application/json"), ("x-request-id", "pd-1")];
    let response =
        engine.send(Method::POST, "/v1/completions", &headers, prefill_body(PROMPT)).await.unwrap();
    let answer = within(answer(response)).await;
    let params = answer.json()["kv_transfer_params"].clone();
    let at = |member: &str| answer.text.find(&format!("\"{member}\":")).unwrap();
    assert_eq!(params.as_object().unwrap().len(), MEMBERS.len());
    assert!(MEMBERS.is_sorted_by_key(|member| at(member)));
    let id = params["remote_request_id"].as_str().unwrap();
    assert!(id.starts_with("cmpl-pd-1-0-") && id.len() == "cmpl-pd-1-0-9616886c".len(), "{id}");
    assert_eq!(params["remote_engine_id"], *engine.state.engine_id());
    assert_eq!(params["remote_engine_id"].as_str().unwrap().len(), 36);
    assert_eq!(params["remote_block_ids"][0].as_array().unwrap().len(), 3);
    assert_eq!(params["remote_port"], engine.state.address().port());
    for (member, value) in [
        ("do_remote_prefill", json!(true)),
        ("do_remote_decode", json!(false)),
        ("remote_host", json!("127.0.0.1")),
        ("remote_num_tokens", json!(40)),
        ("transfer_mode", json!("pull")),
        ("remote_prefill_cached_tokens", json!(0)),
    ] {
        assert_eq!(params[member], value, "{member}");
    }
    assert_eq!(engine.state.pinned(), 1);
    assert_eq!(prefilled(&engine, PROMPT).await["remote_prefill_cached_tokens"], 32);
}

#[rstest::rstest]
#[case("/v1/completions", json!({"prompt": PROMPT, "max_tokens": 4}), "max_tokens")]
#[case("/v1/chat/completions", json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}), "max_tokens")]
#[case("/v1/responses", json!({"input": PROMPT, "max_output_tokens": 4}), "max_output_tokens")]
#[case("/v1/messages", json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}), "max_tokens")]
#[case("/inference/v1/generate", json!({"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}), "")]
#[tokio::test]
async fn every_api_hands_over_and_takes(#[case] path: &str, #[case] request: Value, #[case] limit: &str) {
    let pair = pair(PATIENT).await;
    let mut members = json!({"kv_transfer_params": {"do_remote_decode": true}});
    if !limit.is_empty() {
        members[limit] = 1.into();
    }
    let prefilled = within(pair.prefill.post(path, with(&request, &members))).await;
    let params = prefilled.json()["kv_transfer_params"].clone();
    assert_eq!(pair.prefill.state.pinned(), 1);
    let body = with(&request, &json!({"kv_transfer_params": params}));
    let decoded = within(pair.decode.post(path, body)).await;
    assert_eq!(decoded.status, StatusCode::OK, "{}", decoded.text);
    assert_eq!(decoded.json()["kv_transfer_params"], Value::Null);
    assert_eq!(decoded.json().get("kv_transfer_params").is_none(), path == "/v1/messages");
    assert_eq!(pair.decode.state.transferred(), 1);
    nothing_pinned(&pair.prefill).await;
}

#[rstest::rstest]
#[case(false)]
#[case(true)]
#[tokio::test]
async fn a_fetched_prompt_is_not_computed_and_enters_the_cache(#[case] stream: bool) {
    let pair = pair(PATIENT).await;
    let params = prefilled(&pair.prefill, PROMPT).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 4, "stream": stream, "kv_transfer_params": params});
    let answer = complete(&pair.decode, body.to_string()).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(!answer.text.contains("error"), "{}", answer.text);
    let metrics = pair.decode.state.metrics();
    assert!((metrics.iteration_tokens.sum - 4.0).abs() < 1e-9, "the last token and three words");
    assert_eq!((metrics.external_cache_queries, metrics.external_cache_hits), (40, 40));
    assert_eq!((metrics.prompt_tokens, metrics.prompt_tokens_cached), (40, 0));
    assert_eq!(pair.decode.state.cached_tokens(&encode(PROMPT), "", ""), 32);
    let page = pair.decode.get("/metrics").await.text;
    for line in [
        r#"vllm:external_prefix_cache_queries_total{engine="0",model_name="tiny"} 40.0"#,
        r#"vllm:external_prefix_cache_hits_total{engine="0",model_name="tiny"} 40.0"#,
        r#"vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 0.0"#,
        r#"vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 40.0"#,
        r#"vllm:prompt_tokens_cached_total{engine="0",model_name="tiny"} 40.0"#,
        r#"vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="tiny",source="p2p"} 40.0"#,
    ] {
        assert!(page.lines().any(|other| other == line), "{line}");
    }
    let prefill = pair.prefill.state.metrics();
    assert_eq!((prefill.external_cache_queries, prefill.external_cache_hits), (40, 0));
    assert_eq!(pair.prefill.state.requests().len(), 1, "fetches are not requests");
}

#[rstest::rstest]
#[case(json!({"prompt": "Halt STOP_AFTER=1", "max_tokens": 5}), 0)]
#[case(json!({"prompt": PROMPT, "max_tokens": 1, "stream": true}), 1)]
#[tokio::test]
async fn an_answer_that_stops_or_streams_tells_nothing(#[case] request: Value, #[case] pinned: usize) {
    let engine = TestEngine::start(engine(KvConnector::Nixl, EngineRole::Prefill, PATIENT)).await;
    let body = with(&request, &json!({"kv_transfer_params": {"do_remote_decode": true}}));
    let answer = complete(&engine, body).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(!answer.text.contains("remote_engine_id"), "{}", answer.text);
    assert_eq!(engine.state.pinned(), pinned);
}

#[rstest::rstest]
#[case("remote_request_id", json!("cmpl-other-0-00000000"))]
#[case("remote_engine_id", json!("5fcb9ee6-d892-4c63-9949-010907d27f2a"))]
#[case("remote_port", json!(1))]
#[case("remote_host", json!("host.invalid"))]
#[tokio::test]
async fn what_is_not_there_fails_or_is_computed(#[case] member: &str, #[case] value: Value) {
    let pair = pair(HASTY).await;
    let mut params = prefilled(&pair.prefill, PROMPT).await;
    params[member] = value;
    let failed = complete(&pair.decode, decode_body(&params)).await;
    assert_eq!((failed.status, failed.text.as_str()), (StatusCode::INTERNAL_SERVER_ERROR, FAILED));
    let page = pair.decode.get("/metrics?name[]=vllm:nixl_num_failed_transfers_total").await.text;
    assert!(page.ends_with("{engine=\"0\",model_name=\"tiny\"} 1.0\n"), "{page}");
    pair.decode.until(|metrics| metrics.num_requests_running + metrics.waiting_deferred == 0).await;

    let recomputing =
        EngineConfig { kv_load_recompute: true, ..engine(KvConnector::Nixl, EngineRole::Decode, HASTY) };
    let decode = TestEngine::start(recomputing).await;
    let answer = complete(&decode, decode_body(&params)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(decode.state.transferred(), 0);
    let metrics = decode.state.metrics();
    assert_eq!((metrics.external_cache_queries, metrics.external_cache_hits), (40, 0));
    assert!((metrics.iteration_tokens.sum - 43.0).abs() < 1e-9);
}

#[tokio::test]
async fn a_stream_that_has_begun_fails_with_an_event() {
    let pair = pair(HASTY).await;
    let mut params = prefilled(&pair.prefill, PROMPT).await;
    params["remote_port"] = 1.into();
    let body = json!({"prompt": PROMPT, "stream": true, "kv_transfer_params": params}).to_string();
    let answer = complete(&pair.decode, body).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.text, format!("data: {FAILED}\n\ndata: [DONE]\n\n"));
}

#[rstest::rstest]
#[case("remote_engine_id")]
#[case("remote_request_id")]
#[case("remote_block_ids")]
#[case("remote_host")]
#[case("remote_port")]
#[case("remote_num_tokens")]
#[tokio::test]
async fn a_missing_member_is_named(#[case] member: &str) {
    let pair = pair(PATIENT).await;
    let mut params = prefilled(&pair.prefill, PROMPT).await;
    let without: Map<String, Value> =
        params.as_object().unwrap().clone().into_iter().filter(|(name, _)| name != member).collect();
    params[member] = json!({"of": "another type"});
    for params in [Value::from(without), params] {
        let answer = complete(&pair.decode, decode_body(&params)).await;
        let message = error(&answer, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(message.contains(member), "{message}");
    }
    assert_eq!(pair.prefill.state.pinned(), 1);
}

#[rstest::rstest]
#[case("remote_num_tokens", json!(41), PROMPT)]
#[case("remote_block_ids", json!([[1, 2]]), PROMPT)]
#[case("prompt", Value::Null, "a prompt of other words, which is also exactly as long")]
#[tokio::test]
async fn what_does_not_fit_the_prompt_is_named_at_once(
    #[case] member: &str,
    #[case] value: Value,
    #[case] prefilled_prompt: &str,
) {
    let pair = pair(PATIENT).await;
    // As many tokens, whatever the text.
    let prompt = format!("{prefilled_prompt:-<160}");
    let mut params = prefilled(&pair.prefill, &prompt[..160]).await;
    if !value.is_null() {
        params[member] = value;
    }
    let message =
        error(&complete(&pair.decode, decode_body(&params)).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(message.contains(member), "{message}");
    assert_eq!((pair.prefill.state.pinned(), pair.decode.state.transferred()), (1, 0));
}

#[rstest::rstest]
#[case(EngineRole::Prefill, json!({"do_remote_prefill": true}), "do_remote_prefill")]
#[case(EngineRole::Decode, json!({"do_remote_decode": true}), "do_remote_decode")]
#[case(EngineRole::Both, json!({"do_remote_decode": true, "do_remote_prefill": true}), "exclude")]
#[case(EngineRole::Both, json!({"do_remote_decode": "yes"}), "do_remote_decode")]
#[tokio::test]
async fn a_wish_that_the_engine_cannot_fulfil_is_an_error(
    #[case] role: EngineRole,
    #[case] params: Value,
    #[case] words: &str,
) {
    let engine = TestEngine::start(engine(KvConnector::Nixl, role, PATIENT)).await;
    let message = error(&complete(&engine, decode_body(&params)).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(message.contains(words), "{message}");
    let plain = complete(&engine, json!({"prompt": PROMPT}).to_string()).await;
    assert_eq!(plain.status, StatusCode::OK, "a request without parameters is served by any role");
    let neither = complete(&engine, decode_body(&json!({"do_remote_decode": false}))).await;
    assert_eq!(neither.status, StatusCode::OK);
    assert!(
        error(&complete(&engine, decode_body(&json!(7))).await, StatusCode::BAD_REQUEST).contains("object")
    );
}

#[tokio::test]
async fn a_lease_ends_unread() {
    let pair = pair(HASTY).await;
    let params = prefilled(&pair.prefill, PROMPT).await;
    assert_eq!(pair.prefill.state.pinned(), 1);
    pair.prefill.until(|metrics| metrics.transfers_expired == 1).await;
    nothing_pinned(&pair.prefill).await;
    let page = pair.prefill.get("/metrics?name[]=vllm:nixl_num_kv_expired_reqs_total").await.text;
    assert!(page.ends_with("{engine=\"0\",model_name=\"tiny\"} 1.0\n"), "{page}");
    assert_eq!(complete(&pair.decode, decode_body(&params)).await.text, FAILED);
}

#[tokio::test]
async fn pinned_blocks_are_missing_until_they_are_fetched() {
    let prefill = EngineConfig { blocks: 4, ..engine(KvConnector::Nixl, EngineRole::Prefill, PATIENT) };
    let prefill = TestEngine::start(prefill).await;
    let decode = TestEngine::start(engine(KvConnector::Nixl, EngineRole::Decode, PATIENT)).await;
    let params = prefilled(&prefill, PROMPT).await;
    let other = prefill_body(&PROMPT.replace("The", "One"));
    let mut waiting = Box::pin(prefill.post("/v1/completions", other));
    hangs(&mut waiting).await;
    assert_eq!(complete(&decode, decode_body(&params)).await.status, StatusCode::OK);
    assert_eq!(within(waiting).await.status, StatusCode::OK);
}

#[rstest::rstest]
#[case(Fault::Restart)]
#[case(Fault::Die)]
#[tokio::test]
async fn an_engine_that_is_gone_has_pinned_nothing(#[case] fault: Fault) {
    let pair = pair(HASTY).await;
    let params = prefilled(&pair.prefill, PROMPT).await;
    pair.prefill.state.set_fault(fault);
    assert_eq!(pair.prefill.state.pinned(), 0);
    let same = params["remote_engine_id"] == *pair.prefill.state.engine_id();
    assert_eq!(same, fault == Fault::Die);
    assert_eq!(complete(&pair.decode, decode_body(&params)).await.text, FAILED);
    if fault == Fault::Restart {
        let params = prefilled(&pair.prefill, PROMPT).await;
        assert_eq!(complete(&pair.decode, decode_body(&params)).await.status, StatusCode::OK);
    }
}

#[rstest::rstest]
#[case(EngineConfig { max_queued: Some(0), ..engine(KvConnector::Nixl, EngineRole::Decode, PATIENT) }, json!({}), StatusCode::SERVICE_UNAVAILABLE)]
#[case(engine(KvConnector::Nixl, EngineRole::Decode, PATIENT), json!({"model": "nope"}), StatusCode::NOT_FOUND)]
#[tokio::test]
async fn a_refused_request_frees_what_was_prefilled_for_it(
    #[case] decode: EngineConfig,
    #[case] members: Value,
    #[case] status: StatusCode,
) {
    let pair = Pair::with(decode, PATIENT).await;
    let params = prefilled(&pair.prefill, PROMPT).await;
    let request = json!({"prompt": PROMPT, "kv_transfer_params": params});
    assert_eq!(complete(&pair.decode, with(&request, &members)).await.status, status);
    nothing_pinned(&pair.prefill).await;
    assert_eq!(pair.decode.state.transferred(), 0);
}

#[tokio::test]
async fn several_choices_fetch_once_and_wait_together() {
    let pair = pair(PATIENT).await;
    let params = prefilled(&pair.prefill, PROMPT).await;
    let body = json!({"prompt": PROMPT, "n": 3, "max_tokens": 2, "kv_transfer_params": params}).to_string();
    let answer = complete(&pair.decode, body).await;
    assert_eq!(answer.json()["choices"].as_array().unwrap().len(), 3);
    assert_eq!(pair.decode.state.transferred(), 1);
    let body =
        json!({"prompt": PROMPT, "n": 2, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}});
    complete(&pair.prefill, body.to_string()).await;
    assert_eq!(pair.prefill.state.pinned(), 2, "each choice is pinned, though the answer names one");
}
