//! What Pilotfish knows of the world: endpoints, pools and routes in an immutable snapshot, hot numbers in atomics beside it.
//!
//! Readers take the snapshot once per request and never block; feeds replace it whole. Numbers that change per request
//! (bookings, signals, health) live in the [`Endpoint`] itself and survive a new snapshot, since the endpoint does.

pub mod endpoint;
pub mod health;
pub mod pool;
pub mod reservation;
pub mod signals;

use std::sync::Arc;

use ahash::AHashMap;
use arc_swap::{ArcSwap, Guard};

pub use endpoint::Endpoint;
pub use pool::{Member, Pool, PoolKind, PoolName};
pub use reservation::Reservation;
pub use signals::SignalKind;

use crate::route::RouteTable;

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

impl std::fmt::Display for ObjectName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// One consistent view of the topology.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// All pools.
    pub pools: Vec<Arc<Pool>>,
    /// All endpoints, whether or not a pool selects them.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// ModelRoutes, ready for matching.
    pub routes: RouteTable,
    by_name: AHashMap<PoolName, usize>,
}

impl Snapshot {
    /// Builds a snapshot; `pools` with the same name: the last wins.
    pub fn new(endpoints: Vec<Arc<Endpoint>>, pools: Vec<Arc<Pool>>, routes: RouteTable) -> Self {
        let by_name = pools.iter().enumerate().map(|(at, pool)| (pool.name.clone(), at)).collect();
        Self { pools, endpoints, routes, by_name }
    }

    /// The pool of that kind and name.
    pub fn pool(&self, name: &PoolName) -> Option<&Arc<Pool>> {
        self.by_name.get(name).map(|&at| &self.pools[at])
    }

    /// The pool that `namespace/name` means whatever its kind; a ModelServer wins over an InferencePool of the same name.
    pub fn pool_of_any_kind(&self, object: &ObjectName) -> Option<&Arc<Pool>> {
        [PoolKind::ModelServer, PoolKind::InferencePool]
            .into_iter()
            .find_map(|kind| self.pool(&PoolName { kind, object: object.clone() }))
    }
}

/// The current snapshot, replaced as a whole.
#[derive(Debug, Default)]
pub struct Store {
    current: ArcSwap<Snapshot>,
}

impl Store {
    /// The snapshot of this moment, for the length of one request.
    pub fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// The snapshot of this moment, to be kept.
    pub fn load_full(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Makes `next` what later requests see.
    pub fn replace(&self, next: Snapshot) {
        self.current.store(Arc::new(next));
    }
}
