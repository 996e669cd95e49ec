//! `Endpoint`, our own kind for life without Kubernetes.

use serde::Deserialize;

/// Where an engine listens.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct EndpointSpec {
    /// `IP:port` or `[IPv6]:port`.
    pub address: String,
    /// Whether no new requests should go there.
    #[serde(default)]
    pub drain: bool,
    /// Capacity relative to its pool.
    #[serde(default)]
    pub weight: Option<f64>,
    /// Where the engine publishes its KV events: a port, `tcp://*:PORT`, or `listen:PORT` if it dials us.
    #[serde(default)]
    pub kv_events: Option<String>,
    /// Where it replays missed events: a port or `tcp://*:PORT`.
    #[serde(default)]
    pub kv_replay: Option<String>,
}
