//! Fields, their order and their types, against captures of vLLM 0.32.0.

use std::fmt;

use axum::http::StatusCode;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::support::{TestEngine, config};

/// The shape of a JSON text: keys in order, types instead of values, only the first element of an array.
struct Shape(String);

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Shape, E> {
        Ok(Shape(value.to_string()))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Shape, E> {
        Ok(Shape("integer".into()))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Shape, E> {
        Ok(Shape("float".into()))
    }

    fn visit_str<E>(self, _: &str) -> Result<Shape, E> {
        Ok(Shape("string".into()))
    }

    fn visit_unit<E>(self) -> Result<Shape, E> {
        Ok(Shape("null".into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        let first = seq.next_element::<Shape>()?;
        while seq.next_element::<Shape>()?.is_some() {}
        Ok(Shape(format!("[{}]", first.map(|shape| shape.0).unwrap_or_default())))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
        let mut fields = Vec::new();
        while let Some((key, shape)) = map.next_entry::<String, Shape>()? {
            fields.push(format!("{key}: {}", shape.0));
        }
        Ok(Shape(format!("{{{}}}", fields.join(", "))))
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShapeVisitor)
    }
}

fn shape(json: &str) -> String {
    serde_json::from_str::<Shape>(json).unwrap_or_else(|error| panic!("{error}: {json}")).0
}

/// Shapes of the events of a stream; equal neighbours, which are tokens, count once.
fn stream_shape(text: &str) -> Vec<String> {
    let mut shapes: Vec<String> = text
        .lines()
        .filter(|line| !line.is_empty())
        .map(|line| match line.strip_prefix("data: ") {
            Some(data) if data.starts_with('{') => shape(data),
            _ => line.to_owned(),
        })
        .collect();
    // An event of the Responses and Messages APIs is two lines: join them, so that neighbours can be compared.
    if text.starts_with("event:") {
        shapes = shapes.chunks(2).map(|pair| pair.join(" ")).collect();
    }
    shapes.dedup();
    shapes
}

/// The body in a capture, after the command line and the head.
fn body(capture: &str) -> String {
    let lines: Vec<&str> = capture.lines().collect();
    let start = lines
        .iter()
        .position(|line| line.starts_with('{') || line.starts_with("data:") || line.starts_with("event:"));
    lines[start.unwrap()..].join("\n")
}

fn capture(name: &str) -> String {
    let path = format!("tests/data/vllm/{name}.txt");
    body(&std::fs::read_to_string(path).unwrap())
}

#[rstest::rstest]
#[case(
    "comp1",
    "/v1/completions",
    r#"{"model":"tiny","prompt":"The quick brown fox","max_tokens":8,"temperature":0}"#
)]
#[case(
    "chat1",
    "/v1/chat/completions",
    r#"{"model":"tiny","messages":[{"role":"user","content":"Tell me."}],"max_tokens":6}"#
)]
#[case(
    "messages1",
    "/v1/messages",
    r#"{"model":"tiny","system":"s","messages":[{"role":"user","content":"x"}],"max_tokens":6}"#
)]
#[case(
    "messages_count",
    "/v1/messages/count_tokens",
    r#"{"model":"tiny","messages":[{"role":"user","content":"x"}]}"#
)]
#[case(
    "responses1",
    "/v1/responses",
    r#"{"model":"tiny","input":"x","max_output_tokens":6,"temperature":0}"#
)]
#[case(
    "generate_tokens",
    "/inference/v1/generate",
    r#"{"model":"tiny","token_ids":[1,2],"sampling_params":{"max_tokens":3}}"#
)]
#[case("tok_completion", "/tokenize", r#"{"model":"tiny","prompt":"Hello world"}"#)]
#[tokio::test]
async fn whole_answers_have_the_captured_fields(
    #[case] name: &str,
    #[case] path: &str,
    #[case] request: &'static str,
) {
    let engine = TestEngine::start(config()).await;
    let answer = engine.post(path, request).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(shape(&answer.text), shape(&capture(name)));
}

#[rstest::rstest]
#[case("comp3_stream", "/v1/completions", r#"{"prompt":"x","max_tokens":4,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#)]
#[case("chat2_stream", "/v1/chat/completions", r#"{"messages":[{"content":"x"}],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true,"continuous_usage_stats":true}}"#)]
#[case(
    "chat_stream_plain",
    "/v1/chat/completions",
    r#"{"messages":[{"content":"x"}],"max_tokens":2,"stream":true}"#
)]
#[case(
    "chat_stream_include_usage",
    "/v1/chat/completions",
    r#"{"messages":[{"content":"x"}],"max_tokens":2,"stream":true,"stream_options":{"include_usage":true}}"#
)]
#[case(
    "messages2_stream",
    "/v1/messages",
    r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":4,"stream":true}"#
)]
#[case(
    "responses2_stream",
    "/v1/responses",
    r#"{"instructions":"Be brief.","input":"x","max_output_tokens":4,"temperature":0,"stream":true}"#
)]
#[case(
    "generate_stream",
    "/inference/v1/generate",
    r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":3},"stream":true}"#
)]
#[tokio::test]
async fn streams_have_the_captured_events(
    #[case] name: &str,
    #[case] path: &str,
    #[case] request: &'static str,
) {
    let engine = TestEngine::start(config()).await;
    let answer = engine.post(path, request).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers["content-type"], "text/event-stream; charset=utf-8");
    assert_eq!(stream_shape(&answer.text), stream_shape(&capture(name)));
}

#[tokio::test]
async fn models_are_listed_as_captured() {
    let engine = TestEngine::start(config()).await;
    let answer = engine.get("/v1/models").await;
    let listed = answer.json();
    let captured: serde_json::Value = serde_json::from_str(&capture("models")).unwrap();
    assert_eq!(shape(&answer.text), shape(&capture("models")));
    for field in ["id", "parent", "owned_by"] {
        let column = |value: &serde_json::Value| -> Vec<serde_json::Value> {
            value["data"].as_array().unwrap().iter().map(|model| model[field].clone()).collect()
        };
        assert_eq!(column(&listed), column(&captured));
    }
}

#[rstest::rstest]
#[case("err_badjson", 400, r#"{"model":"#)]
#[case("err_badmodel", 404, r#"{"model":"nope","prompt":"x"}"#)]
#[case("err_toolong", 400, r#"{"model":"tiny","prompt":"x","max_tokens":100000}"#)]
#[tokio::test]
async fn errors_are_the_captured_ones_word_for_word(
    #[case] name: &str,
    #[case] status: u16,
    #[case] request: &'static str,
) {
    let engine =
        TestEngine::start(super::super::EngineConfig { max_model_len: Some(4096), ..config() }).await;
    let answer = engine.post("/v1/completions", request).await;
    assert_eq!(answer.status.as_u16(), status);
    assert_eq!(answer.text, capture(name));
}

#[tokio::test]
async fn a_full_queue_answers_as_captured_before_a_stream_begins() {
    let engine = TestEngine::start(super::super::EngineConfig { max_queued: Some(0), ..config() }).await;
    let answer = engine.post("/v1/completions", r#"{"prompt":"x","stream":true}"#).await;
    assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.text, capture("err_503_admission"));
    assert_eq!(engine.state.metrics().rejected_requests, 1);
}
