//! One engine's events as a whole: every rank's batches, what they say put into the index, and whether that may be trusted.
//!
//! # When the index may be trusted
//!
//! [`Events::Following`] means that what the index holds of this engine is what the engine holds, as of its last batch. A
//! part of it is not enough: a pick would take a prompt for new that the engine has in full. So it is entered only
//! - from the engine's first batch on, or when its replay socket shows that it has published nothing yet;
//! - when its history, replayed, reaches back to batch 0;
//! - after an `AllBlocksCleared`, which makes whatever was unknown void;
//! - when a whole cache's worth of blocks (`num_gpu_blocks` of its metrics) has been stored since the last sign of a block
//!   that is not known, and none waits for its parent. Engines take blocks for new contents from the least recently used
//!   end, so that by then every block that nobody used was taken and announced; one that was used shows itself, by blocks
//!   stored below it or by its removal, and each such sign starts the count anew. An engine that ran long before we came,
//!   or whose events we missed, is known again so. What can stay unknown is a block used all the while below which nothing
//!   was ever stored: that promises too little, never too much.
//!
//! It is left at once when a batch is missing (until the replay has closed the gap), when the socket closes (until the
//! replay socket, or the number of the next batch, shows that none was missed), and when a part of a batch could not be read
//! that may have removed blocks. Blocks that may have been removed are never served again: they are forgotten, or kept and
//! not trusted where there is no replay socket, and forgotten once a cache's worth of blocks has come.

mod apply;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tracing::{info, warn};

pub(in crate::feed) use apply::{attends_to_all, tier_of};

use super::holdings::Holdings;
use super::sequence::{Ask, Known, Sequence};
use super::status::{Counts, Skip, Status};
use super::wire::{Decoder, Shape};
use crate::index::{Tier, TokenIndexes};
use crate::state::Endpoint;
use crate::state::cache::Events;
use crate::state::health::State;
use crate::state::signals::{Millis, SignalKind};

/// Frames in a row without anything readable in them after which the stream counts as unreadable.
const UNREADABLE_AFTER: u32 = 8;
/// A restart that the scraper reports within this time of one that the stream showed is the same.
const SAME_RESTART: Duration = Duration::from_secs(5);

/// One engine's events.
#[derive(Debug)]
pub struct Follower {
    core: Core,
    ranks: Vec<Rank>,
    asleep: bool,
    /// Whether a socket was dialled; until then there is no state to speak of.
    dialled: bool,
    state: Events,
    since: Instant,
}

/// What all ranks share.
#[derive(Debug)]
struct Core {
    endpoint: Arc<Endpoint>,
    index: Arc<TokenIndexes>,
    decoder: Decoder,
    holdings: Holdings,
    scratch: apply::Scratch,
    counts: Counts,
    hindrance: Option<Hindrance>,
    /// Blocks stored since the index was last asked whether it is full.
    unchecked: usize,
    /// Frames in a row without anything readable.
    unread: u32,
    shape: Option<Shape>,
    lag_seconds: Option<f64>,
}

/// Why events are not put into the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hindrance {
    BlockSize,
    Full,
}

/// What belongs to one data-parallel rank.
#[derive(Debug)]
struct Rank {
    sequence: Sequence,
    memory: Memory,
    topic: Bytes,
}

#[derive(Debug, Default)]
struct Memory {
    /// The group whose blocks count: the first seen that attends to the whole prompt.
    group: Option<u64>,
    /// Blocks stored since the last sign of one that is not known.
    turnover: u64,
    /// When the engine made the first batch that counts.
    first_time: Option<f64>,
    restarted_at: Option<Instant>,
}

impl Follower {
    /// Follows nothing yet, and drops what the index may hold from before.
    pub fn new(endpoint: Arc<Endpoint>, index: Arc<TokenIndexes>, ranks: usize, can_replay: bool) -> Self {
        let holder = endpoint.holder();
        index.events.clear(holder);
        let rank =
            || Rank { sequence: Sequence::new(can_replay), memory: Memory::default(), topic: Bytes::new() };
        Self {
            core: Core {
                endpoint,
                index,
                decoder: Decoder::default(),
                holdings: Holdings::new(holder, ranks),
                scratch: apply::Scratch::default(),
                counts: Counts::default(),
                hindrance: None,
                unchecked: usize::MAX / 2,
                unread: 0,
                shape: None,
                lag_seconds: None,
            },
            ranks: (0..ranks.max(1)).map(|_| rank()).collect(),
            asleep: false,
            dialled: false,
            state: Events::None,
            since: Instant::now(),
        }
    }

    /// Counts on from where another follower of the same endpoint stopped.
    pub fn counting_from(mut self, counts: Counts) -> Self {
        self.core.counts = counts;
        self
    }

