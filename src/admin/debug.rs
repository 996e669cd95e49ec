//! The debug pages.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Admin, error, view};
use crate::admission::identity::Attributes;
use crate::decide::{Arrived, Body, Chunks};
use crate::decision::RING;
use crate::extproc::message::named_pool;
use crate::request::head::Head;
use crate::schedule::{Pipeline, Subset};
use crate::snapshot::Snapshot;
use crate::state::PoolKind;
use crate::state::signals::{Millis, SignalKind};

type Page = State<Arc<Admin>>;

/// Which decisions to show.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    request_id: Option<String>,
    decision: Option<String>,
    limit: Option<usize>,
}

/// `GET /debug/decisions`.
pub async fn decisions(State(admin): Page, Query(wanted): Query<Wanted>) -> Json<Value> {
    let found = admin.ring.find(wanted.limit.unwrap_or(20).min(RING), |record| {
        wanted.request_id.as_deref().is_none_or(|id| *record.request_id == *id)
            && wanted.decision.as_deref().is_none_or(|id| *record.id == *id)
    });
    Json(json!({"decisions": found.iter().map(|record| view::decision(record)).collect::<Vec<_>>()}))
}

/// `GET /debug/endpoints`.
pub async fn endpoints(State(admin): Page) -> Json<Value> {
    let snapshot = admin.shared.decider.store.load_full();
    let now = Millis::now();
    let shown: Vec<Value> = snapshot
        .endpoints
        .iter()
        .map(|endpoint| {
            let pools = pools_of(&snapshot, endpoint.slot);
            let health = &endpoint.health;
            let adapters = endpoint.adapters.load();
            let scheduler = &admin.shared.decider.scheduler;
            let index = scheduler.pipeline().text.as_ref().map(|text| text.routed.blocks_of(endpoint.slot).0);
            let pool = snapshot.pools.iter().find(|pool| pool.has(endpoint.slot));
            let placement = pool.and_then(|pool| pool.placement(endpoint.slot));
            json!({
                "endpoint": endpoint.destination,
                "name": endpoint.name.to_string(),
                "pool": pools.first(),
                "pools": pools,
                "state": health.state().name(),
                "full": health.is_full(now),
                "wedged": health.is_wedged(),
                "weight": endpoint.weight,
                "engine": endpoint.engine.name(),
                "role": placement.map(|placement| placement.role.name()),
                "group": placement.and_then(|placement| pool?.disaggregation.as_ref()?.groups.get(placement.group as usize)),
                "scrape": admin.scraper.status(endpoint.slot).map(|status| view::scrape(&status)),
                "events": admin.events.status(endpoint.slot).map(|status| view::events(&status)),
                "models": adapters.as_ref().map(|adapters| adapters.served.clone()),
                "signals": view::signals(endpoint, now),
                "reserved": view::booked(&endpoint.booked),
                "rung": scheduler.best_rung(endpoint).name(),
                "truth": view::truth(endpoint),
                "index_blocks": index,
                "token_blocks": {
                    "routed": scheduler.tokens.routed.blocks_of(endpoint.slot).0,
                    "events": scheduler.tokens.events.blocks_of(endpoint.holder()),
                },
                "rates": view::rates(endpoint, pool.map(|pool| &**pool), now),
            })
        })
        .collect();
    Json(json!({"endpoints": shown}))
}

fn pools_of(snapshot: &Snapshot, slot: u64) -> Vec<String> {
    snapshot.pools.iter().filter(|pool| pool.has(slot)).map(|pool| pool.label.to_string()).collect()
}

/// A request to explain.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Question {
    #[serde(default = "chat_path")]
    path: String,
    #[serde(default)]
    headers: serde_json::Map<String, Value>,
    body: Option<Value>,
    #[serde(default)]
    subset: Option<Vec<String>>,
    pool: Option<String>,
}

fn chat_path() -> String {
    "/v1/chat/completions".to_owned()
}

/// `POST /debug/explain`.
pub async fn explain(State(admin): Page, body: axum::body::Bytes) -> Response {
    let question: Question = match serde_json::from_slice(&body) {
        Ok(question) => question,
        Err(error_) => return error(StatusCode::BAD_REQUEST, &format!("not a question: {error_}")),
    };
    let arrived = question.arrived();
    match admin.shared.decider.explain(&arrived).await {
        Ok(record) => Json(view::decision(&record)).into_response(),
        Err(refusal) => {
            let status =
                StatusCode::from_u16(refusal.reason.status()).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            (status, Json(json!({"refused": {"reason": refusal.reason.name(), "message": refusal.message}})))
                .into_response()
        }
    }
}

impl Question {
    fn arrived(self) -> Arrived {
        let method = if self.body.is_some() { "POST" } else { "GET" };
        let fixed = [(":method", method), (":path", &self.path)].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let given = self.headers.into_iter().map(|(name, value)| match value {
            Value::String(text) => (name, text),
            other => (name, other.to_string()),
        });
        let body = match self.body {
            None => Body::Absent,
            // A body given as text stands for itself, any other JSON for its compact form.
            Some(Value::String(text)) => Body::Whole(Chunks::of(text.into_bytes())),
            Some(value) => Body::Whole(Chunks::of(value.to_string().into_bytes())),
        };
        let now = Instant::now();
        Arrived {
            pool: self.pool.as_deref().map(named_pool),
            head: Head::new(fixed.into_iter().chain(given)),
            body,
            attributes: Attributes::new(),
            subset: self.subset.map(|list| Subset::from_entries(list.iter().map(String::as_str))),
            sees_response: false,
            started: now,
            complete: now,
        }
    }
}

