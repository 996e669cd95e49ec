//! An ext_proc server that does nothing: what `make bench` compares the picker with.
//!
//! It shares the picker's server settings, runtime and allocator, answers every message as its mode asks, moves received
//! bytes into the reply, and sends every request to one fixed endpoint. Whatever it costs, no picker can undercut.

use std::collections::HashMap;
use std::pin::Pin;

use envoy_types::pb::envoy::service::accesslog::v3::access_log_service_server::{
    AccessLogService, AccessLogServiceServer,
};
use envoy_types::pb::envoy::service::accesslog::v3::{StreamAccessLogsMessage, StreamAccessLogsResponse};
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::{
    ExternalProcessor, ExternalProcessorServer,
};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Incoming;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response as Outgoing;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, HeadersResponse, ProcessingRequest, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use futures::{Stream, StreamExt, stream};
use pilotfish::app::server_builder;
use pilotfish::extproc::mode::{BodyMode, Modes};
use pilotfish::extproc::reply;
use tonic::{Request, Response, Status, Streaming};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Noop {
    destination: Struct,
}

impl Noop {
    fn new(endpoint: &str) -> Self {
        let value = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        let keys = ["x-gateway-destination-endpoint", "d1"];
        let fields = keys.iter().map(|key| ((*key).to_owned(), value(endpoint))).collect();
        let lb = Value { kind: Some(Kind::StructValue(Struct { fields })) };
        Self { destination: Struct { fields: HashMap::from([("envoy.lb".to_owned(), lb)]) } }
    }

    fn routed(&self, response: Outgoing) -> ProcessingResponse {
        ProcessingResponse { dynamic_metadata: Some(self.destination.clone()), ..reply::message(response) }
    }
}

/// What a stream remembers.
struct Exchange {
    modes: Option<Modes>,
    held: Vec<Vec<u8>>,
}

impl Exchange {
    fn answer(&mut self, noop: &Noop, message: ProcessingRequest) -> Vec<ProcessingResponse> {
        let modes = *self.modes.get_or_insert_with(|| Modes::learn(message.protocol_config.as_ref()));
        let headers = || Outgoing::RequestHeaders(HeadersResponse::default());
        match message.request {
            Some(Incoming::RequestHeaders(incoming)) if incoming.end_of_stream => {
                vec![noop.routed(headers())]
            }
            Some(Incoming::RequestHeaders(_)) if modes.request == BodyMode::FullDuplex => Vec::new(),
            Some(Incoming::RequestHeaders(_)) => vec![reply::message(headers())],
            Some(Incoming::RequestBody(body)) if modes.request == BodyMode::FullDuplex => {
                self.held.push(body.body);
                if !body.end_of_stream {
                    return Vec::new();
                }
                let pieces = std::mem::take(&mut self.held);
                let last = pieces.len() - 1;
                let pieces =
                    pieces.into_iter().enumerate().map(|(at, piece)| reply::request_piece(piece, at == last));
                std::iter::once(noop.routed(headers())).chain(pieces).collect()
            }
            Some(Incoming::RequestBody(_)) => {
                vec![noop.routed(Outgoing::RequestBody(BodyResponse::default()))]
            }
            Some(Incoming::RequestTrailers(_)) => vec![reply::continue_request_trailers()],
            Some(Incoming::ResponseHeaders(_)) => vec![reply::response_headers(Vec::new())],
            Some(Incoming::ResponseBody(body)) if modes.response == BodyMode::FullDuplex => {
                vec![reply::response_piece(body.body, body.end_of_stream)]
            }
            Some(Incoming::ResponseBody(_)) => vec![reply::response_body(None)],
            Some(Incoming::ResponseTrailers(_)) => vec![reply::continue_response_trailers()],
            None => Vec::new(),
        }
    }
}

type Replies = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

#[derive(Clone)]
struct Service(std::sync::Arc<Noop>);

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = Replies;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Replies>, Status> {
        let noop = std::sync::Arc::clone(&self.0);
        let mut exchange = Exchange { modes: None, held: Vec::new() };
        let replies = request.into_inner().map(move |message| match message {
            Ok(message) => exchange.answer(&noop, message).into_iter().map(Ok).collect(),
            Err(status) => vec![Err(status)],
        });
        Ok(Response::new(replies.flat_map(stream::iter).boxed()))
    }
}

#[tonic::async_trait]
impl AccessLogService for Service {
    async fn stream_access_logs(
        &self,
        request: Request<Streaming<StreamAccessLogsMessage>>,
    ) -> Result<Response<StreamAccessLogsResponse>, Status> {
        let mut entries = request.into_inner();
        while entries.message().await?.is_some() {}
        Ok(Response::new(StreamAccessLogsResponse {}))
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let endpoint =
        std::env::args().nth(1).ok_or("give the endpoint that every request goes to, as ip:port")?;
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{{\"listening\":{{\"grpc\":\"{}\"}}}}", listener.local_addr()?);
        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_service_status("", tonic_health::ServingStatus::Serving).await;
        let noop = Service(std::sync::Arc::new(Noop::new(&endpoint)));
        let access_log = AccessLogServiceServer::new(noop.clone());
        let service = ExternalProcessorServer::new(noop)
            .max_decoding_message_size(65 << 20)
            .max_encoding_message_size(65 << 20);
        let incoming = tonic::transport::server::TcpIncoming::from(listener).with_nodelay(Some(true));
        server_builder()
            .add_service(service)
            .add_service(access_log)
            .add_service(health_service)
            .serve_with_incoming(incoming)
            .await?;
        Ok(())
    })
}
