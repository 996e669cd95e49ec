//! Envoy's side of an ext_proc stream, spoken over the picker's gRPC port in the vocabulary of the cases.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64_of::decode;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_client::ExternalProcessorClient;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{ListValue, Struct, Value as ProtoValue};
use futures::StreamExt;
use pilotfish::extproc::POOL_METADATA;
use pilotfish::extproc::stream::replies_to;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use super::eventually::within;
use super::picker::Picker;
use super::replies::Replies;

/// An open stream.
#[derive(Debug)]
pub struct Stream {
    to: Option<mpsc::UnboundedSender<ProcessingRequest>>,
    from: Streaming<ProcessingResponse>,
    modes: Option<ProtocolConfiguration>,
    /// What has come so far.
    pub replies: Replies,
}

impl Stream {
    /// Opens a stream; it says nothing yet.
    pub async fn open(picker: &Picker) -> Self {
        Self::over(picker.channel()).await
    }

    /// Opens a stream over a connection; it says nothing yet.
    pub async fn over(channel: Channel) -> Self {
        Self::with_pool(channel, None).await
    }

    /// The same with a pool named by the header that gateways use.
    pub async fn with_pool(channel: Channel, pool: Option<&str>) -> Self {
        let (to, outgoing) = mpsc::unbounded_channel();
        let mut client = ExternalProcessorClient::new(channel);
        let mut request = tonic::Request::new(UnboundedReceiverStream::new(outgoing));
        if let Some(pool) = pool {
            request.metadata_mut().insert(POOL_METADATA, pool.parse().unwrap());
        }
        let answer = client.process(request);
        let from = within("a stream", answer).await.unwrap().into_inner();
        Self { to: Some(to), from, modes: None, replies: Replies::default() }
    }

    /// Opens a stream and sends these steps.
    pub async fn of(picker: &Picker, steps: &[Value]) -> Self {
        let mut stream = Self::open(picker).await;
        stream.send_all(steps);
        stream
    }

    /// Sends one step.
    pub fn send(&mut self, step: &Value) {
        if let Some(first) = step.get("first_message") {
            self.modes = Some(modes(&first["protocol_config"]));
            return;
        }
        let message = message(step, self.modes.take());
        // The picker may have ended the stream, as after a refusal.
        let _ = self.to.as_ref().expect("the stream was half-closed").send(message);
    }

    /// Sends a piece of the request body.
    pub fn send_body(&mut self, bytes: &[u8], end_of_stream: bool) {
        let body = HttpBody { body: bytes.to_vec(), end_of_stream, ..HttpBody::default() };
        let request = Some(Request::RequestBody(body));
        let message = ProcessingRequest { request, ..ProcessingRequest::default() };
        let _ = self.to.as_ref().expect("the stream was half-closed").send(message);
    }

    /// Sends steps in order.
    pub fn send_all(&mut self, steps: &[Value]) {
        for step in steps {
            self.send(step);
        }
    }

    /// Takes the next reply; false at the end.
    pub async fn next(&mut self) -> bool {
        match within("the next reply", self.from.message()).await {
            Ok(Some(reply)) => self.replies.all.push(reply),
            Ok(None) => return false,
            Err(status) => {
                self.replies.failed = Some(status);
                return false;
            }
        }
        true
    }

    /// Takes replies until they satisfy `enough` or end.
    pub async fn until(&mut self, enough: impl Fn(&Replies) -> bool) -> &Replies {
        while !enough(&self.replies) {
            assert!(self.next().await, "the stream ended too early: {:?}", self.replies);
        }
        &self.replies
    }

    /// Takes replies until the request is decided.
    pub async fn until_decided(&mut self) -> &Replies {
        self.until(|replies| replies.immediate().is_some() || replies.destination().is_some()).await
    }

    /// Sends nothing more and takes everything that comes: all that was sent has been seen by then.
    pub async fn finish(mut self) -> Replies {
        self.to = None;
        while self.next().await {}
        self.replies
    }

    /// Sends the steps of a response and takes everything that comes.
    pub async fn respond(mut self, steps: &[Value]) -> Replies {
        self.send_all(steps);
        self.finish().await
    }
}

/// Sends all steps and takes everything that comes.
pub async fn run(picker: &Picker, steps: &[Value]) -> Replies {
    Stream::of(picker, steps).await.finish().await
}

