//! Kthena's `ModelRoute`: model name and rules to weighted targets.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// What a route serves and where it sends it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelRouteSpec {
    /// The base model.
    #[serde(default)]
    pub model_name: Option<String>,
    /// Adapters.
    #[serde(default)]
    pub lora_adapters: Vec<String>,
    /// Gateways it belongs to.
    #[serde(default)]
    pub parent_refs: Vec<Value>,
    /// Rules in order.
    #[serde(default)]
    pub rules: Vec<Option<Rule>>,
    /// Token limits.
    #[serde(default)]
    pub rate_limit: Option<Value>,
}

/// One rule.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Rule {
    /// Name, for people.
    #[serde(default)]
    pub name: Option<String>,
    /// When it applies; absent: always.
    #[serde(default)]
    pub model_match: Option<ModelMatch>,
    /// Where it sends.
    #[serde(default)]
    pub target_models: Vec<Option<TargetModel>>,
}

/// Conditions of a rule, all of which must hold.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelMatch {
    /// Headers by name.
    #[serde(default)]
    pub headers: BTreeMap<String, Option<StringMatch>>,
    /// The path.
    #[serde(default)]
    pub uri: Option<StringMatch>,
    /// Members of the body.
    #[serde(default)]
    pub body: Option<BodyMatch>,
}

/// A test on a text; one member should be set.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct StringMatch {
    /// Equal.
    #[serde(default)]
    pub exact: Option<String>,
    /// Begins with.
    #[serde(default)]
    pub prefix: Option<String>,
    /// RE2 pattern, unanchored.
    #[serde(default)]
    pub regex: Option<String>,
}

/// A test on the body.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct BodyMatch {
    /// Exact model name.
    #[serde(default)]
    pub model: Option<String>,
}

/// A weighted target.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TargetModel {
    /// A ModelServer of the route's namespace.
    #[serde(default)]
    pub model_server_name: Option<String>,
    /// A provider outside; not served by Pilotfish.
    #[serde(default)]
    pub external_model_provider_name: Option<String>,
    /// Share, 0 to 100; all or none of a rule's targets set it.
    #[serde(default)]
    pub weight: Option<u32>,
}
