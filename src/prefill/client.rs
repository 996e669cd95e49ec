//! One HTTP client for all prefill engines, with connections that are kept.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::{CaptureConnection, HttpConnector, capture_connection};
use hyper_util::client::legacy::{self, ResponseFuture};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::feed::client::{self as feed, of_connect, uri};

/// Longest wait for a connection: engines that are there take one within a round trip.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Idle connections kept to one engine.
const IDLE_PER_ENGINE: usize = 64;
/// How long they are kept: shorter than uvicorn keeps them (5 s), or it would close some while they are taken.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Most bytes of an answer that are read: one token, and what a client asked to be told of it.
const MOST_ANSWER: usize = 16 << 20;

/// What engines are spoken to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Protocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2 without TLS, known beforehand.
    H2c,
}

/// The client.
#[derive(Debug)]
pub struct Client(legacy::Client<HttpConnector, Full<Bytes>>);

/// A whole answer.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Its content type.
    pub content_type: Option<Box<str>>,
    /// Its body.
    pub body: Bytes,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No connection.
    Refused,
    /// It broke, or the answer is none or too long.
    Broken,
}

impl Client {
    /// A client without connections.
    pub fn new(protocol: Protocol) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(IDLE_PER_ENGINE)
            .http2_only(protocol == Protocol::H2c)
            .build(connector);
        Self(client)
    }

    /// `POST` of a JSON body. The connection shows when it is there.
    pub fn post(
        &self,
        destination: &str,
        path: &str,
        headers: &[(String, String)],
        body: Bytes,
    ) -> Option<(ResponseFuture, CaptureConnection)> {
        let mut request = Request::post(uri(destination, path)?);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        if !headers.iter().any(|(name, _)| name == "content-type") {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let mut request = request.body(Full::new(body)).ok()?;
        let connection = capture_connection(&mut request);
        Some((self.0.request(request), connection))
    }

    /// `GET`, the whole body of a good answer.
    pub async fn get(&self, destination: &str, path: &str) -> Option<Bytes> {
        let request = Request::builder().method(Method::GET).uri(uri(destination, path)?);
        let response = self.0.request(request.body(Full::default()).ok()?).await.ok()?;
        if !response.status().is_success() {
            return None;
        }
        read(response).await.ok().map(|answer| answer.body)
    }
}

/// Waits for a whole answer.
pub async fn answer(response: ResponseFuture) -> Result<Answer, Failure> {
    match response.await {
        Ok(response) => read(response).await,
        // Want of sockets here is no fault of the engine's.
        Err(error) if error.is_connect() && of_connect(&error) == feed::Failure::Refused => {
            Err(Failure::Refused)
        }
        Err(_) => Err(Failure::Broken),
    }
}

async fn read(response: Response<Incoming>) -> Result<Answer, Failure> {
    let (parts, body) = response.into_parts();
    let content_type = parts.headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let content_type = content_type.map(Into::into);
    let body = Limited::new(body, MOST_ANSWER).collect().await.map_err(|_| Failure::Broken)?.to_bytes();
    Ok(Answer { status: parts.status.as_u16(), content_type, body })
}
