//! `InferenceModelRewrite`: the models that serve a requested name, by weight.

use kube::CustomResource;
use serde::{Deserialize, Serialize};

use super::PoolRef;

/// Rules of one pool.
#[derive(Clone, Debug, Deserialize, Serialize, CustomResource)]
#[kube(
    group = "llm-d.ai",
    version = "v1alpha2",
    kind = "InferenceModelRewrite",
    namespaced,
    schema = "disabled"
)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct InferenceModelRewriteSpec {
    /// The pool, in the rewrite's namespace.
    pub pool_ref: PoolRef,
    /// Rules; exact matches come before rules that match everything.
    pub rules: Vec<RewriteRule>,
}

/// One rule.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RewriteRule {
    /// When it applies: if any holds, or if there is none.
    #[serde(default)]
    pub matches: Vec<RewriteMatch>,
    /// What the model becomes.
    #[serde(default)]
    pub targets: Vec<RewriteTarget>,
}

/// A test on the request.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RewriteMatch {
    /// On the model name.
    pub model: ModelTest,
}

/// A test on the model name.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelTest {
    /// `Exact`, the only one there is.
    #[serde(default, rename = "type")]
    pub kind: Option<String>,
    /// The name.
    pub value: String,
}

/// A weighted model name.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RewriteTarget {
    /// Share, from 1; all or none of a rule's targets set it.
    #[serde(default)]
    pub weight: Option<u32>,
    /// The name.
    pub model_rewrite: String,
}
