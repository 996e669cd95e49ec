//! One batch, event by event, into the index.

use std::time::{SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::super::sequence::{Applied, Note, Sink};
use super::super::status::Skip;
use super::super::wire::{BadEvent, Event, Removed, Stored};
use super::{Core, Hindrance, Memory};
use crate::index::{Block, Tier};
use crate::prompt::blocks::{LATER_SEED, Namespace, digest, token_content};
use crate::state::signals::Millis;

/// Blocks with fewer tokens are not indexed: they would cost more than they tell.
const LEAST_BLOCK: usize = 16;
/// Blocks that may be stored before the index is asked again whether it is full.
const UNCHECKED: usize = 4_096;

/// Space used again.
#[derive(Debug, Default)]
pub struct Scratch {
    bytes: Vec<u8>,
    blocks: Vec<Block>,
}

/// Where the batches of one rank go.
pub struct Applier<'a> {
    pub(super) core: &'a mut Core,
    pub(super) memory: &'a mut Memory,
    pub(super) rank: usize,
}

impl Core {
    /// `rank` holds nothing.
    pub(super) fn forget(&mut self, rank: usize) {
        let orphans = self.holdings.clear(&self.index.events, rank);
        self.endpoint.cache.note_emptied(Millis::now());
        self.counts.skip(Skip::Orphan, orphans as u64);
    }

    fn hinder(&mut self, hindrance: Hindrance, ranks: usize) {
        self.hindrance = Some(hindrance);
        (0..ranks).for_each(|rank| self.forget(rank));
    }
}

impl Sink for Applier<'_> {
    fn apply(&mut self, payload: &[u8]) -> Applied {
        let mut decoder = std::mem::take(&mut self.core.decoder);
        let block_tokens = self.core.endpoint.block_tokens();
        let (mut applied, mut usable, mut bad) = (Applied::default(), false, false);
        let head = decoder.decode(payload, |event| match event {
            Ok(event) => {
                usable = true;
                match event {
                    Event::Stored(stored) => self.stored(&stored, block_tokens),
                    Event::Removed(removed) => self.removed(&removed),
                    Event::Cleared => {
                        self.cleared();
                        applied = Applied { emptied: true, doubtful: false };
                    }
                }
            }
            Err(why) => {
                bad = true;
                applied.doubtful |= why == BadEvent::Other;
                let why = if why == BadEvent::UnknownKind { Skip::UnknownKind } else { Skip::BadEvent };
                self.core.counts.skip(why, 1);
            }
        });
        let Self { core, memory, .. } = self;
        core.decoder = decoder;
        core.holdings.flush(&core.index.events);
        core.counts.frames += 1;
        match head {
            Ok(head) => {
                core.shape = head.shape.or(core.shape);
                memory.first_time = memory.first_time.or(head.time);
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map(|now| now.as_secs_f64());
                core.lag_seconds = head.time.zip(now.ok()).map(|(then, now)| now - then);
            }
            Err(_) => {
                applied.doubtful = true;
                bad = true;
                core.counts.skip(Skip::UnreadableFrame, 1);
            }
        }
        match (usable, bad) {
            (true, _) => core.unread = 0,
            (false, true) => core.unread = core.unread.saturating_add(1),
            (false, false) => {}
        }
        if applied.doubtful {
            memory.turnover = 0;
        }
        applied
    }

    fn clear(&mut self) {
        self.core.forget(self.rank);
        *self.memory = Memory { restarted_at: self.memory.restarted_at, ..Memory::default() };
    }

    fn note(&mut self, note: Note) {
        self.core.counts.notes[note as usize] += 1;
        match note {
            Note::Restarted => self.memory.restarted_at = Some(Instant::now()),
            Note::NoReplay => self.memory.turnover = 0,
            _ => {}
        }
    }
}

