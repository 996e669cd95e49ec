//! The endpoints behind one ModelServer or InferencePool, and what a pool remembers across snapshots.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::ObjectName;
use super::disaggregation::{Disaggregation, EngineRole, Placement};
use super::endpoint::{Booked, ByAddress, Endpoint};
use super::rates::{Factors, Rates};
use crate::metrics::PoolMetrics;

/// Which kind of document made a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolKind {
    /// Kthena's ModelServer.
    ModelServer,
    /// The Inference Extension's InferencePool.
    InferencePool,
}

/// A pool's identity. Its label in metrics is `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolName {
    /// Kind of the document.
    pub kind: PoolKind,
    /// Its name.
    pub object: ObjectName,
}

impl fmt::Display for PoolName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.object.fmt(f)
    }
}

/// What a ModelServer asks of the way to its endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TrafficPolicy {
    /// Bound on one request, sent to Envoy as its route timeout.
    pub timeout: Option<Duration>,
    /// Retries after the first attempt: 1 + attempts endpoints are offered. `None`: the default number.
    pub attempts: Option<u32>,
}

/// Where the tokenizer of a pool's model is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TokenizerSource {
    /// A `tokenizer.json`, or a folder with one, below the folder of tokenizers.
    File(Arc<str>),
    /// A service that renders and tokenizes, by the beginning of its URLs.
    Url(Arc<str>),
    /// The pool's own endpoints.
    Engine,
}

/// An endpoint in a pool. An endpoint in two pools has two of these and one set of facts.
#[derive(Debug)]
pub struct Member {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    counts: Arc<MemberCounts>,
}

/// What a pool counts of one of its endpoints. It outlives changes of the endpoint's description.
#[derive(Debug, Default)]
pub struct MemberCounts {
    /// What requests of this pool booked there.
    pub booked: Booked,
    /// Times it was a pick's first choice.
    pub picks: AtomicU64,
    /// Streams that broke there after their response had begun, by cause.
    pub broken: [AtomicU64; BrokenCause::ALL.len()],
}

impl Deref for Member {
    type Target = MemberCounts;

    fn deref(&self) -> &MemberCounts {
        &self.counts
    }
}

impl Member {
    /// A member with nothing booked.
    pub fn new(endpoint: Arc<Endpoint>) -> Self {
        Self { endpoint, counts: Arc::default() }
    }

    /// The same member, its endpoint newly described.
    pub fn with(&self, endpoint: Arc<Endpoint>) -> Self {
        Self { endpoint, counts: Arc::clone(&self.counts) }
    }
}

/// Why a response ended before it was complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BrokenCause {
    /// The client went away.
    Client,
    /// The engine's connection broke.
    Upstream,
    /// A timeout of Envoy.
    Timeout,
    /// Nobody said.
    Unknown,
}

impl BrokenCause {
    /// Every cause.
    pub const ALL: [BrokenCause; 4] =
        [BrokenCause::Client, BrokenCause::Upstream, BrokenCause::Timeout, BrokenCause::Unknown];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            BrokenCause::Client => "client",
            BrokenCause::Upstream => "upstream",
            BrokenCause::Timeout => "timeout",
            BrokenCause::Unknown => "unknown",
        }
    }
}

/// What a pool keeps while documents come and go: its lock, its counters and what it has learned.
#[derive(Debug, Default)]
pub struct PoolMemory {
    /// Held for the length of one scheduling cycle, from the first filter to the booking.
    pub cycle: Mutex<()>,
    /// Counters and histograms.
    pub metrics: PoolMetrics,
    /// Running means that stand in where a response says nothing.
    pub learned: Learned,
}

/// One pool in one snapshot.
#[derive(Debug)]
pub struct Pool {
    /// Identity.
    pub name: PoolName,
    /// `namespace/name`, for labels and records.
    pub label: Arc<str>,
    /// The model name its engines expect, if the document gives one.
    pub model: Option<Arc<str>>,
    /// Members in order of their names.
    pub members: Vec<Arc<Member>>,
    /// Members by address.
    pub by_address: ByAddress,
    /// Timeout and retries.
    pub traffic: TrafficPolicy,
    /// Where its model's tokenizer is; `None` if nothing says so.
    pub tokenizer: Option<TokenizerSource>,
    /// Who prefills and who decodes; none where every endpoint does both.
    pub disaggregation: Option<Disaggregation>,
    /// State that survives the snapshot.
    pub memory: Arc<PoolMemory>,
}

impl Pool {
    /// Builds a pool without a tokenizer; of two members at one address the first counts.
    pub fn new(
        name: PoolName,
        model: Option<Arc<str>>,
        members: Vec<Arc<Member>>,
        traffic: TrafficPolicy,
        memory: Arc<PoolMemory>,
    ) -> Self {
        let mut by_address = ByAddress::default();
        for (at, member) in members.iter().enumerate() {
            by_address.entry(member.endpoint.address).or_insert(at);
        }
        let label = name.to_string().into();
        Self {
            label,
            name,
            model,
            members,
            by_address,
            traffic,
            tokenizer: None,
            disaggregation: None,
            memory,
        }
    }

