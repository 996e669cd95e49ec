//! The next endpoint in line, and a ModelServer's own limits.

use std::collections::BTreeSet;

use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Setup, Stand};
use crate::kit::http::Answer;
use crate::kit::resources::{APP, pool, server};

/// Engines are scraped when they come and not again: the picker learns of a fault from requests alone.
async fn unscraped(setup: Setup, resources: &str) -> Stand {
    Stand::with(setup, 2, resources, |picker| {
        picker.flag("--scrape-interval", "1h").flag("--staleness", "2h")
    })
    .await
}

/// A chat whose answer and record are looked at together.
async fn chat(stand: &Stand, id: &str) -> (Answer, Value) {
    let request = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": id}]});
    let answer = stand.client.chat_with(&[("x-request-id", id)], &request).await;
    (answer, stand.picker.decision(id).await)
}

/// Sends until the closed engine is the first in line; the answer and the record of that request.
async fn first_at_the_closed_engine(stand: &Stand) -> (Answer, Value) {
    let closed = stand.engines[0].address();
    for at in 0..50 {
        let (answer, decision) = chat(stand, &format!("request-{at}")).await;
        if decision["legs"][0]["picked"][0] == *closed {
            return (answer, decision);
        }
        answer.served();
    }
    panic!("{closed} was never the first in line");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_next_in_line_serves_when_the_first_refuses(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = unscraped(setup, &pool()).await;
    stand.engines[0].close().await;
    let (answer, decision) = first_at_the_closed_engine(&stand).await;
    assert_eq!(answer.served(), stand.engines[1].state.name());
    let leg = &decision["legs"][0];
    assert_eq!(leg["attempts"], 2, "{decision}");
    assert_eq!(leg["served"], stand.engines[1].address(), "{decision}");
    assert_eq!(leg["picked"][1], stand.engines[1].address(), "{decision}");
    stand.picker.until_idle("after the retry").await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_retries_has_none(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = unscraped(setup, &server("tiny", APP, "  trafficPolicy: {retry: {attempts: 0}}\n")).await;
    stand.engines[0].close().await;
    let (answer, decision) = first_at_the_closed_engine(&stand).await;
    assert_eq!(answer.status, 503, "{decision}");
    assert_eq!(decision["legs"][0]["attempts"], 1, "{decision}");
    assert_eq!(decision["legs"][0]["picked"].as_array().unwrap().len(), 1, "{decision}");
    stand.picker.until_idle("after the failure").await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_of_a_server_cuts_a_stalled_request(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::with(setup, 2, &server("tiny", APP, "  trafficPolicy: {timeout: 1s}\n"), |p| p).await;
    let (answer, _) = chat(&stand, "before").await;
    let used: BTreeSet<String> = [answer.served()].into();
    assert_eq!(used.len(), 1);
    for engine in &stand.engines {
        engine.state.set_fault(Fault::StallBefore);
    }
    let (answer, decision) = chat(&stand, "stalled").await;
    assert_eq!(answer.status, 504, "{decision}");
    assert_eq!(decision["status"], 504, "{decision}");
    stand.picker.until_idle("after the timeout").await;
}
