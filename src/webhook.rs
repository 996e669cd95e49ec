//! The validating webhook: an API server asks it before it stores an object, and is told what would not work.
//!
//! An object is read as `check` reads a file. What is wrong with it alone denies it; what only others can mend, such as a
//! target that is not there, is a warning, since objects are applied in any order.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::Listener;
use axum::{Json, Router};
use futures::{Stream, StreamExt};
use kube::core::{ApiResource, GroupVersionKind};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::config::TokenizerSettings;
use crate::document::{Problem, Severity};
use crate::extproc::Shared;
use crate::metrics::Metrics;
use crate::resources::lower::{is_read, lower_alone};
use crate::resources::object;
use crate::state::pool::PoolName;
use crate::tls::{Connection, Tls, incoming};

/// A review holds an object twice, and etcd takes objects of 1.5 MiB.
const MOST_BYTES: usize = 8 << 20;
/// API servers cut warnings where all of an answer have 4 KiB.
const MOST_WARNING_CHARS: usize = 256;
const API_VERSION: &str = "admission.k8s.io/v1";

/// `POST /validate`, and `GET /healthz`.
pub fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/validate", post(validate).layer(DefaultBodyLimit::max(MOST_BYTES)))
        .route("/healthz", get(async || "ok\n"))
        .with_state(shared)
}

async fn validate(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let pools = shared.decider.store.load().pools.iter().map(|pool| pool.name.clone()).collect();
    let tokenizers = shared.decider.tokenizing.sources.load();
    match read(&body) {
        Ok(request) => Json(review(&request, pools, &tokenizers)).into_response(),
        Err(why) => {
            (StatusCode::BAD_REQUEST, format!("no AdmissionReview of {API_VERSION}: {why}\n")).into_response()
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    api_version: String,
    kind: String,
    request: Request,
}

/// What is asked. Members that no answer depends on are read past.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    kind: Kind,
    #[serde(default)]
    resource: Resource,
    #[serde(default)]
    sub_resource: String,
    operation: String,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
}

#[derive(Debug, Deserialize)]
struct Kind {
    #[serde(default)]
    group: String,
    version: String,
    #[serde(rename = "kind")]
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct Resource {
    #[serde(default)]
    resource: String,
}

fn read(body: &[u8]) -> Result<Request, String> {
    let review: Review = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    if (&*review.api_version, &*review.kind) == (API_VERSION, "AdmissionReview") {
        Ok(review.request)
    } else {
        Err(format!("it is a {} of {}", review.kind, review.api_version))
    }
}

/// The answer.
fn review(request: &Request, pools: Vec<PoolName>, tokenizers: &TokenizerSettings) -> Value {
    let mut found = Found::default();
    // What goes must be let go, finalizers included, whatever it was.
    let stays = request.object["metadata"]["deletionTimestamp"].is_null();
    if matches!(&*request.operation, "CREATE" | "UPDATE") && request.sub_resource.is_empty() && stays {
        found = look(request, &request.object, pools.clone(), tokenizers);
        if request.old_object.is_object() {
            // Who changes a label of an object that was wrong before is not the one to mend it.
            let before = look(request, &request.old_object, pools, tokenizers);
            let (known, new) = found.errors.into_iter().partition(|error| before.errors.contains(error));
            found.errors = new;
            found.warnings.extend::<Vec<String>>(known);
        }
    }
    let mut response = json!({"uid": request.uid, "allowed": found.errors.is_empty()});
    if !found.errors.is_empty() {
        response["status"] = json!({"code": 422, "reason": "Invalid", "message": found.errors.join("\n")});
    }
    if !found.warnings.is_empty() {
        let short = |warning: &String| warning.chars().take(MOST_WARNING_CHARS).collect::<String>();
        response["warnings"] = found.warnings.iter().map(short).collect();
    }
    json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})
}

/// What is wrong with an object, a line each.
#[derive(Debug, Default)]
struct Found {
    errors: Vec<String>,
    warnings: Vec<String>,
}

fn look(request: &Request, object: &Value, pools: Vec<PoolName>, tokenizers: &TokenizerSettings) -> Found {
    let Kind { group, version, name } = &request.kind;
    let kind = GroupVersionKind::gvk(group, version, name);
    let resource = ApiResource::from_gvk_with_plural(&kind, &request.resource.resource);
    if !is_read(&resource.api_version, &resource.kind) {
        let warning = format!("{} of {} is not validated here", resource.kind, resource.api_version);
        return Found { warnings: vec![warning], ..Found::default() };
    }
    let lowered = lower_alone(object::document(&resource, object), pools);
    let mut found = Found::default();
    for problem in &lowered.problems {
        let lines = if problem.severity == Severity::Error { &mut found.errors } else { &mut found.warnings };
        lines.push(line(problem));
    }
    let unlisted = lowered.tokenizer_urls.iter().filter(|(url, _)| !tokenizers.lists(url));
    found.warnings.extend(unlisted.map(|(_, problem)| line(problem)));
    // Equal lines at several places say nothing more.
    let mut seen = HashSet::new();
    found.errors.retain(|line| seen.insert(line.clone()));
    found
}