/// The same without a socket between: time that is paused stands still.
pub async fn run_inside(picker: &Picker, steps: &[Value]) -> Replies {
    let first = steps.first().and_then(|step| step.get("first_message"));
    let mut told = first.map(|first| modes(&first["protocol_config"]));
    let messages: Vec<_> =
        steps.iter().skip(usize::from(told.is_some())).map(|step| Ok(message(step, told.take()))).collect();
    let shared = Arc::clone(&picker.app.admin.shared);
    let mut from = replies_to(shared, None, futures::stream::iter(messages).boxed());
    let mut replies = Replies::default();
    while let Some(reply) = from.next().await {
        match reply {
            Ok(reply) => replies.all.push(reply),
            Err(status) => replies.failed = Some(status),
        }
    }
    replies
}

/// A step as a message.
pub fn message(step: &Value, protocol_config: Option<ProtocolConfiguration>) -> ProcessingRequest {
    ProcessingRequest {
        request: Some(request(step)),
        metadata_context: step.get("metadata").map(metadata),
        protocol_config,
        ..ProcessingRequest::default()
    }
}

/// Runs many requests, so many at a time, each sent whole and ended without a response.
pub async fn run_many(
    picker: &Picker,
    at_once: usize,
    requests: impl IntoIterator<Item = Vec<Value>>,
) -> Vec<Replies> {
    let runs = requests.into_iter().map(|steps| async move { run(picker, &steps).await });
    futures::stream::iter(runs).buffer_unordered(at_once).collect().await
}

/// How often each destination came first.
pub fn shares<'a>(replies: impl IntoIterator<Item = &'a Replies>) -> BTreeMap<String, usize> {
    let mut shares = BTreeMap::new();
    for replies in replies {
        *shares.entry(replies.first_choice().to_owned()).or_insert(0) += 1;
    }
    shares
}

/// The headers of a POST with JSON.
pub fn post(path: &str) -> Value {
    headers("POST", path, &[], false)
}

/// Request headers with more beside the usual ones.
pub fn headers(method: &str, path: &str, more: &[(&str, &str)], eos: bool) -> Value {
    let fixed = [
        (":method", method),
        (":scheme", "http"),
        (":authority", "gw.test"),
        (":path", path),
        ("content-type", "application/json"),
    ];
    let all: Vec<[&str; 2]> = fixed.iter().chain(more).map(|(name, value)| [*name, *value]).collect();
    json!({"rh": {"headers": all, "eos": eos}})
}

/// A POST with a whole JSON body.
pub fn request_of(path: &str, more: &[(&str, &str)], body: &str) -> [Value; 2] {
    [headers("POST", path, more, false), json!({"rb": {"text": body, "eos": true}})]
}

/// A chat request with a whole body.
pub fn chat(body: &str) -> [Value; 2] {
    request_of(CHAT, &[], body)
}

/// The path of chat completions.
pub const CHAT: &str = "/v1/chat/completions";

