//! What objects are told of themselves.

use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, CustomResourceExt};
use pilotfish::resources::inference_pool::InferencePool;
use pilotfish::resources::model_route::ModelRoute;
use pilotfish::resources::model_server::ModelServer;
use serde_json::{Value, json};

use super::changes::{POOL, SERVER};
use crate::kit::eventually::eventually;
use crate::kit::kube::{Cluster, Server};
use crate::kit::picker::Picker;

/// A route to nowhere, one that comes after an older one, and one that limits.
const ROUTES: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: dangling}
spec: {modelName: other, rules: [{targetModels: [{modelServerName: nowhere}]}]}
---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: same}
spec: {modelName: other, rules: [{targetModels: [{modelServerName: server}]}]}
---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: wrong}
spec: {modelName: third, rules: [{modelMatch: {headers: {x-tier: {regex: '('}}}, targetModels: [{modelServerName: server}]}]}
";

/// Type, status and reason of the conditions of an object; of which none is there, nothing.
async fn conditions(cluster: &Cluster, resource: &ApiResource, name: &str) -> Vec<[String; 3]> {
    let object = cluster.get(resource, name).await;
    let conditions = object.data["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let text = |condition: &Value, member: &str| condition[member].as_str().unwrap().to_owned();
    conditions.iter().map(|c| [text(c, "type"), text(c, "status"), text(c, "reason")]).collect()
}

async fn until_told(cluster: &Cluster, resource: &ApiResource, name: &str, expected: &[[&str; 3]]) {
    eventually(format!("{name} is told {expected:?}"), async || {
        (conditions(cluster, resource, name).await == expected).then_some(())
    })
    .await;
}

/// Reason and note of the events about an object.
async fn events(cluster: &Cluster, kind: &str) -> Vec<(String, String)> {
    let api: Api<Event> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let events = api.list(&ListParams::default()).await.unwrap();
    let about = |event: &Event| event.regarding.as_ref().and_then(|of| of.kind.as_deref()) == Some(kind);
    events.items.into_iter().filter(about).map(|event| (event.reason.unwrap(), event.note.unwrap())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_and_servers_have_conditions_that_follow_what_stands() {
    let cluster = Cluster::namespace().await;
    cluster.apply(SERVER).await;
    for route in ROUTES.split("---") {
        cluster.apply(route).await;
    }
    // Two replicas say the same.
    let pickers = [Picker::of_cluster(&cluster).start().await, Picker::of_cluster(&cluster).start().await];
    let (routes, servers) = (ModelRoute::api_resource(), ModelServer::api_resource());
    let accepted = ["Accepted", "True", "Accepted"];
    let resolved = ["ResolvedRefs", "True", "ResolvedRefs"];
    until_told(&cluster, &routes, "route", &[accepted, resolved]).await;
    let dangling = ["ResolvedRefs", "False", "TargetNotFound"];
    until_told(&cluster, &routes, "dangling", &[accepted, dangling]).await;
    until_told(&cluster, &routes, "same", &[["Accepted", "True", "Conflicted"], resolved]).await;
    until_told(&cluster, &routes, "wrong", &[["Accepted", "False", "Invalid"], resolved]).await;
    let without = ["Ready", "False", "NoEndpoints"];
    until_told(&cluster, &servers, "server", &[accepted, resolved, without]).await;

    cluster.pod("p", &json!({"app": "w"}), &cluster.address(1)).await;
    until_told(&cluster, &servers, "server", &[accepted, resolved, ["Ready", "True", "EndpointsFound"]])
        .await;
    assert_eq!(cluster.get(&servers, "server").await.data["status"]["endpoints"], 1);
    for picker in &pickers {
        let labels = [("kind", "modelroutes")];
        picker.until("errors are counted", "pilotfish_config_errors", &labels, 2.0).await;
    }
    cluster.apply(&SERVER.replace("name: server}\nspec:\n  inf", "name: nowhere}\nspec:\n  inf")).await;
    until_told(&cluster, &routes, "dangling", &[accepted, resolved]).await;
    assert_eq!(events(&cluster, "ModelRoute").await, [], "conditions say it");

    // A change that alters nothing of what is said is seen all the same, and so is an object created anew.
    cluster.patch(&servers, "server", &json!({"spec": {"model": "other"}})).await;
    let observed = async || {
        let server = cluster.get(&servers, "server").await;
        (server.data["status"]["observedGeneration"] == json!(server.metadata.generation)).then_some(())
    };
    eventually("the new generation is observed", observed).await;
    let api: Api<ModelServer> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    api.delete("server", &DeleteParams::default()).await.unwrap();
    cluster.apply(SERVER.split("---").next().unwrap()).await;
    until_told(&cluster, &servers, "server", &[accepted, resolved, ["Ready", "True", "EndpointsFound"]])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_room_for_conditions_is_told_by_events_once() {
    let server = Server::start().await;
    let cluster = Cluster::of(&server).await;
    // As in Kthena's definition: a status without members.
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client.clone());
    let bare = json!([{"op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/status",
        "value": {"type": "object"}}]);
    let patch: Patch<()> = Patch::Json(serde_json::from_value(bare).unwrap());
    api.patch(ModelRoute::crd_name(), &PatchParams::default(), &patch).await.unwrap();
    cluster.apply(SERVER).await;
    cluster.apply(ROUTES.split("---").next().unwrap()).await;
    cluster.apply(&POOL.replace("number: 8000", "number: 9000")).await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"app": "w"}},
        "spec": {"containers": [{"name": "e", "image": "e", "ports": [{"containerPort": 8300}]}]},
    });
    cluster.try_apply(&pod, false).await.unwrap();
    cluster.report("p", &cluster.address(1), true).await;
    let pickers = [Picker::of_cluster(&cluster).start().await, Picker::of_cluster(&cluster).start().await];
    let of_routes = eventually("an event of the route", async || {
        Some(events(&cluster, "ModelRoute").await).filter(|events| !events.is_empty())
    })
    .await;
    assert_eq!(of_routes.len(), 1, "{of_routes:?}");
    assert_eq!(of_routes[0].0, "TargetNotFound");
    let of_pods = eventually("two events of the pod", async || {
        Some(events(&cluster, "Pod").await).filter(|events| events.len() == 2)
    })
    .await;
    assert!(
        of_pods.iter().all(|(reason, note)| reason == "Unroutable" && note.contains("8300")),
        "{of_pods:?}"
    );
    for picker in &pickers {
        let labels = [("reason", "port")];
        picker.until("it is counted", "pilotfish_pods_unroutable", &labels, 2.0).await;
    }
    let pools = ApiResource::erase::<InferencePool>(&());
    assert_eq!(conditions(&cluster, &pools, "pool").await, [[""; 3]; 0], "a pool's status is the gateway's");
    server.kill().await;
}
