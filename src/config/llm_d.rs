//! The plugin types of llm-d that have no counterpart among ours, and what becomes of them.

use super::flow_control::POLICIES;
use super::sessions::{AGENT_IDENTITY, SESSION_ID};

/// What naming an llm-d type means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// What it says is read.
    Read,
    /// Every profile works this way already; only its parameters have no effect.
    BuiltIn,
    /// It is accepted and has no effect.
    Ignored,
    /// Its work would be missed.
    Lacking,
}

/// The type of llm-d's scorer over shares of matched blocks; another instance may hold its parameters.
pub const PREFIX_CACHE_SCORER: &str = "prefix-cache-scorer";
/// The producer that holds that scorer's parameters in llm-d.
pub const APPROXIMATE_PREFIX: &str = "approx-prefix-cache-producer";

/// The producer that follows engines' events in llm-d.
pub const PRECISE_PREFIX: &str = "precise-prefix-cache-producer";

/// Our name of an llm-d type that does what one of ours does.
pub fn alias(name: &str) -> Option<&'static str> {
    (name == "precise-prefix-cache-scorer").then_some("precise-prefix")
}

/// Profiles are run in their order, endpoints keep to their roles, endpoints are scraped, prompts are read at 4 bytes a token,
/// bookings are counted.
const BUILT_IN: &[&str] = &[
    "decode-filter",
    "prefill-filter",
    "disagg-headers-handler",
    "prefill-header-handler",
    "single-profile-handler",
    "metrics-data-source",
    "core-metrics-extractor",
    "openai-parser",
    "anthropic-parser",
    "vllmhttp-parser",
    "sglanghttp-parser",
    "token-producer",
    "tokenizer",
    "inflight-load-producer",
    PRECISE_PREFIX,
];

/// Handlers of profiles: which profile is run for what, and what decides.
const HANDLERS: &[&str] = &["disagg-profile-handler", "pd-profile-handler"];

const IGNORED: &[&str] = &[
    "passthrough-parser",
    "vllmgrpc-parser",
    "vertexai-parser",
    "models-data-source",
    "models-data-extractor",
    "endpoint-notification-source",
    "k8s-notification-source",
];

const LACKING: &[&str] = &[
    "disaggregatedset-rollout-screener",
    "label-selector-filter",
    "by-label-selector",
    "by-label",
    "encode-filter",
    "endpoint-attribute-filter",
    "topology-affinity-filter",
    "utilization-filter",
    "prefix-cache-affinity-filter",
    "slo-headroom-tier-filter",
    "context-length-aware",
    "header-based-testing-filter",
    "load-aware-scorer",
    "token-load-scorer",
    "active-request-scorer",
    "header-label-affinity-scorer",
    "endpoint-attribute-scorer",
    "topology-affinity-scorer",
    "latency-scorer",
    "mm-embeddings-cache-scorer",
    "multicluster-queue-scorer",
    "multicluster-kv-cache-utilization-scorer",
    "multicluster-prefix-cache-scorer",
    "header-profile-handler",
    "data-parallel-profile-handler",
    "always-disagg-multimodal-decider",
    "dcgm-data-source",
    "dcgm-extractor",
    "topology-extractor",
    "file-discovery",
    "multicluster-file-discovery",
    "multicluster-metrics-data-source",
    "multicluster-metrics-extractor",
    "predicted-latency-producer",
    "mm-embeddings-cache-producer",
    "burst-prefix-cache-producer",
    "p2p-source-producer",
    "multicluster-approx-prefix-cache-producer",
    "latency-slo-admitter",
    "probabilistic-admitter",
    "destination-endpoint-served-verifier",
    "soft-reflective-ceiling-policy",
    "sheddable-eviction-filter",
    "priority-then-time-eviction-order-policy",
];

/// What becomes of an llm-d type other than those above; `None` if llm-d has no such type.
pub fn known(name: &str) -> Option<Known> {
    [
        (HANDLERS, Known::Read),
        (BUILT_IN, Known::BuiltIn),
        (IGNORED, Known::Ignored),
        (LACKING, Known::Lacking),
    ]
    .into_iter()
    .find_map(|(names, known)| names.contains(&name).then_some(known))
}

/// Every type above, to find the nearest of a name.
pub fn names() -> Vec<&'static str> {
    let lists = [
        HANDLERS,
        BUILT_IN,
        IGNORED,
        LACKING,
        &POLICIES,
        &[PREFIX_CACHE_SCORER, APPROXIMATE_PREFIX, SESSION_ID, AGENT_IDENTITY],
    ];
    lists.into_iter().flatten().copied().collect()
}
