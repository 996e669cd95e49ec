//! What queues go by.

use std::collections::BTreeMap;
use std::time::Duration;

use ahash::AHashMap;

use super::fairness::{Bound, USUAL_WEIGHT};
use super::saturation::Saturation;

/// What shares a pool's turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ShareBy {
    /// Flows, by the tokens that they cost.
    #[default]
    Tokens,
    /// Flows, by their requests.
    Requests,
    /// Nothing: requests of a band go in one line.
    Nothing,
}

/// The order of requests inside a flow.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Order {
    /// As they came.
    #[default]
    Arrival,
    /// By the time to the first token that they ask for, counted from when they came; those that ask for none by the longest
    /// wait.
    Deadline,
    /// Those that go on with a session first, as if they had come so much earlier: nobody else waits longer than that for
    /// them.
    Session {
        /// The header with the session's id.
        header: Box<str>,
        /// The head start.
        boost: Duration,
        /// Sessions remembered for each pool; the oldest go.
        sessions: usize,
    },
}

/// How much of a pool each band may use.
#[derive(Clone, Debug, PartialEq)]
pub enum Ceilings {
    /// The same share for all.
    Same(f32),
    /// From the highest band that is known, by its own bound or as the usual 0, down to the lowest, the share falls evenly:
    /// what is left over is kept for those that may still come.
    Falling {
        /// Of the highest.
        most: f32,
        /// Of the lowest.
        least: f32,
    },
}

impl Default for Ceilings {
    fn default() -> Self {
        Ceilings::Same(1.0)
    }
}

/// What queues go by.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueSettings {
    /// Whether requests wait for room; else they go on in any case, but those below priority 0.
    pub waits: bool,
    /// What shares turns.
    pub share_by: ShareBy,
    /// The order inside a flow.
    pub order: Order,
    /// Cost of a prompt token and of an output token.
    pub token_weights: (f64, f64),
    /// Shares of identities beside others, in thousandths of the usual.
    pub weights: AHashMap<Box<str>, u32>,
    /// Longest wait; `None` is as long as the client waits.
    pub timeout: Option<Duration>,
    /// Longest wait for the first endpoint of a pool that has none; zero refuses at once.
    pub hold: Duration,
    /// Requests that may wait for the first endpoint of a pool.
    pub hold_requests: usize,
    /// Most that may wait in a pool.
    pub all: Bound,
    /// Most that may wait in bands of their own bound.
    pub bands: BTreeMap<i32, Bound>,
    /// Most that may wait in any other band.
    pub band: Bound,
    /// Most that may wait in a band below 0 that has no bound of its own; `None`: such requests are shed and never wait.
    pub sheddable: Option<Bound>,
    /// When an endpoint is full.
    pub saturation: Saturation,
    /// Requests of a pool at once, whatever its endpoints hold.
    pub most_at_once: Option<u32>,
    /// Requests of a pool in a second.
    pub most_per_second: Option<f64>,
    /// How much of a pool each band may use.
    pub ceilings: Ceilings,
}

impl Default for QueueSettings {
    /// Times and sizes are those of llm-d, weights of tokens those of Kthena.
    fn default() -> Self {
        Self {
            waits: true,
            share_by: ShareBy::default(),
            order: Order::default(),
            token_weights: (1.0, 2.0),
            weights: AHashMap::new(),
            timeout: Some(Duration::from_mins(1)),
            hold: Duration::ZERO,
            hold_requests: 1_000,
            all: Bound::NONE,
            bands: BTreeMap::new(),
            band: Bound { requests: 5_000, bytes: 1_000_000_000 },
            sheddable: None,
            saturation: Saturation::default(),
            most_at_once: None,
            most_per_second: None,
            ceilings: Ceilings::default(),
        }
    }
}

impl QueueSettings {
    /// What is set and has no effect, since requests do not wait.
    pub fn without_effect(&self) -> Option<&'static str> {
        let is_set = self.most_at_once.is_some() || self.most_per_second.is_some() || !self.hold.is_zero();
        (!self.waits && is_set).then_some(
            "requests do not wait, so bounds of a pool's requests (at once, in a second) and --hold-timeout have no effect: \
             turn the queue on, or remove them",
        )
    }

    /// The share of an identity.
    pub fn weight(&self, identity: Option<&str>) -> u32 {
        identity.and_then(|name| self.weights.get(name)).copied().unwrap_or(USUAL_WEIGHT)
    }

    /// What so many tokens cost.
    pub fn cost(&self, input: u64, output: u64) -> u64 {
        match self.share_by {
            // What has cost nothing would never let another go first.
            ShareBy::Tokens => {
                let (of_input, of_output) = self.token_weights;
                (input as f64).mul_add(of_input, output as f64 * of_output).max(1.0) as u64
            }
            ShareBy::Requests | ShareBy::Nothing => 1,
        }
    }

    /// Most that may wait in a band; `None` if nothing may.
    pub fn bound(&self, priority: i32) -> Option<Bound> {
        match self.bands.get(&priority) {
            Some(bound) => Some(*bound),
            None if priority < 0 => self.sheddable,
            None => Some(self.band),
        }
    }
    /// The share of a pool that a band may use.
    pub fn ceiling(&self, priority: i32) -> f32 {
        match self.ceilings {
            Ceilings::Same(share) => share,
            Ceilings::Falling { most, least } => {
                let mut known: Vec<i32> = self.bands.keys().copied().chain([0, priority]).collect();
                known.sort_unstable();
                known.dedup();
                let above = known.iter().filter(|other| **other > priority).count();
                let steps = (known.len() - 1).max(1);
                most - (most - least) * above as f32 / steps as f32
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ceilings_fall_from_the_highest_band_to_the_lowest() {
        let bands = BTreeMap::from([(10, Bound::NONE), (-5, Bound::NONE)]);
        let ceilings = Ceilings::Falling { most: 1.0, least: 0.6 };
        let settings = QueueSettings { bands, ceilings, ..QueueSettings::default() };
        let of = |priority| (settings.ceiling(priority) * 100.0).round();
        assert_eq!([10, 0, -5].map(of), [100.0, 80.0, 60.0]);
        assert_eq!(of(i32::MIN), 60.0);
        let alone = QueueSettings { bands: BTreeMap::new(), ..settings };
        assert_eq!((alone.ceiling(0), (alone.ceiling(-1) * 100.0).round()), (1.0, 60.0));
    }

    #[test]
    fn nothing_is_free_and_nothing_overflows() {
        let settings = QueueSettings::default();
        assert_eq!((settings.cost(10, 5), settings.cost(0, 0)), (20, 1));
        assert_eq!(settings.cost(u64::MAX, u64::MAX), u64::MAX);
        let by_requests = QueueSettings { share_by: ShareBy::Requests, ..settings };
        assert_eq!(by_requests.cost(1_000, 1), 1);
    }
}
