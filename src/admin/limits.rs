//! `GET /debug/limits`: token limits and who has spent of them.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::Admin;
use crate::admission::limits::{Doors, Kind, Per, Rate};

/// Limits shown at most, and buckets.
const MOST: usize = 1_000;

/// The page.
pub async fn limits(State(admin): State<Arc<Admin>>) -> Json<Value> {
    let limiter = admin.doors.watched();
    let limits: Vec<Value> = limiter
        .limits(MOST)
        .into_iter()
        .map(|(limit, well)| {
            json!({
                "route": limit.route,
                "model": limit.model,
                "per": match limit.per { Per::Route => "route", Per::Identity => "identity" },
                "input": limit.rates.input.map(rate),
                "output": limit.rates.output.map(rate),
                "redis": limit.together.as_ref().map(|together| &together.address),
                "redis_well": well,
            })
        })
        .collect();
    let buckets: Vec<Value> = limiter
        .shown(MOST)
        .into_iter()
        .map(|shown| {
            let level = |kind| shown.rates.get(kind).as_ref().map(|_| shown.levels.get(kind).floor() as i64);
            json!({
                "route": shown.route,
                "identity": shown.owner.name(),
                "input": level(Kind::Input),
                "output": level(Kind::Output),
            })
        })
        .collect();
    let door = match admin.doors {
        Doors::Picker(_) => "picker",
        Doors::Envoy(_) => "envoy",
    };
    Json(json!({
        "enforcement": door, "limits": limits, "buckets": buckets, "held": limiter.held(), "overflows": limiter.overflowed(),
    }))
}

fn rate(rate: Rate) -> Value {
    json!({"tokens": rate.tokens, "unit": rate.unit.name()})
}
