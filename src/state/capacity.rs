//! How many requests an engine runs at once, learned from when it lets requests wait.

use std::sync::atomic::{AtomicU32, Ordering};

/// Requests at once that an engine is taken for until it has shown its own number: vLLM's usual `max_num_seqs`.
const USUAL_BATCH: u32 = 256;
/// Readings in a row with requests waiting after which those that run are all that it can run. A single one may have caught
/// an arrival between two steps of the engine.
const SURE: u32 = 3;
/// Readings in a row with requests waiting after which they wait for room.
const PRESSED: u32 = 2;

/// Share of what an engine is thought to run at which it is tried whether it can do more. Bands that may use a part of a pool
/// only fill it no further.
const NEARLY: f64 = 0.8;

/// What successive readings have shown of one engine.
#[derive(Debug, Default)]
pub struct Capacity {
    /// 0 if nothing was learned.
    batch: AtomicU32,
    /// Readings in a row with requests waiting.
    pressed: AtomicU32,
}

impl Capacity {
    /// Takes a reading: requests that run, that wait, and all that are known to be there, those of others too.
    pub fn observe(&self, running: f64, waiting: f64, there: f64) {
        if waiting >= 1.0 {
            let row = self.pressed.load(Ordering::Relaxed).saturating_add(1);
            self.pressed.store(row, Ordering::Relaxed);
            if row >= SURE {
                self.batch.store(running.clamp(1.0, f64::from(u32::MAX)) as u32, Ordering::Relaxed);
            }
            return;
        }
        self.pressed.store(0, Ordering::Relaxed);
        let batch = self.batch();
        if there >= NEARLY * f64::from(batch) {
            // It holds what it was thought to hold and lets nothing wait: it can do more.
            self.batch.store(batch.saturating_add(batch / 2).saturating_add(1), Ordering::Relaxed);
        }
    }

    /// Requests that it can run at once, as far as is known.
    pub fn batch(&self) -> u32 {
        match self.batch.load(Ordering::Relaxed) {
            0 => USUAL_BATCH,
            batch => batch,
        }
    }

    /// Whether requests have been waiting there for longer than one reading.
    pub fn is_pressed(&self) -> bool {
        self.pressed.load(Ordering::Relaxed) >= PRESSED
    }

    /// The process started anew.
    pub fn forget(&self) {
        self.batch.store(0, Ordering::Relaxed);
        self.pressed.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_runs_while_others_wait_for_long_is_all_it_can() {
        let capacity = Capacity::default();
        assert_eq!(capacity.batch(), 256);
        capacity.observe(3.0, 4.0, 7.0);
        assert!(!capacity.is_pressed(), "an arrival between two steps");
        capacity.observe(40.0, 4.0, 44.0);
        assert!(capacity.is_pressed());
        assert_eq!(capacity.batch(), 256);
        capacity.observe(48.0, 9.0, 57.0);
        assert_eq!(capacity.batch(), 48);
        capacity.observe(20.0, 30.0, 50.0);
        assert_eq!(capacity.batch(), 20, "long prompts leave room for fewer");
    }

    #[test]
    fn it_grows_while_the_engine_takes_all_that_it_is_given() {
        let capacity = Capacity::default();
        for _ in 0..3 {
            capacity.observe(4.0, 9.0, 13.0);
        }
        capacity.observe(4.0, 0.0, 3.0);
        assert_eq!((capacity.batch(), capacity.is_pressed()), (4, false), "no more than it had was tried");
        let grown: Vec<u32> = (0..4)
            .map(|_| {
                let there = f64::from(capacity.batch());
                capacity.observe(there, 0.0, there);
                capacity.batch()
            })
            .collect();
        assert_eq!(grown, [7, 11, 17, 26]);
        capacity.forget();
        assert_eq!(capacity.batch(), 256);
    }

    #[test]
    fn no_number_is_out_of_range() {
        let capacity = Capacity::default();
        for running in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
            for _ in 0..3 {
                capacity.observe(running, 1.0, running);
            }
            assert!(capacity.batch() >= 1 || running.is_nan());
            capacity.observe(1.0, 0.0, f64::INFINITY);
        }
    }
}
