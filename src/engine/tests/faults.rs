//! Each fault as a client sees it.

use std::io::ErrorKind;

use axum::http::{Method, StatusCode};
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::{EngineConfig, Fault};
use super::support::{TestEngine, answer, config, hangs, stuck, within};

const REQUEST: &str = r#"{"prompt":"x","max_tokens":3}"#;
const STREAM: &str = r#"{"prompt":"x","max_tokens":8,"stream":true}"#;

async fn until_connect(engine: &TestEngine, accepted: bool) {
    let poll = async {
        while TcpStream::connect(engine.state.address()).await.is_ok() != accepted {
            tokio::task::yield_now().await;
        }
    };
    within(poll).await;
}

async fn serves(engine: &TestEngine) {
    assert_eq!(within(engine.post("/v1/completions", REQUEST)).await.status, StatusCode::OK);
}

#[rstest::rstest]
#[case("503", StatusCode::SERVICE_UNAVAILABLE)]
#[case("500", StatusCode::INTERNAL_SERVER_ERROR)]
#[tokio::test]
async fn a_status_fault_spares_health_and_ends_on_demand(#[case] fault: &str, #[case] status: StatusCode) {
    let engine = TestEngine::start(config()).await;
    let set = engine.post("/fault", json!({"fault": fault}).to_string()).await;
    assert_eq!(set.json(), json!({"faults": [fault]}));
    assert_eq!(engine.post("/v1/completions", REQUEST).await.status, status);
    assert_eq!(engine.get("/health").await.status, StatusCode::OK);
    let cleared = engine.post("/fault", json!({"fault": fault, "clear": true}).to_string()).await;
    assert_eq!(cleared.json(), json!({"faults": []}));
    serves(&engine).await;
}

#[tokio::test]
async fn a_refusing_engine_closes_its_port_until_cleared() {
    let engine = TestEngine::start(EngineConfig { faults: vec![Fault::Refuse(None)], ..config() }).await;
    until_connect(&engine, false).await;
    engine.state.clear_faults();
    until_connect(&engine, true).await;
    serves(&engine).await;
}

#[tokio::test]
async fn a_refusal_with_a_time_ends_by_itself() {
    let engine = TestEngine::start(config()).await;
    engine.state.set_fault("refuse:0.2".parse().unwrap());
    until_connect(&engine, false).await;
    until_connect(&engine, true).await;
    assert_eq!(engine.state.faults().iter().count(), 0);
}

#[rstest::rstest]
#[case(Fault::ResetAccept)]
#[case(Fault::ResetRequest)]
#[tokio::test]
async fn a_reset_is_a_reset(#[case] fault: Fault) {
    let engine = TestEngine::start(EngineConfig { faults: vec![fault], ..config() }).await;
    let mut stream = TcpStream::connect(engine.state.address()).await.unwrap();
    if fault == Fault::ResetRequest {
        let length = REQUEST.len();
        let request =
            format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{REQUEST}");
        stream.write_all(request.as_bytes()).await.unwrap();
    }
    let mut buffer = Vec::new();
    let kind = within(stream.read_to_end(&mut buffer)).await.unwrap_err().kind();
    assert_eq!(kind, ErrorKind::ConnectionReset);
    assert!(buffer.is_empty());
    assert_eq!(engine.state.requests().len(), usize::from(fault == Fault::ResetRequest));
}

#[tokio::test]
async fn a_stall_before_the_first_byte_lasts_until_cleared() {
    let engine = TestEngine::start(config()).await;
    engine.state.set_fault(Fault::StallBefore);
    let mut request = Box::pin(engine.send(Method::POST, "/v1/completions", &[], STREAM));
    hangs(&mut request).await;
    engine.state.clear_faults();
    assert_eq!(within(request).await.unwrap().status(), StatusCode::OK);
}