/// A response of status 200 whose usage says so many tokens.
pub fn response(prompt: u64, completion: u64) -> [Value; 2] {
    let usage = json!({"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).to_string();
    [
        json!({"sh": {"headers": [[":status", "200"], ["content-type", "application/json"]], "eos": false}}),
        json!({"sb": {"text": usage, "eos": true}}),
    ]
}

/// A request that was served and settled.
#[derive(Debug)]
pub struct Served {
    /// What the picker said.
    pub replies: Replies,
    /// Its decision in `/debug/decisions`.
    pub decision: Value,
}

impl Served {
    /// The first destination.
    pub fn endpoint(&self) -> &str {
        self.replies.first_choice()
    }

    /// Estimated prompt tokens.
    pub fn prompt_tokens(&self) -> u64 {
        self.decision["prompt_tokens"].as_u64().unwrap()
    }

    /// Leading blocks of 64 bytes, the last partial one included, that the chosen
    /// endpoint was believed to hold.
    pub fn matched_blocks(&self) -> u64 {
        self.decision["predicted_cached_tokens"].as_u64().unwrap().div_ceil(16)
    }
}

/// Sends a request with a request id of its own, answers it, and fetches its decision.
pub async fn serve(picker: &Picker, path: &str, body: &str) -> Served {
    serve_steps(picker, &request_of(path, &[], body)).await
}

/// The same for a request in steps.
pub async fn serve_steps(picker: &Picker, steps: &[Value]) -> Served {
    static IDS: AtomicU64 = AtomicU64::new(0);
    let id = format!("request-{}", IDS.fetch_add(1, Ordering::Relaxed));
    let mut steps = steps.to_vec();
    for step in &mut steps {
        if let Some(Value::Array(headers)) = step.get_mut("rh").and_then(|rh| rh.get_mut("headers")) {
            headers.push(json!(["x-request-id", id]));
        }
    }
    let mut stream = Stream::of(picker, &steps).await;
    stream.until_decided().await;
    let replies = stream.respond(&response(1, 1)).await;
    Served { decision: picker.decision(&id).await, replies }
}

fn request(step: &Value) -> Request {
    let (kind, said) = step
        .as_object()
        .and_then(|members| members.iter().find(|(name, _)| *name != "metadata"))
        .unwrap_or_else(|| panic!("no step: {step}"));
    match kind.as_str() {
        "rh" => Request::RequestHeaders(http_headers(said)),
        "rb" => Request::RequestBody(http_body(said)),
        "rt" => Request::RequestTrailers(HttpTrailers { trailers: Some(header_map(said)) }),
        "sh" => Request::ResponseHeaders(http_headers(said)),
        "sb" => Request::ResponseBody(http_body(said)),
        "st" => Request::ResponseTrailers(HttpTrailers { trailers: Some(header_map(said)) }),
        other => panic!("no such step: {other}"),
    }
}

fn http_headers(said: &Value) -> HttpHeaders {
    HttpHeaders {
        headers: Some(header_map(&said["headers"])),
        end_of_stream: said["eos"].as_bool().unwrap(),
        ..HttpHeaders::default()
    }
}

fn header_map(pairs: &Value) -> HeaderMap {
    let pairs = pairs.as_array().unwrap().iter().map(|pair| HeaderValue {
        key: pair[0].as_str().unwrap().to_owned(),
        raw_value: pair[1].as_str().unwrap().as_bytes().to_vec(),
        ..HeaderValue::default()
    });
    HeaderMap { headers: pairs.collect() }
}

fn http_body(said: &Value) -> HttpBody {
    HttpBody { body: bytes(said), end_of_stream: said["eos"].as_bool().unwrap(), ..HttpBody::default() }
}

/// The bytes of a body step.
pub fn bytes(said: &Value) -> Vec<u8> {
    if let Some(text) = said.get("text") {
        text.as_str().unwrap().as_bytes().to_vec()
    } else if let Some(hex) = said.get("hex") {
        let digits = hex.as_str().unwrap().as_bytes().chunks(2);
        digits.map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
    } else {
        decode(said["b64"].as_str().unwrap())
    }
}

/// A body step of any bytes.
pub fn body_step(kind: &str, bytes: &[u8], eos: bool) -> Value {
    let mut hex = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        let _ = write!(hex, "{byte:02x}");
    }
    json!({kind: {"hex": hex, "eos": eos}})
}

fn modes(said: &Value) -> ProtocolConfiguration {
    let mode = |name: &str| {
        let name = said[name].as_str().unwrap();
        BodySendMode::from_str_name(name).unwrap_or_else(|| panic!("no mode {name}")) as i32
    };
    ProtocolConfiguration {
        request_body_mode: mode("request_body_mode"),
        response_body_mode: mode("response_body_mode"),
        send_body_without_waiting_for_header_response: said["send_body_without_waiting_for_header_response"]
            .as_bool()
            .unwrap_or(false),
    }
}

/// Filter metadata: namespaces of fields.
fn metadata(said: &Value) -> Metadata {
    let namespaces = said.as_object().unwrap().iter();
    Metadata {
        filter_metadata: namespaces.map(|(name, fields)| (name.clone(), structure(fields))).collect(),
        ..Metadata::default()
    }
}

fn structure(said: &Value) -> Struct {
    let fields = said.as_object().unwrap().iter();
    Struct { fields: fields.map(|(name, value)| (name.clone(), proto(value))).collect() }
}

fn proto(said: &Value) -> ProtoValue {
    let kind = match said {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap()),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(items) => Kind::ListValue(ListValue { values: items.iter().map(proto).collect() }),
        Value::Object(_) => Kind::StructValue(structure(said)),
    };
    ProtoValue { kind: Some(kind) }
}

mod base64_of {
    /// Decodes base64, which no dependency of ours does.
    pub fn decode(text: &str) -> Vec<u8> {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let (mut out, mut bits, mut held) = (Vec::new(), 0u32, 0);
        for digit in text.bytes().filter(|byte| *byte != b'=') {
            let value = DIGITS.iter().position(|d| *d == digit).expect("a base64 digit");
            bits = bits << 6 | value as u32;
            held += 6;
            if held >= 8 {
                held -= 8;
                out.push((bits >> held) as u8);
                bits &= (1 << held) - 1;
            }
        }
        out
    }
}
