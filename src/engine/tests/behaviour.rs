//! What the engine promises beyond the shape of its answers.

use std::io::Write;

use axum::http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::super::tokenizer::encode;
use super::super::{Engine, EngineConfig, EngineError};
use super::support::{TestEngine, answer, config, stuck, within};

/// 80 bytes: 20 tokens, one whole block of 16.
const PROMPT: &str = "The quick brown fox jumps over the lazy dog and runs on into the old deep woods.";

async fn cached(engine: &TestEngine, request: Value) -> u64 {
    let answer = engine.post("/v1/completions", request.to_string()).await;
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn a_repeated_prompt_is_cached_in_whole_blocks_but_never_as_a_whole() {
    let engine = TestEngine::start(config()).await;
    assert_eq!(encode(PROMPT).len(), 20);
    assert_eq!(cached(&engine, json!({"prompt": PROMPT})).await, 0);
    assert_eq!(cached(&engine, json!({"prompt": PROMPT})).await, 16);
    let exact = &PROMPT[..64];
    assert_eq!(cached(&engine, json!({"prompt": exact})).await, 0, "the last token is always computed");
    assert_eq!(engine.state.metrics().prefix_cache_hits, 16);
    assert_eq!(engine.state.metrics().prefix_cache_queries, 56);
}

#[rstest::rstest]
#[case("/v1/messages", "max_tokens", ["/usage/input_tokens", "/usage/cache_read_input_tokens"], [9, 16])]
#[case("/v1/chat/completions", "max_tokens", ["/usage/prompt_tokens", "/usage/prompt_tokens_details/cached_tokens"], [25, 16])]
#[tokio::test]
async fn each_api_counts_cached_tokens_its_own_way(
    #[case] path: &str,
    #[case] limit: &str,
    #[case] fields: [&str; 2],
    #[case] expected: [u64; 2],
) {
    let engine = TestEngine::start(config()).await;
    // 17 bytes before the 48 of the content, 33 after it: 98 bytes are 25 tokens.
    let request = json!({"messages": [{"role": "user", "content": &PROMPT[..48]}], limit: 1}).to_string();
    engine.post(path, request.clone()).await;
    let value = engine.post(path, request).await.json();
    assert_eq!(fields.map(|field| value.pointer(field).unwrap().as_u64().unwrap()), expected);
}

#[tokio::test]
async fn adapters_and_salts_share_nothing() {
    let engine = TestEngine::start(config()).await;
    for request in [
        json!({"prompt": PROMPT}),
        json!({"prompt": PROMPT, "model": "lora1"}),
        json!({"prompt": PROMPT, "model": "lora2"}),
        json!({"prompt": PROMPT, "cache_salt": "tenant"}),
    ] {
        assert_eq!(cached(&engine, request.clone()).await, 0);
        assert_eq!(cached(&engine, request).await, 16);
    }
}

#[tokio::test]
async fn every_prompt_gets_n_answers_and_usage_sums_them() {
    let engine = TestEngine::start(config()).await;
    let answer = engine
        .post("/v1/completions", json!({"prompt": ["one", "two"], "n": 2, "max_tokens": 3}).to_string())
        .await;
    let value = answer.json();
    let indexes: Vec<u64> =
        value["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert_eq!(value["usage"]["prompt_tokens"], 2);
    assert_eq!(value["usage"]["completion_tokens"], 12);
}

#[rstest::rstest]
#[case("/v1/completions", json!({"prompt": "x STOP_AFTER=3"}), "/choices/0/finish_reason", "stop", "/usage/completion_tokens", 3)]
#[case("/v1/completions", json!({"prompt": "x"}), "/choices/0/finish_reason", "length", "/usage/completion_tokens", 16)]
#[case("/v1/chat/completions", json!({"messages": [{"content": "x"}], "max_completion_tokens": 5}), "/choices/0/finish_reason", "length", "/usage/completion_tokens", 5)]
#[case("/v1/messages", json!({"messages": [{"content": "STOP_AFTER=2"}], "max_tokens": 9}), "/stop_reason", "end_turn", "/usage/output_tokens", 2)]
#[case("/v1/responses", json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "STOP_AFTER=2"}]}]}), "/status", "completed", "/usage/output_tokens", 2)]
#[case("/generate", json!({"text": "x", "sampling_params": {"max_new_tokens": 4}}), "/meta_info/finish_reason/type", "length", "/meta_info/completion_tokens", 4)]
#[tokio::test]
async fn an_answer_ends_where_the_request_says(
    #[case] path: &str,
    #[case] request: Value,
    #[case] reason_at: &str,
    #[case] reason: &str,
    #[case] tokens_at: &str,
    #[case] tokens: u64,
) {
    let engine = TestEngine::start(config()).await;
    let value = engine.post(path, request.to_string()).await.json();
    assert_eq!(value.pointer(reason_at).unwrap(), reason);
    assert_eq!(value.pointer(tokens_at).unwrap(), tokens);
}

#[rstest::rstest]
#[case(json!({"stream_options": {"include_usage": true}}), 400)]
#[case(json!({"stream_options": {"include_usage": false}, "stream": false}), 400)]
#[case(json!({"stream_options": {}}), 200)]
#[case(json!({"stream_options": null}), 200)]
#[case(json!({"stream_options": {"include_usage": true}, "stream": true}), 200)]
#[case(json!({"min_tokens": 3, "max_tokens": 2}), 400)]
#[case(json!({"min_tokens": 2, "max_tokens": 2}), 200)]
#[case(json!({"min_tokens": 100}), 200)]
#[tokio::test]
async fn what_a_router_must_take_out_of_a_prefill_request_is_refused(
    #[case] members: Value,
    #[case] status: u16,
) {
    let engine = TestEngine::start(config()).await;
    for (path, mut request) in [
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
    ] {
        for (name, value) in members.as_object().unwrap() {
            request[name] = value.clone();
        }
        let answer = engine.post(path, request.to_string()).await;
        assert_eq!(answer.status.as_u16(), status, "{}", answer.text);
        let named = |name: &str| answer.text.contains(name) || answer.text.contains("Stream options");
        assert!(status == 200 || members.as_object().unwrap().keys().any(|name| named(name)));
    }
}

#[tokio::test]
async fn the_tokenizer_endpoint_counts_what_inference_counts() {
    let engine = TestEngine::start(config()).await;
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "Hi there"}]);
    let counted = engine.post("/tokenize", json!({"messages": messages}).to_string()).await.json();
    let served = engine.post("/v1/chat/completions", json!({"messages": messages}).to_string()).await.json();
    assert_eq!(counted["count"], served["usage"]["prompt_tokens"]);
    let ids = engine.post("/v1/completions", json!({"prompt": counted["tokens"]}).to_string()).await.json();
    assert_eq!(counted["count"], ids["usage"]["prompt_tokens"]);
}

