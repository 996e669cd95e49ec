//! Control headers of clients move nothing and reach nobody.

use pilotfish::engine::{Fault, RecordedRequest};
use pilotfish::request::head::{CONTROL, HINTS, PRIVILEGED};
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup, Stand, endpoints, start_engines, with_keys};
use crate::kit::process::Process;
use crate::kit::resources::pool;

/// Some of our own prefix.
const OWN: [&str; 5] = [
    "x-pilotfish-identity",
    "x-pilotfish-decision",
    "x-pilotfish-reason",
    "x-pilotfish-pool",
    "X-Pilotfish-Anything",
];
const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Headers by which Envoy's own clients steer it: it heeds them from inside only, and nobody is inside.
const ENVOYS: [(&str, &str); 16] = [
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
    ("x-envoy-upstream-stream-duration-ms", "1"),
    ("x-envoy-expected-rq-timeout-ms", "1"),
    ("x-envoy-upstream-rq-timeout-alt-response", "1"),
    ("x-envoy-hedge-on-per-try-timeout", "true"),
    ("x-envoy-max-retries", "0"),
    ("x-envoy-retry-on", "5xx"),
    ("x-envoy-retry-grpc-on", "cancelled"),
    ("x-envoy-retriable-status-codes", "200"),
    ("x-envoy-retriable-header-names", "x-engine-name"),
    ("x-envoy-internal", "true"),
    ("x-envoy-force-trace", "1"),
    ("x-envoy-ip-tags", "tag"),
    ("x-envoy-original-url", "http://elsewhere/"),
    ("x-envoy-upstream-alt-stat-name", "name"),
];

fn chat() -> Value {
    json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}], "user": "bob"})
}

/// All but hints, which are the client's own to give.
fn controls() -> impl Iterator<Item = &'static str> {
    CONTROL.into_iter().chain(OWN).chain(PRIVILEGED)
}

fn forged(address: &str) -> Vec<(&'static str, &str)> {
    controls().map(|name| (name, address)).collect()
}

fn served_by(engines: &[SimulatedEngine]) -> Vec<std::sync::Arc<RecordedRequest>> {
    let received = engines.iter().flat_map(|engine| engine.state.requests());
    received.filter(|request| request.method == "POST").collect()
}

/// Only the picker's own destination may carry a control header's name.
fn check_received(request: &RecordedRequest, decoy: &str, destinations: Option<&[String]>) {
    for name in controls().chain(HINTS) {
        let values: Vec<&str> =
            request.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
        if let Some(known) = destinations.filter(|_| name == DESTINATION) {
            let [list] = values[..] else { panic!("one destination: {values:?}") };
            assert!(list.split(',').all(|address| known.iter().any(|k| k == address)), "{list}");
        } else {
            assert!(values.is_empty(), "{name} was forwarded: {values:?}");
        }
    }
    assert!(!request.headers.values().any(|value| value == decoy), "{:?}", request.headers);
}

