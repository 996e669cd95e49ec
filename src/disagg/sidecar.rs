//! llm-d's sidecar: it stands before the decode engine, reads `x-prefiller-host-port` and runs the prefill leg itself.

use super::connector::{Connector, Order};

/// The request header that names the prefill endpoint, `ip:port`.
pub const HEADER: &str = "x-prefiller-host-port";

/// Bodies stay as they are.
#[derive(Debug)]
pub struct Sidecar;

impl Connector for Sidecar {
    fn order(&self) -> Order {
        Order::BySidecar
    }
}
