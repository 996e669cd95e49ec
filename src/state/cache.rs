//! How far what is believed of an endpoint's cache can be believed: which source knows it best, and how often each was right.
//!
//! Sources form a ladder: the engine's own events, an index shared with others, what we sent there, nothing. A source is
//! left for the next one when it is not there or when it lies, and taken again when it is right for a while: every response
//! that reports its cached tokens is held against what each source had predicted.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// A source of knowledge about caches, the better the higher.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rung {
    /// Nothing is known of the prompt: picks go by load.
    #[default]
    Load,
    /// A hash of the prompt's beginning chooses.
    Hash,
    /// What was sent there before.
    Approximate,
    /// An index that other processes write.
    Shared,
    /// The engine's own events.
    Precise,
}

impl Rung {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Rung::Load => "load",
            Rung::Hash => "hash",
            Rung::Approximate => "approximate",
            Rung::Shared => "shared",
            Rung::Precise => "precise",
        }
    }
}

/// The state of an endpoint's event stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Events {
    /// No source of events is known.
    #[default]
    None,
    /// Its socket cannot be reached.
    Unreachable,
    /// Connected, and the history from before is not known yet.
    Joining,
    /// Every event since the engine's start, or since its cache was empty, has been applied.
    Following,
    /// Events were lost and could not be had again.
    Gap,
    /// Its blocks have another size than its metrics say.
    BlockSize,
    /// Frames come and none can be read.
    Unreadable,
    /// The index is full.
    Full,
    /// The engine sleeps: it holds nothing, and its events stand still.
    Asleep,
}

impl Events {
    const ALL: [Events; 9] = [
        Events::None,
        Events::Unreachable,
        Events::Joining,
        Events::Following,
        Events::Gap,
        Events::BlockSize,
        Events::Unreadable,
        Events::Full,
        Events::Asleep,
    ];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Events::None => "none",
            Events::Unreachable => "unreachable",
            Events::Joining => "joining",
            Events::Following => "following",
            Events::Gap => "gap",
            Events::BlockSize => "block-size",
            Events::Unreadable => "unreadable",
            Events::Full => "index-full",
            Events::Asleep => "asleep",
        }
    }
}

/// What is known about the knowledge of one endpoint's cache.
#[derive(Debug, Default)]
pub struct CacheKnowledge {
    events: AtomicU8,
    truth: [Truth; 3],
}

/// Rungs that predict.
const PREDICTING: [Rung; 3] = [Rung::Approximate, Rung::Shared, Rung::Precise];

impl CacheKnowledge {
    /// The state of its event stream.
    pub fn events(&self) -> Events {
        Events::ALL[usize::from(self.events.load(Ordering::Acquire))]
    }

    /// Sets the state of its event stream; what it was before.
    pub fn set_events(&self, events: Events) -> Events {
        Events::ALL[usize::from(self.events.swap(events as u8, Ordering::AcqRel))]
    }

    /// Whether every event of the engine has been applied.
    pub fn follows_events(&self) -> bool {
        self.events() == Events::Following
    }

    /// Whether picks may go by `rung`: it is there and has not been caught lying.
    pub fn trusts(&self, rung: Rung) -> bool {
        let there = rung != Rung::Precise || self.follows_events();
        there && self.truth(rung).is_none_or(|truth| !truth.is_doubted())
    }

    /// How often a rung was right; none for rungs that predict nothing.
    pub fn truth(&self, rung: Rung) -> Option<&Truth> {
        PREDICTING.iter().position(|&predicting| predicting == rung).map(|at| &self.truth[at])
    }

    /// The engine started anew: what was measured before says nothing.
    pub fn forget(&self) {
        self.truth.iter().for_each(Truth::forget);
    }
}

/// Responses in which an error shows in the mean: each counts one part in so many.
const SAMPLES: f64 = 64.0;
/// Responses before a rung can be doubted.
const LEAST_SAMPLES: u64 = 32;
/// Mean error from which a rung is doubted, and below which it is trusted again; in parts of the prompt.
const DOUBT_ABOVE: f64 = 0.2;
const TRUST_BELOW: f64 = 0.1;

