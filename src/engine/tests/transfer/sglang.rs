//! SGLang's bootstrap rooms.

use axum::http::{Method, StatusCode};
use serde_json::{Value, json};

use super::super::super::{EngineConfig, EngineRole, KvConnector};
use super::super::support::{Answer, TestEngine, hangs, within};
use super::{HASTY, PATIENT, PROMPT, Pair, complete, engine, error, nothing_pinned, with};

async fn pair(speed: f64) -> Pair {
    Pair::start(KvConnector::Sglang, speed).await
}

/// The members that a router adds for one prompt.
fn members(prefill: &TestEngine, room: i64) -> Value {
    let bootstrap = prefill.state.bootstrap_address().unwrap();
    json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": bootstrap.port(), "bootstrap_room": room})
}

/// The same request at both engines, as SGLang's routers send it.
async fn both(pair: &Pair, path: &str, body: &str) -> (Answer, Answer) {
    let (prefill, decode) =
        (pair.prefill.post(path, body.to_owned()), pair.decode.post(path, body.to_owned()));
    within(futures::future::join(prefill, decode)).await
}

#[rstest::rstest]
#[case("/v1/completions", json!({"prompt": PROMPT, "max_tokens": 4}), "/usage/completion_tokens")]
#[case("/v1/completions", json!({"prompt": PROMPT, "max_tokens": 4, "n": 2}), "/usage/completion_tokens")]
#[case("/v1/chat/completions", json!({"messages": [{"content": PROMPT}], "max_tokens": 4}), "/usage/completion_tokens")]
#[case("/generate", json!({"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}), "/meta_info/completion_tokens")]
#[tokio::test]
async fn both_engines_answer_and_the_prefill_with_one_token(
    #[case] path: &str,
    #[case] request: Value,
    #[case] tokens_at: &str,
) {
    let pair = pair(PATIENT).await;
    let choices = request["n"].as_u64().unwrap_or(1);
    let (prefilled, decoded) = both(&pair, path, &with(&request, &members(&pair.prefill, 5))).await;
    assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK), "{}", prefilled.text);
    assert_eq!(prefilled.json().pointer(tokens_at).unwrap(), choices);
    assert_eq!(decoded.json().pointer(tokens_at).unwrap(), 4 * choices);
    assert_eq!(pair.decode.state.transferred(), 1);
    assert!(pair.decode.state.metrics().external_cache_hits > 0);
    nothing_pinned(&pair.prefill).await;
}

#[tokio::test]
async fn streams_meet_too() {
    let pair = pair(PATIENT).await;
    let request = json!({"prompt": PROMPT, "max_tokens": 4, "stream": true});
    let (prefilled, decoded) =
        both(&pair, "/v1/completions", &with(&request, &members(&pair.prefill, 5))).await;
    assert_eq!(prefilled.text.matches("data: {").count(), 1);
    assert_eq!(decoded.text.matches("data: {").count(), 4);
    assert_eq!(pair.decode.state.transferred(), 1);
}

#[tokio::test]
async fn a_prefill_answers_once_it_was_fetched_and_its_room_is_free_again() {
    let pair = pair(PATIENT).await;
    let body = with(&json!({"prompt": PROMPT, "max_tokens": 4}), &members(&pair.prefill, i64::MAX));
    for _ in 0..2 {
        let mut prefill = Box::pin(pair.prefill.post("/v1/completions", body.clone()));
        hangs(&mut prefill).await;
        assert_eq!(pair.prefill.state.pinned(), 1);
        assert_eq!(complete(&pair.decode, body.clone()).await.status, StatusCode::OK);
        assert_eq!(within(prefill).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_batch_has_a_room_for_each_prompt() {
    let pair = pair(PATIENT).await;
    let port = pair.prefill.state.bootstrap_address().unwrap().port();
    let request = json!({"prompt": ["one", PROMPT], "max_tokens": 2, "bootstrap_room": [1, 2]});
    for members in [
        json!({"bootstrap_host": ["127.0.0.1", "127.0.0.1"], "bootstrap_port": [port, port]}),
        json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": port}),
    ] {
        let (prefilled, decoded) = both(&pair, "/v1/completions", &with(&request, &members)).await;
        assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK), "{}", decoded.text);
    }
    assert_eq!(pair.decode.state.transferred(), 4);
    let one = json!({"prompt": ["one"], "max_tokens": 1, "bootstrap_room": [3]});
    let (prefilled, decoded) = both(
        &pair,
        "/v1/completions",
        &with(&one, &json!({"bootstrap_host": ["127.0.0.1"], "bootstrap_port": [port]})),
    )
    .await;
    assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK));
}

#[rstest::rstest]
#[case(json!({"bootstrap_room": null}), "bootstrap_room")]
#[case(json!({"bootstrap_room": "7"}), "bootstrap_room")]
#[case(json!({"bootstrap_room": -1}), "bootstrap_room")]
#[case(json!({"bootstrap_room": 1.5}), "bootstrap_room")]
#[case(json!({"bootstrap_room": 9_223_372_036_854_775_808_u64}), "bootstrap_room")]
#[case(json!({"bootstrap_room": [7]}), "bootstrap_room")]
#[case(json!({"prompt": ["a", "b"], "bootstrap_room": 7}), "bootstrap_room")]
#[case(json!({"prompt": ["a", "b"], "bootstrap_room": [7]}), "bootstrap_room")]
#[case(json!({"prompt": ["a", "b"], "bootstrap_room": [7, null]}), "bootstrap_room")]
#[case(json!({"n": 2, "bootstrap_room": [7, 8]}), "bootstrap_room")]
#[case(json!({"bootstrap_host": 7}), "bootstrap_host")]
#[case(json!({"bootstrap_host": ["127.0.0.1"]}), "bootstrap_host")]
#[case(json!({"bootstrap_port": "8998"}), "bootstrap_port")]
#[case(json!({"bootstrap_port": 70_000}), "bootstrap_port")]
#[tokio::test]
async fn a_member_of_another_type_is_named(#[case] members: Value, #[case] name: &str) {
    let pair = pair(PATIENT).await;
    let mut request: Value = json!({"prompt": PROMPT, "max_tokens": 1});
    for (member, value) in self::members(&pair.prefill, 7).as_object().unwrap() {
        request[member] = value.clone();
    }
    let body = with(&request, &members);
    for engine in [&pair.prefill, &pair.decode] {
        let message = error(&complete(engine, body.clone()).await, StatusCode::BAD_REQUEST);
        assert!(message.starts_with(name), "{message}");
    }
}

