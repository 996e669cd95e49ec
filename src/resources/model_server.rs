//! Kthena's `ModelServer`: the endpoints that serve one model.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Endpoints by label, their engine and what they call the model.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelServerSpec {
    /// The model name its engines expect.
    #[serde(default)]
    pub model: Option<String>,
    /// `vLLM` or `SGLang`.
    pub inference_engine: String,
    /// Which endpoints belong.
    pub workload_selector: WorkloadSelector,
    /// Port of selected Pods; an Endpoint's own address wins.
    #[serde(default)]
    pub workload_port: Option<WorkloadPort>,
    /// Timeout and retries.
    #[serde(default)]
    pub traffic_policy: Option<TrafficPolicy>,
    /// KV transfer between prefill and decode.
    #[serde(default)]
    pub kv_connector: Option<Value>,
}

/// Label selector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct WorkloadSelector {
    /// All must be equal.
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
    /// Prefill and decode roles.
    #[serde(default)]
    pub pd_group: Option<Value>,
}

/// Where Pods listen.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct WorkloadPort {
    /// Port number.
    pub port: u16,
    /// `http` or `https`.
    #[serde(default)]
    pub protocol: Option<String>,
}

/// What Envoy is asked to bound and repeat.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TrafficPolicy {
    /// Bound on one request.
    #[serde(default)]
    pub timeout: Option<String>,
    /// Retries.
    #[serde(default)]
    pub retry: Option<Retry>,
}

/// How a failed attempt is repeated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Retry {
    /// Attempts after the first.
    #[serde(default)]
    pub attempts: Option<i64>,
    /// Pause between attempts.
    #[serde(default)]
    pub retry_interval: Option<String>,
}
