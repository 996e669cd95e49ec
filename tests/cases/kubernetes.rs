//! What pods and permissions do, on a real API server.

use kube::core::ApiResource;
use pilotfish::resources::inference_pool::InferencePool;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::case::{input, list, text};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{Stream, chat, run_many, shares};
use crate::kit::kube::Cluster;
use crate::kit::picker::Picker;
use crate::kit::replies::Replies;

const BODY: &str = r#"{"model":"m","messages":[]}"#;

/// The pods of a case, a pool of their port, and a picker that leaves their addresses alone: they may be somebody's.
struct Pods {
    cluster: Cluster,
    picker: Picker,
}

impl Pods {
    async fn of(pods: &[Value]) -> Self {
        let cluster = Cluster::namespace().await;
        cluster.apply(&pool(pods[0]["port"].as_u64().unwrap())).await;
        let this = Self::without_pods(cluster).await;
        for pod in pods {
            assert_eq!(pod["ready"], true);
            this.cluster.pod(text(pod, "name"), &json!({"app": "w"}), text(pod, "ip")).await;
        }
        let all: Vec<String> =
            pods.iter().map(|pod| format!("{}:{}", text(pod, "ip"), pod["port"])).collect();
        this.until(&all.iter().map(String::as_str).collect::<Vec<_>>()).await;
        this
    }

    async fn without_pods(cluster: Cluster) -> Self {
        let picker = Picker::of_cluster(&cluster).start().await;
        picker.app.admin.scraper.stop();
        picker.app.admin.events.stop();
        picker.until_ready().await;
        Self { cluster, picker }
    }

    async fn until(&self, expected: &[&str]) {
        eventually(format!("endpoints {expected:?}"), async || {
            (self.picker.addresses().await == expected).then_some(())
        })
        .await;
        let snapshot = self.picker.app.admin.shared.decider.store.load_full();
        snapshot.endpoints.iter().for_each(|endpoint| endpoint.health.accepted());
    }

    /// Series that name this endpoint.
    async fn series_of(&self, endpoint: &str) -> usize {
        let page = self.picker.get("/metrics").await.1;
        page.lines().filter(|line| line.contains(&format!("endpoint=\"{endpoint}\""))).count()
    }
}

async fn chats(picker: &Picker, count: usize) -> Vec<Replies> {
    run_many(picker, 8, (0..count).map(|_| chat(BODY).to_vec())).await
}

fn pool(port: u64) -> String {
    format!(
        "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {{name: pool}}\nspec:\n  \
         selector: {{matchLabels: {{app: w}}}}\n  targetPorts: [{{number: {port}}}]\n  \
         endpointPickerRef: {{name: epp, port: {{number: 9002}}}}\n"
    )
}

#[rstest]
#[case::evicted(0, &["10.0.0.11:8000"])]
#[case::succeeded(1, &["10.0.0.11:8000"])]
#[case::moved(2, &["10.0.0.11:8000", "10.0.0.20:8000"])]
#[case::deleted(3, &["10.0.0.11:8000"])]
#[case::unseen(4, &["10.0.0.11:8000"])]
#[tokio::test(flavor = "multi_thread")]
async fn k8s_01_a_pod_without_its_address_is_no_endpoint(#[case] at: usize, #[case] expected: &[&str]) {
    let case = input("K8S-01");
    let pods = Pods::of(list(case, "pods")).await;
    assert!(pods.series_of("10.0.0.10:8000").await > 0);
    let event = &list(case, "events")[0];
    let name = text(event, "pod");
    let variants = list(case, "variants");
    match at {
        0 => drop(pods.cluster.report_status(name, &event["status"]).await),
        1 => {
            assert_eq!(variants[0], "phase Succeeded");
            pods.cluster.report_status(name, &json!({"phase": "Succeeded"})).await;
        }
        2 => {
            assert!(variants[1].as_str().unwrap().contains("10.0.0.10 -> 10.0.0.20"));
            pods.cluster.report(name, "10.0.0.20", true).await;
        }
        // A watch gives no other deletions than with the last state; lists after a gap are the index's own test.
        3 | 4 => {
            assert_eq!(variants.len(), 4);
            pods.cluster.end(name).await;
        }
        _ => unreachable!(),
    }
    pods.until(expected).await;
    assert_eq!(pods.series_of("10.0.0.10:8000").await, 0, "its series go with it");
    let replies = chats(&pods.picker, 20).await;
    assert!(!shares(&replies).contains_key("10.0.0.10:8000"));
}

