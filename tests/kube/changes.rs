//! Everything that happens to pods and pools, under traffic.

use kube::core::ApiResource;
use pilotfish::resources::inference_pool::InferencePool;
use pilotfish::resources::model_server::ModelServer;
use rstest::rstest;
use serde_json::json;

use super::stand::Stand;
use crate::kit::picker::Picker;

/// A pool of the stand's pods.
pub const POOL: &str = "
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: pool}
spec:
  selector: {matchLabels: {app: w}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: picker, port: {number: 9002}}
";
/// The same for Kthena's users.
pub const SERVER: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: server}
spec:
  inferenceEngine: vLLM
  workloadSelector: {matchLabels: {app: w}}
  workloadPort: {port: 8000}
---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: route}
spec:
  modelName: tiny
  rules: [{targetModels: [{modelServerName: server}]}]
";

#[rstest]
#[case::inference_pool(POOL)]
#[case::model_server(SERVER)]
#[tokio::test(flavor = "multi_thread")]
async fn traffic_follows_the_pods(#[case] objects: &str) {
    let mut stand = Stand::over(objects, 3).await;
    stand.add(3).await;
    stand.add(4).await;
    stand.until_only("scaled up", &[0, 1, 2, 3, 4]).await;
    for host in [1, 3, 4] {
        stand.roll_away(host).await;
    }
    stand.until_only("scaled down", &[0, 2]).await;

    stand.cluster.describe("p0", &json!({"labels": {"app": "other"}})).await;
    stand.until_only("relabelled away", &[2]).await;
    stand.cluster.describe("p0", &json!({"labels": {"app": "w"}})).await;
    stand.until_only("relabelled back", &[0, 2]).await;

    for _ in 0..3 {
        let address = stand.cluster.address(3);
        stand.cluster.report("p2", &address, false).await;
        stand.until_only("not ready", &[0]).await;
        stand.cluster.report("p2", &address, true).await;
        stand.until_only("ready again", &[0, 2]).await;
    }
    stand.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn k8s_01_an_evicted_pod_and_one_that_takes_over_its_address() {
    let mut stand = Stand::over(POOL, 2).await;
    // The kubelet kills the engine and then reports; Envoy retries what was on it.
    stand.kill_engine(0, 8000).await;
    stand.cluster.report_status("p0", &json!({"phase": "Failed", "reason": "Evicted", "podIP": null})).await;
    stand.until_only("evicted", &[1]).await;
    stand.engine(0, 8000).await;
    let address = stand.cluster.address(1);
    stand.cluster.pod("heir", &json!({"app": "w"}), &address).await;
    stand.until_only("the address is used again", &[0, 1]).await;
    stand.cluster.end("p0").await;
    stand.until_only("the evicted pod is removed", &[0, 1]).await;
    stand.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn k8s_02_a_terminating_pod_that_is_still_ready_gets_nothing() {
    let mut stand = Stand::over(POOL, 2).await;
    stand.cluster.terminate("p0").await;
    stand.until_only("terminating", &[1]).await;
    let pod = stand.cluster.pods().get("p0").await.unwrap();
    assert!(pod.metadata.deletion_timestamp.is_some(), "it is still there");
    stand.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn k8s_04_ports_come_and_go() {
    let mut stand = Stand::over(POOL, 1).await;
    let pools = ApiResource::erase::<InferencePool>(&());
    let ports = |ports: &[u16]| {
        let ports: Vec<_> = ports.iter().map(|port| json!({"number": port})).collect();
        json!({"spec": {"targetPorts": ports}})
    };
    stand.engine(0, 8001).await;
    stand.cluster.patch(&pools, "pool", &ports(&[8000, 8001])).await;
    let (first, second, third) = (stand.at(0, 8000), stand.at(0, 8001), stand.at(0, 9000));
    stand.until_exactly("two ranks", &[first.clone(), second.clone()]).await;
    stand.cluster.patch(&pools, "pool", &ports(&[8000])).await;
    stand.until_exactly("one rank", std::slice::from_ref(&first)).await;
    stand.engine(0, 9000).await;
    stand.cluster.patch(&pools, "pool", &ports(&[8000, 9000])).await;
    stand.until_exactly("another rank", &[first.clone(), third]).await;
    stand.cluster.describe("p0", &json!({"annotations": {"llm-d.ai/active-ports": "8000"}})).await;
    stand.until_exactly("one active", &[first]).await;
    stand.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn selectors_and_ports_of_model_servers_change() {
    let mut stand = Stand::over(SERVER, 2).await;
    let servers = ApiResource::erase::<ModelServer>(&());
    stand.cluster.describe("p1", &json!({"labels": {"tier": "gold"}})).await;
    let gold = json!({"spec": {"workloadSelector": {"matchLabels": {"tier": "gold"}}}});
    stand.cluster.patch(&servers, "server", &gold).await;
    stand.until_only("both labels", &[1]).await;
    let all = json!({"spec": {"workloadSelector": {"matchLabels": {"tier": null}}}});
    stand.cluster.patch(&servers, "server", &all).await;
    stand.until_only("one label", &[0, 1]).await;
    stand.engine(0, 8100).await;
    stand.engine(1, 8100).await;
    stand.cluster.patch(&servers, "server", &json!({"spec": {"workloadPort": {"port": 8100}}})).await;
    let moved = [stand.at(0, 8100), stand.at(1, 8100)];
    stand.until_exactly("another port", &moved).await;
    stand.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn labels_that_no_pod_can_carry_harm_nobody_else() {
    let mut stand = Stand::over(SERVER, 1).await;
    for (name, value) in [("odd", "my app"), ("sly", "a),x in (b")] {
        let server = SERVER.split("---").next().unwrap().replace("name: server", &format!("name: {name}"));
        stand.cluster.apply(&server.replace("app: w", &format!("app: '{value}'"))).await;
        let labels = [("name", &*format!("{}/{name}", stand.cluster.namespace))];
        stand.picker.until("it is told", "pilotfish_config_errors", &labels, 1.0).await;
    }
    stand.add(1).await;
    stand.until_only("a pod more", &[0, 1]).await;
    Picker::of_cluster(&stand.cluster).start().await.until_ready().await;
    stand.end().await;
}
