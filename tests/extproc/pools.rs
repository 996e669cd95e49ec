//! Several pools in one picker, told apart by what the gateway says.

use rstest::rstest;
use serde_json::{Value, json};
use tonic::transport::Endpoint;

use crate::kit::extproc::{CHAT, Stream, request_of, run};
use crate::kit::picker::{Picker, Setup};
use crate::kit::resources::{endpoint_of, pool_of, route, server};

const BODY: &str = r#"{"model":"m","messages":[]}"#;

/// Pools `one/pool` and `two/pool`, an engine each, and a route that leads the model `m` to neither.
fn two_pools() -> Setup {
    let pools = ["one", "two"].map(|namespace| pool_of(namespace, "pool", "m"));
    let engines =
        [endpoint_of("one", "m", "e", "10.0.0.1:8000"), endpoint_of("two", "m", "e", "10.0.0.2:8000")];
    let route = route("r", "  modelName: m\n  rules: [{targetModels: [{modelServerName: s}]}]\n");
    let third = server("s", "m", "") + &endpoint_of("default", "m", "e", "10.0.0.3:8000") + &route;
    Picker::with(&(pools.concat() + &engines.concat() + &third))
}

/// A chat whose messages carry the pool as the gateway's metadata.
fn named(pool: &Value) -> [Value; 2] {
    request_of(CHAT, &[], BODY).map(|mut step| {
        step["metadata"] = json!({"pilotfish": {"pool": pool}});
        step
    })
}

#[rstest]
#[case(json!("one/pool"), Ok("10.0.0.1:8000"))]
#[case(json!("two/pool"), Ok("10.0.0.2:8000"))]
#[case(json!("three/pool"), Err("three/pool does not exist"))]
#[case(json!("pool"), Err("/pool does not exist"))]
#[case(json!(7), Ok("10.0.0.3:8000"))]
#[tokio::test(flavor = "multi_thread")]
async fn metadata_names_the_pool(#[case] pool: Value, #[case] expected: Result<&str, &str>) {
    let picker = two_pools().start().await;
    let replies = run(&picker, &named(&pool)).await;
    match expected {
        Ok(endpoint) => assert_eq!(replies.first_choice(), endpoint),
        Err(why) => {
            assert_eq!(replies.refused().status(), 503);
            assert!(replies.refused().message().contains(why), "{}", replies.refused().message());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_or_a_header_of_the_stream_names_the_pool_and_metadata_goes_before_both() {
    let picker = two_pools().flag("--pool-port", "0=one/pool").start().await;
    let port = Endpoint::from_shared(format!("http://{}", picker.app.bound.pools["one/pool"])).unwrap();
    let through_the_port = async |header: Option<&str>, steps: &[Value]| {
        let mut stream = Stream::with_pool(port.connect_lazy(), header).await;
        stream.send_all(steps);
        stream.finish().await.first_choice().to_owned()
    };
    let plain = request_of(CHAT, &[], BODY);
    assert_eq!(through_the_port(None, &plain).await, "10.0.0.1:8000");
    assert_eq!(through_the_port(Some("two/pool"), &plain).await, "10.0.0.2:8000");
    assert_eq!(through_the_port(Some("one/pool"), &named(&json!("two/pool"))).await, "10.0.0.2:8000");
    assert_eq!(run(&picker, &plain).await.first_choice(), "10.0.0.3:8000", "other ports go by routes");
}
