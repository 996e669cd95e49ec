//! An engine on a free port with a client.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, Method, Request, StatusCode};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinHandle;

use super::super::{Engine, EngineConfig, EngineState, Timing};

pub(super) struct TestEngine {
    pub state: Arc<EngineState>,
    client: Client<HttpConnector, Full<Bytes>>,
    task: JoinHandle<()>,
}

impl Drop for TestEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Twenty times faster than real, with two adapters.
pub(super) fn config() -> EngineConfig {
    EngineConfig { speed: 20.0, loras: vec!["lora1".into(), "lora2".into()], ..EngineConfig::default() }
}

/// An engine whose prompts take a minute per token, so that nothing is ever generated.
pub(super) fn stuck() -> EngineConfig {
    let timing = Timing { prefill_token: Duration::from_mins(1), ..Timing::default() };
    EngineConfig { timing, speed: 1.0, ..config() }
}

pub(super) struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub text: String,
}

impl Answer {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.text).unwrap()
    }
}

impl TestEngine {
    pub async fn start(config: EngineConfig) -> Self {
        let engine = Engine::bind(config).await.unwrap();
        let state = engine.state();
        let task = tokio::spawn(async move { engine.run(std::future::pending()).await.unwrap() });
        Self { state, client: Client::builder(TokioExecutor::new()).build_http(), task }
    }

    /// Sends a request and waits for the head of the response.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<axum::http::Response<Incoming>, hyper_util::client::legacy::Error> {
        let mut request =
            Request::builder().method(method).uri(format!("http://{}{path}", self.state.address()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.client.request(request.body(Full::new(body.into())).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: impl Into<Bytes>) -> Answer {
        answer(self.send(Method::POST, path, &[("content-type", "application/json")], body).await.unwrap())
            .await
    }

    pub async fn get(&self, path: &str) -> Answer {
        within(async { answer(self.send(Method::GET, path, &[], "").await.unwrap()).await }).await
    }

    /// A page of another port.
    pub async fn get_from(&self, uri: &str) -> Answer {
        within(async { answer(self.client.get(uri.parse().unwrap()).await.unwrap()).await }).await
    }

    /// Waits until the numbers satisfy `condition`.
    pub async fn until(&self, condition: impl Fn(&super::super::metrics::Metrics) -> bool) {
        let poll = async {
            while !condition(&self.state.metrics()) {
                tokio::task::yield_now().await;
            }
        };
        within(poll).await;
    }
}

pub(super) async fn answer(response: axum::http::Response<Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.unwrap().to_bytes();
    Answer { status: parts.status, headers: parts.headers, text: String::from_utf8(bytes.to_vec()).unwrap() }
}

/// The result of `future`, or a failed test after ten seconds.
pub(super) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("nothing happened for ten seconds")
}

/// Asserts that `future` is still pending after a tenth of a second.
pub(super) async fn hangs<F: Future + Unpin>(future: &mut F) {
    assert!(tokio::time::timeout(Duration::from_millis(100), future).await.is_err(), "it should hang");
}
