//! What is known of endpoints and pools: who they are, what is booked on them, what engines say, whether they are well.
//!
//! Numbers that change per request (bookings, signals, health) live in the [`Endpoint`] itself as atomics and survive a new
//! [snapshot](crate::snapshot), since the endpoint does.

pub mod cache;
pub mod capacity;
pub mod disaggregation;
pub mod endpoint;
pub mod health;
pub mod pool;
pub mod rates;
pub mod reservation;
mod seat;
pub mod signals;

use std::sync::Arc;

pub use endpoint::Endpoint;
pub use pool::{Member, Pool, PoolKind, PoolName, TokenizerSource};
pub use signals::SignalKind;

/// A name within a namespace, written `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    /// Namespace; `default` where a document gives none.
    pub namespace: Arc<str>,
    /// Name within the namespace.
    pub name: Arc<str>,
}

impl ObjectName {
    /// Builds a name from its two parts.
    pub fn new(namespace: impl Into<Arc<str>>, name: impl Into<Arc<str>>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl std::str::FromStr for ObjectName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self::new(namespace, name))
            }
            _ => Err(format!("`{text}` is not NAMESPACE/NAME")),
        }
    }
}

impl std::fmt::Display for ObjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
