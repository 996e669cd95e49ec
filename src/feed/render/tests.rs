//! Against a server that answers what the test says, through a real socket.

use std::collections::VecDeque;
use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::*;
use crate::request::Api;

/// A server with answers in a row, which notes the paths it was asked for.
#[derive(Default)]
struct Script {
    answers: Mutex<VecDeque<(u16, &'static str)>>,
    paths: Mutex<Vec<String>>,
    /// Answers wait for a permit, if there is one.
    gate: Option<Semaphore>,
}

async fn serve(script: Arc<Script>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let answer = |State(script): State<Arc<Script>>, uri: Uri| async move {
        script.paths.lock().push(uri.path().to_owned());
        if let Some(gate) = &script.gate {
            gate.acquire().await.unwrap().forget();
        }
        let (status, body) =
            script.answers.lock().pop_front().unwrap_or((200, r#"{"tokens":[1],"token_ids":[1]}"#));
        (StatusCode::from_u16(status).unwrap(), body)
    };
    let router = Router::new().fallback(answer).with_state(script);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn ask(target: Target) -> RemoteAsk {
    RemoteAsk {
        target,
        api: Api::Completions,
        path: "/v1/completions".into(),
        body: bytes::Bytes::from_static(br#"{"model":"m","prompt":"x"}"#),
        model: "m".into(),
        budget: Duration::from_secs(5),
    }
}

fn engine(address: SocketAddr) -> Target {
    Target::Engine(address, EngineKind::Vllm)
}

fn renderer() -> Renderer {
    Renderer::new(RenderConfig::default())
}

#[tokio::test]
async fn rendering_is_tried_first_and_not_again_for_a_while_where_it_is_not_served() {
    let script = Arc::new(Script::default());
    script.answers.lock().extend([
        (200, r#"[{"token_ids":[5,6],"model":"m"}]"#),
        (403, ""),
        (200, r#"{"count":1,"tokens":[9]}"#),
        (200, r#"{"count":1,"tokens":[8]}"#),
    ]);
    let address = serve(Arc::clone(&script)).await;
    let renderer =
        Renderer::new(RenderConfig { without_render: Duration::from_mins(1), ..RenderConfig::default() });
    for expected in [&[5, 6][..], &[9], &[8]] {
        assert_eq!(renderer.ids(ask(engine(address))).await.as_deref(), Ok(expected));
    }
    let asked = ["/v1/completions/render", "/v1/completions/render", "/tokenize", "/tokenize"];
    assert_eq!(*script.paths.lock(), asked);
}

#[tokio::test]
async fn a_url_keeps_what_stands_before_the_apis_path_and_sglang_has_no_rendering() {
    let script = Arc::new(Script::default());
    let address = serve(Arc::clone(&script)).await;
    let renderer = renderer();
    renderer.ids(ask(Target::Url(format!("http://{address}/models/a/").into()))).await.unwrap();
    renderer.ids(ask(Target::Engine(address, EngineKind::Sglang))).await.unwrap();
    assert_eq!(*script.paths.lock(), ["/models/a/v1/completions/render", "/tokenize"]);
}

#[rstest::rstest]
#[case(400, "", Skipped::Refused)]
#[case(404, r#"{"error":{"type":"NotFoundError"}}"#, Skipped::Refused)]
#[case(429, "", Skipped::Saturated)]
#[case(503, "", Skipped::Saturated)]
#[case(500, "", Skipped::RemoteError)]
#[case(302, "", Skipped::BadAnswer)]
#[case(200, "<html>", Skipped::BadAnswer)]
#[case(200, r#"{"token_ids":[1],"model":"another"}"#, Skipped::BadAnswer)]
#[tokio::test]
async fn every_failure_has_its_reason(
    #[case] status: u16,
    #[case] body: &'static str,
    #[case] reason: Skipped,
) {
    let script = Arc::new(Script::default());
    script.answers.lock().push_back((status, body));
    let address = serve(script).await;
    assert_eq!(renderer().ids(ask(engine(address))).await, Err(reason));
}

#[tokio::test]
async fn a_closed_port_and_an_address_that_is_none_are_unreachable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    assert_eq!(renderer().ids(ask(engine(address))).await, Err(Skipped::Unreachable));
    assert_eq!(renderer().ids(ask(Target::Url("::".into()))).await, Err(Skipped::Unreachable));
}

#[tokio::test]
async fn what_a_target_cannot_bear_is_shed_at_once_and_a_dropped_call_makes_room() {
    let script = Arc::new(Script { gate: Some(Semaphore::new(0)), ..Script::default() });
    let address = serve(Arc::clone(&script)).await;
    let renderer = renderer();
    assert_eq!(renderer.saturation(), 0.0);
    let mut calls: Vec<_> = (0..4).map(|_| renderer.ids(ask(engine(address)))).collect();
    assert_eq!(renderer.saturation(), 1.0);
    assert_eq!(renderer.ids(ask(engine(address))).await, Err(Skipped::Saturated));
    calls.truncate(1);
    assert!(renderer.saturation() < 1.0);
    if let Some(gate) = &script.gate {
        gate.add_permits(9);
    }
    assert!(calls.remove(0).await.is_ok());
    assert_eq!(renderer.saturation(), 0.0);
    assert!(renderer.expected(&engine(address)).is_some());
}