    /// The replay that `rank` wants.
    pub fn ask(&self, rank: usize) -> Option<Ask> {
        self.ranks[rank].sequence.ask()
    }

    /// Whether the live socket of `rank` may be read.
    pub fn takes_more(&self, rank: usize) -> bool {
        self.ranks[rank].sequence.takes_more()
    }

    /// The live socket of `rank` is connected.
    pub fn connected(&mut self, rank: usize) {
        self.dialled = true;
        self.drive(rank, |sequence, sink| sequence.connected(sink));
    }

    /// The live socket of `rank` is not, or no longer.
    pub fn disconnected(&mut self, rank: usize) {
        self.dialled = true;
        self.drive(rank, |sequence, _| sequence.disconnected());
    }

    /// A frame came on the live socket of `rank`.
    pub fn live(&mut self, rank: usize, topic: &Bytes, seq: u64, payload: Bytes) {
        if self.ranks[rank].topic != topic {
            // A slice would keep alive everything that was read with it.
            self.ranks[rank].topic = Bytes::copy_from_slice(topic);
            let of_another = names_another(topic, &self.core.endpoint);
            self.core.counts.topic_mismatches += u64::from(of_another);
        }
        self.drive(rank, |sequence, sink| sequence.live(sink, seq, payload));
    }

    /// A frame came that has no effect.
    pub fn skipped(&mut self, why: Skip) {
        self.core.counts.skip(why, 1);
    }

    /// A frame came by the replay of that id.
    pub fn replayed(&mut self, rank: usize, id: u64, seq: u64, payload: &[u8]) {
        self.drive(rank, |sequence, sink| sequence.replayed(sink, id, seq, payload));
    }

    /// The replay of that id is over.
    pub fn replay_ended(&mut self, rank: usize, id: u64, whole: bool) {
        self.drive(rank, |sequence, sink| sequence.replay_ended(sink, id, whole));
    }

    /// The scraper saw that the engine's process is another. What came from the new process already stays.
    pub fn restarted(&mut self) {
        let started =
            self.core.endpoint.signals.last(SignalKind::ProcessStart, Millis::now()).map(|(start, _)| start);
        for rank in 0..self.ranks.len() {
            let memory = &self.ranks[rank].memory;
            let seen = match (memory.first_time, started) {
                (Some(first), Some(started)) => first >= started,
                _ => memory.restarted_at.is_some_and(|at| at.elapsed() < SAME_RESTART),
            };
            if !seen {
                self.drive(rank, |sequence, sink| sequence.restarted(sink));
            }
        }
    }

    /// Looks at what changes without frames: whether the engine sleeps, whether the index has room again.
    pub fn look(&mut self) {
        let asleep = self.core.endpoint.health.state() == State::Asleep;
        if asleep && !self.asleep {
            // Falling asleep empties the cache. The engine says so only with its first step after waking.
            (0..self.ranks.len()).for_each(|rank| self.core.forget(rank));
        }
        self.asleep = asleep;
        self.settle();
    }

    /// Tries again what failed: history whose replay did not come, and an index that was full.
    pub fn retry(&mut self) {
        let has_room = self.core.hindrance == Some(Hindrance::Full) && !self.core.index.events.is_full();
        for rank in 0..self.ranks.len() {
            self.drive(rank, |sequence, sink| sequence.retry(sink));
        }
        if has_room {
            self.resume();
            self.settle();
        }
    }

    /// The state of the stream.
    pub fn state(&self) -> Events {
        self.state
    }

    /// Counters.
    pub fn counts(&self) -> &Counts {
        &self.core.counts
    }

    /// What is known of the stream.
    pub fn status(&self) -> Status {
        Status {
            state: self.state,
            since: self.since.elapsed(),
            sources: Vec::new(),
            counts: self.core.counts,
            pending: self.core.holdings.pending(),
            blocks: self.core.index.events.blocks_of(self.core.endpoint.holder()),
            shape: self.core.shape,
            lag_seconds: self.core.lag_seconds,
        }
    }

    /// Nobody follows this engine any more: what is known ages from now on.
    pub fn stop(&mut self) {
        self.ranks.iter_mut().for_each(|rank| rank.sequence.disconnected());
        self.dialled = false;
        self.settle();
    }

