//! Asks one server for one answer within a time and a size, and tells a port that is closed from one that is silent.

use std::error::Error;
use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use http::uri::{PathAndQuery, Scheme};
use http::{Request, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::{HttpConnector, capture_connection};
use hyper_util::rt::TokioExecutor;
use tokio::time::{Instant, timeout_at};

/// What an endpoint answered.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// The body, or as much of it as came in time and fits.
    pub body: Vec<u8>,
    /// Whether that is all of it.
    pub whole: bool,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Nothing listens there, or nothing can be reached.
    #[error("the connection was refused or the host cannot be reached; check that the engine runs")]
    Refused,
    /// Something listens, took the connection, and said nothing in time or nothing that is HTTP.
    #[error(
        "the connection was accepted but no HTTP answer came; check that the port is the engine's HTTP port"
    )]
    Silent,
    /// The request never left this process; says nothing of the endpoint.
    #[error("the request could not be sent; check the address and the limit of open files of this process")]
    Local,
}

/// What a client is bounded by.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Time for a whole exchange.
    pub timeout: Duration,
    /// Bytes of an answer that are read.
    pub max_body: usize,
    /// Idle connections that are kept.
    pub connections: usize,
}

/// A client of one server. Connections are kept and end with it.
#[derive(Debug)]
pub struct Client {
    http: legacy::Client<HttpConnector, Full<Bytes>>,
    destination: String,
    bounds: Bounds,
}

impl Client {
    /// A client of `destination`, `host:port` with IPv6 in brackets.
    pub fn new(destination: &str, bounds: Bounds) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_max_idle_per_host(bounds.connections)
            .build(connector);
        Self { http, destination: destination.to_owned(), bounds }
    }

    /// `GET path`. Time runs out for all of it: a body that is still under way by then is cut.
    pub async fn get(&self, path: &str) -> Result<Answer, Failure> {
        let request = Request::get(uri(&self.destination, path).ok_or(Failure::Local)?);
        let request = request.header(header::ACCEPT, "text/plain, application/json");
        self.exchange(request.body(Full::default()).map_err(|_| Failure::Local)?).await
    }

    /// `POST path` with a JSON body, within the same bounds.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Answer, Failure> {
        let request = Request::post(uri(&self.destination, path).ok_or(Failure::Local)?);
        let request = request.header(header::CONTENT_TYPE, "application/json");
        self.exchange(request.body(Full::new(body)).map_err(|_| Failure::Local)?).await
    }

    async fn exchange(&self, mut request: Request<Full<Bytes>>) -> Result<Answer, Failure> {
        let deadline = Instant::now() + self.bounds.timeout;
        let connection = capture_connection(&mut request);
        let response = match timeout_at(deadline, self.http.request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) if error.is_connect() => return Err(of_connect(&error)),
            _ if connection.connection_metadata().is_some() => return Err(Failure::Silent),
            _ => return Err(Failure::Refused),
        };
        let (parts, mut body) = response.into_parts();
        let mut answer = Answer { status: parts.status.as_u16(), body: Vec::new(), whole: false };
        loop {
            match timeout_at(deadline, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    let data = frame.into_data().unwrap_or_default();
                    let room = self.bounds.max_body - answer.body.len();
                    answer.body.extend_from_slice(&data[..data.len().min(room)]);
                    if data.len() > room {
                        return Ok(answer);
                    }
                }
                Ok(None) => return Ok(Answer { whole: true, ..answer }),
                Ok(Some(Err(_))) | Err(_) => return Ok(answer),
            }
        }
    }
}

/// Where a page is. `None` if the address has a form that URIs do not (an IPv6 zone).
pub fn uri(destination: &str, path: &str) -> Option<Uri> {
    Uri::builder()
        .scheme(Scheme::HTTP)
        .authority(destination)
        .path_and_query(PathAndQuery::try_from(path).ok()?)
        .build()
        .ok()
}

/// Want of sockets or ports here must not look like an endpoint that is down.
pub fn of_connect(error: &(dyn Error + 'static)) -> Failure {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            return match error.kind() {
                ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::ConnectionAborted
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::TimedOut => Failure::Refused,
                _ => Failure::Local,
            };
        }
        cause = error.source();
    }
    Failure::Local
}