#[tokio::test]
async fn only_the_decode_side_needs_the_host() {
    let pair = pair(HASTY).await;
    let body = json!({"prompt": PROMPT, "max_tokens": 1, "bootstrap_room": 7}).to_string();
    let message = error(&complete(&pair.decode, body.clone()).await, StatusCode::BAD_REQUEST);
    assert!(message.starts_with("bootstrap_host"), "{message}");
    let waited = error(&complete(&pair.prefill, body).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert!(waited.contains("not fetched"), "{waited}");
}

#[tokio::test]
async fn a_room_in_use_is_an_error() {
    let pair = pair(PATIENT).await;
    let body = with(&json!({"prompt": PROMPT, "max_tokens": 1}), &members(&pair.prefill, 7));
    for engine in [&pair.prefill, &pair.decode] {
        let mut first = Box::pin(engine.post("/v1/completions", body.clone()));
        hangs(&mut first).await;
        let message = error(&complete(engine, body.clone()).await, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(message.contains("in use"), "{message}");
    }
}

#[tokio::test]
async fn either_side_fails_when_the_other_does_not_come() {
    let pair = pair(HASTY).await;
    let body = with(&json!({"prompt": PROMPT, "max_tokens": 1}), &members(&pair.prefill, 7));
    for engine in [&pair.prefill, &pair.decode] {
        error(&complete(engine, body.clone()).await, StatusCode::INTERNAL_SERVER_ERROR);
    }
    nothing_pinned(&pair.prefill).await;
    assert_eq!(pair.decode.state.transferred(), 0);
    let unreachable = with(
        &json!({"prompt": PROMPT, "max_tokens": 1, "stream": true}),
        &json!({"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}),
    );
    let answer = complete(&pair.decode, unreachable).await;
    assert!(answer.text.contains(r#""code":500"#) && answer.text.ends_with("[DONE]\n\n"), "{}", answer.text);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_room_along() {
    let pair = pair(PATIENT).await;
    let body = with(&json!({"prompt": PROMPT, "max_tokens": 1}), &members(&pair.prefill, 7));
    let request = pair.prefill.send(Method::POST, "/v1/completions", &[], body.clone());
    let mut request = Box::pin(request);
    hangs(&mut request).await;
    assert_eq!(pair.prefill.state.pinned(), 1);
    drop(request);
    nothing_pinned(&pair.prefill).await;
    let (prefilled, decoded) = both(&pair, "/v1/completions", &body).await;
    assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK));
}

#[tokio::test]
async fn a_room_belongs_to_a_rank() {
    let config = engine(KvConnector::Sglang, EngineRole::Prefill, HASTY);
    let prefill = TestEngine::start(EngineConfig { data_parallel: Some((1, 4)), ..config }).await;
    let ask = async |room: i64| {
        let body = json!({"prompt": PROMPT, "max_tokens": 1, "bootstrap_room": room}).to_string();
        error(&complete(&prefill, body).await, StatusCode::INTERNAL_SERVER_ERROR)
    };
    assert!(ask(6).await.contains("rank 1 of 4"));
    assert!(ask(5).await.contains("not fetched"));
}

#[tokio::test]
async fn an_engine_of_both_roles_needs_no_room_but_checks_it() {
    let engine = TestEngine::start(engine(KvConnector::Sglang, EngineRole::Both, PATIENT)).await;
    for room in [json!(null), json!(7)] {
        let body = json!({"prompt": PROMPT, "max_tokens": 3, "bootstrap_room": room}).to_string();
        assert_eq!(complete(&engine, body).await.json()["usage"]["completion_tokens"], 3);
    }
    let body = json!({"prompt": PROMPT, "bootstrap_room": "x"}).to_string();
    error(&complete(&engine, body).await, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_port_is_8998_when_it_is_not_told() {
    let decode = TestEngine::start(engine(KvConnector::Sglang, EngineRole::Decode, PATIENT)).await;
    let config = engine(KvConnector::Sglang, EngineRole::Prefill, PATIENT);
    // An address of this process alone, so that nothing else has this port.
    let [_, a, b, c] = std::process::id().to_be_bytes();
    let listen = std::net::SocketAddr::from(([127, 64 | a & 63, b, c], 0));
    let prefill = TestEngine::start(EngineConfig { listen, bootstrap: Some(8998), ..config }).await;
    let pair = Pair { prefill, decode };
    let host = listen.ip().to_string();
    let request = json!({"prompt": PROMPT, "max_tokens": 1, "bootstrap_host": host});
    for members in [json!({"bootstrap_room": 1}), json!({"bootstrap_room": 2, "bootstrap_port": null})] {
        let (prefilled, decoded) = both(&pair, "/v1/completions", &with(&request, &members)).await;
        assert_eq!((prefilled.status, decoded.status), (StatusCode::OK, StatusCode::OK), "{}", decoded.text);
    }
}
