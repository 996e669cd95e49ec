//! Token limits through Envoy: what its rate-limit filter asks, and what becomes of the answers.

use std::net::SocketAddr;
use std::path::PathBuf;

use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::envoy::{Setup, Stand};
use crate::kit::eventually::eventually;
use crate::kit::rate_limits::{Asked, RateLimits, Verdict};
use crate::kit::resources::pool;

fn chat(tokens: u32) -> Value {
    json!({"model": "tiny", "max_tokens": tokens, "messages": [{"role": "user", "content": "hello"}], "user": "alice"})
}

/// A piece that brings the cluster of a rate-limit service.
fn service(dir: &TempDir, address: SocketAddr) -> PathBuf {
    let endpoint =
        format!("{{socket_address: {{address: {}, port_value: {}}}}}", address.ip(), address.port());
    let text = format!(
        "clusters:
- name: counted
  type: STATIC
  connect_timeout: 1s
  typed_extension_protocol_options:
    envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
      \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
      explicit_http_config: {{http2_protocol_options: {{}}}}
  load_assignment: {{cluster_name: counted, endpoints: [{{lb_endpoints: [{{endpoint: {{address: {endpoint}}}}}]}}]}}
"
    );
    let file = dir.path().join("service.yaml");
    std::fs::write(&file, text).unwrap();
    file
}

/// A piece that says of every request that it has the limit `default/route`.
fn limited(dir: &TempDir) -> PathBuf {
    let text = "before_picker:
- name: envoy.filters.http.set_metadata
  typed_config:
    \"@type\": type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config
    metadata: [{metadata_namespace: pilotfish, value: {limit: default/route, limit_output: default/route}}]
";
    let file = dir.path().join("limited.yaml");
    std::fs::write(&file, text).unwrap();
    file
}

/// `limits.yaml` asking another service than the picker.
fn elsewhere(text: &str) -> String {
    let (before, after) = text.split_once("rate_limit_service:").expect("the piece");
    let after = after.replacen("cluster_name: pilotfish", "cluster_name: counted", 1);
    format!("{before}rate_limit_service:{after}")
}

async fn stand(setup: Setup, limits: &RateLimits, with_limit: bool) -> Stand {
    let dir = TempDir::new().unwrap();
    let (service, limited) = (service(&dir, limits.address), limited(&dir));
    let mut pieces = vec!["limits.yaml", service.to_str().unwrap()];
    pieces.extend(with_limit.then(|| limited.to_str().unwrap()));
    let envoy = (setup, &pieces[..], |text: String| elsewhere(&text));
    Stand::assembled(envoy, 1, &pool(), |picker| {
        picker.flag("--identity", "user").flag("--usage-injection", "always")
    })
    .await
}

