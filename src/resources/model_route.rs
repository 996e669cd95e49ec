//! Kthena's `ModelRoute`: model name and rules to weighted targets.

use std::collections::BTreeMap;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::status::Status;

/// What a route serves and where it sends it.
#[derive(Clone, Debug, Deserialize, Serialize, CustomResource, JsonSchema)]
#[kube(
    group = "networking.serving.volcano.sh",
    version = "v1alpha1",
    kind = "ModelRoute",
    namespaced,
    status = "Status",
    doc = "Model name and rules to weighted targets.",
    printcolumn(name = "Model", type_ = "string", json_path = ".spec.modelName"),
    printcolumn = r#"{"name": "Accepted", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Accepted')].status"}"#,
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "(has(self.modelName) && self.modelName != '') || (has(self.loraAdapters) && size(self.loraAdapters) > 0)",
        "message": "give modelName, loraAdapters or both",
    },
    {
        "rule": "!has(self.loraAdapters) || self.loraAdapters.all(adapter, adapter != '')",
        "message": "give every adapter a name",
    },
    {
        "rule": "!has(self.loraAdapters) || size(self.loraAdapters) == 0 || self.rules.all(rule, rule.targetModels.all(target, \
                 !has(target.externalModelProviderName) || target.externalModelProviderName == ''))",
        "message": "a route of adapters cannot target an external provider",
    },
]))]
pub struct ModelRouteSpec {
    /// The base model.
    #[serde(default)]
    #[schemars(extend("x-kubernetes-validations" = [{
        "rule": "self == oldSelf",
        "message": "modelName is immutable: make another ModelRoute",
    }]))]
    pub model_name: Option<String>,
    /// Adapters.
    #[serde(default)]
    #[schemars(!default, with = "Option<Vec<String>>", length(max = 10))]
    pub lora_adapters: Vec<String>,
    /// Gateways it belongs to.
    #[serde(default)]
    #[schemars(!default, with = "Option<Vec<ParentReference>>")]
    pub parent_refs: Vec<ParentReference>,
    /// Rules in order.
    #[serde(default)]
    #[schemars(!default, with = "Vec<Rule>", length(max = 16))]
    pub rules: Vec<Option<Rule>>,
    /// Token limits.
    #[serde(default)]
    pub rate_limit: Option<RateLimit>,
}

/// One rule.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.targetModels.exists(target, !has(target.weight) || target.weight > 0)",
    "message": "give one target a weight above 0",
}]))]
pub struct Rule {
    /// Name, for people.
    #[serde(default)]
    pub name: Option<String>,
    /// When it applies; absent: always.
    #[serde(default)]
    pub model_match: Option<ModelMatch>,
    /// Where it sends.
    #[serde(default)]
    #[schemars(!default, with = "Vec<TargetModel>", length(min = 1, max = 16))]
    pub target_models: Vec<Option<TargetModel>>,
}

/// Conditions of a rule, all of which must hold.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ModelMatch {
    /// Headers by name.
    #[serde(default)]
    #[schemars(!default, with = "Option<BTreeMap<String, StringMatch>>")]
    pub headers: BTreeMap<String, Option<StringMatch>>,
    /// The path.
    #[serde(default)]
    pub uri: Option<StringMatch>,
    /// Members of the body.
    #[serde(default)]
    pub body: Option<BodyMatch>,
}

/// A test on a text; one member should be set.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
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
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct BodyMatch {
    /// Exact model name.
    #[serde(default)]
    pub model: Option<String>,
}

/// A weighted target.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "(has(self.modelServerName) && self.modelServerName != '') \
             != (has(self.externalModelProviderName) && self.externalModelProviderName != '')",
    "message": "give exactly one of modelServerName and externalModelProviderName",
}]))]
pub struct TargetModel {
    /// A ModelServer of the route's namespace.
    #[serde(default)]
    pub model_server_name: Option<String>,
    /// A provider outside; not served by Pilotfish.
    #[serde(default)]
    pub external_model_provider_name: Option<String>,
    /// Share, 0 to 100; all or none of a rule's targets set it.
    #[serde(default)]
    #[schemars(range(max = 100), extend("default" = 100))]
    pub weight: Option<u32>,
}

/// Names as Gateway API has them: DNS labels and subdomains, and kinds.
const LABEL: &str = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$";
const SUBDOMAIN: &str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
const GROUP: &str = r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$";
const KIND: &str = "^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$";

/// A Gateway that a route belongs to.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct ParentReference {
    /// API group.
    #[serde(default)]
    #[schemars(length(max = 253), extend("pattern" = GROUP, "default" = "gateway.networking.k8s.io"))]
    pub group: Option<String>,
    /// Kind.
    #[serde(default)]
    #[schemars(length(min = 1, max = 63), extend("pattern" = KIND, "default" = "Gateway"))]
    pub kind: Option<String>,
    /// Namespace, the route's own if absent.
    #[serde(default)]
    #[schemars(length(min = 1, max = 63), extend("pattern" = LABEL))]
    pub namespace: Option<String>,
    /// Name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// One listener of the Gateway.
    #[serde(default)]
    #[schemars(length(min = 1, max = 253), extend("pattern" = SUBDOMAIN))]
    pub section_name: Option<String>,
    /// The listeners of one port.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub port: Option<u16>,
}

/// Tokens that a route may take in a unit of time.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct RateLimit {
    /// Prompt tokens; absent: any number.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub input_tokens_per_unit: Option<u32>,
    /// Generated tokens; absent: any number.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub output_tokens_per_unit: Option<u32>,
    /// The unit.
    #[serde(default)]
    #[schemars(extend("enum" = ["second", "minute", "hour", "day", "month"], "default" = "second"))]
    pub unit: Option<String>,
    /// Counted together with other routers.
    #[serde(default)]
    pub global: Option<GlobalLimit>,
}

/// Where a limit is counted for all routers together.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct GlobalLimit {
    /// The store.
    #[serde(default)]
    pub redis: Option<LimitStore>,
}

/// A Redis server.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct LimitStore {
    /// `host:port`.
    pub address: String,
}
