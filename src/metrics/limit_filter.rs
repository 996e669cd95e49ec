//! Whether Envoy's rate limit filter asks about token limits, where it is the one to enforce them.

use std::sync::atomic::{AtomicU64, Ordering};

/// So many requests with a limit without a call of the filter, and it is not there: it asks before each of them.
const SILENT: u64 = 20;

/// What Envoy was told of limits, and what it made of it.
#[derive(Debug, Default)]
pub struct LimitFilter {
    told: AtomicU64,
    calls: AtomicU64,
}

impl LimitFilter {
    /// Counts a request whose limit Envoy was told.
    pub fn told(&self) {
        let told = self.told.fetch_add(1, Ordering::Relaxed) + 1;
        if told == SILENT && self.is_silent() {
            tracing::warn!(
                "Envoy never asks about token limits, so nothing is limited: put envoy/limits.yaml into its \
                 configuration, or start the picker with --limit-enforcement picker"
            );
        }
    }

    /// Counts a call of the rate limit service.
    pub fn called(&self) {
        if self.is_silent() {
            tracing::info!("Envoy asks about token limits");
        }
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether nothing is limited that should be.
    pub fn is_silent(&self) -> bool {
        self.told.load(Ordering::Relaxed) >= SILENT && self.calls.load(Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_never_asks_is_missed_until_it_does() {
        let filter = LimitFilter::default();
        (1..SILENT).for_each(|_| filter.told());
        assert!(!filter.is_silent(), "its calls may be under way");
        filter.told();
        assert!(filter.is_silent());
        filter.called();
        (0..SILENT).for_each(|_| filter.told());
        assert!(!filter.is_silent());
    }
}
