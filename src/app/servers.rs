//! The ports: three, and the webhook's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context, Result};
use envoy_types::pb::envoy::service::accesslog::v3::access_log_service_server::AccessLogServiceServer;
use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessorServer;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic_health::pb::health_server::HealthServer;

use super::Bound;
use super::health::HealthService;
use crate::admin::{self, Admin};
use crate::args::{PoolPort, ServeArgs};
use crate::extproc::ExtProc;
use crate::extproc::access_log::AccessLog;
use crate::extproc::rate_limit::TokenLimits;
use crate::state::ObjectName;
use crate::tls::{Tls, incoming};
use crate::trust::Trust;
use crate::webhook::{self, Door};

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
    webhook: Option<TcpListener>,
    pools: Vec<(TcpListener, ObjectName)>,
}

impl Ports {
    /// Binds all.
    pub async fn bind(args: &ServeArgs) -> Result<Self> {
        let webhook = match args.webhook.webhook_port {
            Some(port) => Some(bind(args.host(), port, "--webhook-port").await?),
            None => None,
        };
        let mut pools = Vec::new();
        for PoolPort { port, pool } in &args.ports.pool_ports {
            pools.push((bind(args.host(), *port, "--pool-port").await?, pool.clone()));
        }
        Ok(Self {
            pools,
            grpc: bind(args.host(), args.ports.grpc_port, "--grpc-port").await?,
            health: bind(args.host(), args.ports.grpc_health_port, "--grpc-health-port").await?,
            admin: bind(args.admin_host(), args.ports.metrics_port, "--metrics-port").await?,
            webhook,
        })
    }

    /// The addresses.
    pub fn bound(&self) -> Result<Bound> {
        Ok(Bound {
            grpc: self.grpc.local_addr()?,
            health: self.health.local_addr()?,
            admin: self.admin.local_addr()?,
            webhook: self.webhook.as_ref().map(TcpListener::local_addr).transpose()?,
            pools: self
                .pools
                .iter()
                .map(|(listener, pool)| Ok((pool.to_string(), listener.local_addr()?)))
                .collect::<Result<_>>()?,
        })
    }

    /// Serves all, with the TLS of the gRPC ports and that of the webhook's. The gRPC ports close gracefully on `closing`, the
    /// others live until `stop`.
    pub fn serve(
        self,
        args: &ServeArgs,
        admin: &Arc<Admin>,
        (tls, webhook_tls): (Option<&Arc<Tls>>, Option<Arc<Tls>>),
        closing: &CancellationToken,
        stop: &CancellationToken,
        tasks: &TaskTracker,
    ) -> Result<tokio::task::JoinHandle<Result<(), tonic::transport::Error>>> {
        let shared = &admin.shared;
        let health = |until: &CancellationToken| {
            HealthServer::new(HealthService::new(Arc::clone(&admin.readiness), until.clone()))
        };
        let most = shared.decider.settings.max_body + MESSAGE_OVERHEAD;
        let ext_proc = |pool| {
            ExternalProcessorServer::new(ExtProc::new(Arc::clone(shared), pool))
                .max_decoding_message_size(args.limits.grpc_max_recv_msg_size.unwrap_or(most))
                .max_encoding_message_size(args.limits.grpc_max_send_msg_size.unwrap_or(most))
        };
        let access_log = AccessLogServiceServer::new(AccessLog::new(
            Arc::clone(&shared.ledger),
            Arc::clone(&shared.metrics),
            Trust::new(args.trusted_clients.clone()),
        ));
        let token_limits = RateLimitServiceServer::new(TokenLimits::new(
            admin.doors.clone(),
            Arc::clone(&shared.metrics),
            Trust::new(args.trusted_clients.clone()),
        ));
        let listeners = self.pools.into_iter().map(|(listener, pool)| (listener, Some(pool)));
        let servers = std::iter::once((self.grpc, None)).chain(listeners).map(|(listener, pool)| {
            let grpc = server_builder()
                .add_service(ext_proc(pool))
                .add_service(access_log.clone())
                .add_service(token_limits.clone())
                .add_service(health(closing));
            let connections = incoming(listener, tls.cloned(), Arc::clone(&shared.metrics));
            grpc.serve_with_incoming_shutdown(connections, closing.clone().cancelled_owned())
        });
        let servers = futures::future::try_join_all(servers.collect::<Vec<_>>());
        let grpc = tasks.spawn(async { servers.await.map(drop) });

        let health_only = server_builder().add_service(health(stop));
        let connections = incoming(self.health, None, Arc::clone(&shared.metrics));
        let stopped = stop.clone().cancelled_owned();
        tasks.spawn(health_only.serve_with_incoming_shutdown(connections, stopped));

        let pages = admin::router(Arc::clone(admin)).into_make_service_with_connect_info::<SocketAddr>();
        if let Some((listener, tls)) = self.webhook.zip(webhook_tls) {
            let door = Door::new(listener, tls, Arc::clone(&shared.metrics))?;
            let (router, stop) = (webhook::router(Arc::clone(shared)), stop.clone());
            tasks.spawn(async move {
                axum::serve(door, router).with_graceful_shutdown(stop.cancelled_owned()).await
            });
        }
        let (listener, stop) = (self.admin, stop.clone());
        tasks.spawn(async move {
            axum::serve(listener, pages).with_graceful_shutdown(stop.cancelled_owned()).await
        });
        Ok(grpc)
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

async fn bind(host: IpAddr, port: u16, flag: &str) -> Result<TcpListener> {
    let address = SocketAddr::new(host, port);
    let bound = match TcpListener::bind(address).await {
        // A kernel without IPv6.
        Err(error) if error.raw_os_error() == Some(NO_SUCH_FAMILY) && host.is_unspecified() => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await
        }
        bound => bound,
    };
    bound.with_context(|| format!("cannot listen on {address}: choose another with {flag}"))
}

/// Linux' `EAFNOSUPPORT`.
const NO_SUCH_FAMILY: i32 = 97;
