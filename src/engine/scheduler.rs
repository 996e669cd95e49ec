//! The virtual engine: continuous batching with chunked prefill, in steps whose length is arithmetic instead of a GPU.
//!
//! A step lasts `step + running * sequence + prefill_tokens * prefill_token`, divided by `speed`; at its end every
//! sequence whose prompt is computed gains one token. Gauges move only with steps, as in vLLM.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::cache::{chain, chain_start};
use super::events::Publisher;
use super::fault::{Fault, Faults};
use super::metrics::Metrics;

mod core;
mod handover;
mod sequence;

pub use handover::{Arrival, Kept};

use self::core::Core;

/// What one step costs at speed 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    /// Per prompt token that is computed.
    pub prefill_token: Duration,
    /// Per step, however small the batch.
    pub step: Duration,
    /// Per running sequence and step.
    pub sequence: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            prefill_token: Duration::from_micros(100),
            step: Duration::from_millis(10),
            sequence: Duration::from_micros(50),
        }
    }
}

/// Sizes and limits of the virtual engine.
#[derive(Clone, Debug)]
pub struct Limits {
    /// KV blocks.
    pub blocks: u64,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences in one batch.
    pub max_running: u32,
    /// Requests running and waiting beyond which a new one is refused.
    pub max_queued: Option<u32>,
    /// Tokens computed in one step.
    pub max_batched_tokens: u32,
    /// Distinct adapters in one batch.
    pub max_lora: u32,
    /// Whether adapters are served at all.
    pub has_loras: bool,
    /// Divisor of all times.
    pub speed: f64,
    /// Costs at speed 1.
    pub timing: Timing,
    /// Whether a KV connector is asked for what the cache lacks.
    pub connected: bool,
}

/// One sequence to compute.
#[derive(Clone, Debug)]
pub struct Work {
    /// The prompt.
    pub tokens: Arc<[u32]>,
    /// Adapter name, empty for the base model.
    pub adapter: Arc<str>,
    /// The request's `cache_salt`, empty when absent.
    pub salt: Arc<str>,
    /// Tokens to generate; 0 computes the prompt only (embeddings).
    pub max_tokens: u32,
    /// Ends the answer with `stop` after so many tokens.
    pub stop_after: Option<u32>,
    /// Decides the words of the answer.
    pub seed: u64,
    /// The request's `n`, for its histogram.
    pub choices: u32,
    /// Set when the prompt is computed by another engine.
    pub arrival: Option<Arc<Arrival>>,
    /// Takes the blocks of a sequence that ended by its length.
    pub kept: Option<Arc<Kept>>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model chose to.
    Stop,
    /// `max_tokens` was reached.
    Length,
    /// The engine died.
    Error,
}

/// Progress of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Index of the sequence in its submission.
    pub choice: u32,
    /// The new token, absent when only a prompt was computed or the engine died.
    pub token: Option<u32>,
    /// Prompt tokens that came from the prefix cache.
    pub cached: u32,
    /// Set on the last event of the sequence.
    pub finish: Option<Finish>,
}

/// Too many requests are queued.
#[derive(Debug, thiserror::Error)]
#[error("the queue is full: raise max_queued or send fewer requests at once")]
pub struct QueueFull;

/// The virtual engine of one simulated server.
pub struct Scheduler {
    core: Mutex<Core>,
    wake: Arc<Notify>,
    limits: Limits,
    publisher: Option<Arc<Publisher>>,
}

impl Scheduler {
    /// An idle engine that tells `publisher` what happens to its cache.
    pub fn new(limits: Limits, publisher: Option<Arc<Publisher>>) -> Self {
        Self { core: Mutex::new(Core::new(limits.clone())), wake: Arc::default(), limits, publisher }
    }

    /// Queues the sequences of one request. Dropping the receiver cancels them at the next step.
    pub fn submit(&self, works: Vec<Work>) -> Result<mpsc::UnboundedReceiver<Event>, QueueFull> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let mut core = self.core.lock();
        if self.limits.max_queued.is_some_and(|limit| core.in_flight() >= limit as usize) {
            core.metrics.rejected_requests += 1;
            return Err(QueueFull);
        }
        let now = Instant::now();
        for (choice, work) in works.into_iter().enumerate() {
            core.enqueue(work, choice as u32, sender.clone(), now);
        }
        drop(core);
        self.wake.notify_one();
        Ok(receiver)
    }

    /// Where the blocks of a sequence stay after its end.
    pub fn keep(&self) -> Arc<Kept> {
        Arc::new(Kept::new(self.core.lock().returned.clone(), self.wake.clone()))
    }

    /// Looks again at sequences whose arrival was settled.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// A copy of all numbers.
    pub fn metrics(&self) -> Metrics {
        self.core.lock().metrics.clone()
    }

    /// Forgets all cached blocks without a holder.
    pub fn clear_cache(&self) {
        self.core.lock().clear_cache();
    }

    /// Leading tokens of a prompt that are cached.
    pub fn cached_tokens(&self, prompt: &[u32], adapter: &str, salt: &str) -> usize {
        let (size, mut scratch, mut parent) =
            (self.limits.block_size as usize, Vec::new(), chain_start(adapter, salt));
        let hashes = prompt.chunks_exact(size).map(|block| {
            parent = chain(parent, block, &mut scratch);
            parent
        });
        self.core.lock().cached_prefix(hashes) * size
    }

    /// Starts anew: running requests fail, nothing is cached, KV events start from 0.
    pub fn restart(&self) {
        let mut core = self.core.lock();
        core.restart();
        if let Some(publisher) = &self.publisher {
            publisher.restart();
        }
    }

    /// Publishes what happened to the cache. Only steps do, as in vLLM: after a reset nothing is heard until the next one.
    fn publish(&self, core: &mut Core, faults: &Faults) {
        let announcements = core.take_announcements();
        if let Some(publisher) = &self.publisher {
            publisher.publish(&announcements, faults);
        }
    }

    /// Runs steps for ever.
    pub async fn run(self: Arc<Self>, mut faults: watch::Receiver<Faults>) {
        let mut deadline = None;
        loop {
            let now = faults.borrow_and_update().clone();
            let dead = now.has(Fault::Die);
            if dead {
                self.core.lock().fail_all();
            }
            if dead || now.frozen() {
                deadline = None;
                if faults.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let planned = self.core.lock().schedule(Instant::now());
            let Some(step) = planned else {
                deadline = None;
                tokio::select! {
                    () = self.wake.notified() => {}
                    changed = faults.changed() => if changed.is_err() { return },
                }
                continue;
            };
            let length = step.length(&self.limits.timing).mul_f64(now.slowdown() / self.limits.speed);
            let end = next_deadline(deadline, Instant::now(), length);
            deadline = Some(end);
            if end > Instant::now() {
                tokio::time::sleep_until(end).await;
            } else {
                tokio::task::yield_now().await;
            }
            let mut core = self.core.lock();
            core.complete(Instant::now());
            self.publish(&mut core, &now);
        }
    }
}

/// When the step ends. Timers tick in milliseconds, so that at high speed a step counts from the end of the one before
/// and not from when this task woke; a lag beyond 100 ms is given up.
fn next_deadline(previous: Option<Instant>, now: Instant, length: Duration) -> Instant {
    let earliest = now.checked_sub(Duration::from_millis(100)).unwrap_or(now);
    previous.map_or(now, |previous| previous.max(earliest)) + length
}

#[cfg(test)]
mod tests;
