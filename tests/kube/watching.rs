//! That the servers of the tests behave as a cluster's do.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, ListParams};
use kube::runtime::{WatchStreamExt, reflector, watcher};
use pilotfish::resources::model_server::ModelServer;
use serde_json::json;

use crate::kit::eventually::eventually;
use crate::kit::kube::{Cluster, Server};

const SERVER: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: s}
spec: {inferenceEngine: vLLM, workloadSelector: {matchLabels: {app: x}}, workloadPort: {port: 8000}}
";

/// A store that follows the namespace, for as long as the task lives.
fn follow<K>(cluster: &Cluster) -> (reflector::Store<K>, tokio::task::JoinHandle<()>)
where
    K: kube::Resource<DynamicType = (), Scope = k8s_openapi::NamespaceResourceScope>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + Sync
        + 'static,
{
    let (store, writer) = reflector::store();
    let api = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    // The initial list as a stream: what an etcd without progress notifications cannot give.
    let events = watcher(api, watcher::Config::default().streaming_lists()).default_backoff();
    let events = reflector(writer, events);
    (store, tokio::spawn(events.for_each(|_| std::future::ready(()))))
}

#[tokio::test]
async fn a_reflector_sees_an_object_come_change_and_go() {
    let cluster = Cluster::namespace().await;
    let (store, task) = follow::<ModelServer>(&cluster);
    let port = || Some(store.state().first()?.spec.workload_port.as_ref()?.port);
    cluster.apply(SERVER).await;
    eventually("the server is seen", async || (port() == Some(8000)).then_some(())).await;
    cluster.apply(&SERVER.replace("8000", "9000")).await;
    eventually("its change is seen", async || (port() == Some(9000)).then_some(())).await;
    let api: Api<ModelServer> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    api.delete("s", &DeleteParams::default()).await.unwrap();
    eventually("its end is seen", async || store.is_empty().then_some(())).await;
    task.abort();
}

#[tokio::test]
async fn a_pod_is_ready_at_an_address_of_this_machine() {
    let cluster = Cluster::namespace().await;
    let (store, task) = follow::<Pod>(&cluster);
    let address = || {
        let pod = store.state().first().cloned()?;
        let status = pod.status.as_ref()?;
        let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
        let all: Vec<_> = status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect();
        Some((status.pod_ip.clone()?, all, ready))
    };
    let expected = |ip: &str, ready| Some((ip.to_owned(), vec![ip.to_owned()], ready));
    cluster.pod("p", &json!({"app": "x"}), "127.0.0.2").await;
    eventually("it is ready", async || (address() == expected("127.0.0.2", true)).then_some(())).await;
    cluster.report("p", "127.0.0.3", false).await;
    eventually("it moved", async || (address() == expected("127.0.0.3", false)).then_some(())).await;
    task.abort();
}

#[tokio::test]
async fn namespaces_do_not_see_each_other() {
    let (one, two) = (Cluster::namespace().await, Cluster::namespace().await);
    one.apply(SERVER).await;
    let api: Api<ModelServer> = Api::namespaced(two.client.clone(), &two.namespace);
    assert!(api.list(&ListParams::default()).await.unwrap().items.is_empty());
}

#[tokio::test]
async fn the_servers_end_with_their_owner_even_under_an_open_watch() {
    let server = Server::start().await;
    let api: Api<Pod> = Api::all(server.client().await);
    let mut watch = watcher(api.clone(), watcher::Config::default()).boxed();
    watch.try_next().await.unwrap();
    server.kill().await;
    assert!(api.list(&ListParams::default()).await.is_err());
}
