//! What Envoy is told in dynamic metadata beside the destination: scores of the candidates, numbers made of usage.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use envoy_types::pb::google::protobuf::value::Kind;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::extproc::{CHAT, Stream, request_of, run};
use crate::kit::picker::{Picker, Setup};
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, pool};

const COST: &str = "x-gateway-inference-request-cost";
const SCORES: &str = "x-gateway-destination-endpoint-scores";

fn picker() -> Setup {
    let endpoints = (1..=3).map(|at| endpoint(&format!("e{at}"), &format!("10.0.0.{at}:8000")));
    Picker::with(&(pool() + &endpoints.collect::<String>()))
}

fn reporting(attributes: &str) -> Setup {
    picker().config(&format!(
        "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: openai-parser
- type: queue-scorer
- name: total-tokens-cost-reporter
  type: request-attribute-reporter
  parameters: {{attributes: [{attributes}]}}
schedulingProfiles:
- {{name: default, plugins: [{{pluginRef: openai-parser}}, {{pluginRef: queue-scorer}}]}}
"
    ))
}

/// The fields of a namespace of one reply.
fn fields<'a>(reply: &'a ProcessingResponse, namespace: &str) -> BTreeMap<&'a str, &'a Kind> {
    let namespaces = reply.dynamic_metadata.iter().filter_map(|metadata| metadata.fields.get(namespace));
    let structs = namespaces.filter_map(|value| match &value.kind {
        Some(Kind::StructValue(fields)) => Some(fields),
        _ => None,
    });
    structs
        .flat_map(|fields| &fields.fields)
        .map(|(name, value)| (&**name, value.kind.as_ref().unwrap()))
        .collect()
}

fn number(kind: Option<&&Kind>) -> Option<f64> {
    match kind {
        Some(Kind::NumberValue(number)) => Some(*number),
        _ => None,
    }
}

async fn answered(picker: &Picker, kind: &str, pieces: &[&str]) -> Replies {
    let body = json!({"model": "m", "stream": kind.contains("event"), "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": "hello"}]});
    let mut stream = Stream::of(picker, &request_of(CHAT, &[], &body.to_string())).await;
    stream.until_decided().await;
    let mut steps: Vec<Value> =
        vec![json!({"sh": {"headers": [[":status", "200"], ["content-type", kind]], "eos": false}})];
    let last = pieces.len() - 1;
    steps
        .extend(pieces.iter().enumerate().map(|(at, text)| json!({"sb": {"text": text, "eos": at == last}})));
    stream.respond(&steps).await
}

const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const USAGE: &str = r#""usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}"#;

#[rstest]
#[case::json(JSON, &[r#"{"choices":[],"usage":{"prompt_tokens":5,"comple"#, r#"tion_tokens":10}}"#], Some(10.0))]
#[case::streamed(
    EVENTS,
    &["data: {\"choices\":[{}]}\n\n", "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":10}}\n\n", "data: [DONE]\n\n"],
    Some(10.0)
)]
#[case::without_usage(JSON, &[r#"{"choices":[]}"#], None)]
#[tokio::test(flavor = "multi_thread")]
async fn a_number_made_of_usage_comes_with_the_last_reply_to_the_response_body(
    #[case] kind: &str,
    #[case] pieces: &[&str],
    #[case] expected: Option<f64>,
) {
    let attribute = format!(
        "{{key: {{name: {COST}}}, expression: usage.completion_tokens, condition: has(usage.completion_tokens)}}"
    );
    let picker = reporting(&attribute).start().await;
    let replies = answered(&picker, kind, pieces).await;
    let (last, before) = replies.all.split_last().unwrap();
    assert_eq!(replies.kinds().last(), Some(&"sb"));
    assert_eq!(number(fields(last, "envoy.lb").get(COST)), expected);
    assert!(before.iter().all(|reply| !fields(reply, "envoy.lb").contains_key(COST)));
}

#[tokio::test(flavor = "multi_thread")]
async fn several_numbers_go_to_their_namespaces_and_what_fails_is_counted() {
    let picker = reporting(
        "{key: {name: all, namespace: billing}, expression: usage.total_tokens}, \
         {key: {name: output_cost, namespace: pilotfish}, expression: usage.completion_tokens * 3.0}, \
         {key: {name: cached}, expression: usage.prompt_tokens_details.cached_tokens}, \
         {key: {name: never}, expression: usage.total_tokens, condition: usage.total_tokens > 100.0}",
    )
    .start()
    .await;
    let replies = answered(&picker, JSON, &[&format!("{{{USAGE}}}")]).await;
    let last = replies.all.last().unwrap();
    assert_eq!(number(fields(last, "billing").get("all")), Some(15.0));
    let own = fields(last, "pilotfish");
    assert_eq!((number(own.get("output_cost")), number(own.get("output_tokens"))), (Some(30.0), Some(10.0)));
    assert!(fields(last, "envoy.lb").is_empty(), "{last:?}");
    let failed = async |name| picker.metric("pilotfish_report_failures_total", &[("name", name)]).await;
    assert_eq!((failed("cached").await, failed("never").await, failed("all").await), (1.0, 0.0, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn scores_are_told_on_request_only() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let replies = run(&picker().start().await, &request_of(CHAT, &[], &body)).await;
    assert!(replies.destination().is_some());
    assert!(replies.all.iter().all(|reply| !fields(reply, "envoy.lb").contains_key(SCORES)));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_candidate_has_its_score_in_the_metadata() {
    let picker = picker().plugins(&["queue-scorer"]).switch("--emit-endpoint-scores").start().await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let replies = run(&picker, &request_of(CHAT, &[], &body)).await;
    let scores = replies.all.iter().find_map(|reply| match fields(reply, "envoy.lb").get(SCORES) {
        Some(Kind::StructValue(scores)) => Some(scores.clone()),
        _ => None,
    });
    let scores = scores.expect("scores");
    let mut endpoints: Vec<&str> = scores.fields.keys().map(String::as_str).collect();
    endpoints.sort_unstable();
    assert_eq!(endpoints, ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]);
    assert!(scores.fields.values().all(|score| matches!(score.kind, Some(Kind::NumberValue(_)))));
}