/// A problem in one line, with the member it is about: lines and columns of a stored object are nobody's.
fn line(problem: &Problem) -> String {
    let member = problem.source.trim().trim_end_matches(['{', '[', ',', ' ', ':']);
    let at = if member.is_empty() { Cow::default() } else { Cow::from(format!(", at {member}")) };
    let advice = problem.advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default();
    format!("{}{at}{advice}", problem.message).replace(['\n', '\r'], " ")
}

/// Connections of API servers.
pub struct Door {
    connections: Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>,
    address: SocketAddr,
}

impl Door {
    /// Those that come to `listener`, with TLS. Fails if the listener has no address.
    pub fn new(listener: TcpListener, tls: Arc<Tls>, metrics: Arc<Metrics>) -> io::Result<Self> {
        let address = listener.local_addr()?;
        Ok(Self { connections: Box::pin(incoming(listener, Some(tls), metrics)), address })
    }
}

impl Listener for Door {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            // The stream neither ends nor fails.
            if let Some(Ok(connection)) = self.connections.next().await {
                return (connection, self.address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{ObjectName, PoolKind};
    use rstest::rstest;

    const GOOD: &str = r#"{"modelName": "m", "rules": [{"targetModels": [{"modelServerName": "s"}]}]}"#;
    const BAD: &str = r#"{"modelName": "m", "rules": [{"modelMatch": {"uri": {"regex": "("}}, "targetModels": [{"modelServerName": "s"}]}]}"#;

    fn asked(operation: &str, object: &Value, old: &Value) -> Request {
        let kind =
            json!({"group": "networking.serving.volcano.sh", "version": "v1alpha1", "kind": "ModelRoute"});
        let resource = json!({"resource": "modelroutes"});
        let request = json!({"uid": "u", "kind": kind, "resource": resource, "operation": operation,
            "object": object, "oldObject": old});
        serde_json::from_value(request).unwrap()
    }

    fn route(spec: &str) -> Value {
        json!({"metadata": {"name": "r", "namespace": "n"}, "spec": serde_json::from_str::<Value>(spec).unwrap()})
    }

    fn answered(request: &Request) -> Value {
        let pool = PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("n", "s") };
        review(request, vec![pool], &TokenizerSettings::default())["response"].clone()
    }

    #[test]
    fn a_bad_object_is_denied_with_its_problem_and_a_good_one_passes_in_silence() {
        let denied = answered(&asked("CREATE", &route(BAD), &Value::Null));
        let why = r#"`(` is not a regular expression: unclosed group, at "regex": "(""#;
        let status = json!({"code": 422, "reason": "Invalid", "message": why});
        assert_eq!(denied, json!({"uid": "u", "allowed": false, "status": status}));
        let passed = answered(&asked("CREATE", &route(GOOD), &Value::Null));
        assert_eq!(passed, json!({"uid": "u", "allowed": true}));
    }

    #[test]
    fn what_others_can_mend_is_a_warning() {
        let answer = answered(&asked("CREATE", &route(&GOOD.replace("\"s\"", "\"ss\"")), &Value::Null));
        let warning =
            r#"ModelServer n/ss is not known here yet, at "modelServerName": "ss"; did you mean `s`?"#;
        assert_eq!(answer, json!({"uid": "u", "allowed": true, "warnings": [warning]}));
    }

    #[test]
    fn nothing_keeps_an_object_from_going_or_from_being_touched() {
        let mut going = route(BAD);
        going["metadata"]["deletionTimestamp"] = json!("2026-09-01T00:00:00Z");
        for request in [
            asked("DELETE", &Value::Null, &route(BAD)),
            asked("UPDATE", &going, &route(BAD)),
            Request { sub_resource: "status".to_owned(), ..asked("UPDATE", &route(BAD), &route(GOOD)) },
        ] {
            assert_eq!(answered(&request), json!({"uid": "u", "allowed": true}));
        }
        let touched = answered(&asked("UPDATE", &route(BAD), &route(BAD)));
        assert_eq!((&touched["allowed"], touched["warnings"].as_array().unwrap().len()), (&json!(true), 1));
        assert_eq!(answered(&asked("UPDATE", &route(BAD), &route(GOOD)))["allowed"], false);
    }

    #[test]
    fn kinds_and_versions_that_are_not_read_pass_with_a_word() {
        let mut request = asked("CREATE", &json!({"metadata": {"name": "x"}}), &Value::Null);
        request.kind.version = "v2".to_owned();
        let warning = "ModelRoute of networking.serving.volcano.sh/v2 is not validated here";
        assert_eq!(answered(&request), json!({"uid": "u", "allowed": true, "warnings": [warning]}));
    }

    #[rstest]
    #[case("", "EOF")]
    #[case("{}", "missing field")]
    #[case(r#"{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}"#, "missing field `request`")]
    #[case(
        r#"{"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": {"uid": "u", "operation": "CREATE",
            "kind": {"version": "v1", "kind": "Pod"}}}"#,
        "admission.k8s.io/v1beta1"
    )]
    fn what_is_no_review_is_refused(#[case] body: &str, #[case] why: &str) {
        let error = read(body.as_bytes()).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}
