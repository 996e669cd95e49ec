//! The picker dies, and Envoy goes on without it.

use std::collections::BTreeSet;

use futures::future::join_all;
use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines};
use crate::kit::eventually::eventually;
use crate::kit::http::Opened;
use crate::kit::process::Process;
use crate::kit::resources::pool;

fn chat(stream: bool) -> Value {
    json!({
        "model": "tiny", "max_tokens": 20, "stream": stream,
        "messages": [{"role": "user", "content": "who is there"}],
    })
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_without_a_picker_and_by_the_next_one(
    #[values(false, true)] one_engine_dead: bool,
) {
    let mut engines = start_engines(3).await;
    let resources = endpoints(&engines) + &pool();
    let mut picker = Process::start(&resources, "").await;
    picker.until("pilotfish_endpoints", &[("state", "up")], 3.0).await;
    let addresses: Vec<_> = engines.iter().map(|engine| engine.state.address()).collect();
    let gateway = Gateway::start(Setup::StaticFailOpen, &[picker.grpc], &addresses).await;
    if one_engine_dead {
        engines.remove(0);
        gateway.until_healthy("fallback", 2).await;
    }
    for engine in &engines {
        engine.state.set_fault(Fault::StallInStream(1));
    }
    let request = chat(true);
    let mut running = join_all((0..12).map(|_| gateway.client.stream(&request))).await;
    join_all(running.iter_mut().map(|stream| stream.events(2))).await;
    picker.until("pilotfish_reserved_requests", &[], 12.0).await;

    picker.kill();
    let mut names = BTreeSet::new();
    for _ in 0..30 {
        names.insert(gateway.client.chat(&chat(false)).await.served());
    }
    // Envoy's workers learn of a member that became healthy up to a second later (`update_merge_window`).
    eventually("the fallback spreads requests over all living engines", async || {
        names.insert(gateway.client.chat(&chat(false)).await.served());
        (names.len() == engines.len()).then_some(())
    })
    .await;
    for engine in &engines {
        engine.state.clear_faults();
    }
    for events in join_all(running.into_iter().map(Opened::all_events)).await {
        assert_eq!(events.len(), 19 + 1, "every further token and the end");
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    }

    let port = picker.grpc.port();
    let picker = Process::start_at(port, &resources, "").await;
    eventually("the new picker decides", async || {
        gateway.client.chat(&chat(false)).await.served();
        (picker.metric("pilotfish_picks_total", &[]).await > 0.0).then_some(())
    })
    .await;
    let before = picker.metric("pilotfish_picks_total", &[]).await;
    for _ in 0..10 {
        gateway.client.chat(&chat(false)).await.served();
    }
    assert_eq!(picker.metric("pilotfish_picks_total", &[]).await, before + 10.0, "it decides every request");
    picker.until("pilotfish_reserved_requests", &[], 0.0).await;
}
