//! A simulated inference engine: vLLM's HTTP API, metrics and failures over a scheduler that computes nothing.
//!
//! It is the stand-in for real engines in end-to-end tests, the quickstart and benches. Many can run in one process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tokio::net::TcpListener;
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

mod admin;
mod cache;
mod chat;
mod completions;
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
mod vocabulary;

pub use events::{EventConfig, EventHashes, EventShape};
pub use fault::{Fault, Faults, UnknownFault};
pub use record::RecordedRequest;
pub use scheduler::Timing;

use events::Publisher;
use metrics::Metrics;
use page::{Page, PageConfig};
use record::Records;
use scheduler::{Limits, Scheduler};
use vocabulary::Vocabulary;

/// Longest request unless the cache is smaller, tokens.
const MAX_MODEL_LEN: u64 = 1 << 20;

/// Everything that shapes one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Value of the response header `x-engine-name`; `engine-PORT` when absent.
    pub name: Option<String>,
    /// Served names of the base model, at least one; the first labels the metrics.
    pub models: Vec<String>,
    /// Names of LoRA adapters.
    pub loras: Vec<String>,
    /// Divisor of all times: 1 is realistic, 100 is a hundred times faster.
    pub speed: f64,
    /// What a step costs at speed 1.
    pub timing: Timing,
    /// KV blocks.
    pub blocks: u64,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences in one batch.
    pub max_running: u32,
    /// Tokens computed in one step; longer prompts are computed in chunks.
    pub max_batched_tokens: u32,
    /// Sequences running and waiting from which on requests get 503 (vLLM: `--max-num-queued-reqs`).
    pub max_queued: Option<u32>,
    /// Distinct adapters in one batch.
    pub max_lora: u32,
    /// Prompt and answer together, tokens; as much as the cache holds when absent.
    pub max_model_len: Option<u32>,
    /// Decides the generated words and the ids.
    pub seed: u64,
    /// Faults in force from the start.
    pub faults: Vec<Fault>,
    /// Bytes to which unrelated series fill an unfiltered `/metrics` page (a real one has about 60,000); 0 for none.
    pub page_padding: usize,
    /// Whether `/metrics` answers whole whatever `?name[]=` asks for, as servers that do not know the query do.
    pub whole_pages: bool,
    /// How KV events are published; absent, none are.
    pub events: Option<EventConfig>,
    /// How many received requests are kept for inspection.
    pub recorded: usize,
    /// A `tokenizer.json`, or a folder with one and its chat template; four bytes are a token when absent.
    pub tokenizer: Option<PathBuf>,
    /// Whether `/render` is served (vLLM: `--enable-scale-out`).
    pub scale_out: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            name: None,
            models: vec!["tiny".to_owned()],
            loras: Vec::new(),
            speed: 1.0,
            timing: Timing::default(),
            blocks: 512,
            block_size: 16,
            max_running: 256,
            max_batched_tokens: 2048,
            max_queued: None,
            max_lora: 2,
            max_model_len: None,
            seed: 0,
            faults: Vec::new(),
            page_padding: 0,
            whole_pages: false,
            events: None,
            recorded: 256,
            tokenizer: None,
            scale_out: false,
        }
    }
}

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
            Fault::Restart => return self.scheduler.restart(),
            Fault::DropEvents(n) => return drop_events(n, true),
            Fault::LoseEvents(n) => return drop_events(n, false),
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
    event_ports: Option<events::Ports>,
}

fn check(config: &EngineConfig) -> Result<u32, EngineError> {
    let capacity = config.blocks.saturating_mul(u64::from(config.block_size));
    let rule = |holds: bool, message| if holds { Ok(()) } else { Err(EngineError::Config(message)) };
    rule(!config.models.is_empty(), "give at least one model name")?;
    rule(config.speed.is_finite() && config.speed > 0.0, "speed must be greater than 0")?;
    rule(capacity > 0, "blocks and block_size must be at least 1")?;
    rule(config.max_running > 0, "max_running must be at least 1")?;
    rule(config.max_batched_tokens > 0, "max_batched_tokens must be at least 1")?;
    rule(config.max_lora > 0, "max_lora must be at least 1")?;
    let max_model_len = config.max_model_len.map_or(capacity.min(MAX_MODEL_LEN), u64::from);
    rule(max_model_len > 0, "max_model_len must be at least 1")?;
    rule(max_model_len <= capacity, "max_model_len must fit into blocks * block_size: raise blocks")?;
    Ok(max_model_len as u32)
}

impl Engine {
    /// Checks the configuration and opens the port.
    pub async fn bind(config: EngineConfig) -> Result<Self, EngineError> {
        let max_model_len = check(&config)?;
        let vocabulary = Vocabulary::load(config.tokenizer.as_deref())?;
        let listen = |source| EngineError::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let started = generation::unix_seconds();
        let id_seed = xxh3_64_with_seed(&started.to_le_bytes(), config.seed ^ u64::from(address.port()));
        let page = Page::new(&PageConfig {
            model: &config.models[0],
            blocks: config.blocks,
            block_size: config.block_size,
            max_model_len,
            max_lora: config.max_lora,
            started,
            padding: config.page_padding,
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
            scheduler: Arc::new(Scheduler::new(limits(&config), publisher.clone())),
            publisher,
            faults: watch::Sender::new(Faults::default()),
            page,
            vocabulary,
            records: Records::default(),
            in_flight: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            config,
        };
        for fault in state.config.faults.clone() {
            state.set_fault(fault);
        }
        Ok(Self { state: Arc::new(state), listener, event_ports })
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
        server::run(self.state, self.listener, self.event_ports, shutdown).await
    }
}

fn limits(config: &EngineConfig) -> Limits {
    Limits {
        blocks: config.blocks,
        block_size: config.block_size,
        max_running: config.max_running,
        max_queued: config.max_queued,
        max_batched_tokens: config.max_batched_tokens,
        max_lora: config.max_lora,
        has_loras: !config.loras.is_empty(),
        speed: config.speed,
        timing: config.timing,
    }
}

#[cfg(test)]
mod tests;
