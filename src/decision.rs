//! The one record of a decision: written while the request is served, read by debug, log, metrics and explain alike.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::admission::Identity;
use crate::disagg::Report;
use crate::index::Held;
use crate::prompt::Prepared;
use crate::prompt::blocks::Ending;
use crate::refusal::Reason;
use crate::schedule::{LegRecord, Split};
use crate::session;
use crate::state::cache::Rung;
use crate::state::reservation::Role;
use crate::usage::{Usage, UsageSource};

/// Bytes of a client's string that a record keeps.
const CLIENT_STRING: usize = 128;
/// Records the ring keeps.
pub const RING: usize = 1_024;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Outcome {
    /// Still running.
    #[default]
    Open,
    /// The whole response passed.
    Complete,
    /// Answered by the picker.
    Refused(Reason),
    /// The response broke off after it had begun.
    Broken,
    /// The stream ended before any response.
    Aborted,
    /// The engine, or Envoy in its place, answered an error.
    Failed,
    /// The stream ended and nothing said how.
    Ended,
}

impl Outcome {
    /// The name in JSON; a refusal is named by its reason.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Open => "open",
            Outcome::Complete => "complete",
            Outcome::Refused(reason) => reason.name(),
            Outcome::Broken => "broken",
            Outcome::Aborted => "aborted",
            Outcome::Failed => "failed",
            Outcome::Ended => "ended",
        }
    }
}

/// How long each stage of a request took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stages {
    /// Headers in to last body byte in.
    pub receive: Duration,
    /// Decoding and parsing the body.
    pub parse: Duration,
    /// Matching the route.
    pub route: Duration,
    /// Hashing the prompt.
    pub prompt: Duration,
    /// Waiting for its turn.
    pub queue: Duration,
    /// Filtering, scoring, picking, reserving.
    pub schedule: Duration,
    /// The prefill leg, as far as the request waited for it.
    pub prefill: Duration,
    /// Last body byte in to reply out, without waiting.
    pub decision: Duration,
    /// Reply out to first body byte back; zero if unknown.
    pub first_token: Option<Duration>,
    /// Headers in to end of stream.
    pub total: Duration,
}

/// Share of the prompt that each rung believed cached at the choice; none where it knew nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Predictions {
    /// By what was sent there.
    pub approximate: Option<f32>,
    /// By an index that others write.
    pub shared: Option<f32>,
    /// By the engine's events.
    pub precise: Option<f32>,
    /// By how much a prediction may be off and still be right: one block of the engine's, where tokens were estimated.
    pub tolerance: f32,
}

impl Predictions {
    fn of(prompt: &Prepared, held: &Held) -> Self {
        let share = |rung| {
            let tokens = held.tokens_by(rung, prompt)?;
            Some((tokens as f32 / prompt.tokens.max(1) as f32).min(1.0))
        };
        Self {
            approximate: share(Rung::Approximate),
            // A prompt of which only the beginning was looked up can be held further: nothing to measure by.
            shared: share(Rung::Shared).filter(|_| !is_cut_off(prompt, held)),
            precise: share(Rung::Precise),
            tolerance: match prompt.engine_block {
                Some(block) if !prompt.counted => block as f32 / prompt.tokens.max(1) as f32,
                _ => 0.0,
            },
        }
    }

    /// Predictions with their rungs.
    pub fn each(self) -> impl Iterator<Item = (Rung, f32)> {
        [(Rung::Approximate, self.approximate), (Rung::Shared, self.shared), (Rung::Precise, self.precise)]
            .into_iter()
            .filter_map(|(rung, share)| Some((rung, share?)))
    }
}

fn is_cut_off(prompt: &Prepared, held: &Held) -> bool {
    prompt.shared.as_ref().zip(held.shared).is_some_and(|(owners, depth)| owners.is_cut_off(depth))
}

