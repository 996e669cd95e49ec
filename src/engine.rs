//! A simulated inference engine: vLLM's HTTP API, metrics and failures over a scheduler that computes nothing.
//!
//! It is the stand-in for real engines in end-to-end tests, the quickstart and benches. Many can run in one process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::net::TcpListener;
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

mod admin;
mod cache;
mod chat;
mod completions;
mod config;
mod error;
pub mod events;
mod fault;
mod generate;
mod generation;
mod http;
mod messages;
pub mod metrics;
mod page;
mod pooling;
mod record;
mod responses;
mod scheduler;
mod server;
mod sse;
pub mod tokenizer;
mod transfer;
mod vocabulary;

pub use config::EngineConfig;
pub use events::{EventConfig, EventHashes, EventShape};
pub use fault::{Fault, Faults, UnknownFault};
pub use record::RecordedRequest;
pub use scheduler::Timing;
pub use transfer::{EngineRole, KvConnector};

use events::Publisher;
use metrics::Metrics;
use page::{Page, PageConfig};
use record::Records;
use scheduler::Scheduler;
use transfer::Transfers;
use vocabulary::Vocabulary;

/// Why an engine could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The configuration makes no sense.
    #[error("engine configuration: {0}")]
    Config(&'static str),
    /// The tokenizer cannot be used.
    #[error("--tokenizer: {0}")]
    Tokenizer(String),
    /// A port of the KV events could not be opened.
    #[error("cannot open the ports of the KV events: {source}; choose others, or 0 for free ones")]
    Events {
        /// The error of the system.
        source: std::io::Error,
    },
    /// The port could not be opened.
    #[error("cannot listen on {address}: {source}; choose another port, or 0 for a free one")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The error of the system.
        source: std::io::Error,
    },
}

/// What the handlers share, and what tests may look at.
pub struct EngineState {
    config: EngineConfig,
    name: String,
    address: SocketAddr,
    max_model_len: u32,
    fingerprint: String,
    id_seed: u64,
    started: f64,
    scheduler: Arc<Scheduler>,
    publisher: Option<Arc<Publisher>>,
    faults: watch::Sender<Faults>,
    page: Page,
    vocabulary: Vocabulary,
    records: Records,
    in_flight: AtomicU64,
    ids: AtomicU64,
    bootstrap: Option<SocketAddr>,
    transfers: Transfers,
}

impl EngineState {
    /// The engine's name in `x-engine-name`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where KV events are published.
    pub fn events_address(&self) -> Option<SocketAddr> {
        self.publisher.as_ref().map(|publisher| publisher.events())
    }

    /// Where KV events are replayed.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.publisher.as_ref().and_then(|publisher| publisher.replay())
    }

    /// Where the bootstrap server of a Mooncake or SGLang prefill engine listens.
    pub fn bootstrap_address(&self) -> Option<SocketAddr> {
        self.bootstrap
    }

    /// The engine as its peers know it (`remote_engine_id`); another one after every restart.
    pub fn engine_id(&self) -> Arc<str> {
        self.transfers.identity()
    }

    /// Prefills whose KV waits to be fetched.
    pub fn pinned(&self) -> usize {
        self.transfers.pinned()
    }

    /// Fetches that this engine completed as the decode side.
    pub fn transferred(&self) -> u64 {
        self.transfers.transferred()
    }

    /// Leading tokens of a prompt that are cached, in whole blocks: what KV events must add up to. `adapter` and `salt` are
    /// empty for none.
    pub fn cached_tokens(&self, prompt: &[u32], adapter: &str, salt: &str) -> usize {
        self.scheduler.cached_tokens(prompt, adapter, salt)
    }

    /// The last requests received, oldest first; `/metrics`, `/health` and the control paths are left out.
    pub fn requests(&self) -> Vec<Arc<RecordedRequest>> {
        self.records.all()
    }

    /// Forgets the recorded requests.
    pub fn clear_requests(&self) {
        self.records.clear();
    }

    /// Requests for inference under way.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// The numbers that `/metrics` shows.
    pub fn metrics(&self) -> Metrics {
        let mut metrics = self.scheduler.metrics();
        metrics.transfers_failed = self.transfers.failed();
        metrics.transfers_expired = self.transfers.expired();
        metrics.sleep_level = self.faults.borrow().sleep_level();
        if metrics.sleep_level > 0 {
            // A sleeping vLLM shows no load, even while requests hang in it.
            metrics.num_requests_running = 0;
            metrics.waiting_capacity = 0;
            metrics.waiting_deferred = 0;
            metrics.kv_cache_usage = 0.0;
        }
        metrics
    }

    /// The faults in force.
    pub fn faults(&self) -> Faults {
        self.faults.borrow().clone()
    }

    /// Begins a fault, replacing one of the same kind.
    pub fn set_fault(&self, fault: Fault) {
        let drop_events = |n, kept| self.publisher.iter().for_each(|publisher| publisher.drop_next(n, kept));
        match fault {
            Fault::Sleep(_) => self.scheduler.clear_cache(),
            // These happen and are over.
            Fault::Restart => {
                self.transfers.restart(&generation::uuid(self));
                return self.scheduler.restart();
            }
            Fault::DropEvents(n) => return drop_events(n, true),
            Fault::LoseEvents(n) => return drop_events(n, false),
            Fault::Die => self.transfers.clear(),
            _ => {}
        }
        self.faults.send_modify(|faults| faults.set(fault));
    }

    /// Ends the fault of this kind, whatever its argument.
    pub fn clear_fault(&self, fault: Fault) {
        self.faults.send_modify(|faults| faults.clear(fault));
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        self.faults.send_modify(Faults::clear_all);
    }
}