/// How a source's predictions compare with what engines report, in parts of the prompt.
#[derive(Debug, Default)]
pub struct Truth {
    /// Mean of `|predicted - reported| / prompt`, as bits of `f64`.
    error: AtomicU64,
    /// Mean of `(predicted - reported) / prompt`.
    bias: AtomicU64,
    samples: AtomicU64,
    doubted: AtomicU8,
}

/// A rung fell from trust or came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Its mean error rose above 20 %.
    Doubted,
    /// Its mean error fell below 10 %.
    Trusted,
}

impl Truth {
    /// Holds a prediction against a report, both as shares of the prompt. Concurrent calls may lose a sample, which a
    /// mean can bear.
    pub fn observe(&self, predicted: f64, reported: f64) -> Option<Turn> {
        let off = predicted - reported;
        let samples = self.samples.fetch_add(1, Ordering::Relaxed) + 1;
        let weight = 1.0 / SAMPLES.min(samples as f64);
        let follow = |mean: &AtomicU64, sample: f64| {
            let before = f64::from_bits(mean.load(Ordering::Relaxed));
            let after = before + (sample - before) * weight;
            mean.store(after.to_bits(), Ordering::Relaxed);
            after
        };
        follow(&self.bias, off);
        let error = follow(&self.error, off.abs());
        if samples >= LEAST_SAMPLES && error > DOUBT_ABOVE && self.doubted.swap(1, Ordering::AcqRel) == 0 {
            return Some(Turn::Doubted);
        }
        if error < TRUST_BELOW && self.doubted.swap(0, Ordering::AcqRel) == 1 {
            return Some(Turn::Trusted);
        }
        None
    }

    /// Mean of `|predicted - reported| / prompt` over the last 64 responses or so; none before the first.
    pub fn error(&self) -> Option<f64> {
        (self.samples() > 0).then(|| f64::from_bits(self.error.load(Ordering::Relaxed)))
    }

    /// Mean of `(predicted - reported) / prompt`: above 0 it promises too much.
    pub fn bias(&self) -> f64 {
        f64::from_bits(self.bias.load(Ordering::Relaxed))
    }

    /// Responses measured.
    pub fn samples(&self) -> u64 {
        self.samples.load(Ordering::Relaxed)
    }

    /// Whether it has been caught lying and not been right for long enough since.
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(Ordering::Acquire) == 1
    }

    fn forget(&self) {
        self.samples.store(0, Ordering::Relaxed);
        self.error.store(0, Ordering::Relaxed);
        self.bias.store(0, Ordering::Relaxed);
        self.doubted.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lying_rung_is_doubted_and_trusted_again_only_when_it_is_right_for_a_while() {
        let truth = Truth::default();
        let turns: Vec<usize> = (0..100).filter(|_| truth.observe(1.0, 0.0) == Some(Turn::Doubted)).collect();
        assert_eq!((turns, truth.is_doubted(), truth.bias()), (vec![31], true, 1.0));
        let right = (1..1_000).find(|_| truth.observe(0.5, 0.5) == Some(Turn::Trusted)).unwrap();
        // (63/64)^n < 0.1
        assert_eq!((right, truth.is_doubted()), (147, false));
        assert_eq!(truth.observe(0.5, 0.5), None);
    }

    #[test]
    fn an_error_between_the_bounds_changes_nothing() {
        let truth = Truth::default();
        assert!((0..500).all(|_| truth.observe(0.15, 0.0).is_none()));
        assert!(!truth.is_doubted());
        assert!((truth.error().unwrap() - 0.15).abs() < 1e-9);
    }

    #[test]
    fn precise_needs_a_stream_that_is_followed() {
        let knowledge = CacheKnowledge::default();
        assert!(!knowledge.trusts(Rung::Precise) && knowledge.trusts(Rung::Approximate));
        assert_eq!(knowledge.set_events(Events::Following), Events::None);
        assert!(knowledge.trusts(Rung::Precise));
        for _ in 0..LEAST_SAMPLES {
            knowledge.truth(Rung::Precise).unwrap().observe(1.0, 0.0);
        }
        assert!(!knowledge.trusts(Rung::Precise));
        knowledge.forget();
        assert!(knowledge.trusts(Rung::Precise));
        for events in Events::ALL {
            knowledge.set_events(events);
            assert_eq!(knowledge.events(), events);
        }
    }
}
