//! Kthena's `ModelServer`: the endpoints that serve one model.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::duration;
use super::status::ServerStatus;

/// Endpoints by label, their engine and what they call the model.
#[derive(Clone, Debug, Deserialize, Serialize, CustomResource, JsonSchema)]
#[kube(
    group = "networking.serving.volcano.sh",
    version = "v1alpha1",
    kind = "ModelServer",
    namespaced,
    status = "ServerStatus",
    doc = "The endpoints that serve one model.",
    printcolumn(name = "Engine", type_ = "string", json_path = ".spec.inferenceEngine"),
    printcolumn(name = "Port", type_ = "integer", json_path = ".spec.workloadPort.port"),
    printcolumn = r#"{"name": "Endpoints", "type": "integer", "jsonPath": ".status.endpoints"}"#,
    printcolumn = r#"{"name": "Accepted", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Accepted')].status"}"#,
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelServerSpec {
    /// The model name its engines expect.
    #[serde(default)]
    #[schemars(length(max = 256))]
    pub model: Option<String>,
    /// `vLLM`, `SGLang` or `TGI`.
    #[schemars(extend("enum" = ["vLLM", "SGLang", "TGI"]))]
    pub inference_engine: String,
    /// Which endpoints belong.
    pub workload_selector: WorkloadSelector,
    /// Port of selected Pods; an Endpoint's own address wins.
    #[serde(default)]
    #[schemars(!default, with = "WorkloadPort")]
    pub workload_port: Option<WorkloadPort>,
    /// Timeout and retries.
    #[serde(default)]
    pub traffic_policy: Option<TrafficPolicy>,
    /// KV transfer between prefill and decode.
    #[serde(default)]
    pub kv_connector: Option<KvConnector>,
}

/// Label selector.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct WorkloadSelector {
    /// All must be equal.
    #[serde(default)]
    #[schemars(!default, extend("minProperties" = 1))]
    pub match_labels: BTreeMap<String, String>,
    /// Prefill and decode roles.
    #[serde(default)]
    pub pd_group: Option<PdGroup>,
}

/// How prefill and decode engines are told apart and which of them belong together.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PdGroup {
    /// The label key whose value names the group.
    #[schemars(length(min = 1))]
    pub group_key: String,
    /// Labels of prefill engines.
    #[schemars(extend("minProperties" = 1))]
    pub prefill_labels: BTreeMap<String, String>,
    /// Labels of decode engines.
    #[schemars(extend("minProperties" = 1))]
    pub decode_labels: BTreeMap<String, String>,
}

/// Where Pods listen.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct WorkloadPort {
    /// Port number.
    #[schemars(range(min = 1))]
    pub port: u16,
    /// `http` or `https`.
    #[serde(default)]
    #[schemars(extend("enum" = ["http", "https"], "default" = "http"))]
    pub protocol: Option<String>,
}

/// What Envoy is asked to bound and repeat.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TrafficPolicy {
    /// Bound on one request.
    #[serde(default)]
    #[schemars(extend("pattern" = duration::PATTERN))]
    pub timeout: Option<String>,
    /// Retries.
    #[serde(default)]
    pub retry: Option<Retry>,
}

/// What the API server writes where `retryInterval` is absent.
pub const DEFAULT_RETRY_INTERVAL: &str = "100ms";

/// How a failed attempt is repeated.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Retry {
    /// Attempts after the first.
    #[serde(default)]
    #[schemars(with = "Option<i32>", range(min = 0))]
    pub attempts: Option<i64>,
    /// Pause between attempts.
    #[serde(default)]
    #[schemars(extend("pattern" = duration::PATTERN, "default" = DEFAULT_RETRY_INTERVAL))]
    pub retry_interval: Option<String>,
}

/// How KV blocks travel from prefill to decode.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct KvConnector {
    /// `http`, `lmcache`, `nixl` or `mooncake`.
    #[serde(default, rename = "type")]
    #[schemars(extend("enum" = ["http", "lmcache", "nixl", "mooncake"], "default" = "http"))]
    pub kind: Option<String>,
}