/// One decision.
#[derive(Clone, Debug)]
pub struct Record {
    /// Unique to the stream.
    pub id: Box<str>,
    /// `x-request-id`, for people only: it can be forged and repeated.
    pub request_id: Box<str>,
    /// Who sends it.
    pub identity: Identity,
    /// How important it is.
    pub priority: i32,
    /// When the request headers came in.
    pub time: SystemTime,
    /// The client's model name.
    pub model: Box<str>,
    /// The name the engine sees.
    pub target_model: Option<Arc<str>>,
    /// `namespace/name`.
    pub pool: Option<Arc<str>>,
    /// The ModelRoute, `namespace/name`.
    pub route: Option<Arc<str>>,
    /// Which rung of the cache ladder informed the pick.
    pub rung: Rung,
    /// The end of its token ids, where they are known.
    pub ending: Option<Ending>,
    /// What each rung predicted for the choice, to be held against what its engine reports.
    pub predictions: Predictions,
    /// Prompt tokens, counted or estimated.
    pub prompt_tokens: u64,
    /// What became of its session; `None` where no plugin of the profile asks.
    pub session: Option<session::Outcome>,
    /// Whether two endpoints serve it; `None` in pools without roles.
    pub split: Option<Split>,
    /// What became of its prefill leg, if it had one.
    pub prefill: Option<Report>,
    /// Cycles: that of the destination, then that of who computes the prompt.
    pub legs: SmallVec<[LegRecord; 1]>,
    /// Prompt tokens believed cached at the choice.
    pub predicted_cached_tokens: u64,
    /// Prompt tokens the engine reported as cached.
    pub reported_cached_tokens: Option<u64>,
    /// Token counts and where they came from.
    pub usage: Option<(Usage, UsageSource)>,
    /// The endpoint that served, if known.
    pub served: Option<Arc<str>>,
    /// Attempts of Envoy, 0 if unknown.
    pub attempts: u32,
    /// Response status, 0 if unknown.
    pub status: u16,
    /// How it ended.
    pub outcome: Outcome,
    /// Durations.
    pub stages: Stages,
}

impl Record {
    /// A record of a request that has just begun.
    pub fn begin(id: Box<str>, request_id: &str) -> Self {
        Self {
            id,
            request_id: cut(request_id),
            identity: Identity::default(),
            priority: 0,
            time: SystemTime::now(),
            model: Box::default(),
            target_model: None,
            pool: None,
            route: None,
            rung: Rung::Load,
            ending: None,
            predictions: Predictions::default(),
            prompt_tokens: 0,
            session: None,
            split: None,
            prefill: None,
            legs: SmallVec::new(),
            predicted_cached_tokens: 0,
            reported_cached_tokens: None,
            usage: None,
            served: None,
            attempts: 0,
            status: 0,
            outcome: Outcome::Open,
            stages: Stages::default(),
        }
    }
}

impl Record {
    /// Whether another endpoint computed its prompt.
    pub fn was_split(&self) -> bool {
        self.legs.first().is_some_and(|leg| leg.role == Role::Decode)
    }

    /// Notes what the choice is believed to hold.
    pub fn predict(&mut self, prompt: &Prepared, held: Held) {
        self.prompt_tokens = prompt.tokens;
        self.predicted_cached_tokens = u64::from(held.tokens);
        self.rung = held.rung;
        self.predictions = Predictions::of(prompt, &held);
        self.ending = prompt.token_ids.as_ref().and_then(|ids| prompt.ids.ending(ids));
    }
}

/// A client's string, cut to 128 bytes at a character boundary.
pub fn cut(text: &str) -> Box<str> {
    text[..text.floor_char_boundary(CLIENT_STRING)].into()
}

/// The last records, oldest first.
#[derive(Debug, Default)]
pub struct Ring {
    records: Mutex<VecDeque<Arc<Record>>>,
}

impl Ring {
    /// Moves a finished record in.
    pub fn push(&self, record: Arc<Record>) {
        let mut records = self.records.lock();
        let evicted = if records.len() == RING { records.pop_front() } else { None };
        records.push_back(record);
        drop(records);
        drop(evicted);
    }

    /// Up to `limit` records that satisfy `wanted`, newest first.
    pub fn find(&self, limit: usize, wanted: impl Fn(&Record) -> bool) -> Vec<Arc<Record>> {
        self.records.lock().iter().rev().filter(|record| wanted(record)).take(limit).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_strings_are_cut_between_characters() {
        assert_eq!(&*cut("abc"), "abc");
        assert_eq!(cut(&"é".repeat(100)).len(), 128);
        assert_eq!(cut(&format!("x{}", "é".repeat(100))).len(), 127);
    }

    #[test]
    fn the_ring_keeps_the_newest() {
        let ring = Ring::default();
        for n in 0..RING + 3 {
            ring.push(Arc::new(Record::begin(n.to_string().into(), "")));
        }
        let found = ring.find(2, |_| true);
        assert_eq!((&*found[0].id, &*found[1].id), ("1026", "1025"));
        assert_eq!(ring.find(10, |r| &*r.id == "2").len(), 0);
        assert_eq!(ring.find(10, |r| &*r.id == "3").len(), 1);
    }
}