    /// The same pool with the tokenizer of its model.
    pub fn with_tokenizer(self, tokenizer: Option<TokenizerSource>) -> Self {
        Self { tokenizer, ..self }
    }

    /// The same pool with the roles of its members.
    pub fn with_disaggregation(self, disaggregation: Option<Disaggregation>) -> Self {
        Self { disaggregation, ..self }
    }

    /// What the endpoint of that slot is among the pool's roles.
    pub fn placement(&self, slot: u64) -> Option<Placement> {
        let at = self.members.iter().position(|member| member.endpoint.slot == slot)?;
        self.disaggregation.as_ref()?.placements.get(at).copied().flatten()
    }

    /// Whether member `at` generates outputs.
    pub fn generates(&self, at: usize) -> bool {
        self.disaggregation.as_ref().is_none_or(|roles| roles.role(at).is_some_and(EngineRole::decodes))
    }

    /// Whether the endpoint of that slot is a member.
    pub fn has(&self, slot: u64) -> bool {
        self.members.iter().any(|member| member.endpoint.slot == slot)
    }

    /// Tokens in a block of its engines' caches, once one said so.
    pub fn engine_block(&self) -> Option<usize> {
        self.members.iter().find_map(|member| member.endpoint.block_tokens())
    }

    /// Whether `model` is an adapter on the base model of this pool, as far as its engines listed their models.
    pub fn is_adapter(&self, model: &str) -> bool {
        let listed = |member: &Arc<Member>| {
            let adapters = member.endpoint.adapters.load();
            adapters.as_ref().map(|a| a.adapters.iter().any(|name| **name == *model) || !a.serves(model))
        };
        // Engines of a pool serve one base model, so the first list that names `model` as none is enough.
        self.model.as_deref() != Some(model) && self.members.iter().find_map(listed).unwrap_or(false)
    }

    /// The member at that address.
    pub fn member_at(&self, address: std::net::SocketAddr) -> Option<&Arc<Member>> {
        self.by_address.get(&address).map(|&at| &self.members[at])
    }
}

/// A mean that follows its samples: each counts one sixteenth, the first counts whole.
#[derive(Debug, Default)]
pub struct RunningMean(AtomicU64);

impl RunningMean {
    /// Takes a sample; concurrent samples may overwrite each other, which a mean can bear.
    pub fn learn(&self, sample: f64) {
        if sample.is_finite() {
            let next = self.get().map_or(sample, |mean| mean + (sample - mean) / 16.0);
            // +0.0 has the bits of "never"; a mean of exactly zero is as good as the smallest number.
            self.0.store(next.max(f64::MIN_POSITIVE).to_bits(), Ordering::Relaxed);
        }
    }

    /// The mean, `None` before the first sample.
    pub fn get(&self) -> Option<f64> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            bits => Some(f64::from_bits(bits)),
        }
    }
}

/// No prompt takes longer than this, seconds; a client may claim one of 2^64 tokens.
const LONGEST_PREFILL: f64 = 3_600.0;

/// What a pool has learned of its model's traffic.
#[derive(Debug, Default)]
pub struct Learned {
    /// Output tokens of a response.
    pub output_tokens: RunningMean,
    /// Response bytes per output token, streamed responses.
    pub stream_bytes_per_token: RunningMean,
    /// Response bytes per output token, whole responses.
    pub whole_bytes_per_token: RunningMean,
    /// Prompt tokens that an endpoint had to compute.
    pub uncached_tokens: RunningMean,
    /// How fast its endpoints of weight 1 have been.
    pub rates: Rates,
}

impl Learned {
    /// Output tokens expected of a request that allows `max_tokens`; 256 before anything was learned.
    pub fn expected_output(&self, max_tokens: Option<u64>) -> u64 {
        let mean = self.output_tokens.get().unwrap_or(256.0) as u64;
        max_tokens.map_or(mean, |max| max.min(mean.max(1)))
    }

    /// How long the engine will take before the first token of a prompt with so many uncached tokens.
    /// At [unit speed](super::rates) before anything was learned.
    pub fn expected_prefill(&self, tokens: u64) -> Duration {
        let seconds = self.rates.factors(Factors::UNIT).prefill(tokens as f64, 0.0);
        Duration::from_secs_f64(seconds.min(LONGEST_PREFILL))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_mean_starts_with_its_first_sample() {
        let mean = RunningMean::default();
        assert_eq!(mean.get(), None);
        mean.learn(f64::NAN);
        assert_eq!(mean.get(), None);
        mean.learn(16.0);
        mean.learn(32.0);
        assert_eq!(mean.get(), Some(17.0));
    }

    #[test]
    fn expected_output_is_bounded_by_what_the_client_allows() {
        let learned = Learned::default();
        assert_eq!(learned.expected_output(None), 256);
        assert_eq!(learned.expected_output(Some(16)), 16);
        assert_eq!(learned.expected_output(Some(u64::MAX)), 256);
        learned.output_tokens.learn(40.0);
        assert_eq!(learned.expected_output(Some(u64::MAX)), 40);
    }
}