/// `GET /debug/config`: problems of what the operator wrote, and the profile that runs.
pub async fn config(State(admin): Page) -> Json<Value> {
    let pipeline = admin.shared.decider.scheduler.pipeline();
    let documents = admin.documents.read();
    let snapshot = admin.shared.decider.store.load_full();
    let rewrites = snapshot.rewrites.iter().map(|(pool, rewrites)| {
        let labels: Vec<&str> = rewrites.all().iter().map(|rewrite| &*rewrite.label).collect();
        (pool.to_string(), json!(labels))
    });
    let objectives = snapshot.objectives.iter().map(|(name, it)| (name.to_string(), json!(it.priority)));
    Json(json!({
        "scheduler": crate::config::effective(&pipeline),
        "settings": settings(&pipeline),
        "rewrites": rewrites.collect::<serde_json::Map<_, _>>(),
        "objectives": objectives.collect::<serde_json::Map<_, _>>(),
        "resource_problems": documents.resource_problems,
        "config_problems": documents.config_problems,
    }))
}

/// Every plugin with its settings as they act, defaults included.
fn settings(pipeline: &Pipeline) -> Value {
    let profile = &pipeline.profile;
    let filters =
        profile.filters.iter().map(|f| json!({"filter": f.name, "settings": format!("{:?}", f.filter)}));
    let scorers =
        profile.scorers.iter().map(|s| json!({"scorer": s.name, "settings": format!("{:?}", s.scorer)}));
    let picker = json!({"picker": profile.picker.name, "settings": format!("{:?}", profile.picker.picker)});
    filters.chain(scorers).chain([picker]).collect()
}

fn dump(admin: &Admin, kind: &str) -> Vec<Value> {
    let documents = admin.documents.read();
    let of_kind = documents.resources.iter().filter(|document| document.kind == kind);
    of_kind.map(|d| json!({"name": d.name.name, "namespace": d.name.namespace, "spec": d.spec})).collect()
}

/// `GET /debug/config_dump/modelroutes`, in Kthena's shape.
pub async fn model_routes(State(admin): Page) -> Json<Value> {
    Json(json!({"modelroutes": dump(&admin, "ModelRoute")}))
}

/// `GET /debug/config_dump/inferencemodelrewrites`, as the others.
pub async fn rewrites(State(admin): Page) -> Json<Value> {
    Json(json!({"inferencemodelrewrites": dump(&admin, "InferenceModelRewrite")}))
}

/// `GET /debug/config_dump/inferenceobjectives`, as the others.
pub async fn objectives(State(admin): Page) -> Json<Value> {
    Json(json!({"inferenceobjectives": dump(&admin, "InferenceObjective")}))
}

/// `GET /debug/config_dump/modelservers`, in Kthena's shape.
pub async fn model_servers(State(admin): Page) -> Json<Value> {
    let snapshot = admin.shared.decider.store.load_full();
    let mut servers = dump(&admin, "ModelServer");
    for server in &mut servers {
        let pool = snapshot.pools.iter().find(|pool| {
            pool.name.kind == PoolKind::ModelServer
                && *pool.name.object.name == *server["name"].as_str().unwrap_or_default()
                && *pool.name.object.namespace == *server["namespace"].as_str().unwrap_or_default()
        });
        if let Some(pool) = pool {
            server["associatedPods"] = pool.members.iter().map(|m| m.endpoint.name.to_string()).collect();
        }
    }
    Json(json!({"modelservers": servers}))
}

/// `GET /debug/config_dump/pods`, in Kthena's shape; unknown numbers are null.
pub async fn pods(State(admin): Page) -> Json<Value> {
    let snapshot = admin.shared.decider.store.load_full();
    let now = Millis::now();
    let shown: Vec<Value> = snapshot
        .endpoints
        .iter()
        .map(|endpoint| {
            let value = |kind| endpoint.signals.last(kind, now).map(|(value, _)| value);
            let models = endpoint.adapters.load();
            json!({
                "name": endpoint.name.name,
                "namespace": endpoint.name.namespace,
                "engine": endpoint.engine.name(),
                "metrics": {
                    "gpuCacheUsage": value(SignalKind::KvUsage),
                    "requestWaitingNum": value(SignalKind::Waiting),
                    "requestRunningNum": value(SignalKind::Running),
                    "tpot": value(SignalKind::TimePerOutputToken),
                    "ttft": value(SignalKind::TimeToFirstToken),
                },
                "models": models.as_ref().map(|models| models.served.clone()),
                "modelServers": pools_of(&snapshot, endpoint.slot),
            })
        })
        .collect();
    Json(json!({"pods": shown}))
}
