//! What is counted and shown of one engine's events.

use std::time::Duration;

use super::sequence::Note;
use super::wire::Shape;
use crate::state::cache::Events;

/// Why an event, or a whole frame, had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// A frame that is no batch of events.
    UnreadableFrame,
    /// An event of a kind that this version does not know.
    UnknownKind,
    /// An event whose members are not what they should be.
    BadEvent,
    /// Blocks of layers that do not attend to the whole prompt, or of a second group that does.
    OtherGroup,
    /// Blocks in a kind of memory that this version does not know.
    UnknownMedium,
    /// Blocks announced without their tokens.
    NoTokens,
    /// Blocks of a size that cannot be used.
    BlockSize,
    /// The index is full.
    IndexFull,
    /// Blocks whose parent never came.
    Orphan,
    /// A frame whose topic names another endpoint, on a socket that engines dial.
    Foreign,
}

impl Skip {
    /// Every reason, in the order of their counters.
    pub const ALL: [Skip; 10] = [
        Skip::UnreadableFrame,
        Skip::UnknownKind,
        Skip::BadEvent,
        Skip::OtherGroup,
        Skip::UnknownMedium,
        Skip::NoTokens,
        Skip::BlockSize,
        Skip::IndexFull,
        Skip::Orphan,
        Skip::Foreign,
    ];

    /// The label value.
    pub fn name(self) -> &'static str {
        match self {
            Skip::UnreadableFrame => "unreadable-frame",
            Skip::UnknownKind => "unknown-kind",
            Skip::BadEvent => "bad-event",
            Skip::OtherGroup => "other-group",
            Skip::UnknownMedium => "unknown-medium",
            Skip::NoTokens => "no-tokens",
            Skip::BlockSize => "block-size",
            Skip::IndexFull => "index-full",
            Skip::Orphan => "orphan",
            Skip::Foreign => "foreign",
        }
    }
}

/// How gaps ended, by the label value.
pub const GAP_OUTCOMES: [(&str, Note); 4] = [
    ("replayed", Note::Repaired),
    ("history-lost", Note::Lost),
    ("replay-failed", Note::ReplayFailed),
    ("no-replay", Note::NoReplay),
];

/// Counters of one engine's events. They only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames taken.
    pub frames: u64,
    /// Blocks announced as stored.
    pub stored: u64,
    /// Blocks announced as removed.
    pub removed: u64,
    /// Times the engine emptied its cache.
    pub cleared: u64,
    /// What had no effect, by [`Skip`].
    pub skipped: [u64; Skip::ALL.len()],
    /// What happened to the order of frames, by [`Note`].
    pub notes: [u64; Note::ALL.len()],
    /// Topics that named another address than the endpoint's.
    pub topic_mismatches: u64,
}

impl Counts {
    /// Counts something that had no effect.
    pub fn skip(&mut self, why: Skip, n: u64) {
        self.skipped[why as usize] += n;
    }

    /// How often that happened.
    pub fn noted(&self, note: Note) -> u64 {
        self.notes[note as usize]
    }
}

/// What is known of one engine's events.
#[derive(Clone, Debug)]
pub struct Status {
    /// State of the stream.
    pub state: Events,
    /// For how long.
    pub since: Duration,
    /// Sockets followed, `rank: address`, the replay socket after a slash.
    pub sources: Vec<String>,
    /// Counters.
    pub counts: Counts,
    /// Blocks that wait for their parent.
    pub pending: usize,
    /// Blocks held, in all tiers.
    pub blocks: usize,
    /// How the engine writes events; none before the first.
    pub shape: Option<Shape>,
    /// Age of the last batch when it came, by the clocks of the engine and of this host.
    pub lag_seconds: Option<f64>,
}
