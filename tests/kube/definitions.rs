//! The definitions of our kinds, as the API server takes them.

use std::path::PathBuf;
use std::sync::Arc;

use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, CustomResourceExt};
use pilotfish::document::Node;
use pilotfish::resources::lower::{Lowered, lower, lower_objects};
use pilotfish::resources::model_route::ModelRoute;
use pilotfish::resources::model_server::ModelServer;
use pilotfish::resources::{crd, object};
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::kube::Cluster;

const SERVING: &str = "networking.serving.volcano.sh/v1alpha1";

fn route(spec: &Value) -> Value {
    json!({"apiVersion": SERVING, "kind": "ModelRoute", "metadata": {"name": "r"}, "spec": spec})
}

fn server(spec: &Value) -> Value {
    json!({"apiVersion": SERVING, "kind": "ModelServer", "metadata": {"name": "s"}, "spec": spec})
}

fn yaml(text: &str) -> Value {
    Node::parse(text).unwrap()[0].to_json()
}

/// Every member that the definitions know.
const ROUTE: &str = "
modelName: chat
loraAdapters: [sql, poems]
parentRefs: [{name: gateway, namespace: infra, sectionName: https, port: 443}]
rules:
- name: paid
  modelMatch:
    headers: {x-tier: {exact: paid}, x-client: {regex: '^app-'}}
    uri: {prefix: /v1/}
    body: {model: chat}
  targetModels: [{modelServerName: big, weight: 90}, {modelServerName: small, weight: 10}]
- targetModels: [{modelServerName: small}]
rateLimit: {inputTokensPerUnit: 1000, outputTokensPerUnit: 2000, unit: minute, global: {redis: {address: 'redis:6379'}}}
";
const SERVER: &str = "
model: org/chat
inferenceEngine: vLLM
workloadSelector:
  matchLabels: {app: chat}
  pdGroup: {groupKey: group, prefillLabels: {role: prefill}, decodeLabels: {role: decode}}
workloadPort: {port: 8000, protocol: http}
trafficPolicy: {timeout: 30s, retry: {attempts: 2}}
kvConnector: {type: nixl}
";

#[tokio::test]
async fn the_shipped_definitions_pass_a_dry_run() {
    let cluster = Cluster::namespace().await;
    for (path, text) in crd::documents().unwrap() {
        let result = cluster.try_apply(&yaml(&text), true).await;
        assert!(result.is_ok(), "{path}: {result:?}");
    }
}

#[rstest]
#[case::full_route(route(&yaml(ROUTE)))]
#[case::adapters_only(route(&yaml("{loraAdapters: [sql], rules: [{targetModels: [{modelServerName: s}]}]}")))]
#[case::model_only(route(&yaml("{modelName: m, rules: [{targetModels: [{modelServerName: s}]}]}")))]
#[case::external(route(&yaml("{modelName: m, rules: [{targetModels: [{externalModelProviderName: e}]}]}")))]
#[case::full_server(server(&yaml(SERVER)))]
#[case::sglang(server(&yaml("{inferenceEngine: SGLang, workloadSelector: {matchLabels: {a: b}}, workloadPort: {port: 1}}")))]
#[tokio::test]
async fn good_objects_are_accepted(#[case] object: Value) {
    let cluster = Cluster::namespace().await;
    cluster.try_apply(&object, false).await.unwrap();
}

