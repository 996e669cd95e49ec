//! A client of the gateway: whole answers, streams event by event, and connections that end half-way.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::eventually::within;
use super::extproc::CHAT;

/// A request body.
pub type Body = BoxBody<Bytes, Infallible>;

/// Sends to one gateway; clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    http: legacy::Client<HttpConnector, Body>,
    gateway: SocketAddr,
}

/// An answer whose body has come whole.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
}

/// An answer whose headers have come. Dropped early, it closes its connection.
#[derive(Debug)]
pub struct Opened {
    /// Its status.
    pub status: u16,
    /// Its headers.
    pub headers: HeaderMap,
    body: Incoming,
    unread: Vec<u8>,
}

impl Client {
    /// A client of the gateway at this address.
    pub fn of(gateway: SocketAddr) -> Self {
        Self { http: legacy::Client::builder(TokioExecutor::new()).build_http(), gateway }
    }

    /// Where it sends to.
    pub fn gateway(&self) -> SocketAddr {
        self.gateway
    }

    /// Sends a request and waits for the answer's headers.
    pub async fn open(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> Result<Opened, legacy::Error> {
        let uri = format!("http://{}{path}", self.gateway);
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self.http.request(request.body(body).unwrap()).await?;
        let (head, body) = response.into_parts();
        Ok(Opened { status: head.status.as_u16(), headers: head.headers, body, unread: Vec::new() })
    }

    /// POSTs JSON and waits for the answer's headers.
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], body: Body) -> Opened {
        let mut all = vec![("content-type", "application/json")];
        all.extend(headers);
        within(format!("an answer of {path}"), self.open("POST", path, &all, body)).await.unwrap()
    }

    /// A chat that must be answered.
    pub async fn chat(&self, request: &Value) -> Answer {
        self.chat_with(&[], request).await
    }

    /// A chat with headers that must be answered.
    pub async fn chat_with(&self, headers: &[(&str, &str)], request: &Value) -> Answer {
        self.post(CHAT, headers, whole(request.to_string())).await.rest().await
    }

    /// A chat of which events are read one by one.
    pub async fn stream(&self, request: &Value) -> Opened {
        self.post(CHAT, &[], whole(request.to_string())).await
    }

    /// Sends the head and the first half of a chat; the rest never comes.
    pub async fn half_a_chat(&self, request: &Value) -> TcpStream {
        let body = request.to_string();
        let mut stream = TcpStream::connect(self.gateway).await.unwrap();
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body.as_bytes()[..body.len() / 2]).await.unwrap();
        stream
    }
}

/// A body of known length.
pub fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed()
}

/// A body without a length, in pieces.
pub fn chunked(bytes: impl Into<Bytes>) -> Body {
    let bytes: Bytes = bytes.into();
    let pieces: Vec<Bytes> = bytes.chunks(16_384).map(Bytes::copy_from_slice).collect();
    let frames = pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
    BodyExt::boxed(StreamBody::new(futures::stream::iter(frames)))
}

impl Opened {
    /// The next piece of the body.
    async fn piece(&mut self) -> Result<bool, hyper::Error> {
        while let Some(frame) = within("a piece of the answer", self.body.frame()).await {
            if let Ok(data) = frame?.into_data() {
                self.unread.extend_from_slice(&data);
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The data of the next event; `None` at the clean end of the body.
    pub async fn try_event(&mut self) -> Result<Option<String>, hyper::Error> {
        loop {
            if let Some(end) = self.unread.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.unread.drain(..end + 2).collect();
                let event = String::from_utf8(event).unwrap();
                return Ok(Some(event.trim_end().strip_prefix("data: ").unwrap().to_owned()));
            }
            if !self.piece().await? {
                assert!(self.unread.is_empty(), "half an event at the end");
                return Ok(None);
            }
        }
    }

    /// The data of the next event, which must come.
    pub async fn event(&mut self) -> String {
        self.try_event().await.unwrap().expect("one more event")
    }

    /// So many events.
    pub async fn events(&mut self, count: usize) -> Vec<String> {
        let mut events = Vec::with_capacity(count);
        while events.len() < count {
            events.push(self.event().await);
        }
        events
    }

    /// All further events; the body must end cleanly.
    pub async fn all_events(mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.try_event().await.unwrap() {
            events.push(event);
        }
        events
    }

    /// Everything that still comes; the body must end cleanly.
    pub async fn rest(self) -> Answer {
        self.try_rest().await.unwrap()
    }

    /// Everything that still comes, if the body ends cleanly.
    pub async fn try_rest(mut self) -> Result<Answer, hyper::Error> {
        while self.piece().await? {}
        Ok(Answer { status: self.status, headers: self.headers, body: self.unread.into() })
    }

    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

impl Answer {
    /// A header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        let body = String::from_utf8_lossy(&self.body);
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error} in {} {body}", self.status))
    }

    /// Checks that an engine answered with success, and gives its name.
    #[track_caller]
    pub fn served(&self) -> String {
        assert_eq!(self.status, 200, "{}", String::from_utf8_lossy(&self.body));
        self.header("x-engine-name").expect("an engine answered").to_owned()
    }
}
