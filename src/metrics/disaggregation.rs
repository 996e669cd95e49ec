//! What is counted of requests whose prompt is computed elsewhere than their output.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Histogram, TTFT_BUCKETS};
use crate::disagg::Fallback;
use crate::schedule::Split;

/// What is counted for one pool.
#[derive(Debug)]
pub struct DisaggregationMetrics {
    /// Picks by what was decided.
    pub decisions: [AtomicU64; Split::ALL.len()],
    /// Prefill legs that were of no use, by why.
    pub fallbacks: [AtomicU64; Fallback::ALL.len()],
    /// From the decision to the end of the prefill leg.
    pub prefill: Histogram,
    /// From there to the end of the response.
    pub decode: Histogram,
    /// Prompt tokens whose blocks were to be fetched by the decode endpoint.
    pub transferred_tokens: AtomicU64,
}

impl Default for DisaggregationMetrics {
    fn default() -> Self {
        Self {
            decisions: Default::default(),
            fallbacks: Default::default(),
            prefill: Histogram::new(TTFT_BUCKETS),
            decode: Histogram::new(TTFT_BUCKETS),
            transferred_tokens: AtomicU64::default(),
        }
    }
}

impl DisaggregationMetrics {
    /// Counts a decision.
    pub fn decided(&self, split: Split) {
        self.decisions[split as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a prefill leg that was of no use.
    pub fn fell_back(&self, why: Fallback) {
        self.fallbacks[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a prefill leg that was of use, and the tokens that are fetched after it.
    pub fn handed_over(&self, took: Duration, tokens: u64) {
        self.prefill.observe(took.as_secs_f64());
        self.transferred_tokens.fetch_add(tokens, Ordering::Relaxed);
    }
}
