//! An engine dies under load.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Setup, Stand};
use crate::kit::eventually::eventually;
use crate::kit::extproc::CHAT;
use crate::kit::http::{Client, whole};
use crate::kit::picker;
use crate::kit::resources::pool;

const STREAMS: usize = 12;
const UNARY: usize = 6;
const SCRAPE_INTERVAL: Duration = Duration::from_millis(500);

fn chat(stream: bool) -> Value {
    json!({
        "model": "tiny", "max_tokens": 60, "stream": stream,
        "messages": [{"role": "user", "content": "tell me something"}],
    })
}

/// Streams that were served whole, and the ids of those that broke.
async fn stream_until(
    setup: Setup,
    stop: Arc<AtomicBool>,
    client: Client,
    number: usize,
) -> (usize, Vec<String>) {
    let (mut whole_streams, mut broken) = (0, Vec::new());
    for at in 0.. {
        if stop.load(Ordering::SeqCst) {
            break;
        }
        let id = format!("stream-{number}-{at}");
        let headers = [("x-request-id", &*id)];
        let stream = client.post(CHAT, &headers, whole(chat(true).to_string())).await;
        if setup == Setup::GatewayShaped && stream.status == 502 {
            // The engine's headers had reached Envoy, which showed them to the picker when the connection broke.
            broken.push(id);
            continue;
        }
        assert_eq!(stream.status, 200, "no request fails before its headers came: {:?}", stream.headers);
        match stream.try_rest().await {
            Ok(answer) => {
                assert!(answer.body.ends_with(b"data: [DONE]\n\n"), "cut short without an error");
                whole_streams += 1;
            }
            Err(_) => broken.push(id),
        }
    }
    (whole_streams, broken)
}

async fn unary_until(stop: Arc<AtomicBool>, client: Client) -> usize {
    let mut served = 0;
    while !stop.load(Ordering::SeqCst) {
        client.chat(&chat(false)).await.served();
        served += 1;
    }
    served
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_engine_costs_only_the_streams_that_ran_on_it(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let interval = format!("{}ms", SCRAPE_INTERVAL.as_millis());
    let mut stand = Stand::with(setup, 3, &pool(), |p| p.flag("--scrape-interval", &interval)).await;
    // Slow enough that the picker still keeps the records of all broken streams at the end.
    for engine in &stand.engines {
        engine.state.set_fault(Fault::Slow(20.0));
    }
    let stop = Arc::new(AtomicBool::new(false));
    let stream = |number| tokio::spawn(stream_until(setup, stop.clone(), stand.client.clone(), number));
    let streams: Vec<_> = (0..STREAMS).map(stream).collect();
    let unary: Vec<_> =
        (0..UNARY).map(|_| tokio::spawn(unary_until(stop.clone(), stand.client.clone()))).collect();
    eventually("every engine is at work", async || {
        let busy = stand.engines.iter().all(|engine| engine.state.in_flight() >= 1);
        let served = stand.picker.metric("pilotfish_requests_total", &[("code", "200")]).await;
        (busy && served >= 50.0).then_some(())
    })
    .await;

    let dead = stand.engines.remove(0);
    let address = dead.address();
    let picks = [("endpoint", &*address)];
    drop(dead);
    let picker = &stand.picker;
    eventually("the picker knows of the death", async || {
        (picker.endpoint(&address).await["state"] == "down").then_some(())
    })
    .await;
    let metrics = picker.metrics().await;
    let (to_the_dead, total) =
        (metrics.sum("pilotfish_picks_total", &picks), metrics.sum("pilotfish_picks_total", &[]));
    let later = eventually("200 more decisions", async || {
        let metrics = picker.metrics().await;
        (metrics.sum("pilotfish_picks_total", &[]) >= total + 200.0).then_some(metrics)
    })
    .await;
    assert_eq!(later.sum("pilotfish_picks_total", &picks), to_the_dead, "nobody is sent to the dead");
    stop.store(true, Ordering::SeqCst);

    let mut broken = Vec::new();
    for stream in streams {
        let (whole, of_this) = stream.await.unwrap();
        assert!(whole > 0);
        broken.extend(of_this);
    }
    for client in unary {
        assert!(client.await.unwrap() > 0);
    }
    assert!(broken.len() <= STREAMS, "{broken:?}");
    for id in &broken {
        let decision = picker.decision(id).await;
        assert_eq!(decision["legs"][0]["served"], *address, "only its own streams break: {decision}");
        assert_eq!(decision["outcome"], "broken", "{decision}");
    }
    picker.until_idle("after the load").await;
    let counted = [("endpoint", &*address), ("cause", "upstream")];
    picker.until("counted", "pilotfish_broken_streams_total", &counted, broken.len() as f64).await;
    assert_eq!(picker.metric("pilotfish_broken_streams_total", &[]).await, broken.len() as f64);
    assert_eq!(picker.endpoint(&address).await["state"], "down");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_does_not_revive_a_dead_engine(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    // Scraped when they come and not again: health is learned from requests alone.
    let unscraped = |p: picker::Setup| p.flag("--scrape-interval", "1h").flag("--staleness", "2h");
    let stand = Stand::with(setup, 2, &pool(), unscraped).await;
    for engine in &stand.engines {
        engine.state.set_fault(Fault::StallInStream(1));
    }
    let mut running = Vec::new();
    for _ in 0..8 {
        let mut stream = stand.client.stream(&chat(true)).await;
        stream.events(2).await;
        running.push(stream);
    }
    let dying = &stand.engines[0];
    let address = dying.address();
    let on_it = dying.state.in_flight();
    assert!(on_it > 0);
    dying.close().await;
    eventually("the engine is down", async || {
        stand.client.chat(&chat(false)).await.served();
        (stand.picker.endpoint(&address).await["state"] == "down").then_some(())
    })
    .await;
    dying.state.set_fault(Fault::CutStream(1));
    dying.state.clear_fault(Fault::StallInStream(1));
    let labels = [("endpoint", &*address)];
    stand.picker.until("settled", "pilotfish_broken_streams_total", &labels, on_it as f64).await;
    assert_eq!(stand.picker.endpoint(&address).await["state"], "down", "what has broken says nothing good");
}
