//! Who is told that new requests are wanted, and under which names.

use rstest::rstest;
use tonic_health::pb::health_check_response::ServingStatus;

use crate::kit::health::{Watch, plain, serves};
use crate::kit::picker::Picker;
use crate::kit::process::Process;
use crate::kit::resources::pool;

#[rstest]
#[case("", Some(true), Some(false))]
#[case("readiness", Some(true), Some(false))]
#[case("inference-extension", Some(true), Some(false))]
#[case("envoy.service.ext_proc.v3.ExternalProcessor", Some(true), Some(false))]
#[case("liveness", Some(true), Some(true))]
#[case("livenes", None, None)]
#[case("Readiness", None, None)]
#[tokio::test(flavor = "multi_thread")]
async fn names_on_both_ports(
    #[case] name: &str,
    #[case] when_ready: Option<bool>,
    #[case] when_held: Option<bool>,
) {
    let picker = Picker::serve(&pool()).await;
    let readiness = &picker.app.admin.readiness;
    for port in [picker.app.bound.grpc, picker.app.bound.health] {
        assert_eq!(serves(plain(port).await, name).await, when_ready, "{port}");
        readiness.hold("pods", "list forbidden");
        assert_eq!(serves(plain(port).await, name).await, when_held, "{port}");
        readiness.release("pods");
        assert_eq!(serves(plain(port).await, name).await, when_ready, "{port}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn readyz_says_what_is_missing() {
    let picker = Picker::serve(&pool()).await;
    assert_eq!(picker.get("/readyz").await, (200, "ready\n".to_owned()));
    picker.app.admin.readiness.hold("pods", "list forbidden: give the service account the role");
    picker.app.admin.readiness.hold("services", "not listed yet");
    let expected =
        "not ready\npods: list forbidden: give the service account the role\nservices: not listed yet\n";
    assert_eq!(picker.get("/readyz").await, (503, expected.to_owned()));
    assert_eq!(picker.get("/healthz").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_tells_every_change() {
    let picker = Picker::serve(&pool()).await;
    for port in [picker.app.bound.grpc, picker.app.bound.health] {
        let readiness = &picker.app.admin.readiness;
        let mut watch = Watch::of(plain(port).await, "inference-extension").await;
        let mut alive = Watch::of(plain(port).await, "liveness").await;
        let mut unknown = Watch::of(plain(port).await, "nobody").await;
        assert_eq!(watch.next().await, Some(ServingStatus::Serving));
        assert_eq!(alive.next().await, Some(ServingStatus::Serving));
        assert_eq!(unknown.next().await, Some(ServingStatus::ServiceUnknown));
        readiness.hold("pods", "lost");
        assert_eq!(watch.next().await, Some(ServingStatus::NotServing));
        readiness.release("pods");
        assert_eq!(watch.next().await, Some(ServingStatus::Serving));
    }
}

/// A client that watches holds a stream open; the drain timeout is minutes.
#[tokio::test(flavor = "multi_thread")]
async fn watches_do_not_delay_the_end() {
    let mut picker = Process::start(&pool(), "--drain-grace 10ms --drain-timeout 5m").await;
    let mut watches = Vec::new();
    for (port, name) in [(picker.grpc, "readiness"), (picker.grpc, "nobody"), (picker.health, "liveness")] {
        let mut watch = Watch::of(plain(port).await, name).await;
        watch.next().await.unwrap();
        watches.push(watch);
    }
    picker.terminate();
    assert_eq!(watches[0].next().await, Some(ServingStatus::NotServing));
    assert_eq!(picker.ended().await.code(), Some(0));
}