#[tokio::test]
async fn a_stream_is_answered_before_its_prompt_is_computed_and_cancelled_with_its_client() {
    let engine = TestEngine::start(stuck()).await;
    let request = json!({"prompt": "x", "stream": true}).to_string();
    let response = within(engine.send(Method::POST, "/v1/completions", &[], request)).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    engine.until(|metrics| metrics.num_requests_running == 1).await;
    assert_eq!(engine.state.in_flight(), 1);
    drop(response);
    within(async {
        while engine.state.in_flight() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_blocks_and_is_no_success() {
    let engine = TestEngine::start(EngineConfig { speed: 1.0, ..config() }).await;
    let request = json!({"prompt": PROMPT, "stream": true, "max_tokens": 4000}).to_string();
    let mut response = engine.send(Method::POST, "/v1/completions", &[], request).await.unwrap();
    within(response.body_mut().frame()).await.unwrap().unwrap();
    assert!(engine.state.metrics().kv_cache_usage > 0.0);
    drop(response);
    engine.until(|metrics| metrics.num_requests_running == 0).await;
    let metrics = engine.state.metrics();
    assert!(metrics.kv_cache_usage.abs() < 1e-9);
    assert_eq!(metrics.finished_length + metrics.finished_stop, 0);
}

#[tokio::test]
async fn the_raw_bytes_are_recorded_and_the_decoded_ones_parsed() {
    let engine = TestEngine::start(config()).await;
    let text = json!({"prompt": PROMPT, "max_tokens": 1}).to_string();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(text.as_bytes()).unwrap();
    let packed = encoder.finish().unwrap();
    let headers = [("content-encoding", "gzip"), ("x-request-id", "r-1")];
    let response = engine.send(Method::POST, "/v1/completions?a=b", &headers, packed.clone()).await.unwrap();
    let response = answer(response).await;
    assert_eq!(response.json()["id"], "cmpl-r-1");
    assert_eq!(response.headers["x-request-id"], "r-1");
    assert_eq!(response.headers["x-received-bytes"], packed.len().to_string());
    assert_eq!(response.headers["x-received-xxh3"], format!("{:016x}", xxh3_64(&packed)));
    assert_eq!(response.headers["x-engine-name"], engine.state.name());
    let recorded = engine.state.requests();
    assert_eq!(recorded.len(), 1);
    assert_eq!(recorded[0].body, packed);
    let shown = engine.get("/debug/requests").await.json();
    assert_eq!(shown[0]["path"], "/v1/completions?a=b");
    assert_eq!(shown[0]["xxh3"], format!("{:016x}", xxh3_64(&packed)));
    assert!(shown[0]["body_base64"].as_str().unwrap().starts_with("H4sI"));
}

#[tokio::test]
async fn a_body_of_several_megabytes_is_accepted_and_too_long_for_the_model() {
    let engine = TestEngine::start(config()).await;
    let answer = engine.post("/v1/completions", json!({"prompt": "x".repeat(5 << 20)}).to_string()).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST);
    assert_eq!(answer.json()["error"]["param"], "input_tokens");
    assert!(!answer.text.contains("xxxx"));
}

#[rstest::rstest]
#[case("/v1/completions", "")]
#[case("/v1/completions", "[]")]
#[case("/v1/completions", r#"{"prompt":""}"#)]
#[case("/v1/completions", r#"{"prompt":[]}"#)]
#[case("/v1/completions", r#"{"prompt":"x","n":0}"#)]
#[case("/v1/completions", r#"{"prompt":"x","max_tokens":0}"#)]
#[case("/v1/completions", r#"{"prompt":[-1]}"#)]
#[case("/v1/chat/completions", r#"{"messages":7}"#)]
#[case("/tokenize", "{}")]
#[case("/rerank", "{}")]
#[case("/fault", r#"{"fault":"nonsense"}"#)]
#[tokio::test]
async fn nonsense_gets_400(#[case] path: &str, #[case] request: &'static str) {
    let engine = TestEngine::start(config()).await;
    assert_eq!(engine.post(path, request).await.status, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn prompt_only_apis_generate_nothing() {
    let engine = TestEngine::start(config()).await;
    let embeddings = engine.post("/v1/embeddings", json!({"input": ["a", "bcdef"]}).to_string()).await.json();
    assert_eq!(embeddings["data"].as_array().unwrap().len(), 2);
    assert_eq!(embeddings["usage"]["prompt_tokens"], 3);
    let ranked =
        engine.post("/v1/rerank", json!({"query": "q", "documents": ["a", "b"]}).to_string()).await.json();
    assert_eq!(ranked["results"].as_array().unwrap().len(), 2);
    assert_eq!(engine.state.metrics().generation_tokens, 0);
}

#[tokio::test]
async fn engines_in_one_process_share_nothing() {
    let (first, second) = (TestEngine::start(config()).await, TestEngine::start(config()).await);
    first.post("/v1/completions", r#"{"prompt":"x","max_tokens":2}"#).await;
    assert_eq!(first.state.metrics().generation_tokens, 2);
    assert_eq!(second.state.metrics().generation_tokens, 0);
    assert!(second.state.requests().is_empty());
}

#[tokio::test]
async fn the_page_is_filtered_by_sample_names() {
    let engine = TestEngine::start(config()).await;
    engine.post("/v1/completions", r#"{"prompt":"x","max_tokens":2}"#).await;
    let path = "/metrics?name[]=vllm:generation_tokens_total&name%5B%5D=vllm:num_requests_running";
    let answer = engine.get(path).await;
    assert_eq!(answer.headers["content-type"], "text/plain; version=1.0.0; charset=utf-8");
    let samples: Vec<&str> = answer.text.lines().filter(|line| !line.starts_with('#')).collect();
    assert_eq!(
        samples,
        [
            r#"vllm:num_requests_running{engine="0",model_name="tiny"} 0.0"#,
            r#"vllm:generation_tokens_total{engine="0",model_name="tiny"} 2.0"#
        ]
    );
}

#[rstest::rstest]
#[case(EngineConfig { models: vec![], ..config() }, "at least one model")]
#[case(EngineConfig { speed: 0.0, ..config() }, "speed")]
#[case(EngineConfig { max_model_len: Some(9000), ..config() }, "max_model_len")]
#[tokio::test]
async fn a_senseless_configuration_is_refused(#[case] config: EngineConfig, #[case] words: &str) {
    let error = Engine::bind(config).await.err().unwrap();
    assert!(matches!(error, EngineError::Config(text) if text.contains(words)), "{error}");
}
