//! The mean of what a histogram took in since the last page.

use ahash::AHashMap;

/// Series of one histogram that are followed; more are ignored. An engine has one per data-parallel rank and model.
const MAX_SERIES: usize = 4096;

/// Sum and count of a series.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Sum of all samples.
    pub sum: f64,
    /// Number of samples.
    pub count: f64,
}

/// Follows the series of one histogram.
#[derive(Debug, Default)]
pub struct Means {
    last: AHashMap<u64, Totals>,
    name: usize,
}

impl Means {
    /// The mean over the samples that all series of the page took since they were last seen; `None` without new samples.
    ///
    /// A series that was never seen counts whole, so the first page gives the mean over the engine's life. One whose
    /// numbers fell restarted, and counts whole again. `name` says which alias the series belong to: another alias is
    /// another histogram.
    pub fn advance(&mut self, name: usize, page: impl Iterator<Item = (u64, Totals)>) -> Option<f64> {
        if self.name != name {
            self.last.clear();
            self.name = name;
        }
        let mut new = Totals::default();
        for (series, totals) in page {
            let known = self.last.get(&series).copied();
            if known.is_none() && self.last.len() >= MAX_SERIES {
                continue;
            }
            self.last.insert(series, totals);
            let restarted = known.is_some_and(|last| totals.count < last.count || totals.sum < last.sum);
            let before = known.filter(|_| !restarted).unwrap_or_default();
            new.sum += totals.sum - before.sum;
            new.count += totals.count - before.count;
        }
        (new.count > 0.0).then(|| new.sum / new.count)
    }

    /// Forgets all series.
    pub fn reset(&mut self) {
        self.last.clear();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(series: &[(u64, f64, f64)]) -> impl Iterator<Item = (u64, Totals)> {
        series.iter().map(|&(key, sum, count)| (key, Totals { sum, count }))
    }

    #[test]
    fn means_are_over_all_series_and_new_samples_only() {
        let mut means = Means::default();
        assert_eq!(means.advance(0, page(&[(0, 5.0, 10.0), (1, 3.0, 30.0)])), Some(0.2));
        assert_eq!(means.advance(0, page(&[(0, 5.0, 10.0), (1, 3.0, 30.0)])), None);
        assert_eq!(means.advance(0, page(&[(0, 6.0, 12.0), (1, 3.0, 30.0)])), Some(0.5));
        assert_eq!(means.advance(0, page(&[(0, 6.0, 12.0), (1, 1.0, 2.0)])), Some(0.5), "series 1 restarted");
        assert_eq!(means.advance(0, page(&[(1, 2.0, 3.0)])), Some(1.0), "a series may be missing once");
        assert_eq!(means.advance(0, page(&[(0, 7.0, 13.0)])), Some(1.0));
    }

    #[test]
    fn another_name_is_another_histogram() {
        let mut means = Means::default();
        means.advance(1, page(&[(0, 5.0, 10.0)]));
        assert_eq!(means.advance(0, page(&[(0, 6.0, 20.0)])), Some(0.3));
    }

    #[test]
    fn series_are_bounded() {
        let mut means = Means::default();
        means.advance(0, (0..10_000).map(|key| (key, Totals { sum: 1.0, count: 1.0 })));
        assert_eq!(means.last.len(), MAX_SERIES);
    }

    proptest! {
        #[test]
        fn a_mean_is_never_negative_or_nan(
            pages in proptest::collection::vec(proptest::collection::vec((0..3u64, 0.0..1e9f64, 0.0..1e6f64), 0..5), 1..6),
        ) {
            let mut means = Means::default();
            for series in pages {
                let mean = means.advance(0, page(&series));
                prop_assert!(mean.is_none_or(|mean| mean >= 0.0 && mean.is_finite()), "{mean:?}");
            }
        }
    }
}
