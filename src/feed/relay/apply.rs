//! One engine's batches, rank by rank, into the mirror.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use super::mirror::{Field, Mirror, Name};
use crate::feed::kv_events::follower::{attends_to_all, tier_of};
use crate::feed::kv_events::sequence::{Applied, Known, Note, Sequence, Sink};
use crate::feed::kv_events::wire::{BadEvent, Decoder, Event, Removed, Stored};
use crate::index::shared::standard_hash;

/// What came from the engine. Numbers only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks announced as stored.
    pub stored: u64,
    /// Blocks announced as removed.
    pub removed: u64,
    /// Times that everything was forgotten: the engine emptied its cache or started anew, or events were lost.
    pub cleared: u64,
    /// Blocks whose names in the index would say too little: of a salt, of media, of an adapter without a name.
    pub unnamed: u64,
    /// Events without effect: unreadable, of another group, of an unknown medium, without tokens, or too many.
    pub skipped: u64,
    /// Times that events were missing.
    pub gaps: u64,
}

/// What is known of an engine.
#[derive(Debug)]
pub struct State {
    /// What it holds.
    pub mirror: Mirror,
    /// What came.
    pub counts: Counts,
    ranks: Vec<Rank>,
    decoder: Decoder,
    connected_until: u64,
}

#[derive(Debug)]
struct Rank {
    sequence: Sequence,
    /// The group whose blocks count: the first seen that attends to the whole prompt.
    group: Option<u64>,
}

impl State {
    /// Nothing, of an engine that serves `model`.
    pub fn new(model: &str) -> Self {
        Self {
            mirror: Mirror::new(model),
            counts: Counts::default(),
            ranks: Vec::new(),
            decoder: Decoder::default(),
            connected_until: 0,
        }
    }

    /// Follows so many ranks from now on; `can_replay` says of each whether it has a replay socket.
    pub fn begin(&mut self, can_replay: &[bool]) {
        (0..self.ranks.len()).for_each(|rank| self.mirror.clear(rank));
        let rank = |&can_replay| Rank { sequence: Sequence::new(can_replay), group: None };
        self.ranks = can_replay.iter().map(rank).collect();
    }

    /// The order of a rank's batches.
    pub fn sequence(&self, rank: usize) -> &Sequence {
        &self.ranks[rank].sequence
    }

    /// Whether every rank is connected, and what it held before is known or cannot be.
    pub fn has_joined(&self) -> bool {
        let joined = |rank: &Rank| rank.sequence.is_connected() && rank.sequence.ask().is_none();
        !self.ranks.is_empty() && self.ranks.iter().all(joined)
    }

    /// The Unix time to which claims are true: a restart that nobody has seen yet must not make old claims look new.
    pub fn stamp(&self) -> u64 {
        if self.is_connected() { unix_time() } else { self.connected_until }
    }

    /// Whether every rank is connected.
    pub fn is_connected(&self) -> bool {
        !self.ranks.is_empty() && self.ranks.iter().all(|rank| rank.sequence.is_connected())
    }

    /// Something happened on the sockets of a rank.
    pub fn drive(&mut self, rank: usize, event: impl FnOnce(&mut Sequence, &mut Applier<'_>)) {
        if self.is_connected() {
            self.connected_until = unix_time();
        }
        let Self { mirror, counts, ranks, decoder, .. } = self;
        let Rank { sequence, group } = &mut ranks[rank];
        let mut applier = Applier { mirror, counts, decoder, group, rank };
        event(sequence, &mut applier);
        // Claims that may be wrong send prompts to the wrong engine; those that are missing cost a prefill at most.
        if sequence.known() == Known::Doubtful {
            sequence.give_up(&mut applier);
        }
    }

    /// A batch came on the live socket of a rank.
    pub fn live(&mut self, rank: usize, seq: u64, payload: Bytes) {
        self.drive(rank, |sequence, sink| sequence.live(sink, seq, payload));
    }
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs())
}

