//! The three ports.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use envoy_types::pb::envoy::service::accesslog::v3::access_log_service_server::AccessLogServiceServer;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessorServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::server::HealthReporter;

use super::Bound;
use crate::admin::{self, Admin};
use crate::args::ServeArgs;
use crate::extproc::ExtProc;
use crate::extproc::access_log::AccessLog;
use crate::trust::Trust;

/// Room for what a message holds beside the body: headers, attributes, metadata.
const MESSAGE_OVERHEAD: usize = 1 << 20;
/// HTTP/2 windows. The default 64 KiB would make every larger body wait for window updates.
const STREAM_WINDOW: u32 = 4 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// Streams on one connection of Envoy: one for every request in flight. The default of 200 would make Envoy open more
/// connections as load grows, each a burst of set-ups.
const MOST_STREAMS: u32 = 16_384;

/// Bound listeners.
#[derive(Debug)]
pub struct Ports {
    grpc: TcpListener,
    health: TcpListener,
    admin: TcpListener,
}

impl Ports {
    /// Binds all three.
    pub async fn bind(args: &ServeArgs) -> Result<Self> {
        Ok(Self {
            grpc: bind(args.host(), args.grpc_port, "--grpc-port").await?,
            health: bind(args.host(), args.grpc_health_port, "--grpc-health-port").await?,
            admin: bind(args.admin_host(), args.metrics_port, "--metrics-port").await?,
        })
    }

    /// The addresses.
    pub fn bound(&self) -> Result<Bound> {
        Ok(Bound {
            grpc: self.grpc.local_addr()?,
            health: self.health.local_addr()?,
            admin: self.admin.local_addr()?,
        })
    }

    /// Serves all three. The gRPC port closes gracefully on `closing`, the others live until `stop`.
    pub async fn serve(
        self,
        admin: &Arc<Admin>,
        trust: Trust,
        closing: &CancellationToken,
        stop: &CancellationToken,
        tasks: &TaskTracker,
    ) -> (HealthReporter, tokio::task::JoinHandle<Result<(), tonic::transport::Error>>) {
        let (reporter, health) = tonic_health::server::health_reporter();
        let shared = &admin.shared;
        let most = shared.decider.settings.max_body + MESSAGE_OVERHEAD;
        let ext_proc = ExternalProcessorServer::new(ExtProc::new(Arc::clone(shared)))
            .max_decoding_message_size(most)
            .max_encoding_message_size(most);
        let access_log = AccessLogServiceServer::new(AccessLog::new(
            Arc::clone(&shared.ledger),
            Arc::clone(&shared.metrics),
            trust,
        ));
        let grpc = server_builder().add_service(ext_proc).add_service(access_log).add_service(health.clone());
        let closed = closing.clone().cancelled_owned();
        let grpc = tasks.spawn(grpc.serve_with_incoming_shutdown(incoming(self.grpc), closed));

        let health_only = server_builder().add_service(health);
        tasks.spawn(
            health_only.serve_with_incoming_shutdown(incoming(self.health), stop.clone().cancelled_owned()),
        );

        let pages = admin::router(Arc::clone(admin)).into_make_service_with_connect_info::<SocketAddr>();
        let (listener, stop) = (self.admin, stop.clone());
        tasks.spawn(async move {
            axum::serve(listener, pages).with_graceful_shutdown(stop.cancelled_owned()).await
        });
        (reporter, grpc)
    }
}

/// A gRPC server with the windows that request bodies need.
pub fn server_builder() -> Server {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MOST_STREAMS)
        .tcp_nodelay(true)
}

fn incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

async fn bind(host: IpAddr, port: u16, flag: &str) -> Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: choose another with {flag}"))
}