fn calls(prompt: u64, output: u64, user: &str) -> Vec<Asked> {
    let entries = |kind| {
        let user = if user.is_empty() { String::new() } else { format!("user={user} ") };
        format!("pilotfish limit=default/route {user}tokens={kind}")
    };
    vec![
        vec![(entries("input"), Some(prompt)), (entries("output"), Some(0))],
        vec![(entries("output"), Some(output))],
    ]
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn envoy_asks_before_and_after_for_requests_with_a_limit(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let limits = RateLimits::start().await;
    let stand = stand(setup, &limits, true).await;
    for (stream, user) in [(false, "user:alice"), (true, "user:alice"), (true, "")] {
        let before = limits.asked().len();
        let id = format!("asked-{before}");
        let mut request = chat(5);
        request["stream"] = json!(stream);
        if user.is_empty() {
            request["stream_options"] = json!({"include_usage": false});
            request.as_object_mut().unwrap().remove("user");
        }
        let answer = stand.client.chat_with(&[("x-request-id", &id)], &request).await;
        answer.served();
        assert_eq!(answer.header("x-ratelimit-remaining"), Some("7"), "what the service says");
        let decision = stand.picker.decision(&id).await;
        assert_eq!(decision["usage"]["completion"], 5);
        eventually("the call after the response", async || {
            (limits.asked().len() == before + 2).then_some(())
        })
        .await;
        let prompt = decision["prompt_tokens"].as_u64().unwrap();
        assert!(prompt > 0);
        assert_eq!(limits.asked()[before..], calls(prompt, 5, user));
    }
}

/// A limit of this door that the manual names: nobody can tell Envoy any more.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_before_the_end_spends_no_output(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let limits = RateLimits::start().await;
    let stand = stand(setup, &limits, true).await;
    stand.engines[0].state.set_fault(Fault::StallInStream(3));
    let mut request = chat(9);
    request["stream"] = json!(true);
    let mut leaves = stand.client.stream(&request).await;
    leaves.events(3).await;
    drop(leaves);
    stand.picker.until_idle("the client has left").await;
    stand.engines[0].state.clear_faults();
    stand.client.chat(&chat(5)).await.served();
    eventually("the call after the next", async || (limits.asked().len() >= 3).then_some(())).await;
    let calls = limits.asked();
    let hits: Vec<Option<u64>> = calls.iter().filter_map(|call| call.last()).map(|(_, hits)| *hits).collect();
    assert_eq!(hits, [Some(0), Some(0), Some(5)], "{calls:?}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_limit_cost_no_call(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let limits = RateLimits::start().await;
    let stand = stand(setup, &limits, false).await;
    limits.answer(Verdict::Limited);
    for _ in 0..3 {
        let answer = stand.client.chat(&chat(2)).await;
        answer.served();
        for name in ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"] {
            assert_eq!(answer.header(name), None);
        }
    }
    stand.picker.until_idle("all are answered").await;
    assert_eq!(limits.asked(), Vec::<Asked>::new());
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_is_beyond_a_limit_reaches_no_engine_and_who_does_not_answer_limits_nobody(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let limits = RateLimits::start().await;
    let stand = stand(setup, &limits, true).await;
    limits.answer(Verdict::Limited);
    let refused = stand.client.chat(&chat(2)).await;
    assert_eq!((refused.status, refused.header("x-ratelimit-remaining")), (429, Some("7")));
    assert_eq!(refused.header("x-envoy-ratelimited"), None);
    stand.picker.until_idle("the booking of a refused request").await;
    assert_eq!(
        stand.engines[0].state.requests().iter().filter(|request| request.method == "POST").count(),
        0
    );
    limits.answer(Verdict::Hang);
    stand.client.chat(&chat(2)).await.served();
    stand.picker.until_idle("all are answered").await;
}

const COSTS: &str = "apiVersion: pilotfish.dev/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: least-request
- type: request-attribute-reporter
  parameters:
    attributes:
    - key: {namespace: pilotfish.cost, name: tokens}
      expression: 3.0 * usage.completion_tokens + usage.prompt_tokens
schedulingProfiles:
- {name: default, plugins: [{pluginRef: least-request}]}
";

/// As Envoy Gateway writes a BackendTrafficPolicy of docs/gateways/envoy-gateway-limits.yaml.
const COST_LIMIT: &str = "after_picker:
- name: envoy.filters.http.ratelimit
  typed_config:
    \"@type\": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
    domain: gateway
    rate_limit_service: {grpc_service: {envoy_grpc: {cluster_name: counted}}, transport_api_version: V3}
    rate_limits:
    - actions: [{generic_key: {descriptor_key: rule, descriptor_value: cost}}]
      hits_addend: {number: 0}
    - actions: [{generic_key: {descriptor_key: rule, descriptor_value: cost}}]
      hits_addend: {format: \"%DYNAMIC_METADATA(pilotfish.cost:tokens)%\"}
      apply_on_stream_done: true
";

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_cost_of_ones_own_is_taken_from_a_gateways_budget(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let (limits, dir) = (RateLimits::start().await, TempDir::new().unwrap());
    let (service, cost) = (service(&dir, limits.address), dir.path().join("cost.yaml"));
    std::fs::write(&cost, COST_LIMIT).unwrap();
    let writable = |text: String| {
        let own = "receiving_namespaces: {untyped: [envoy.lb, pilotfish]}";
        assert_eq!(text.matches(own).count(), 1);
        text.replace(own, "receiving_namespaces: {untyped: [envoy.lb, pilotfish, pilotfish.cost]}")
    };
    let pieces = [cost.to_str().unwrap(), service.to_str().unwrap()];
    let stand = Stand::assembled((setup, &pieces, writable), 1, &pool(), |picker| picker.config(COSTS)).await;
    stand.client.chat_with(&[("x-request-id", "cost")], &chat(5)).await.served();
    let usage = stand.picker.decision("cost").await["usage"].clone();
    let cost = 3 * usage["completion"].as_u64().unwrap() + usage["prompt"].as_u64().unwrap();
    eventually("the call after the response", async || (limits.asked().len() == 2).then_some(())).await;
    let call = |hits| vec![("gateway rule=cost".to_owned(), Some(hits))];
    assert_eq!(limits.asked(), [call(0), call(cost)]);
}
