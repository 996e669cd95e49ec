//! Where the ports listen.

use std::net::IpAddr;

use clap::Args;

/// Flags of the ports.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Ports")]
pub struct PortArgs {
    /// Address of the gRPC and health ports; 127.0.0.1 with --resources, else all addresses.
    #[arg(long, value_name = "IP", env = "PILOTFISH_LISTEN")]
    pub listen: Option<IpAddr>,
    /// Address of the admin port; same default.
    #[arg(long, value_name = "IP", env = "PILOTFISH_ADMIN_LISTEN")]
    pub admin_listen: Option<IpAddr>,
    /// Port of ext_proc, access log and health; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 9002, env = "PILOTFISH_GRPC_PORT")]
    pub grpc_port: u16,
    /// Port of gRPC health alone, always without TLS; 0 picks a free one.
    #[arg(long, value_name = "PORT", default_value_t = 9003, env = "PILOTFISH_GRPC_HEALTH_PORT")]
    pub grpc_health_port: u16,
    /// Port of metrics, debug pages, /healthz and /readyz; 0 picks a free one.
    #[arg(
        long,
        alias = "admin-port",
        value_name = "PORT",
        default_value_t = 9090,
        env = "PILOTFISH_METRICS_PORT"
    )]
    pub metrics_port: u16,
}
