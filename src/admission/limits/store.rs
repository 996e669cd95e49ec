//! Buckets that several replicas share, as the limiter sees them. Who keeps them stands behind [`Store`].

use std::fmt::Debug;
use std::sync::Arc;

use futures::future::BoxFuture;

use super::{Both, Kind, Rate, Tokens};

/// The port of addresses that name none.
const PORT: u16 = 6379;

/// A bucket of a store.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Name(pub Arc<str>);

/// What one request asks of one bucket.
#[derive(Clone, Debug)]
pub struct Demand {
    /// The bucket.
    pub name: Name,
    /// How it fills.
    pub rate: Rate,
    /// Whose rules count.
    pub kind: Kind,
    /// Tokens.
    pub amount: u64,
}

/// What the store says of the demands of one request.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// What was taken, of all or of none.
    pub taken: Option<Tokens>,
    /// What the buckets held before.
    pub levels: Both<f64>,
}

/// Tokens that were spent, or come back if fewer than 0.
#[derive(Clone, Debug)]
pub struct Spent {
    /// The bucket.
    pub name: Name,
    /// How it fills.
    pub rate: Rate,
    /// Tokens.
    pub tokens: i64,
}

/// Keeps buckets for several replicas.
pub trait Store: Debug + Send + Sync {
    /// Whether it answers at present. One that does not costs no time.
    fn is_well(&self) -> bool;

    /// Replicas that count here, by what was last known; at least 1.
    fn replicas(&self) -> u32;

    /// Takes from all buckets or from none; nothing if it cannot say in time. A demand that was granted too late is undone.
    fn check(&self, demands: Both<Option<Demand>>) -> BoxFuture<'_, Option<Answer>>;

    /// Tells it what was spent, at once or when it is well again.
    fn add(&self, spent: Spent);
}

/// Finds stores.
pub trait Stores: Debug + Send + Sync {
    /// Whether the store at `host:port` may be spoken to.
    fn allows(&self, address: &str) -> bool;

    /// The store at `host:port`; none if it must not be spoken to.
    fn open(&self, address: &str) -> Option<Arc<dyn Store>>;

    /// Settlements that no store will hear of.
    fn lost(&self) -> u64;
}

/// The place that an address means, however it is written: in lower case, without brackets, with a port.
pub fn place_of(address: &str) -> String {
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if port.parse::<u16>().is_ok() && (!host.contains(':') || host.ends_with(']')) => {
            (host, port.to_owned())
        }
        _ => (address, PORT.to_string()),
    };
    format!("{}:{port}", host.trim_matches(['[', ']']).to_ascii_lowercase())
}
