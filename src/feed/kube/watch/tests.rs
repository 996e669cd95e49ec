//! Against a scripted API server, for what a real one does rarely.

use std::collections::VecDeque;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::feed::kube::kind;
use crate::feed::kube::{Kind, Scope};

/// What the server answers to the next list, and to the watch after it.
#[derive(Debug)]
struct Act {
    /// Names of the listed objects, or the status of a refusal.
    list: Result<Vec<&'static str>, u16>,
    /// Events of the watch, which then ends; none keeps it open.
    watch: Option<Vec<Value>>,
}

type Script = Arc<Mutex<VecDeque<Act>>>;

fn object(name: &str) -> Value {
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"namespace": "n", "name": name, "resourceVersion": "7"}, "spec": {},
    })
}

async fn objects_page(State(script): State<Script>, RawQuery(query): RawQuery) -> Response {
    if query.is_some_and(|query| query.contains("watch=true")) {
        let events = script.lock().pop_front().and_then(|act| act.watch);
        return match events {
            Some(events) => {
                let lines: Vec<String> = events.iter().map(ToString::to_string).collect();
                Body::from(lines.join("\n") + "\n").into_response()
            }
            None => Body::from_stream(futures::stream::pending::<std::io::Result<String>>()).into_response(),
        };
    }
    let list = script.lock().front().map(|act| act.list.clone());
    match list {
        Some(Ok(names)) => {
            let items: Vec<Value> = names.iter().map(|name| object(name)).collect();
            axum::Json(json!({"metadata": {"resourceVersion": "5"}, "items": items})).into_response()
        }
        Some(Err(status)) => {
            script.lock().pop_front();
            refusal(status)
        }
        None => futures::future::pending().await,
    }
}

fn refusal(code: u16) -> Response {
    let status = json!({"kind": "Status", "status": "Failure", "reason": "", "message": "no", "code": code});
    (StatusCode::from_u16(code).unwrap(), axum::Json(status)).into_response()
}

/// The kind as discovery shows it.
async fn discovery(State(verbs): State<&'static [&'static str]>) -> axum::Json<Value> {
    let resource = json!({"name": "inferencepools", "singularName": "", "namespaced": true, "kind": "InferencePool", "verbs": verbs});
    axum::Json(json!({"groupVersion": "inference.networking.k8s.io/v1", "resources": [resource]}))
}

/// A watch of pools on a server that follows the script.
async fn watched(
    verbs: &'static [&'static str],
    script: impl IntoIterator<Item = Act>,
) -> (mpsc::Receiver<Update>, [AbortOnDropHandle<()>; 2]) {
    let script: Script = Arc::new(Mutex::new(script.into_iter().collect()));
    let group = "/apis/inference.networking.k8s.io/v1";
    let router = Router::new()
        .route(&format!("{group}/inferencepools"), get(objects_page))
        .with_state(script)
        .merge(Router::new().route(group, get(discovery)).with_state(verbs));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let client = Client::try_from(kube::Config::new(format!("http://{address}").parse().unwrap())).unwrap();
    let (send, updates) = mpsc::channel(64);
    let watches = Arc::new(Watches::default());
    let pools =
        kind::sources(&Scope::default()).into_iter().find(|source| source.kind == Kind::InferencePool);
    let source = pools.unwrap();
    let wiring = Wiring { client, id: watches.add(&source), watches, send };
    let watch = tokio::spawn(objects(wiring, source));
    (updates, [server, watch].map(AbortOnDropHandle::new))
}

/// The next update that is about objects: what it does, to which.
async fn next(updates: &mut mpsc::Receiver<Update>) -> (&'static str, Vec<String>) {
    let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
    loop {
        let update = tokio::time::timeout(Duration::from_secs(20), updates.recv());
        match update.await.expect("an update within the deadline").unwrap() {
            Update::Reset(_, objects) => return ("reset", objects.iter().map(name).collect()),
            Update::Apply(_, object) => return ("apply", vec![name(&object)]),
            Update::Delete(_, object) => return ("delete", vec![object.name.to_string()]),
            Update::Current(_)
            | Update::Behind(..)
            | Update::ApplyPod(..)
            | Update::DeletePod(..)
            | Update::ResetPods(..) => {}
        }
    }
}

fn event(kind: &str, name: &str) -> Value {
    json!({"type": kind, "object": object(name)})
}

fn expired() -> Value {
    let status = json!({"kind": "Status", "status": "Failure", "reason": "Expired", "message": "too old", "code": 410});
    json!({"type": "ERROR", "object": status})
}

const WHOLE: &[&str] = &["get", "list", "watch", "create"];

#[tokio::test]
async fn an_expired_watch_lists_anew() {
    let first = Act { list: Ok(vec!["a"]), watch: Some(vec![event("ADDED", "b"), expired()]) };
    let second = Act { list: Ok(vec!["b", "c"]), watch: None };
    let (mut updates, _tasks) = watched(WHOLE, [first, second]).await;
    assert_eq!(next(&mut updates).await, ("reset", vec!["a".to_owned()]));
    assert_eq!(next(&mut updates).await, ("apply", vec!["b".to_owned()]));
    assert_eq!(next(&mut updates).await, ("reset", vec!["b".to_owned(), "c".to_owned()]));
}

#[tokio::test]
async fn refused_lists_are_tried_again() {
    let refused = [500, 403, 404, 429].map(|status| Act { list: Err(status), watch: None });
    let last = Act { list: Ok(vec!["a"]), watch: None };
    let (mut updates, _tasks) = watched(WHOLE, refused.into_iter().chain([last])).await;
    assert_eq!(next(&mut updates).await, ("reset", vec!["a".to_owned()]));
}

#[tokio::test]
async fn a_deletion_is_believed_and_one_that_was_taken_back_is_not_told() {
    let events = vec![event("DELETED", "a"), event("DELETED", "b"), event("ADDED", "b"), event("ADDED", "c")];
    let act = Act { list: Ok(vec!["a", "b"]), watch: Some(events) };
    let rest = Act { list: Ok(vec!["b", "c"]), watch: None };
    let (mut updates, _tasks) = watched(WHOLE, [act, rest]).await;
    assert_eq!(next(&mut updates).await.0, "reset");
    assert_eq!(next(&mut updates).await, ("apply", vec!["b".to_owned()]));
    assert_eq!(next(&mut updates).await, ("apply", vec!["c".to_owned()]));
    assert_eq!(next(&mut updates).await, ("delete", vec!["a".to_owned()]));
}

/// While a definition is being removed, the API server lists what is left of its objects, and takes none.
#[tokio::test]
async fn nothing_is_believed_of_a_kind_that_is_being_removed() {
    let act = Act { list: Ok(vec![]), watch: None };
    let (mut updates, _tasks) = watched(&["get", "list", "watch", "delete"], [act]).await;
    for _ in 0..3 {
        assert!(matches!(updates.recv().await, Some(Update::Behind(..))));
    }
}
