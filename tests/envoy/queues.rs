//! Requests that wait for their turn while Envoy holds them.

use std::time::Duration;

use rstest::rstest;
use serde_json::json;

use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines};
use crate::kit::eventually::eventually;
use crate::kit::extproc::CHAT;
use crate::kit::http::whole;
use crate::kit::picker::Picker;
use crate::kit::resources::pool;

/// One request at a time.
const ONE: &str =
    "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nqueue: {maxConcurrent: 1}\n";

fn chat(tokens: u32) -> serde_json::Value {
    json!({"model": "tiny", "max_tokens": tokens, "stream": true,
           "messages": [{"role": "user", "content": "a prompt"}]})
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_wait_for_longer_than_envoys_message_timeout(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let engines = start_engines(1).await;
    let picker = Picker::with(&(endpoints(&engines) + &pool())).config(ONE).start().await;
    picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
    let addresses = [engines[0].state.address()];
    let timeout = "message_timeout: 0.2s";
    let gateway = Gateway::adjusted(setup, &[picker.app.bound.grpc], &addresses, |text| {
        text.replace(" message_timeout: 5s", &format!(" {timeout}"))
    })
    .await;
    // A generation of about 0.6 s, and one behind it.
    let mut first = gateway.client.stream(&chat(6_000)).await;
    first.event().await;
    let behind = [("x-request-id", "behind")];
    let short = chat(1);
    let second = gateway.client.chat_with(&behind, &short);
    let (events, second) = futures::join!(first.all_events(), second);
    assert!(events.len() > 100);
    assert_eq!(second.status, 200, "{:?}", second.body);
    let decision = picker.decision("behind").await;
    let waited = Duration::from_micros(decision["stages_us"]["queue"].as_u64().unwrap());
    assert!(waited > Duration::from_millis(200), "{waited:?}: this test shows nothing");
    assert_eq!(decision["outcome"], "complete");
    assert!(
        decision["stages_us"]["decision"].as_u64().unwrap() < 200_000,
        "the wait is no part of the decision"
    );
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_while_waiting_leaves_no_trace(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let engines = start_engines(1).await;
    let picker = Picker::with(&(endpoints(&engines) + &pool())).config(ONE).start().await;
    picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
    let gateway = Gateway::start(setup, &[picker.app.bound.grpc], &[engines[0].state.address()]).await;
    let mut first = gateway.client.stream(&chat(30_000)).await;
    first.event().await;
    let body = chat(1).to_string();
    let waiting = (0..20).map(|_| {
        let (client, body) = (gateway.client.clone(), body.clone());
        tokio::spawn(async move { client.open("POST", CHAT, &[], whole(body)).await.map(drop) })
    });
    let waiting: Vec<_> = waiting.collect();
    picker.until("all wait", "pilotfish_queue_requests", &[], 20.0).await;
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    picker.until("their places are free", "pilotfish_queue_requests", &[], 0.0).await;
    drop(first);
    eventually("the way is free", async || {
        let queue = picker.json("/debug/queues").await["queues"][0].clone();
        (queue["running"] == 0).then_some(())
    })
    .await;
    assert_eq!(gateway.client.chat(&chat(1)).await.status, 200);
}