#[rstest]
#[case::no_model("{rules: [{targetModels: [{modelServerName: s}]}]}", "give modelName, loraAdapters or both")]
#[case::empty_model(
    "{modelName: '', rules: [{targetModels: [{modelServerName: s}]}]}",
    "give modelName, loraAdapters or both"
)]
#[case::no_rules("{modelName: m}", "spec.rules: Required value")]
#[case::no_targets(
    "{modelName: m, rules: [{targetModels: []}]}",
    "spec.rules[0].targetModels: Invalid value"
)]
#[case::two_targets_in_one(
    "{modelName: m, rules: [{targetModels: [{modelServerName: s, externalModelProviderName: e}]}]}",
    "give exactly one of modelServerName and externalModelProviderName"
)]
#[case::weightless(
    "{modelName: m, rules: [{targetModels: [{modelServerName: s, weight: 0}]}]}",
    "give one target a weight above 0"
)]
#[case::nameless_adapter(
    "{loraAdapters: [sql, ''], rules: [{targetModels: [{modelServerName: s}]}]}",
    "give every adapter a name"
)]
#[case::adapters_outside(
    "{loraAdapters: [sql], rules: [{targetModels: [{modelServerName: s}, {externalModelProviderName: e}]}]}",
    "a route of adapters cannot target an external provider"
)]
#[case::gateway(
    "{modelName: m, rules: [], parentRefs: [{name: g, namespace: Infra}]}",
    "spec.parentRefs[0].namespace in body should match"
)]
#[case::heavy(
    "{modelName: m, rules: [{targetModels: [{modelServerName: s, weight: 101}]}]}",
    "should be less than or equal to 100"
)]
#[case::misspelt("{modelNme: m, modelName: m, rules: []}", ".spec.modelNme: field not declared in schema")]
#[case::unit(
    "{modelName: m, rules: [], rateLimit: {unit: week}}",
    "Unsupported value: \"week\": supported values: \"second\", \"minute\", \"hour\", \"day\", \"month\""
)]
#[tokio::test]
async fn wrong_routes_are_rejected_with_the_reason(#[case] spec: &str, #[case] why: &str) {
    let cluster = Cluster::namespace().await;
    let error = cluster.try_apply(&route(&yaml(spec)), false).await.unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

#[rstest]
#[case::engine("inferenceEngine", json!("Ollama"), "supported values: \"vLLM\", \"SGLang\", \"TGI\"")]
#[case::no_labels("workloadSelector", json!({"matchLabels": {}}), "should have at least 1 properties")]
#[case::port("workloadPort", json!({"port": 65536}), "should be less than or equal to 65535")]
#[case::port_zero("workloadPort", json!({"port": 0}), "should be greater than or equal to 1")]
#[case::timeout("trafficPolicy", json!({"timeout": "5 minutes"}), "spec.trafficPolicy.timeout in body should match")]
#[case::role("workloadSelector", json!({"matchLabels": {"a": "b"}, "pdGroup": {"groupKey": "g"}}), "prefillLabels: Required value")]
#[case::connector("kvConnector", json!({"type": "pigeon"}), "Unsupported value: \"pigeon\"")]
#[tokio::test]
async fn wrong_servers_are_rejected_with_the_reason(
    #[case] member: &str,
    #[case] value: Value,
    #[case] why: &str,
) {
    let cluster = Cluster::namespace().await;
    let mut spec = yaml(SERVER);
    spec[member] = value;
    let error = cluster.try_apply(&server(&spec), false).await.unwrap_err().to_string();
    assert!(error.contains(why), "{error}");
}

#[tokio::test]
async fn the_model_of_a_route_stays() {
    let cluster = Cluster::namespace().await;
    let named = |model: &str| route(&json!({"modelName": model, "rules": []}));
    cluster.try_apply(&named("one"), false).await.unwrap();
    let error = cluster.try_apply(&named("two"), false).await.unwrap_err().to_string();
    assert!(error.contains("modelName is immutable"), "{error}");
}

#[rstest]
#[case::conditions(json!({"observedGeneration": 1, "conditions": [condition("Accepted", "True")]}), "")]
#[case::several(json!({"endpoints": 2, "conditions": [condition("Accepted", "True"), condition("Ready", "Unknown")]}), "")]
#[case::one_of_a_type(json!({"conditions": [condition("Ready", "True"), condition("Ready", "False")]}), "Duplicate value")]
#[case::word(json!({"conditions": [condition("Ready", "Perhaps")]}), "Unsupported value: \"Perhaps\"")]
#[case::count(json!({"endpoints": -1}), "should be greater than or equal to 0")]
#[tokio::test]
async fn the_status_of_a_server_has_the_usual_conditions(#[case] status: Value, #[case] why: &str) {
    let cluster = Cluster::namespace().await;
    cluster.try_apply(&server(&yaml(SERVER)), false).await.unwrap();
    let resource = ModelServer::api_resource();
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &cluster.namespace, &resource);
    let patch = Patch::Merge(json!({"status": status}));
    match api.patch_status("s", &PatchParams::default(), &patch).await {
        Ok(stored) => assert_eq!((&stored.data["status"], why), (&status, "")),
        Err(error) => assert!(!why.is_empty() && error.to_string().contains(why), "{error}"),
    }
}