impl Applier<'_> {
    fn stored(&mut self, stored: &Stored<'_>, block_tokens: Option<usize>) {
        let Self { core, memory, rank } = self;
        let n = stored.hashes.len();
        let (size, tokens) = (stored.block_size, stored.tokens.len());
        if !attends_to_all(stored.attention) || *memory.group.get_or_insert(stored.group) != stored.group {
            return core.counts.skip(Skip::OtherGroup, 1);
        }
        let Some(tier) = tier_of(stored.medium) else { return core.counts.skip(Skip::UnknownMedium, 1) };
        if tokens == 0 {
            return core.counts.skip(Skip::NoTokens, 1);
        }
        if size.checked_mul(n) != Some(tokens) {
            return core.counts.skip(Skip::BadEvent, 1);
        }
        if size < LEAST_BLOCK || block_tokens.is_some_and(|known| known != size) {
            if core.hindrance.is_none() {
                core.hinder(Hindrance::BlockSize, core.holdings.ranks());
            }
            return core.counts.skip(Skip::BlockSize, 1);
        }
        match core.hindrance {
            None => {}
            // The size agrees again.
            Some(Hindrance::BlockSize) => core.hindrance = None,
            Some(Hindrance::Full) => return core.counts.skip(Skip::IndexFull, 1),
        }
        core.unchecked += n;
        if core.unchecked > UNCHECKED {
            core.unchecked = 0;
            if core.index.events.is_full() {
                core.hinder(Hindrance::Full, core.holdings.ranks());
                return core.counts.skip(Skip::IndexFull, 1);
            }
        }
        core.scratch.read(stored);
        let blocks = &core.scratch.blocks;
        let outcome = core.holdings.store(&core.index.events, *rank, tier, stored.parent, blocks);
        core.counts.stored += n as u64;
        core.counts.skip(Skip::Orphan, outcome.dropped as u64);
        if tier == Tier::Gpu {
            let unknown = outcome.pending + outcome.dropped > 0;
            memory.turnover = if unknown { 0 } else { memory.turnover + n as u64 };
        }
    }

    fn removed(&mut self, removed: &Removed<'_>) {
        let Self { core, memory, rank } = self;
        if memory.group.is_some_and(|group| group != removed.group) {
            return core.counts.skip(Skip::OtherGroup, 1);
        }
        let Some(tier) = tier_of(removed.medium) else { return core.counts.skip(Skip::UnknownMedium, 1) };
        core.counts.removed += removed.hashes.len() as u64;
        if core.hindrance.is_some() {
            return;
        }
        for name in removed.hashes {
            if !core.holdings.remove(&core.index.events, *rank, tier, *name) && tier == Tier::Gpu {
                memory.turnover = 0;
            }
        }
    }

    fn cleared(&mut self) {
        self.core.counts.cleared += 1;
        self.core.forget(self.rank);
        self.memory.turnover = 0;
    }
}

impl Scratch {
    /// The blocks of an event, by content.
    fn read(&mut self, stored: &Stored<'_>) {
        let Self { bytes, blocks } = self;
        blocks.clear();
        let mut extra_keys = stored.extra;
        // An adapter that has a number only is none that a request can name: its blocks are nobody else's.
        let unnamed = stored.adapter.is_none().then_some(stored.adapter_id).flatten();
        let unnamed = unnamed.map_or(0, |id| digest(&id.to_le_bytes()));
        for (at, (name, tokens)) in
            stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_size)).enumerate()
        {
            let is_first = at == 0 && stored.parent.is_none();
            let extra = extra_keys.next(stored.adapter, is_first);
            let (seed, further) = if is_first {
                let space = Namespace { adapter: stored.adapter, salt: extra.salt.or(stored.salt) };
                (space.seed(), extra.further ^ unnamed)
            } else {
                (LATER_SEED, extra.further)
            };
            blocks.push(Block { name: *name, content: token_content(tokens, seed, further, bytes) });
        }
    }
}

/// Whether layers of that kind need every block of a prefix. Versions that do not say have no others.
pub(in crate::feed) fn attends_to_all(attention: Option<&str>) -> bool {
    matches!(attention, None | Some("full_attention" | "mla_attention" | "sink_full_attention"))
}

/// Where a medium is. Versions that do not say have device memory only.
pub(in crate::feed) fn tier_of(medium: Option<&str>) -> Option<Tier> {
    let Some(medium) = medium else { return Some(Tier::Gpu) };
    let is = |names: &[&str]| names.iter().any(|name| medium.eq_ignore_ascii_case(name));
    if is(&["GPU"]) {
        Some(Tier::Gpu)
    } else if is(&["CPU", "CPU_PINNED"]) {
        Some(Tier::Cpu)
    } else if is(&["DISK", "STORAGE", "EXTERNAL"]) {
        Some(Tier::Disk)
    } else {
        None
    }
}
