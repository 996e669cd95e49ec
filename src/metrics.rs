//! Everything counted, and how it is shown: OpenMetrics text under the prefix `pilotfish_`.
//!
//! Numbers live beside what they count, as atomics of a pool or an endpoint, so that counting costs one addition and a
//! series ends when its pool or endpoint does. They are turned into series only when somebody scrapes.

mod disaggregation;
mod limit_filter;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::histogram::Histogram;

pub use disaggregation::DisaggregationMetrics;
pub use limit_filter::LimitFilter;

use crate::refusal::Reason;
use crate::session::Outcome;
use crate::usage::UsageSource;

/// Seconds, from 10 us to 10 s: decisions and their stages.
const FINE_BUCKETS: [f64; 16] = [
    0.00001, 0.000_025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5,
    1.0, 10.0,
];
/// Seconds, as vLLM cuts them: time to first token.
const TTFT_BUCKETS: [f64; 20] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0,
];

/// Counts by HTTP status, 100 to 599.
#[derive(Debug)]
pub struct ByStatus([AtomicU64; 500]);

impl Default for ByStatus {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl ByStatus {
    /// Counts one; a status outside 100..=599 counts as unknown (0 in `read`).
    pub fn add(&self, status: u16) {
        let at = usize::from(status).checked_sub(100).filter(|at| *at < 500).unwrap_or(0);
        self.0[at].fetch_add(1, Ordering::Relaxed);
    }

    /// Statuses seen with their counts. 100 stands for unknown: an interim status never ends a request.
    pub fn read(&self) -> impl Iterator<Item = (u16, u64)> + '_ {
        self.0
            .iter()
            .enumerate()
            .map(|(at, n)| (at as u16 + 100, n.load(Ordering::Relaxed)))
            .filter(|(_, n)| *n > 0)
    }
}

/// Counts by reason.
#[derive(Debug)]
pub struct ByReason([AtomicU64; Reason::ALL.len()]);

impl Default for ByReason {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl ByReason {
    /// Counts one.
    pub fn add(&self, reason: Reason) {
        self.0[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Reasons seen with their counts.
    pub fn read(&self) -> impl Iterator<Item = (Reason, u64)> + '_ {
        Reason::ALL
            .iter()
            .map(|&reason| (reason, self.0[reason as usize].load(Ordering::Relaxed)))
            .filter(|(_, n)| *n > 0)
    }
}

/// What is counted for one pool.
#[derive(Debug)]
pub struct PoolMetrics {
    /// Requests answered by an engine, or by Envoy in its place.
    pub served: ByStatus,
    /// Requests answered by the picker.
    pub refused: ByReason,
    /// Prompt tokens of settled requests.
    pub prompt_tokens: AtomicU64,
    /// Output tokens of settled requests.
    pub output_tokens: AtomicU64,
    /// Prompt tokens that engines reported as cached.
    pub cached_tokens: AtomicU64,
    /// Times a filter was ignored because it would have left nobody.
    pub filters_ignored: AtomicU64,
    /// Picks of a profile that keeps sessions, by what became of the session.
    pub sessions: [AtomicU64; Outcome::ALL.len()],
    /// Requests whose prompt is computed elsewhere than their output.
    pub disaggregation: DisaggregationMetrics,
    /// Time that requests waited for their turn, those that did.
    pub queued: Histogram,
    /// Time to first token as the picker saw it.
    pub time_to_first_token: Histogram,
}

impl Default for PoolMetrics {
    fn default() -> Self {
        Self {
            served: ByStatus::default(),
            refused: ByReason::default(),
            prompt_tokens: AtomicU64::default(),
            output_tokens: AtomicU64::default(),
            cached_tokens: AtomicU64::default(),
            filters_ignored: AtomicU64::default(),
            sessions: Default::default(),
            disaggregation: DisaggregationMetrics::default(),
            queued: Histogram::new(TTFT_BUCKETS),
            time_to_first_token: Histogram::new(TTFT_BUCKETS),
        }
    }
}

/// Why something works less well than configured. A source is 1 until it recovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Degraded {
    /// The resources on disk are invalid; the last good ones serve.
    Resources,
    /// The scheduler configuration is invalid; the last good one serves.
    Config,
    /// Envoy ends our streams at the response headers: bookings end by access log or prediction.
    StreamEnd,
    /// No source of token usage: settled by estimates.
    Usage,
    /// A source of cache knowledge was wrong too often at some endpoint: picks there go by the next.
    CacheTruth,
    /// A tokenizer that is configured cannot be used.
    Tokenizer,
    /// An engine publishes KV events, and what it holds is not known by them.
    KvEvents,
    /// The shared block index does not answer: nothing is known by it.
    Redis,
    /// A store of token limits does not answer: what counts meanwhile is what `--limit-outage` says. Or Envoy is to enforce
    /// limits and asks about none.
    Limiter,
    /// The certificate or the CA on disk is invalid; the last good one serves.
    Certificate,
    /// The API server does not answer, or no longer lets us read something: the last state serves.
    Kubernetes,
}

impl Degraded {
    /// Every source.
    pub const ALL: [Degraded; 11] = [
        Degraded::Resources,
        Degraded::Config,
        Degraded::StreamEnd,
        Degraded::Usage,
        Degraded::CacheTruth,
        Degraded::Tokenizer,
        Degraded::KvEvents,
        Degraded::Redis,
        Degraded::Limiter,
        Degraded::Certificate,
        Degraded::Kubernetes,
    ];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Degraded::Resources => "resources",
            Degraded::Config => "config",
            Degraded::StreamEnd => "stream_end",
            Degraded::Usage => "usage",
            Degraded::CacheTruth => "cache_truth",
            Degraded::Tokenizer => "tokenizer",
            Degraded::KvEvents => "kv_events",
            Degraded::Redis => "redis",
            Degraded::Limiter => "limiter",
            Degraded::Certificate => "certificate",
            Degraded::Kubernetes => "kubernetes",
        }
    }
}

