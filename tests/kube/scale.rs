//! What a large cluster costs: run by `make bench-kube`, which shows what it measured.

use std::time::Duration;

use futures::StreamExt;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::kit::kube::{Cluster, Server};
use crate::kit::process::Process;

const PODS: u32 = 1000;
const POOLS: u32 = 10;
const ROUTES: u32 = 200;
/// How long the CPU time is measured, in each state.
const MEASURED: Duration = Duration::from_secs(20);
const EVENTS_A_SECOND: u32 = 10;

fn labels(pod: u32) -> serde_json::Value {
    json!({"app": format!("pool-{}", pod % POOLS)})
}

fn objects() -> Vec<String> {
    let mut all = Vec::new();
    for pool in 0..POOLS {
        all.push(format!(
            "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {{name: pool-{pool}}}\n\
             spec: {{inferenceEngine: vLLM, workloadSelector: {{matchLabels: {{app: pool-{pool}}}}}, workloadPort: {{port: 8000}}}}\n"
        ));
    }
    for route in 0..ROUTES {
        let rules = format!("{{targetModels: [{{modelServerName: pool-{}}}]}}", route % POOLS);
        all.push(format!(
            "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\nmetadata: {{name: route-{route}}}\n\
             spec: {{modelName: model-{route}, rules: [{rules}]}}\n"
        ));
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: make bench-kube"]
async fn a_thousand_pods() {
    let server = Server::start().await;
    let cluster = Cluster::of(&server).await;
    for object in objects() {
        cluster.apply(&object).await;
    }
    let create = |pod: u32| {
        let cluster = &cluster;
        async move {
            let ip = format!("127.{}.{}.{}", 200 + pod / 60_000, pod / 250, 1 + pod % 250);
            cluster.pod(&format!("p{pod}"), &labels(pod), &ip).await;
        }
    };
    futures::stream::iter(0..PODS).map(create).buffer_unordered(16).collect::<Vec<_>>().await;

    let flags = format!("--namespaces {} --scrape-interval 1h --staleness 3h", cluster.namespace);
    let began = Instant::now();
    let picker = Process::of_cluster(&cluster, &flags).await;
    picker.until("pilotfish_endpoints", &[], f64::from(PODS)).await;
    let ready = began.elapsed();
    // The statuses of the first minute are written once.
    sleep(MEASURED).await;
    let (_, resident) = picker.used();
    let (before, _) = picker.used();
    sleep(MEASURED).await;
    let (idle, _) = picker.used();
    let mut pause = tokio::time::interval(Duration::from_secs(1) / EVENTS_A_SECOND);
    let until = Instant::now() + MEASURED;
    let mut events = 0;
    while Instant::now() < until {
        pause.tick().await;
        let pod = events % PODS;
        cluster
            .describe(
                &format!("p{pod}"),
                &json!({"annotations": {"pilotfish.dev/weight": format!("{}", 2 + events / PODS)}}),
            )
            .await;
        events += 1;
    }
    let (busy, _) = picker.used();
    let seconds = MEASURED.as_secs_f64();
    println!("{PODS} pods, {POOLS} pools, {ROUTES} routes");
    println!("from start to {PODS} endpoints: {:.2} s", ready.as_secs_f64());
    println!("resident: {resident:.0} MiB");
    println!("CPU at rest: {:.2} % of a core", 100.0 * (idle - before) / seconds);
    println!("CPU at {events} pod events in {seconds} s: {:.2} % of a core", 100.0 * (busy - idle) / seconds);
    server.kill().await;
}
