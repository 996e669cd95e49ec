//! Computes a prompt at one engine for another that generates its output: what each of them is told.
//!
//! ```text
//! client's body --> prefill body --> prefill engine --> transfer fields --> decode body --> decode engine
//! ```
//!
//! Nothing here does IO: the call is made by [`prefill`](crate::prefill), the decode leg is sent by Envoy. A connector is one
//! small file.

mod body;
mod connector;
mod handoff;
mod http;
mod lmcache;
mod mooncake;
mod nixl;
mod sglang;
mod shared_storage;
pub mod sidecar;

pub use body::{has_transfer_fields, is_batch, may_be_split, without_transfer_fields};
pub use connector::{Connector, Fields, Meeting, Order, Prefilled, Useless, bootstrap_port};
pub use handoff::{Fallback, Handoff, Original, Report};

use crate::state::disaggregation::KvConnector;

/// The behaviour of a connector.
pub fn of(connector: KvConnector) -> &'static dyn Connector {
    match connector {
        KvConnector::Http => &http::Http,
        KvConnector::Lmcache => &lmcache::Lmcache,
        KvConnector::SharedStorage => &shared_storage::SharedStorage,
        KvConnector::Nixl => &nixl::Nixl,
        KvConnector::Mooncake => &mooncake::Mooncake,
        KvConnector::Sglang => &sglang::Sglang,
        KvConnector::Sidecar => &sidecar::Sidecar,
    }
}
