//! One factor, learned from samples that fade.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::state::signals::Millis;

/// Samples of an endpoint that what is usual outweighs until there are as many.
const PRIOR_SAMPLES: f64 = 8.0;
/// Samples that count at most: older ones fade for newer ones.
const MOST_SAMPLES: f64 = 32.0;
/// Time after which samples count half. An endpoint that looks slow is chosen no more and could not show otherwise: it is
/// taken for a usual one again after some of these.
const HALF_LIFE: Duration = Duration::from_mins(2);
/// A single sample counts as at most so many times what was expected: one that waited for a cold start says nothing of the
/// rate.
const OUTLIER: f64 = 8.0;

/// A factor learned from samples: seconds measured over seconds at unit speed. A ratio of sums, for the mean of ratios is
/// that of the shortest samples, which waited for something else most of their time.
#[derive(Debug, Default)]
pub struct Learned {
    sums: Mutex<Sums>,
    /// What readers see of the sums: the factor and the samples as `f32`, and when the last came.
    factor: AtomicU32,
    samples: AtomicU32,
    last: AtomicU64,
}

#[derive(Debug, Default)]
struct Sums {
    measured: f64,
    at_unit: f64,
    samples: f64,
}

impl Learned {
    /// Takes a sample: what took `measured` seconds takes `at_unit` at unit speed, `known` times as long as far as known.
    pub fn learn(&self, measured: f64, at_unit: f64, known: f64, now: Millis) {
        if !(measured.is_finite() && measured > 0.0 && at_unit.is_finite() && at_unit > 0.0) {
            return;
        }
        let mut sums = self.sums.lock();
        let mut kept = self.kept(now);
        kept *= ((MOST_SAMPLES - 1.0) / (sums.samples * kept)).min(1.0);
        let expected = known * at_unit;
        let measured = measured.clamp(expected / OUTLIER, expected * OUTLIER);
        sums.measured = sums.measured * kept + measured;
        sums.at_unit = sums.at_unit * kept + at_unit;
        sums.samples = sums.samples * kept + 1.0;
        self.factor.store(((sums.measured / sums.at_unit) as f32).to_bits(), Ordering::Relaxed);
        self.samples.store((sums.samples as f32).to_bits(), Ordering::Relaxed);
        self.last.store(now.0, Ordering::Relaxed);
    }

    /// The factor, `prior` before the first sample.
    pub fn or(&self, prior: f64) -> f64 {
        match f32::from_bits(self.factor.load(Ordering::Relaxed)) {
            0.0 => prior,
            factor => f64::from(factor),
        }
    }

    /// The factor, pulled towards `usual` while samples are few or old.
    pub fn among(&self, usual: f64, now: Millis) -> f64 {
        let samples = self.samples(now);
        (self.or(usual) * samples + usual * PRIOR_SAMPLES) / (samples + PRIOR_SAMPLES)
    }

    /// Samples that count still.
    pub fn samples(&self, now: Millis) -> f64 {
        f64::from(f32::from_bits(self.samples.load(Ordering::Relaxed))) * self.kept(now)
    }

    /// The share of the samples that time has left.
    fn kept(&self, now: Millis) -> f64 {
        let idle = now.since(Millis(self.last.load(Ordering::Relaxed)));
        // An endpoint in use costs no power function at each pick.
        if idle < HALF_LIFE / 100 { 1.0 } else { (-idle.as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = Millis(1_000);

    fn close(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 0.05
    }

    #[test]
    fn one_sample_that_waited_does_not_condemn_an_endpoint() {
        let learned = Learned::default();
        learned.learn(1.0, 1.0, learned.or(1.0), NOW);
        learned.learn(10_000.0, 1.0, learned.or(1.0), NOW);
        for (measured, at_unit) in [(f64::NAN, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, f64::INFINITY)] {
            learned.learn(measured, at_unit, learned.or(1.0), NOW);
        }
        assert!(learned.or(1.0) <= 4.5);
        assert_eq!(learned.samples(NOW), 2.0);
    }

    #[test]
    fn long_prompts_say_more_than_short_ones_that_waited() {
        let learned = Learned::default();
        for _ in 0..20 {
            learned.learn(2.0, 1.0, learned.or(1.0), NOW);
            learned.learn(0.02 + 0.1, 0.01, learned.or(1.0), NOW);
        }
        assert!((2.0..2.2).contains(&learned.or(1.0)), "{}", learned.or(1.0));
    }

    #[test]
    fn newer_samples_outweigh_older_ones() {
        let learned = Learned::default();
        (0..1_000).for_each(|_| learned.learn(4.0, 1.0, learned.or(1.0), NOW));
        assert!(close(learned.samples(NOW), MOST_SAMPLES));
        (0..150).for_each(|_| learned.learn(1.0, 1.0, learned.or(1.0), NOW));
        assert!(close(learned.or(9.0), 1.0), "{}", learned.or(9.0));
    }

    #[test]
    fn an_endpoint_that_nobody_chooses_is_taken_for_a_usual_one_in_time() {
        let learned = Learned::default();
        (0..100).for_each(|_| learned.learn(4.0, 1.0, learned.or(1.0), NOW));
        let after = |half_lives| learned.among(1.0, NOW.plus(HALF_LIFE * half_lives));
        assert!(after(0) > 3.0 && after(1) < after(0) && after(10) < 1.05, "{}", after(10));
        learned.learn(4.0, 1.0, learned.or(1.0), NOW.plus(HALF_LIFE * 10));
        assert!(learned.samples(NOW.plus(HALF_LIFE * 10)) < 1.1, "what has faded does not come back");
    }
}
