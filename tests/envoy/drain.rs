//! A picker is asked to end while it is at work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures::future::join_all;
use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines};
use crate::kit::eventually::eventually;
use crate::kit::http::Opened;
use crate::kit::process::Process;
use crate::kit::resources::pool;

fn chat(stream: bool) -> Value {
    json!({
        "model": "tiny", "max_tokens": 20, "stream": stream,
        "messages": [{"role": "user", "content": "stay with me"}],
    })
}

/// What gRPC health says: `SERVING` is 1, `NOT_SERVING` is 2.
async fn health(picker: &Process) -> i32 {
    let channel =
        Endpoint::from_shared(format!("http://{}", picker.health)).unwrap().connect().await.unwrap();
    let asked = HealthCheckRequest { service: String::new() };
    HealthClient::new(channel).check(asked).await.unwrap().into_inner().status
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn running_streams_complete_before_a_drained_picker_ends(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let engines = start_engines(2).await;
    let mut picker =
        Process::start(&(endpoints(&engines) + &pool()), "--drain-grace 3s --drain-timeout 5m").await;
    picker.until("pilotfish_endpoints", &[("state", "up")], 2.0).await;
    let addresses: Vec<_> = engines.iter().map(|engine| engine.state.address()).collect();
    let gateway = Gateway::start(setup, &[picker.grpc], &addresses).await;
    for engine in &engines {
        engine.state.set_fault(Fault::StallInStream(1));
    }
    let request = chat(true);
    let mut running = join_all((0..20).map(|_| gateway.client.stream(&request))).await;
    join_all(running.iter_mut().map(|stream| stream.events(2))).await;
    picker.until("pilotfish_reserved_requests", &[], 20.0).await;
    assert_eq!((health(&picker).await, picker.get("/readyz").await.status), (1, 200));

    picker.terminate();
    eventually("the picker says that it is not ready", async || {
        (picker.get("/readyz").await.status == 503).then_some(())
    })
    .await;
    assert_eq!(health(&picker).await, 2, "both say so");
    assert_eq!(picker.get("/healthz").await.status, 200, "it lives");
    let accepts = tokio::net::TcpStream::connect(picker.grpc).await.is_ok();
    assert!(accepts, "it says so at once and takes streams until the grace is over");
    eventually("the listener is closed", async || tokio::net::TcpStream::connect(picker.grpc).await.err())
        .await;
    assert_eq!(picker.metric("pilotfish_reserved_requests", &[]).await, 20.0, "streams still run");
    for engine in &engines {
        engine.state.clear_faults();
    }
    for events in join_all(running.into_iter().map(Opened::all_events)).await {
        assert_eq!(events.len(), 19 + 1, "every further token and the end");
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    }
    assert_eq!(picker.ended().await.code(), Some(0), "with its last stream, not with the drain timeout");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_one_of_two_pickers_drains(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let engines = start_engines(2).await;
    let resources = endpoints(&engines) + &pool();
    let mut draining = Process::start(&resources, "--drain-timeout 15s").await;
    let staying = Process::start(&resources, "").await;
    for picker in [&draining, &staying] {
        picker.until("pilotfish_endpoints", &[("state", "up")], 2.0).await;
    }
    let addresses: Vec<_> = engines.iter().map(|engine| engine.state.address()).collect();
    let gateway = Gateway::start(setup, &[draining.grpc, staying.grpc], &addresses).await;
    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let (client, stop, served) = (gateway.client.clone(), stop.clone(), served.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    client.chat(&chat(false)).await.served();
                    served.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    eventually("both pickers decide", async || {
        let draining = draining.metric("pilotfish_picks_total", &[]).await;
        (draining > 20.0 && staying.metric("pilotfish_picks_total", &[]).await > 20.0).then_some(())
    })
    .await;
    let before = served.load(Ordering::SeqCst);
    draining.terminate();
    assert_eq!(draining.ended().await.code(), Some(0));
    let ended = staying.metric("pilotfish_picks_total", &[]).await;
    eventually("the other one goes on", async || {
        (staying.metric("pilotfish_picks_total", &[]).await > ended + 100.0).then_some(())
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.expect("no request failed");
    }
    assert!(served.load(Ordering::SeqCst) > before + 100);
}
