//! `InferenceObjective`: how important the requests are that name it.

use kube::CustomResource;
use serde::{Deserialize, Serialize};

use super::PoolRef;

/// The priority of requests in one pool.
#[derive(Clone, Debug, Deserialize, Serialize, CustomResource)]
#[kube(
    group = "llm-d.ai",
    version = "v1alpha2",
    kind = "InferenceObjective",
    namespaced,
    schema = "disabled"
)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InferenceObjectiveSpec {
    /// Higher is served first, below 0 is shed first; absent counts as 0.
    #[serde(default)]
    pub priority: Option<i32>,
    /// The pool, in the objective's namespace.
    pub pool_ref: PoolRef,
}
