//! The documents that describe endpoints, pools and routes, as users write them.
//!
//! One YAML shape everywhere: the same types read files and, in a cluster, what the API server sends. No logic here;
//! `lower` turns documents into a [`World`](crate::topology::World).

pub mod crd;
pub mod duration;
pub mod endpoint;
pub mod inference_model_rewrite;
pub mod inference_objective;
pub mod inference_pool;
pub mod lower;
pub mod model_route;
pub mod model_server;
pub mod name;
pub mod object;
pub mod pod;
pub mod quantity;
pub mod status;
pub mod tokenizer;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use endpoint::EndpointSpec;
pub use inference_model_rewrite::InferenceModelRewriteSpec;
pub use inference_objective::InferenceObjectiveSpec;
pub use inference_pool::InferencePoolSpec;
pub use model_route::ModelRouteSpec;
pub use model_server::ModelServerSpec;

/// Metadata of any document. Members that only an API server sets are read past.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name, required.
    #[serde(default)]
    pub name: String,
    /// Namespace, `default` if absent.
    #[serde(default)]
    pub namespace: Option<String>,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Annotations.
    #[serde(default)]
    pub annotations: BTreeMap<String, String>,
    /// RFC 3339, set by the API server.
    #[serde(default)]
    pub creation_timestamp: Option<String>,
}

impl Metadata {
    /// Creation time in seconds since the epoch; documents of files have none and are equally old.
    pub fn created(&self) -> i64 {
        self.creation_timestamp.as_deref().and_then(crate::clock::parse_rfc3339).unwrap_or(0)
    }
}

/// A document of a known kind.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Document<S> {
    /// Group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Identity and labels.
    pub metadata: Metadata,
    /// What is wanted.
    pub spec: S,
    /// What an API server reported; not read.
    #[serde(default)]
    pub status: Option<Value>,
}

/// The pool that an object belongs to.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct PoolRef {
    /// API group, that of InferencePool if absent.
    #[serde(default)]
    pub group: Option<String>,
    /// Kind, InferencePool if absent.
    #[serde(default)]
    pub kind: Option<String>,
    /// Name.
    pub name: String,
}