    fn drive(&mut self, rank: usize, event: impl FnOnce(&mut Sequence, &mut apply::Applier<'_>)) {
        let Rank { sequence, memory, .. } = &mut self.ranks[rank];
        let before = self.core.hindrance;
        event(sequence, &mut apply::Applier { core: &mut self.core, memory, rank });
        if before.is_some() && self.core.hindrance.is_none() {
            // A history that holds blocks of both sizes is not asked for again while it is read.
            if self.ranks[rank].sequence.ask().is_none() {
                self.resume();
            } else {
                self.ranks.iter_mut().for_each(|rank| rank.sequence.knows_part());
            }
        }
        self.learn(rank);
        self.settle();
    }

    /// Events may be put into the index again: starts from the beginning.
    fn resume(&mut self) {
        self.core.hindrance = None;
        for (rank, Rank { sequence, memory, .. }) in self.ranks.iter_mut().enumerate() {
            sequence.rejoin(&mut apply::Applier { core: &mut self.core, memory, rank });
        }
    }

    /// Whether a cache's worth of blocks has shown what there is.
    fn learn(&mut self, rank: usize) {
        let Rank { sequence, memory, .. } = &mut self.ranks[rank];
        if sequence.known() == Known::All || self.core.hindrance.is_some() {
            return;
        }
        let blocks = self.core.endpoint.signals.last(SignalKind::Blocks, Millis::now());
        let Some(blocks) = blocks.map(|(blocks, _)| blocks).filter(|blocks| *blocks >= 1.0) else { return };
        // The signal is the sum over all ranks.
        if (memory.turnover as f64) < blocks / self.ranks.len() as f64 {
            return;
        }
        let Rank { sequence, memory, .. } = &mut self.ranks[rank];
        if sequence.known() == Known::Doubtful {
            sequence.give_up(&mut apply::Applier { core: &mut self.core, memory, rank });
        } else if self.core.holdings.pending_in(rank, Tier::Gpu) == 0 {
            sequence.learnt_all();
        }
    }

    fn judge(&self) -> Events {
        let sequences = || self.ranks.iter().map(|rank| &rank.sequence);
        if !self.dialled {
            Events::None
        } else if self.asleep {
            Events::Asleep
        } else if !sequences().all(Sequence::is_connected) {
            Events::Unreachable
        } else if self.core.unread >= UNREADABLE_AFTER {
            Events::Unreadable
        } else if let Some(hindrance) = self.core.hindrance {
            match hindrance {
                Hindrance::BlockSize => Events::BlockSize,
                Hindrance::Full => Events::Full,
            }
        } else if sequences().any(Sequence::has_lost) {
            Events::Gap
        } else if sequences().all(Sequence::is_following) {
            Events::Following
        } else {
            Events::Joining
        }
    }

    fn settle(&mut self) {
        let state = self.judge();
        if state == self.state {
            return;
        }
        let before = std::mem::replace(&mut self.state, state);
        self.since = Instant::now();
        self.core.endpoint.cache.set_events(state);
        log_change(&self.core.endpoint, before, state);
    }
}

/// Whether a topic `kv@ADDRESS@MODEL` names an address, and one that is not the endpoint's.
pub fn names_another(topic: &[u8], endpoint: &Endpoint) -> bool {
    let Some(named) = std::str::from_utf8(topic).ok().and_then(|topic| topic.split('@').nth(1)) else {
        return false;
    };
    if let Ok(address) = named.parse::<std::net::SocketAddr>() {
        address != endpoint.address
    } else {
        named.parse::<std::net::IpAddr>().is_ok_and(|ip| ip != endpoint.address.ip())
    }
}

fn log_change(endpoint: &Endpoint, before: Events, now: Events) {
    let (name, address, before) = (&endpoint.name, &*endpoint.destination, before.name());
    macro_rules! log {
        ($level:ident, $text:literal) => {
            $level!(endpoint = %name, address, before, now = now.name(), $text)
        };
    }
    match now {
        Events::Following => log!(info, "KV events: followed; picks go by what the engine says it holds"),
        Events::Asleep => log!(info, "KV events: the engine sleeps and holds nothing"),
        Events::None => log!(info, "KV events: no longer followed"),
        Events::Joining => log!(
            info,
            "KV events: what the engine held before is not known yet; until then picks go by what was sent there"
        ),
        Events::Unreachable => log!(
            warn,
            "KV events: the socket cannot be reached; picks go by what was sent there; check that the engine \
             publishes on that port and that the network lets us in"
        ),
        Events::Gap => log!(
            warn,
            "KV events: some were lost and could not be replayed; picks go by what was sent there until the cache \
             has turned over; give the engine a replay endpoint and larger buffer_steps"
        ),
        Events::BlockSize => log!(
            warn,
            "KV events: their blocks have another size than the engine's metrics say, or fewer than 16 tokens; \
             they are ignored; check the engine's --block-size"
        ),
        Events::Unreadable => log!(
            warn,
            "KV events: frames come and none can be read; picks go by what was sent there; check that the port is \
             the one of the KV events and that this version knows the engine's"
        ),
        Events::Full => log!(
            warn,
            "KV events: the index is full; this endpoint's events are ignored and picks go by what was sent there"
        ),
    }
}

#[cfg(test)]
mod tests;