#[tokio::test]
async fn a_stall_inside_a_stream_comes_after_its_tokens() {
    let engine = TestEngine::start(config()).await;
    engine.state.set_fault(Fault::StallInStream(2));
    let mut response = engine.send(Method::POST, "/v1/completions", &[], STREAM).await.unwrap();
    let mut text = String::new();
    while text.matches("data: {").count() < 2 {
        let frame = within(response.body_mut().frame()).await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(frame.data_ref().unwrap()).unwrap());
    }
    let mut frame = response.body_mut().frame();
    hangs(&mut frame).await;
    engine.state.clear_faults();
    let rest = within(answer(response)).await.text;
    assert_eq!(rest.matches("data: {").count(), 6);
    assert!(rest.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_cut_stream_ends_in_an_error() {
    let engine = TestEngine::start(config()).await;
    engine.state.set_fault(Fault::CutStream(2));
    let response = engine.send(Method::POST, "/v1/completions", &[], STREAM).await.unwrap();
    assert!(within(response.into_body().collect()).await.is_err());
}

#[tokio::test]
async fn stalled_metrics_leave_inference_alone() {
    let engine = TestEngine::start(config()).await;
    engine.state.set_fault(Fault::StallMetrics);
    let mut page = Box::pin(engine.get("/metrics"));
    hangs(&mut page).await;
    serves(&engine).await;
    engine.state.clear_faults();
    within(page).await;
}

#[tokio::test]
async fn a_sleeping_engine_hangs_without_a_trace_and_serves_after_waking() {
    let engine = TestEngine::start(config()).await;
    assert_eq!(engine.post("/sleep?level=1", "").await.status, StatusCode::OK);
    let mut request = Box::pin(engine.post("/v1/completions", REQUEST));
    hangs(&mut request).await;
    assert_eq!(engine.get("/health").await.status, StatusCode::OK);
    assert_eq!(engine.get("/is_sleeping").await.json(), json!({"is_sleeping": true}));
    let page = engine.get("/metrics").await.text;
    for line in [
        r#"vllm:num_requests_running{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:num_requests_waiting{engine="0",model_name="tiny"} 0.0"#,
        r#"vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="awake"} 0.0"#,
        r#"vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_offloaded"} 1.0"#,
    ] {
        assert!(page.lines().any(|other| other == line), "{line}");
    }
    engine.post("/wake_up", "").await;
    assert_eq!(within(request).await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_engine_that_falls_asleep_shows_no_load_though_its_requests_stay() {
    let engine = TestEngine::start(stuck()).await;
    let mut request = Box::pin(engine.post("/v1/completions", REQUEST));
    hangs(&mut request).await;
    assert_eq!(engine.state.metrics().num_requests_running, 1);
    engine.state.set_fault(Fault::Sleep(2));
    let metrics = engine.state.metrics();
    assert_eq!((metrics.num_requests_running, metrics.sleep_level), (0, 2));
    assert!(metrics.kv_cache_usage.abs() < 1e-9);
    engine.state.clear_faults();
    assert_eq!(engine.state.metrics().num_requests_running, 1);
}

#[tokio::test]
async fn a_silent_shutdown_closes_the_port_and_leaves_streams_open() {
    let engine = TestEngine::start(EngineConfig { speed: 1.0, ..config() }).await;
    let request = json!({"prompt": "x", "max_tokens": 1000, "stream": true}).to_string();
    let mut response = engine.send(Method::POST, "/v1/completions", &[], request).await.unwrap();
    within(response.body_mut().frame()).await.unwrap().unwrap();
    engine.state.set_fault(Fault::SilentShutdown);
    until_connect(&engine, false).await;
    let silence = async {
        // Tokens that were already on their way may still arrive.
        while tokio::time::timeout(std::time::Duration::from_millis(200), response.body_mut().frame())
            .await
            .map(|frame| frame.expect("the stream must not end").expect("the stream must not fail"))
            .is_ok()
        {}
    };
    within(silence).await;
    assert!(TcpStream::connect(engine.state.address()).await.is_err());
}

#[tokio::test]
async fn a_dead_engine_ends_its_streams_with_an_error_event() {
    let engine = TestEngine::start(EngineConfig { speed: 1.0, ..config() }).await;
    let request = json!({"prompt": "x", "max_tokens": 1000, "stream": true}).to_string();
    let response = engine.send(Method::POST, "/v1/completions", &[], request).await.unwrap();
    engine.until(|metrics| metrics.generation_tokens > 0).await;
    engine.state.set_fault(Fault::Die);
    let text = within(answer(response)).await.text;
    assert!(text.contains(r#""type":"InternalServerError","param":null,"code":500}}"#));
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(engine.get("/health").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(engine.post("/v1/completions", REQUEST).await.status, StatusCode::INTERNAL_SERVER_ERROR);
}
