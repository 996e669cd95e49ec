//! `GET /v1/models`, answered from the ModelRoutes.

use serde_json::json;

use super::{Arrived, Body};
use crate::snapshot::Snapshot;

/// The list of all model and adapter names, if the request asks for it, any ModelRoute is loaded, and the gateway did not
/// restrict the request to endpoints: then it means to ask one of them.
pub fn answer(snapshot: &Snapshot, arrived: &Arrived) -> Option<String> {
    let asks = matches!(arrived.body, Body::Absent)
        && arrived.head.method() == "GET"
        && arrived.head.path().trim_end_matches('/') == "/v1/models";
    if !asks || arrived.subset.is_some() || snapshot.routes.is_empty() {
        return None;
    }
    let model = |name: &&str| json!({"id": name, "object": "model", "created": 0, "owned_by": "pilotfish"});
    let data: Vec<_> = snapshot.routes.names().iter().map(model).collect();
    Some(json!({"object": "list", "data": data}).to_string())
}
