//! Where the ports listen.

use std::net::IpAddr;
use std::str::FromStr;

use clap::Args;

use crate::state::ObjectName;

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
    /// A further gRPC port whose requests all go to one pool; may be given several times. Port 0 picks a free one.
    #[arg(
        long = "pool-port",
        value_name = "PORT=NS/NAME",
        value_delimiter = ',',
        env = "PILOTFISH_POOL_PORT"
    )]
    pub pool_ports: Vec<PoolPort>,
}

/// A port and the pool it is for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolPort {
    /// The port.
    pub port: u16,
    /// The pool.
    pub pool: ObjectName,
}

impl FromStr for PoolPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (port, pool) = text.split_once('=').ok_or("write PORT=NAMESPACE/NAME")?;
        let port = port.parse().map_err(|_| format!("`{port}` is not a port"))?;
        Ok(Self { port, pool: pool.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("9012=chat/llama", Some((9012, "chat/llama")))]
    #[case("0=a/b", Some((0, "a/b")))]
    #[case("9012", None)]
    #[case("9012=llama", None)]
    #[case("90120=a/b", None)]
    #[case("1=/b", None)]
    #[case("1=a/b/c", None)]
    fn a_port_and_its_pool(#[case] text: &str, #[case] expected: Option<(u16, &str)>) {
        let read = text.parse::<PoolPort>().ok().map(|read| (read.port, read.pool.to_string()));
        assert_eq!(read, expected.map(|(port, pool)| (port, pool.to_owned())));
    }
}
