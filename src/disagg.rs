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
pub use connector::{Connector, Fields, Meeting, Order, Prefilled, Useless, bootstrap_port, of};
pub use handoff::{Fallback, Handoff, Original, Report};
