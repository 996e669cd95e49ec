//! The signals feed: asks every endpoint for its metrics and its models, and writes what they say into the endpoint.
//!
//! ```text
//!   worker  one task per endpoint: client -> page -> observer; list of models -> adapters
//!   observer  pages in succession: restarts, sleep, standstill, missing series -> Signals, Health
//!   reading  one page through one table: series put together     histogram, adapters  what needs the page before
//!   table  names of vllm, sglang, tgi                            text  lines of a page
//! ```

pub mod adapters;
pub mod histogram;
pub mod observer;
pub mod reading;
pub mod sglang;
pub mod table;
pub mod text;
pub mod tgi;
pub mod vllm;
mod worker;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use ahash::{AHashMap, AHashSet};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

pub use observer::ScrapeStatus;
pub use table::Combine;

use crate::state::Endpoint;
use worker::{Shared, Worker};

/// Called with an endpoint whose engine restarted: what is known of its cache no longer holds.
pub type OnRestart = Arc<dyn Fn(&Arc<Endpoint>) + Send + Sync>;

/// Rhythm and limits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScrapeConfig {
    /// Time between two pages of an endpoint, give or take a tenth.
    pub interval: Duration,
    /// Time within which a page must have come.
    pub timeout: Duration,
    /// Time between two lists of models, give or take a tenth.
    pub models_interval: Duration,
    /// Bytes of a page that are read.
    pub max_page: usize,
    /// What the KV usages of several data-parallel ranks make together.
    pub kv_usage: Combine,
}

impl Default for ScrapeConfig {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(200),
            timeout: Duration::from_secs(1),
            models_interval: Duration::from_secs(5),
            max_page: 8 << 20,
            kv_usage: Combine::Max,
        }
    }
}

/// Follows endpoints, each in its own task. Clones share the tasks, which end with the last clone.
#[derive(Clone)]
pub struct Scraper {
    inner: Arc<Inner>,
}

struct Inner {
    config: ScrapeConfig,
    on_restart: OnRestart,
    followed: Mutex<AHashMap<u64, Followed>>,
}

struct Followed {
    shared: Arc<Shared>,
    _task: AbortOnDropHandle<()>,
}

impl std::fmt::Debug for Scraper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scraper").finish_non_exhaustive()
    }
}

impl Scraper {
    /// A scraper that follows nobody yet. `on_restart` runs in the task of the endpoint and must not block.
    pub fn new(config: ScrapeConfig, on_restart: OnRestart) -> Self {
        Self { inner: Arc::new(Inner { config, on_restart, followed: Mutex::default() }) }
    }

    /// Follows these endpoints and no others. Tasks of those that left are aborted and their connections closed; those
    /// that stay are not disturbed. Must be called within a tokio runtime.
    pub fn follow(&self, endpoints: &[Arc<Endpoint>]) {
        let wanted: AHashSet<u64> = endpoints.iter().map(|endpoint| endpoint.slot).collect();
        let mut followed = self.inner.followed.lock();
        followed.retain(|slot, _| wanted.contains(slot));
        for endpoint in endpoints {
            followed.entry(endpoint.slot).or_insert_with(|| self.start(endpoint));
        }
    }

    fn start(&self, endpoint: &Arc<Endpoint>) -> Followed {
        let status = ScrapeStatus { filtered: true, ..ScrapeStatus::default() };
        let shared = Arc::new(Shared { status: Mutex::new(status), models: Notify::new() });
        let worker = Worker {
            endpoint: Arc::clone(endpoint),
            config: self.inner.config,
            on_restart: Arc::clone(&self.inner.on_restart),
            shared: Arc::clone(&shared),
        };
        Followed { shared, _task: AbortOnDropHandle::new(tokio::spawn(worker.run())) }
    }

    /// Asks the endpoint for its list of models at once, for instance because it did not know one.
    pub fn refresh_models(&self, endpoint: &Endpoint) {
        if let Some(followed) = self.inner.followed.lock().get(&endpoint.slot) {
            followed.shared.models.notify_one();
        }
    }

    /// What was found out about the endpoint of that slot; `None` if it is not followed.
    pub fn status(&self, slot: u64) -> Option<ScrapeStatus> {
        Some(self.inner.followed.lock().get(&slot)?.shared.status.lock().clone())
    }

    /// Follows nobody any more.
    pub fn stop(&self) {
        self.inner.followed.lock().clear();
    }
}
