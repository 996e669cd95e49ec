//! How far what is believed of an endpoint's cache can be believed: which source knows it best, and how often each was right.
//!
//! Sources form a ladder: the engine's own events, an index shared with others, what we sent there, nothing. A source is
//! left for the next one when it is not there or when it lies, and taken again when it is right for a while: every response
//! that reports its cached tokens is held against what each source had predicted.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::signals::Millis;

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
    /// Parts of 1,024 taken off what the approximate index remembers.
    forgotten: AtomicU32,
    /// Blocks the approximate index remembers.
    blocks: AtomicU32,
    /// When it was last given a prompt that nobody held, counted in such prompts.
    last_cold: AtomicU64,
    /// Whether it was found in the shared index.
    shared: AtomicBool,
    /// When its events last said that it holds nothing.
    emptied: AtomicU64,
}

/// Prompts that nobody held.
static COLD: AtomicU64 = AtomicU64::new(0);

/// Responses between two corrections of what is remembered.
const CORRECT_EVERY: u64 = 16;
/// Bias from which less is remembered, and below which more is.
const TOO_MUCH: f64 = 0.05;
const TOO_LITTLE: f64 = 0.01;
/// At least a sixteenth is remembered, in parts of 1,024.
const WHOLE: u32 = 1_024;
const LEAST: u32 = WHOLE / 16;

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

    /// Notes that its events say that it holds nothing, or that nothing is known of it any more.
    pub fn note_emptied(&self, now: Millis) {
        self.emptied.store(now.0, Ordering::Relaxed);
    }

    /// When that was last.
    pub fn emptied(&self) -> Millis {
        Millis(self.emptied.load(Ordering::Relaxed))
    }

    /// Whether every event of the engine has been applied.
    pub fn follows_events(&self) -> bool {
        self.events() == Events::Following
    }

    /// Whether picks may go by `rung`: it is there and has not been caught lying.
    pub fn trusts(&self, rung: Rung) -> bool {
        let there = match rung {
            Rung::Precise => self.follows_events(),
            // Who was never found there may have nobody who writes for it.
            Rung::Shared => self.shared.load(Ordering::Relaxed),
            _ => true,
        };
        there && self.truth(rung).is_none_or(|truth| !truth.is_doubted())
    }

    /// How often a rung was right; none for rungs that predict nothing.
    pub fn truth(&self, rung: Rung) -> Option<&Truth> {
        PREDICTING.iter().position(|&predicting| predicting == rung).map(|at| &self.truth[at])
    }

    /// Follows what reports say of the approximate rung: promised too much, it remembers a tenth less from now on;
    /// promised no more than there was, it remembers a tenth more, up to the engine's whole cache.
    pub fn follow_bias(&self) {
        let Some(truth) = self.truth(Rung::Approximate) else { return };
        if truth.samples() == 0 || !truth.samples().is_multiple_of(CORRECT_EVERY) {
            return;
        }
        let kept = WHOLE - self.forgotten.load(Ordering::Relaxed);
        let kept = match truth.bias() {
            bias if bias > TOO_MUCH => (kept - kept / 10).max(LEAST),
            bias if bias < TOO_LITTLE => (kept + kept / 10 + 1).min(WHOLE),
            _ => return,
        };
        self.forgotten.store(WHOLE - kept, Ordering::Relaxed);
    }

    /// Blocks that were sent there and are remembered.
    pub fn blocks(&self) -> u32 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Notes how many blocks are remembered.
    pub fn set_blocks(&self, blocks: usize) {
        self.blocks.store(u32::try_from(blocks).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// It is given a prompt that nobody holds.
    pub fn note_cold(&self) {
        self.last_cold.store(COLD.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// When it was last given such a prompt, in numbers that grow; 0 if never.
    pub fn last_cold(&self) -> u64 {
        self.last_cold.load(Ordering::Relaxed)
    }

    /// How many of `capacity` blocks the approximate index should remember.
    pub fn remembered(&self, capacity: usize) -> usize {
        let kept = (WHOLE - self.forgotten.load(Ordering::Relaxed)) as usize;
        (capacity * kept / WHOLE as usize).max(1)
    }

    /// The rungs that picks may go by, of those that predict, the best first.
    pub fn trusted(&self) -> impl Iterator<Item = Rung> + '_ {
        PREDICTING.into_iter().rev().filter(|&rung| self.trusts(rung))
    }

    /// It was found in the shared index.
    pub fn note_shared(&self) {
        self.shared.store(true, Ordering::Relaxed);
    }

    /// The engine started anew: what was measured before says nothing.
    pub fn forget(&self) {
        self.shared.store(false, Ordering::Relaxed);
        self.truth.iter().for_each(Truth::forget);
        self.forgotten.store(0, Ordering::Relaxed);
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
    /// Holds a prediction against a report, both as shares of the prompt; what lies within `tolerance` is right.
    /// Concurrent calls may lose a sample, which a mean can bear.
    pub fn observe(&self, predicted: f64, reported: f64, tolerance: f64) -> Option<Turn> {
        let off = predicted - reported;
        let off = off.signum() * (off.abs() - tolerance).max(0.0);
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
        let turns: Vec<usize> =
            (0..100).filter(|_| truth.observe(1.0, 0.0, 0.0) == Some(Turn::Doubted)).collect();
        assert_eq!((turns, truth.is_doubted(), truth.bias()), (vec![31], true, 1.0));
        let right = (1..1_000).find(|_| truth.observe(0.5, 0.5, 0.0) == Some(Turn::Trusted)).unwrap();
        // (63/64)^n < 0.1
        assert_eq!((right, truth.is_doubted()), (147, false));
        assert_eq!(truth.observe(0.5, 0.5, 0.0), None);
    }

    #[test]
    fn an_error_between_the_bounds_changes_nothing() {
        let truth = Truth::default();
        assert!((0..500).all(|_| truth.observe(0.35, 0.0, 0.2).is_none()));
        assert!(!truth.is_doubted());
        assert!((truth.error().unwrap() - 0.15).abs() < 1e-9);
    }

    #[test]
    fn an_index_that_promises_too_much_remembers_less_and_recovers() {
        let knowledge = CacheKnowledge::default();
        let respond = |reported: f64| {
            knowledge.truth(Rung::Approximate).unwrap().observe(1.0, reported, 0.0);
            knowledge.follow_bias();
        };
        assert_eq!(knowledge.remembered(1_000), 1_000);
        (0..48).for_each(|_| respond(0.5));
        assert_eq!(knowledge.remembered(1_000), 729, "three corrections of a tenth");
        (0..10_000).for_each(|_| respond(0.0));
        assert_eq!(knowledge.remembered(1_600), 100);
        (0..10_000).for_each(|_| respond(1.0));
        assert_eq!(knowledge.remembered(1_000), 1_000);
    }

    #[test]
    fn the_shared_index_counts_for_those_who_were_found_in_it() {
        let knowledge = CacheKnowledge::default();
        assert!(!knowledge.trusts(Rung::Shared));
        knowledge.note_shared();
        assert!(knowledge.trusts(Rung::Shared));
        knowledge.forget();
        assert!(!knowledge.trusts(Rung::Shared));
    }

    #[test]
    fn precise_needs_a_stream_that_is_followed() {
        let knowledge = CacheKnowledge::default();
        assert!(!knowledge.trusts(Rung::Precise) && knowledge.trusts(Rung::Approximate));
        assert_eq!(knowledge.set_events(Events::Following), Events::None);
        assert!(knowledge.trusts(Rung::Precise));
        for _ in 0..LEAST_SAMPLES {
            knowledge.truth(Rung::Precise).unwrap().observe(1.0, 0.0, 0.0);
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
