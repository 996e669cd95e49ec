//! Prefill legs that are slow, and who does not wait for them.

use std::time::Duration;

use pilotfish::engine::Fault;
use rstest::rstest;
use tokio::net::TcpStream;

use crate::kit::envoy::{Gateway, Setup};
use crate::kit::eventually::eventually;
use crate::kit::http::whole;
use crate::kit::pairs::{ALWAYS, COMPLETIONS, Plan, bodies, by_one_engine, completion, text, unscraped};
use crate::kit::process::Process;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_leg_that_takes_too_long_is_given_up(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http", "sglang")] connector: &'static str,
) {
    let timed = |picker| unscraped(picker).flag("--prefill-timeout", "300ms");
    let stand = Plan::new(setup, connector).patient().engines(2, 1).start(timed).await;
    for engine in &stand.prefill {
        engine.state.set_fault(Fault::Slow(1e6));
    }
    let answer = stand.ask("slow").await;
    let asked: usize = stand.prefill.iter().map(|engine| bodies(engine).len()).sum();
    if connector == "sglang" {
        assert_eq!(asked, 1, "both legs are sent");
        let message = stand.check_refused(&answer, 503, "prefill-failed").await;
        assert!(message.contains("timeout"), "{message}");
    } else {
        assert_eq!(asked, 2, "one after the other");
        let decision = stand.check_whole("slow", &answer).await;
        assert_eq!(decision["prefill"]["failure"], "timeout", "{decision}");
        assert_eq!(decision["prefill"]["endpoint"], decision["legs"][1]["picked"][1], "{decision}");
        assert_eq!(decision["prefill"]["attempts"], 2, "{decision}");
    }
    assert_eq!((stand.fell_back("timeout").await, stand.fell_back("").await), (1.0, 1.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_leg_may_take_longer_than_envoys_message_timeout(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let shorter = |text: String| text.replace(" message_timeout: 5s", " message_timeout: 0.2s");
    let stand = Plan::new(setup, "nixl").start_with(unscraped, shorter).await;
    // About 0.6 s.
    stand.prefill[0].state.set_fault(Fault::Slow(2_500.0));
    let answer = stand.ask("slow").await;
    let decision = stand.check_whole("slow", &answer).await;
    let took = Duration::from_micros(decision["stages_us"]["prefill"].as_u64().unwrap());
    assert!(took > Duration::from_millis(200), "{took:?}: this test shows nothing");
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
    assert_eq!(stand.decode[0].state.transferred(), 1, "what was computed is used");
    assert_eq!(stand.prefill[0].state.pinned(), 0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_picker_that_drains_completes_prefill_legs_under_way(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang")] connector: &'static str,
) {
    let plan = Plan::new(setup, connector).patient();
    let (prefill, decode) = plan.start_engines().await;
    let dir = tempfile::TempDir::new().unwrap();
    let config = dir.path().join("config.yaml");
    std::fs::write(&config, ALWAYS).unwrap();
    let flags = format!("--drain-grace 100ms --drain-timeout 5m --config {}", config.display());
    let mut picker = Process::start(&plan.resources(&prefill, &decode), &flags).await;
    picker.until("pilotfish_endpoints", &[("state", "up")], 2.0).await;
    let addresses = [prefill[0].state.address(), decode[0].state.address()];
    let gateway = Gateway::start(setup, &[picker.grpc], &addresses).await;
    prefill[0].state.set_fault(Fault::StallBefore);
    let client = gateway.client.clone();
    let answer = tokio::spawn(async move {
        client.post(COMPLETIONS, &[], whole(completion("draining", false))).await.rest().await
    });
    eventually("the prompt is on its way", async || (!bodies(&prefill[0]).is_empty()).then_some(())).await;
    picker.terminate();
    eventually("the listener is closed", async || TcpStream::connect(picker.grpc).await.err()).await;
    assert_eq!(picker.metric("pilotfish_reserved_requests", &[]).await, 2.0, "both legs are booked");
    prefill[0].state.clear_fault(Fault::StallBefore);
    let answer = answer.await.unwrap();
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    assert_eq!(text(&answer.json()), by_one_engine("draining").await);
    assert_eq!(decode[0].state.transferred(), 1);
    assert_eq!(picker.ended().await.code(), Some(0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_prefill_leg(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    // It would take minutes.
    stand.prefill[0].state.set_fault(Fault::Slow(1e6));
    let answer = stand.begin("leaving");
    stand.at_work(&stand.prefill[0]).await;
    answer.abort();
    stand.released().await;
    assert_eq!(stand.prefill[0].state.pinned(), 0);
    if connector != "sglang" {
        assert_eq!(bodies(&stand.decode[0]), Vec::<String>::new());
    }
    stand.picker.until("counted", "pilotfish_requests_total", &[("reason", "aborted")], 1.0).await;
    assert_eq!(stand.picker.metric("pilotfish_requests_total", &[]).await, 1.0, "counted once");
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_the_decode_leg(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    stand.decode[0].state.set_fault(Fault::StallInStream(1));
    let mut stream = stand.client.post(COMPLETIONS, &[], whole(completion("leaving", true))).await;
    stream.event().await;
    assert_eq!(stand.decode[0].state.in_flight(), 1);
    drop(stream);
    stand.released().await;
    assert_eq!(stand.prefill[0].state.pinned(), 0);
    let cause = [("cause", "client")];
    stand.picker.until("counted", "pilotfish_broken_streams_total", &cause, 1.0).await;
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
}
