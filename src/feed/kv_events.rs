//! Follows the events that engines publish of their KV caches, so that the index holds what they hold.
//!
//! `source` says where an engine publishes, `worker` keeps the sockets open, `sequence` puts batches in order, `wire` reads
//! them, `holdings` counts blocks into the index, and `follower` judges whether the index may be trusted. All but `worker`
//! and `replay` are pure.

pub mod follower;
pub mod holdings;
pub mod pending;
pub(super) mod replay;
pub mod sequence;
pub mod source;
pub mod status;
pub mod wire;
mod worker;

use std::sync::Arc;

use ahash::{AHashMap, AHashSet};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

pub use follower::Follower;
pub use status::{Counts, GAP_OUTCOMES, Skip, Status};

use crate::index::TokenIndexes;
use crate::state::Endpoint;
use crate::state::cache::Events;
use crate::state::endpoint::EventPort;
use worker::{Following, Shared, Worker};

/// Replays under way at once, over all endpoints: each may bring tens of thousands of batches.
const MOST_REPLAYS: usize = 8;

/// Follows endpoints, each in its own task. Clones share the tasks, which end with the last clone.
#[derive(Clone)]
pub struct EventFeed {
    inner: Arc<Inner>,
}

struct Inner {
    index: Arc<TokenIndexes>,
    replays: Arc<Semaphore>,
    followed: Mutex<Followers>,
}

#[derive(Default)]
struct Followers {
    here: AHashMap<u64, Followed>,
    /// Endpoints that left and may come back: their followers go on where they stopped.
    away: AHashMap<u64, Arc<Shared>>,
    /// What those had counted who will not come back.
    gone: [u64; Skip::ALL.len()],
}

struct Followed {
    endpoint: Arc<Endpoint>,
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

impl std::fmt::Debug for EventFeed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventFeed").finish_non_exhaustive()
    }
}

impl EventFeed {
    /// A feed that follows nobody yet and writes to the event index of `index`.
    pub fn new(index: Arc<TokenIndexes>) -> Self {
        let replays = Arc::new(Semaphore::new(MOST_REPLAYS));
        Self { inner: Arc::new(Inner { index, replays, followed: Mutex::default() }) }
    }

    /// Follows these endpoints and no others. Those that stay as they are are not disturbed. Must be called within a tokio
    /// runtime.
    pub fn follow(&self, endpoints: &[Arc<Endpoint>]) {
        let wanted: AHashSet<u64> = endpoints.iter().map(|endpoint| endpoint.slot).collect();
        let mut followed = self.inner.followed.lock();
        let Followers { here, away, .. } = &mut *followed;
        for (slot, left) in here.extract_if(|slot, _| !wanted.contains(slot)) {
            park(&left.shared);
            away.insert(slot, left.shared);
        }
        for endpoint in endpoints {
            let same = |followed: &Followed| {
                followed.endpoint.event_ports == endpoint.event_ports
                    && followed.endpoint.engine == endpoint.engine
            };
            if here.get(&endpoint.slot).is_some_and(same) {
                continue;
            }
            let before = here.remove(&endpoint.slot).map(|followed| followed.shared);
            if let Some(shared) = &before {
                park(shared);
            }
            let shared = before.or_else(|| away.remove(&endpoint.slot)).unwrap_or_default();
            here.insert(endpoint.slot, self.start(endpoint, shared));
        }
    }

    fn start(&self, endpoint: &Arc<Endpoint>, shared: Arc<Shared>) -> Followed {
        let worker = Worker {
            endpoint: Arc::clone(endpoint),
            index: Arc::clone(&self.inner.index),
            replays: Arc::clone(&self.inner.replays),
            shared: Arc::clone(&shared),
        };
        let task = AbortOnDropHandle::new(tokio::spawn(worker.run()));
        Followed { endpoint: Arc::clone(endpoint), shared, _task: task }
    }

    /// Forgets endpoints that left and whose slot is not `live` any more.
    pub fn retain(&self, live: &dyn Fn(u64) -> bool) {
        let mut followed = self.inner.followed.lock();
        let Followers { away, gone, .. } = &mut *followed;
        for (_, shared) in away.extract_if(|slot, _| !live(*slot)) {
            if let Some(Following { follower, .. }) = &*shared.following.lock() {
                add(gone, follower.counts());
            }
        }
    }

    /// The scraper saw that the engine's process is another.
    pub fn restarted(&self, endpoint: &Endpoint) {
        let shared = self.inner.followed.lock().here.get(&endpoint.slot).map(|f| Arc::clone(&f.shared));
        let Some(shared) = shared else { return };
        if let Some(following) = &mut *shared.following.lock() {
            following.follower.restarted();
        }
        shared.woken.send_replace(());
        shared.ask_again.notify_one();
    }

    /// What is known of the events of the endpoint of that slot; `None` if it has no source of events.
    pub fn status(&self, slot: u64) -> Option<Status> {
        let shared = Arc::clone(&self.inner.followed.lock().here.get(&slot)?.shared);
        let following = shared.following.lock();
        let Following { ports, follower } = following.as_ref()?;
        let sources = ports.iter().enumerate().map(|(rank, ports)| {
            let events = match ports.events {
                EventPort::Dial(port) => port.to_string(),
                EventPort::Listen(port) => format!("listen:{port}"),
            };
            let replay = ports.replay.map_or_else(|| "none".to_owned(), |port| port.to_string());
            format!("rank {rank}: events {events}, replay {replay}")
        });
        Some(Status { sources: sources.collect(), ..follower.status() })
    }

    /// What had no effect, by [`Skip`], over all endpoints there ever were.
    pub fn skipped(&self) -> [u64; Skip::ALL.len()] {
        let followed = self.inner.followed.lock();
        let mut sum = followed.gone;
        let shared = followed.here.values().map(|followed| &followed.shared).chain(followed.away.values());
        for shared in shared {
            if let Some(Following { follower, .. }) = &*shared.following.lock() {
                add(&mut sum, follower.counts());
            }
        }
        sum
    }

    /// Whether any endpoint has a source of events and what it holds is not known by them.
    pub fn is_degraded(&self) -> bool {
        let followed = self.inner.followed.lock();
        followed.here.values().any(|followed| {
            let following = followed.shared.following.lock();
            following.as_ref().is_some_and(|following| {
                !matches!(following.follower.state(), Events::Following | Events::Asleep | Events::None)
            })
        })
    }

    /// Follows nobody any more.
    pub fn stop(&self) {
        self.follow(&[]);
    }
}

/// The task of that follower has ended, or is about to.
fn park(shared: &Shared) {
    if let Some(following) = &mut *shared.following.lock() {
        following.follower.stop();
    }
}

fn add(sum: &mut [u64; Skip::ALL.len()], counts: &Counts) {
    sum.iter_mut().zip(counts.skipped).for_each(|(sum, n)| *sum += n);
}
