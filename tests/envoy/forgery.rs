//! Control headers of clients move nothing and reach nobody.

use pilotfish::engine::{Fault, RecordedRequest};
use rstest::rstest;
use serde_json::json;

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup, Stand, endpoints, start_engines};
use crate::kit::process::Process;
use crate::kit::resources::pool;

/// Every control header, and one of our own prefix.
const CONTROL: [&str; 14] = [
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-scores",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-data-parallel-rank",
    "x-kv-cache-source-host-port",
    "x-vllm-priority",
    "x-llm-d-request-dropped-reason",
    "x-pilotfish-decision",
    "X-Pilotfish-Anything",
];

fn chat() -> serde_json::Value {
    json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]})
}

fn forged(address: &str) -> Vec<(&'static str, &str)> {
    CONTROL.iter().map(|name| (*name, address)).collect()
}

/// Only the picker's own destination may carry a control header's name.
fn check_received(request: &RecordedRequest, decoy: &str, destinations: Option<&[String]>) {
    for name in CONTROL {
        let values: Vec<&str> =
            request.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
        if let Some(known) = destinations.filter(|_| name == "x-gateway-destination-endpoint") {
            let [list] = values[..] else { panic!("one destination: {values:?}") };
            assert!(list.split(',').all(|address| known.iter().any(|k| k == address)), "{list}");
        } else {
            assert!(values.is_empty(), "{name} was forwarded: {values:?}");
        }
    }
    assert!(!request.headers.values().any(|value| value == decoy), "{:?}", request.headers);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn forged_control_headers_are_neither_obeyed_nor_forwarded(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    let decoy: SimulatedEngine = start_engines(1).await.remove(0);
    let address = decoy.address();
    for at in 0..10 {
        let id = format!("forged-{at}");
        let mut headers = forged(&address);
        headers.push(("x-request-id", &id));
        let served = stand.client.chat_with(&headers, &chat()).await.served();
        let decision = stand.picker.decision(&id).await;
        let engine = &stand.engine(&served).state;
        assert_eq!(decision["legs"][0]["served"], engine.address().to_string(), "{decision}");
        assert_eq!(decision["legs"][0]["picked"][0], engine.address().to_string(), "{decision}");
        assert_eq!(decision["legs"][0]["candidates_total"], 2, "a forged subset is no subset");
    }
    assert!(decoy.state.requests().is_empty(), "the forged destination was obeyed");
    let known: Vec<String> = stand.engines.iter().map(SimulatedEngine::address).collect();
    let received = stand.engines.iter().flat_map(|engine| engine.state.requests());
    let received: Vec<_> = received.filter(|request| request.method == "POST").collect();
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
        gateway.client.chat_with(&forged(&decoy.address()), &chat()).await.served();
    }
    assert!(decoy.state.requests().is_empty(), "the forged destination was obeyed");
    let received = engines.iter().flat_map(|engine| engine.state.requests());
    let received: Vec<_> = received.filter(|request| request.method == "POST").collect();
    assert_eq!(received.len(), 5);
    for request in &received {
        check_received(request, &decoy.address(), None);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn clients_do_not_set_envoys_limits(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 1).await;
    stand.engines[0].state.set_fault(Fault::Slow(1000.0));
    let forged = [
        ("x-envoy-upstream-rq-timeout-ms", "1"),
        ("x-envoy-max-retries", "0"),
        ("x-forwarded-for", "10.0.0.1"),
    ];
    stand.client.chat_with(&forged, &chat()).await.served();
    let received = stand.engines[0].state.requests();
    let [request] = &received.iter().filter(|request| request.method == "POST").collect::<Vec<_>>()[..]
    else {
        panic!("received once: {received:?}")
    };
    for name in [forged[0].0, forged[1].0] {
        assert_eq!(request.header(name), None, "{name} was forwarded");
    }
}
