//! `InferencePool` of the Gateway API Inference Extension, which owns its CRD.

use std::collections::BTreeMap;

use kube::CustomResource;
use serde::{Deserialize, Serialize};

/// Endpoints by label.
#[derive(Clone, Debug, Deserialize, Serialize, CustomResource)]
#[kube(
    group = "inference.networking.k8s.io",
    version = "v1",
    kind = "InferencePool",
    namespaced,
    schema = "disabled"
)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InferencePoolSpec {
    /// Which endpoints belong.
    pub selector: Selector,
    /// Ports of selected Pods, each an endpoint of its own; an Endpoint's own address wins.
    #[serde(default)]
    pub target_ports: Vec<TargetPort>,
    /// Protocol towards the endpoints; the gateway's concern.
    #[serde(default)]
    pub app_protocol: Option<String>,
    /// How a gateway finds its picker; the gateway's concern.
    #[serde(default)]
    pub endpoint_picker_ref: Option<EndpointPickerRef>,
}

/// Label selector.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Selector {
    /// All must be equal.
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
}

/// One port.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TargetPort {
    /// Port number.
    pub number: u16,
}

/// The service that picks for a pool.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct EndpointPickerRef {
    /// API group, the core group if absent.
    #[serde(default)]
    pub group: Option<String>,
    /// Kind, `Service` if absent.
    #[serde(default)]
    pub kind: Option<String>,
    /// Name.
    pub name: String,
    /// The Service's port.
    #[serde(default)]
    pub port: Option<TargetPort>,
    /// `FailOpen` or `FailClose`.
    #[serde(default)]
    pub failure_mode: Option<String>,
}