/// An engine with an open port.
pub struct Engine {
    state: Arc<EngineState>,
    listener: TcpListener,
    bootstrap: Option<TcpListener>,
    event_ports: Option<events::Ports>,
}

impl Engine {
    /// Checks the configuration and opens the port.
    pub async fn bind(config: EngineConfig) -> Result<Self, EngineError> {
        let max_model_len = config.check()?;
        let vocabulary = Vocabulary::load(config.tokenizer.as_deref())?;
        let listen = |source| EngineError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let started = generation::unix_seconds();
        let id_seed = xxh3_64_with_seed(&started.to_le_bytes(), config.seed ^ u64::from(address.port()));
        let bootstrap = match config.bootstrap.filter(|_| config.role != EngineRole::Decode) {
            Some(port) => {
                let address = SocketAddr::new(config.listen.ip(), port);
                let listen = |source| EngineError::Listen { address, source };
                Some(TcpListener::bind(address).await.map_err(listen)?)
            }
            None => None,
        };
        let page = Page::new(&PageConfig {
            model: &config.models[0],
            blocks: config.blocks,
            block_size: config.block_size,
            max_model_len,
            max_lora: config.max_lora,
            started,
            padding: config.page_padding,
            nixl: config.connector == Some(KvConnector::Nixl),
        });
        let (mut event_ports, mut publisher) = (None, None);
        if let Some(events) = &config.events {
            let ports = events::Ports::bind(events, address)
                .await
                .map_err(|source| EngineError::Events { source })?;
            let new = Publisher::new(events.clone(), &ports, config.block_size, address, &config.models[0]);
            publisher = Some(Arc::new(new.map_err(|source| EngineError::Events { source })?));
            event_ports = Some(ports);
        }
        let state = EngineState {
            name: config.name.clone().unwrap_or_else(|| format!("engine-{}", address.port())),
            address,
            max_model_len,
            fingerprint: format!("vllm-0.32.0-{:08x}", xxh3_64_with_seed(b"fingerprint", config.seed) as u32),
            id_seed,
            started,
            scheduler: Arc::new(Scheduler::new(config.limits(), publisher.clone())),
            publisher,
            faults: watch::Sender::new(Faults::default()),
            page,
            vocabulary,
            records: Records::default(),
            in_flight: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            bootstrap: bootstrap.as_ref().map(TcpListener::local_addr).transpose().map_err(listen)?,
            transfers: Transfers::default(),
            config,
        };
        state.transfers.restart(&generation::uuid(&state));
        for fault in state.config.faults.clone() {
            state.set_fault(fault);
        }
        Ok(Self { state: Arc::new(state), listener, bootstrap, event_ports })
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// The shared state, for tests in the same process.
    pub fn state(&self) -> Arc<EngineState> {
        self.state.clone()
    }

    /// Serves until `shutdown` resolves or this future is dropped; either cuts the open connections.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), EngineError> {
        server::run(self.state, self.listener, self.bootstrap, self.event_ports, shutdown).await
    }
}

#[cfg(test)]
mod tests;