/// What a header might bring whoever forges it: another engine, name, model or rank.
fn temptations<'a>(name: &str, decoy: &'a str) -> Vec<&'a str> {
    match name {
        "x-data-parallel-rank" | "x-vllm-priority" => vec!["1", "-100"],
        "x-pilotfish-identity" | "x-llm-d-inference-fairness-id" | "x-gateway-inference-fairness-id" => {
            vec!["bob", ""]
        }
        "x-pilotfish-pool" => vec!["default/other"],
        _ if PRIVILEGED.contains(&name) => vec!["other", "critical"],
        _ => vec![decoy, "[]"],
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_client_gains_nothing_by_any_control_header(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let identity = "header:x-pilotfish-identity,user";
    let envoy = (setup, &["auth/api-key.yaml"][..], |text: String| with_keys(&text));
    let stand = Stand::assembled(envoy, 2, &pool(), |picker| picker.flag("--identity", identity)).await;
    let decoy: SimulatedEngine = start_engines(1).await.remove(0);
    let address = decoy.address();
    let known: Vec<String> = stand.engines.iter().map(SimulatedEngine::address).collect();
    let mut sent = 0;
    for name in controls() {
        for value in temptations(name, &address) {
            let id = format!("{name}-{sent}");
            let headers = [("authorization", "Bearer sk-alice"), ("x-request-id", &id), (name, value)];
            let served = stand.client.chat_with(&headers, &chat()).await.served();
            sent += 1;
            let decision = stand.picker.decision(&id).await;
            let context = format!("{name}: {value}: {decision}");
            let leg = &decision["legs"][0];
            assert_eq!(decision["user"], "alice", "{context}");
            assert_eq!(decision["pool"], "default/pool", "{context}");
            assert!(["tiny", ""].contains(&decision["target_model"].as_str().unwrap_or("")), "{context}");
            assert_ne!(decision["decision"], address, "{context}");
            assert_eq!(leg["candidates_total"], 2, "a forged subset is no subset: {context}");
            let engine = stand.engine(&served).state.address().to_string();
            assert_eq!((&leg["served"], &leg["picked"][0]), (&json!(engine), &json!(engine)), "{context}");
        }
    }
    assert!(decoy.state.requests().is_empty(), "a forged destination was obeyed");
    let received = served_by(&stand.engines);
    assert_eq!(received.len(), sent);
    for request in &received {
        check_received(request, &address, Some(&known));
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        assert_eq!((&body["model"], &body["priority"]), (&json!("tiny"), &Value::Null));
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn all_of_them_at_once_are_neither_obeyed_nor_forwarded(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let identity = "header:x-pilotfish-identity";
    let stand = Stand::with(setup, 2, &pool(), |picker| picker.flag("--identity", identity)).await;
    let decoy: SimulatedEngine = start_engines(1).await.remove(0);
    let address = decoy.address();
    for at in 0..10 {
        let id = format!("forged-{at}");
        let mut headers = forged(&address);
        headers.extend([("x-request-id", &*id), ("x-session-id", "s"), ("x-session-token", "t")]);
        let served = stand.client.chat_with(&headers, &chat()).await.served();
        let decision = stand.picker.decision(&id).await;
        let engine = &stand.engine(&served).state;
        assert_eq!(decision["legs"][0]["served"], engine.address().to_string(), "{decision}");
        assert_eq!(decision["legs"][0]["picked"][0], engine.address().to_string(), "{decision}");
        assert_eq!(decision["legs"][0]["candidates_total"], 2, "a forged subset is no subset");
        assert_eq!(decision["user"], Value::Null, "without authentication nobody is anybody");
    }
    assert!(decoy.state.requests().is_empty(), "the forged destination was obeyed");
    let known: Vec<String> = stand.engines.iter().map(SimulatedEngine::address).collect();
    let received = served_by(&stand.engines);
    assert_eq!(received.len(), 10);
    for request in &received {
        check_received(request, &address, Some(&known));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_control_headers_stop_at_envoy_while_no_picker_lives() {
    let engines = start_engines(2).await;
    let decoy = start_engines(1).await.remove(0);
    let mut picker = Process::start(&(endpoints(&engines) + &pool()), "").await;
    let addresses: Vec<_> = engines.iter().map(|engine| engine.state.address()).collect();
    let gateway = Gateway::start(Setup::StaticFailOpen, &[picker.grpc], &addresses).await;
    picker.kill();
    for _ in 0..5 {
        let address = decoy.address();
        let mut headers = forged(&address);
        headers.extend(HINTS.map(|name| (name, "1")));
        gateway.client.chat_with(&headers, &chat()).await.served();
    }
    assert!(decoy.state.requests().is_empty(), "the forged destination was obeyed");
    let received = served_by(&engines);
    assert_eq!(received.len(), 5);
    for request in &received {
        check_received(request, &decoy.address(), None);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn clients_do_not_steer_envoy(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("10.0.0.1", "127.0.0.1")] claimed: &str,
) {
    let stand = Stand::of(setup, 1).await;
    stand.engines[0].state.set_fault(Fault::Slow(1000.0));
    let forged = [&ENVOYS[..], &[("x-forwarded-for", claimed)]].concat();
    stand.client.chat_with(&forged, &chat()).await.served();
    let received = served_by(&stand.engines);
    let [request] = &received[..] else { panic!("received once: {received:?}") };
    for (name, value) in ENVOYS {
        let came = request.header(name);
        assert_ne!(came, Some(value), "{name} was forwarded");
    }
}
