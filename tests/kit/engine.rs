//! Servers that the picker scrapes: simulated engines, and pages that no engine would write.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use parking_lot::Mutex;
use pilotfish::engine::{Engine, EngineConfig, EngineState, Fault};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::eventually::eventually;

/// A simulated engine on a free port of loopback.
pub struct SimulatedEngine {
    /// What it has seen, and its faults.
    pub state: Arc<EngineState>,
    _task: AbortOnDropHandle<()>,
}

impl SimulatedEngine {
    /// Starts it.
    pub async fn start(config: EngineConfig) -> Self {
        Self::try_start(config).await.expect("a free port")
    }

    /// Starts it if its ports are free.
    pub async fn try_start(config: EngineConfig) -> Option<Self> {
        let engine = Engine::bind(config).await.ok()?;
        let state = engine.state();
        let task = tokio::spawn(async move { engine.run(std::future::pending()).await.unwrap() });
        Some(Self { state, _task: AbortOnDropHandle::new(task) })
    }

    /// Where it listens.
    pub fn address(&self) -> String {
        self.state.address().to_string()
    }

    /// Closes the port and waits until it refuses connections.
    pub async fn close(&self) {
        self.state.set_fault(Fault::Refuse(None));
        eventually("a closed port", async || TcpStream::connect(self.state.address()).await.err()).await;
    }
}

/// How `/metrics` answers.
#[derive(Clone, Debug)]
pub enum Answer {
    /// 200 with this text of this content type.
    Page(&'static str, String),
    /// This status.
    Status(u16),
    /// Never.
    Hang,
}

impl Answer {
    /// A page of metrics.
    pub fn page(text: &str) -> Self {
        Self::Page("text/plain; version=0.0.4", text.to_owned())
    }
}

/// A server of one metrics page.
#[derive(Debug)]
pub struct MetricsPage {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Shared {
    answer: Mutex<Answer>,
    asked: AtomicU64,
}

impl MetricsPage {
    /// Starts one on a free port of loopback.
    pub async fn start(answer: Answer) -> Self {
        Self::start_at("127.0.0.1:0", answer).await
    }

    /// Starts one at an address.
    pub async fn start_at(address: &str, answer: Answer) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared { answer: Mutex::new(answer), asked: AtomicU64::new(0) });
        let router = Router::new().route("/metrics", get(page)).with_state(Arc::clone(&shared));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, shared, _task: AbortOnDropHandle::new(task) }
    }

    /// Answers so from now on.
    pub fn answer(&self, answer: Answer) {
        *self.shared.answer.lock() = answer;
    }

    /// Times the page was asked for.
    pub fn asked(&self) -> u64 {
        self.shared.asked.load(Ordering::SeqCst)
    }
}

async fn page(State(shared): State<Arc<Shared>>) -> Response {
    shared.asked.fetch_add(1, Ordering::SeqCst);
    let answer = shared.answer.lock().clone();
    match answer {
        Answer::Page(kind, text) => ([(header::CONTENT_TYPE, kind)], text).into_response(),
        Answer::Status(status) => StatusCode::from_u16(status).unwrap().into_response(),
        Answer::Hang => std::future::pending().await,
    }
}

/// How a scripted engine answers inference.
#[derive(Clone, Debug)]
pub enum Script {
    /// This status, content type and body.
    Answer(u16, &'static str, String),
    /// 200 and half of a body.
    BreakOff,
    /// Nothing, until another script is set.
    Hold,
}

/// An engine that answers inference as a test says, and looks well to scrapes.
#[derive(Debug)]
pub struct ScriptedEngine {
    /// Where it listens.
    pub address: SocketAddr,
    lines: Arc<Lines>,
    _task: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Lines {
    script: watch::Sender<Script>,
    asked: AtomicU64,
}

impl ScriptedEngine {
    /// Starts one on a free port of loopback.
    pub async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let lines = Arc::new(Lines { script: watch::Sender::new(script), asked: AtomicU64::new(0) });
        let page = "process_start_time_seconds 1\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n";
        let models = r#"{"object":"list","data":[{"id":"tiny","object":"model"}]}"#;
        let json = [(header::CONTENT_TYPE, "application/json")];
        let router = Router::new()
            .route(
                "/metrics",
                get(async move || ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], page)),
            )
            .route("/v1/models", get(async move || (json, models)))
            .fallback(play)
            .with_state(Arc::clone(&lines));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, lines, _task: AbortOnDropHandle::new(task) }
    }

    /// Answers so from now on, what is held too.
    pub fn play(&self, script: Script) {
        self.lines.script.send_replace(script);
    }

    /// Requests for inference so far.
    pub fn asked(&self) -> u64 {
        self.lines.asked.load(Ordering::SeqCst)
    }
}

async fn play(State(lines): State<Arc<Lines>>, method: Method) -> Response {
    if method != Method::POST {
        return StatusCode::NOT_FOUND.into_response();
    }
    lines.asked.fetch_add(1, Ordering::SeqCst);
    // The sender lives in the state: waiting cannot fail.
    let script =
        lines.script.subscribe().wait_for(|script| !matches!(script, Script::Hold)).await.unwrap().clone();
    match script {
        Script::Answer(status, kind, body) => {
            (StatusCode::from_u16(status).unwrap(), [(header::CONTENT_TYPE, kind)], body).into_response()
        }
        Script::BreakOff => {
            let half = futures::stream::iter([Ok("{\"id\":\"x\","), Err(std::io::Error::other("cut"))]);
            ([(header::CONTENT_LENGTH, "1000")], Body::from_stream(half)).into_response()
        }
        Script::Hold => unreachable!("it waited for another"),
    }
}
