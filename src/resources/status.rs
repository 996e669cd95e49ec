//! What is reported back about an object: whether it is accepted, and what of it has no effect and why.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Condition of every kind: `False` where the object, or a part of it, is wrong and left out.
pub const ACCEPTED: &str = "Accepted";
/// Condition of every kind: `False` where it names an object that is not there.
pub const RESOLVED_REFS: &str = "ResolvedRefs";
/// Condition of a ModelServer: `True` while a pod that it selects is ready on its port.
pub const READY: &str = "Ready";

/// Status of a ModelRoute, and the part that a ModelServer's has in common with it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// The generation of the object that the conditions are about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Accepted` and `ResolvedRefs`; of a ModelServer `Ready` too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
}

/// Status of a ModelServer.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServerStatus {
    /// What every kind reports.
    #[serde(flatten)]
    pub common: Status,
    /// Endpoints of ready pods that it selects, whatever their engines say of themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub endpoints: Option<i32>,
}

/// `metav1.Condition` with the bounds that Kubernetes' own generator gives it; one of a type, so that several writers can
/// own one each. The bounds are those of `k8s.io/apimachinery/pkg/apis/meta/v1/types.go`.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "description": "One aspect of the object's state.",
            "required": ["lastTransitionTime", "message", "reason", "status", "type"],
            "properties": {
                "type": {
                    "type": "string",
                    "description": "Which aspect.",
                    "maxLength": 316,
                    "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
                },
                "status": {
                    "type": "string",
                    "description": "Whether it holds.",
                    "enum": ["True", "False", "Unknown"],
                },
                "observedGeneration": {
                    "type": "integer",
                    "format": "int64",
                    "description": "The generation of the object that this is about.",
                    "minimum": 0,
                },
                "lastTransitionTime": {
                    "type": "string",
                    "format": "date-time",
                    "description": "When the status changed.",
                },
                "reason": {
                    "type": "string",
                    "description": "Why, for programs.",
                    "minLength": 1,
                    "maxLength": 1024,
                    "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
                },
                "message": {
                    "type": "string",
                    "description": "Why, for people.",
                    "maxLength": 32768,
                },
            },
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_written_flat_and_without_what_is_not_known() {
        let status = ServerStatus {
            common: Status { observed_generation: Some(3), ..Status::default() },
            endpoints: Some(0),
        };
        let written = serde_json::json!({"observedGeneration": 3, "endpoints": 0});
        assert_eq!(serde_json::to_value(&status).unwrap(), written);
        assert_eq!(serde_json::from_value::<ServerStatus>(written).unwrap(), status);
        assert_eq!(serde_json::to_value(Status::default()).unwrap(), serde_json::json!({}));
    }
}