/// Where the batches of one rank go.
pub struct Applier<'a> {
    mirror: &'a mut Mirror,
    counts: &'a mut Counts,
    decoder: &'a mut Decoder,
    group: &'a mut Option<u64>,
    rank: usize,
}

impl Sink for Applier<'_> {
    fn apply(&mut self, payload: &[u8]) -> Applied {
        let mut decoder = std::mem::take(self.decoder);
        let mut applied = Applied::default();
        let read = decoder.decode(payload, |event| match event {
            Ok(Event::Stored(stored)) => self.stored(&stored),
            Ok(Event::Removed(removed)) => self.removed(&removed),
            Ok(Event::Cleared) => {
                self.clear();
                applied = Applied { emptied: true, doubtful: false };
            }
            Err(why) => {
                applied.doubtful |= why == BadEvent::Other;
                self.counts.skipped += 1;
            }
        });
        *self.decoder = decoder;
        if read.is_err() {
            applied.doubtful = true;
            self.counts.skipped += 1;
        }
        applied
    }

    fn clear(&mut self) {
        self.counts.cleared += 1;
        self.mirror.clear(self.rank);
        *self.group = None;
    }

    fn note(&mut self, note: Note) {
        let rank = self.rank;
        match note {
            Note::Gap => self.counts.gaps += 1,
            Note::Restarted => {
                tracing::info!(rank, "the engine started anew: its blocks are taken out of the index");
            }
            Note::Lost | Note::ReplayFailed | Note::NoReplay => tracing::warn!(
                rank,
                "events were lost: the engine's blocks are taken out of the index until it announces them anew; give it a \
                 replay endpoint and larger buffer_steps"
            ),
            Note::Duplicate | Note::Repaired | Note::Replay => {}
        }
    }
}

impl Applier<'_> {
    fn name(&self, tier: crate::index::Tier, hash: u64) -> Name {
        Name { rank: self.rank, tier, hash }
    }

    fn stored(&mut self, stored: &Stored<'_>) {
        let size = stored.block_size;
        let counts = attends_to_all(stored.attention)
            && *self.group.get_or_insert(stored.group) == stored.group
            && size > 0
            && size.checked_mul(stored.hashes.len()) == Some(stored.tokens.len());
        let Some(tier) = tier_of(stored.medium).filter(|_| counts) else {
            self.counts.skipped += 1;
            return;
        };
        self.counts.stored += stored.hashes.len() as u64;
        // An engine may announce again, and not remove once more, what a request used again.
        let again = |mirror: &Mirror| stored.hashes.iter().all(|hash| mirror.holds(self.name(tier, *hash)));
        if stored.parent.is_none() && again(self.mirror) {
            return;
        }
        let mut unnamed = stored.salt.is_some()
            || stored.adapter.is_none() && stored.adapter_id.is_some()
            || stored.parent.is_some_and(|parent| self.mirror.holds_unnamed(self.name(tier, parent)));
        let model = self.mirror.model_number(stored.adapter);
        let mut extra_keys = stored.extra;
        for (at, (hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate() {
            let extra = extra_keys.next(stored.adapter, at == 0 && stored.parent.is_none());
            // What follows a block that no other prompt can use cannot be used by them either.
            unnamed |= extra.salt.is_some() || extra.further != 0;
            let field = model.filter(|_| !unnamed).map(|model| Field { model, hash: standard_hash(tokens) });
            self.counts.unnamed += u64::from(field.is_none());
            if !self.mirror.store(self.name(tier, *hash), field) {
                self.counts.skipped += 1;
            }
        }
    }

    fn removed(&mut self, removed: &Removed<'_>) {
        let tier = tier_of(removed.medium).filter(|_| self.group.is_none_or(|group| group == removed.group));
        let Some(tier) = tier else {
            self.counts.skipped += 1;
            return;
        };
        self.counts.removed += removed.hashes.len() as u64;
        for hash in removed.hashes {
            self.mirror.remove(self.name(tier, *hash));
        }
    }
}
