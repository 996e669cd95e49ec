//! A bound on the request bytes that all streams hold together.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::metrics::Metrics;

/// The bound. What is held is `buffered_bytes` of the metrics, so that what is shown is what is counted.
#[derive(Debug)]
pub struct Budget {
    metrics: Arc<Metrics>,
    most: i64,
}

impl Budget {
    /// A bound of `most` bytes.
    pub fn new(metrics: Arc<Metrics>, most: usize) -> Self {
        Self { metrics, most: i64::try_from(most).unwrap_or(i64::MAX) }
    }

    fn held(&self) -> &AtomicI64 {
        &self.metrics.buffered_bytes
    }
}

/// Bytes held by one stream, given back when it is dropped.
#[derive(Debug)]
pub struct Held {
    budget: Arc<Budget>,
    bytes: i64,
}

impl Held {
    /// Nothing held yet.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, bytes: 0 }
    }

    /// Holds `bytes` more; false, and nothing more held, if that would pass the bound.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let bytes = bytes as i64;
        if self.budget.held().fetch_add(bytes, Ordering::Relaxed) + bytes > self.budget.most {
            self.budget.held().fetch_sub(bytes, Ordering::Relaxed);
            return false;
        }
        self.bytes += bytes;
        true
    }

    /// Gives all back.
    pub fn release(&mut self) {
        self.budget.held().fetch_sub(std::mem::take(&mut self.bytes), Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_streams_together_stay_under_the_bound() {
        let metrics = Arc::new(Metrics::default());
        let budget = Arc::new(Budget::new(Arc::clone(&metrics), 10));
        let (mut a, mut b) = (Held::new(Arc::clone(&budget)), Held::new(budget));
        assert!(a.grow(6) && !b.grow(5) && b.grow(4));
        drop(a);
        assert!(b.grow(6));
        b.release();
        drop(b);
        assert_eq!(metrics.buffered_bytes.load(Ordering::Relaxed), 0);
    }
}