fn condition(name: &str, status: &str) -> Value {
    let time = "2026-09-01T00:00:00Z";
    json!({"type": name, "status": status, "reason": "Tested", "message": "", "lastTransitionTime": time})
}

/// `null` is what a template leaves where it has nothing to say.
#[tokio::test]
async fn defaults_take_the_place_of_what_is_absent_or_null() {
    let cluster = Cluster::namespace().await;
    let targets = json!([{"modelServerName": "a", "weight": null}, {"modelServerName": "b"}]);
    let spec = json!({"modelName": "m", "rules": [{"targetModels": targets}]});
    let stored = cluster.try_apply(&route(&spec), false).await.unwrap();
    let targets = json!([{"modelServerName": "a", "weight": 100}, {"modelServerName": "b", "weight": 100}]);
    assert_eq!(stored.data["spec"], json!({"modelName": "m", "rules": [{"targetModels": targets}]}));
}

/// An object as the API server stores it, as a document.
async fn stored(cluster: &Cluster, resource: &ApiResource, name: &str) -> (PathBuf, Arc<str>) {
    let api: Api<DynamicObject> = Api::namespaced_with(cluster.client.clone(), &cluster.namespace, resource);
    object::document(resource, &serde_json::to_value(api.get(name).await.unwrap()).unwrap())
}

#[tokio::test]
async fn a_stored_object_means_what_its_file_means() {
    let cluster = Cluster::namespace().await;
    // Given in full: a route of a file has no creation time, and weights by default that are not 100.
    let text = format!(
        "apiVersion: {SERVING}\nkind: ModelServer\nmetadata: {{name: s, namespace: {0}}}\nspec: {{model: org/m, \
         inferenceEngine: vLLM, workloadSelector: {{matchLabels: {{app: x}}}}, workloadPort: {{port: 8000}}, \
         trafficPolicy: {{timeout: 5s, retry: {{attempts: 3}}}}}}\n---\napiVersion: {SERVING}\nkind: ModelRoute\n\
         metadata: {{name: r, namespace: {0}}}\nspec: {{modelName: m, rules: [{{targetModels: [{{modelServerName: s, \
         weight: 7}}]}}]}}\n",
        cluster.namespace
    );
    cluster.apply(&text).await;
    let watched = lower_objects(&[
        stored(&cluster, &ModelServer::api_resource(), "s").await,
        stored(&cluster, &ModelRoute::api_resource(), "r").await,
    ]);
    let written = lower(&[("all.yaml", Arc::from(text))]);
    let warnings: Vec<&str> = watched.problems.iter().map(|problem| problem.message.as_str()).collect();
    assert_eq!(warnings, [""; 0], "defaults warn of what nobody wrote, or pods are missed");
    assert_eq!(format!("{:?}", watched.world.pools), format!("{:?}", written.world.pools));
    let rules = |lowered: &Lowered| format!("{:?}", lowered.world.routes[0].rules);
    assert_eq!(rules(&watched), rules(&written));
    assert!(watched.world.routes[0].created > 0, "the API server says when it was created");
}