#[tokio::test(flavor = "multi_thread")]
async fn k8s_02_a_terminating_pod_gets_nothing_and_finishes_what_it_has() {
    let case = input("K8S-02");
    let pods = Pods::of(list(case, "pods")).await;
    // Streams run until ten do so on p0.
    let (mut running, mut there) = (Vec::new(), 0);
    while there < 10 {
        let mut stream = Stream::of(&pods.picker, &chat(BODY)).await;
        there += usize::from(stream.until_decided().await.first_choice() == "10.0.0.10:8000");
        running.push(stream);
    }
    let open = async || pods.picker.metric("pilotfish_reserved_requests", &[]).await;
    assert!(open().await >= 10.0);
    let event = &list(case, "events")[0];
    assert!(event["metadata"]["deletionTimestamp"].is_string());
    pods.cluster.terminate(text(event, "pod")).await;
    pods.until(&["10.0.0.11:8000"]).await;
    let shares = shares(&chats(&pods.picker, 100).await);
    assert_eq!(shares.get("10.0.0.10:8000"), None, "{shares:?}");
    for stream in running {
        stream.finish().await;
    }
    pods.picker.until_idle("all streams ended").await;
    pods.cluster.terminate("p1").await;
    pods.until(&[]).await;
    let refused = chats(&pods.picker, 1).await;
    assert_eq!(refused[0].refused().status(), 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn k8s_04_ports_are_endpoints_and_pods_of_other_ports_are_reported() {
    let case = input("K8S-04");
    let steps = list(case, "steps");
    assert_eq!(steps.len(), 5);
    let cluster = Cluster::namespace().await;
    let here = format!("namespace: {}", cluster.namespace);
    cluster.apply(&text(case, "apply").replace("namespace: default", &here)).await;
    let pods = Pods::without_pods(cluster).await;
    let cluster = &pods.cluster;
    let pools = ApiResource::erase::<InferencePool>(&());
    // "pod with no declared ports": it listens on all.
    cluster.pod("p0", &json!({"app": "w"}), "10.0.0.10").await;
    pods.until(&["10.0.0.10:8000", "10.0.0.10:8001"]).await;
    for step in &steps[..2] {
        let ports = step.as_str().unwrap().trim_start_matches("targetPorts -> ");
        let ports = pilotfish::document::Node::parse(ports).unwrap()[0].to_json();
        cluster.patch(&pools, "pool", &json!({"spec": {"targetPorts": ports}})).await;
        let expected: Vec<String> =
            ports.as_array().unwrap().iter().map(|port| format!("10.0.0.10:{}", port["number"])).collect();
        pods.until(&expected.iter().map(String::as_str).collect::<Vec<_>>()).await;
    }
    let fresh = pods.picker.endpoint("10.0.0.10:9000").await;
    assert!(
        fresh["signals"].as_object().unwrap().values().all(|signal| signal["value"].is_null()),
        "{fresh}"
    );

    assert_eq!(steps[2], "pod with containerPort 8300 only");
    let other = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "labels": {"app": "w"}},
        "spec": {"containers": [{"name": "e", "image": "e", "ports": [{"containerPort": 8300}]}]},
    });
    cluster.try_apply(&other, false).await.unwrap();
    cluster.report("other", "10.0.0.12", true).await;
    let labels = [("reason", "port")];
    pods.picker.until("it is counted", "pilotfish_pods_unroutable", &labels, 1.0).await;
    pods.until(&["10.0.0.10:8000", "10.0.0.10:9000"]).await;

    assert_eq!(steps[4], "two hostNetwork pods on one node ip with ports 8000 and 8001");
    cluster
        .patch(&pools, "pool", &json!({"spec": {"targetPorts": [{"number": 8000}, {"number": 8001}]}}))
        .await;
    for (name, port) in [("h0", "8000"), ("h1", "8001")] {
        cluster.pod(name, &json!({"app": "none"}), "10.0.0.13").await;
        let metadata = json!({"labels": {"app": "w"}, "annotations": {"llm-d.ai/active-ports": port}});
        cluster.describe(name, &metadata).await;
    }
    pods.until(&["10.0.0.10:8000", "10.0.0.10:8001", "10.0.0.13:8000", "10.0.0.13:8001"]).await;
}
