//! `InferencePool` of the Gateway API Inference Extension.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Endpoints by label.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InferencePoolSpec {
    /// Which endpoints belong.
    pub selector: Selector,
    /// Ports of selected Pods; an Endpoint's own address wins.
    #[serde(default)]
    pub target_ports: Vec<TargetPort>,
    /// Protocol towards the endpoints; the gateway's concern.
    #[serde(default)]
    pub app_protocol: Option<String>,
    /// How a gateway finds its picker; the gateway's concern.
    #[serde(default)]
    pub endpoint_picker_ref: Option<Value>,
}

/// Label selector.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Selector {
    /// All must be equal.
    #[serde(default)]
    pub match_labels: BTreeMap<String, String>,
}

/// One port.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TargetPort {
    /// Port number.
    pub number: u16,
}
