//! `GET /debug/queues`: who waits in front of each pool, and how full it is.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::Admin;
use crate::admission::GateStatus;

/// All pools.
pub async fn queues(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let mut gates = admin.shared.decider.admission.gates();
    gates.sort_by(|(a, _), (b, _)| a.cmp(b));
    let queues: Vec<Value> = gates.iter().map(|(pool, gate)| queue(pool, &gate.status())).collect();
    Json(json!({"queues": queues}))
}

fn queue(pool: &str, gate: &GateStatus) -> Value {
    let bands = gate.bands.iter().map(|(priority, waiting)| {
        json!({"priority": priority, "requests": waiting.requests, "bytes": waiting.bytes})
    });
    let room = &gate.room;
    json!({
        "pool": pool,
        "bands": bands.collect::<Vec<_>>(),
        "flows": gate.flows,
        "running": gate.open,
        "waits_for_an_endpoint": gate.holds,
        "endpoints_up": room.endpoints,
        // What nothing is known of takes any number.
        "capacity": room.capacity.is_finite().then_some(room.capacity),
        "used": room.used,
    })
}