/// Stages of a decision that are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Headers in to last body byte in.
    Receive,
    /// Decoding and parsing.
    Parse,
    /// Route matching.
    Route,
    /// Hashing the prompt.
    Prompt,
    /// Filter, score, pick, reserve.
    Schedule,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 5] = [Stage::Receive, Stage::Parse, Stage::Route, Stage::Prompt, Stage::Schedule];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Receive => "receive",
            Stage::Parse => "parse",
            Stage::Route => "route",
            Stage::Prompt => "prompt",
            Stage::Schedule => "schedule",
        }
    }
}

/// What is counted for the process.
#[derive(Debug)]
pub struct Metrics {
    /// Requests that named an InferenceObjective which does not exist.
    pub unknown_objectives: AtomicU64,
    /// Requests that named more than one.
    pub several_objectives: AtomicU64,
    /// Last body byte in to reply out.
    pub decision: Histogram,
    /// Each stage.
    pub stages: [Histogram; Stage::ALL.len()],
    /// Refusals before a pool was known.
    pub refused: ByReason,
    /// Settled requests by where their token counts came from.
    pub usage: [AtomicU64; UsageSource::ALL.len()],
    /// Requests the picker answered itself with success (`GET /v1/models`).
    pub answered: AtomicU64,
    /// Request bytes held now.
    pub buffered_bytes: AtomicI64,
    /// Open ext_proc streams.
    pub streams: AtomicI64,
    /// Access-log entries joined to a decision, and entries of others.
    pub access_log_joined: AtomicU64,
    /// See `access_log_joined`.
    pub access_log_foreign: AtomicU64,
    /// Calls refused because the caller is not trusted.
    pub untrusted_calls: AtomicU64,
    /// Descriptors of Envoy's that name a limit that is not there.
    pub unknown_limits: AtomicU64,
    /// Whether Envoy asks about limits at all.
    pub limit_filter: LimitFilter,
    /// TLS handshakes of the gRPC port that failed.
    pub failed_handshakes: AtomicU64,
    degraded: [AtomicU64; Degraded::ALL.len()],
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            unknown_objectives: AtomicU64::default(),
            several_objectives: AtomicU64::default(),
            decision: Histogram::new(FINE_BUCKETS),
            stages: std::array::from_fn(|_| Histogram::new(FINE_BUCKETS)),
            refused: ByReason::default(),
            usage: Default::default(),
            answered: AtomicU64::default(),
            buffered_bytes: AtomicI64::default(),
            streams: AtomicI64::default(),
            access_log_joined: AtomicU64::default(),
            access_log_foreign: AtomicU64::default(),
            untrusted_calls: AtomicU64::default(),
            unknown_limits: AtomicU64::default(),
            limit_filter: LimitFilter::default(),
            failed_handshakes: AtomicU64::default(),
            degraded: Default::default(),
        }
    }
}

impl Metrics {
    /// Times one stage.
    pub fn stage(&self, stage: Stage, took: Duration) {
        self.stages[stage as usize].observe(took.as_secs_f64());
    }

    /// Sets whether a source is degraded; true if that is news. Beside it limits have [`Metrics::limit_filter`].
    pub fn set_degraded(&self, source: Degraded, degraded: bool) -> bool {
        self.degraded[source as usize].swap(u64::from(degraded), Ordering::Relaxed) != u64::from(degraded)
    }

    /// Whether a source is degraded.
    pub fn is_degraded(&self, source: Degraded) -> bool {
        self.degraded[source as usize].load(Ordering::Relaxed) == 1
            || (source == Degraded::Limiter && self.limit_filter.is_silent())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_out_of_range_are_kept_as_unknown() {
        let counts = ByStatus::default();
        for status in [200, 200, 599, 0, 65_535] {
            counts.add(status);
        }
        assert_eq!(counts.read().collect::<Vec<_>>(), [(100, 2), (200, 2), (599, 1)]);
    }

    #[test]
    fn a_change_of_degradation_is_news_once() {
        let metrics = Metrics::default();
        assert!(metrics.set_degraded(Degraded::Config, true));
        assert!(!metrics.set_degraded(Degraded::Config, true));
        assert!(metrics.is_degraded(Degraded::Config));
        assert!(metrics.set_degraded(Degraded::Config, false));
    }
}
