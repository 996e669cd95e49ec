//! The order of one rank's batches: which come next, which came already, which are missing, and when the engine started anew.
//!
//! Pure: it is told what happened on the sockets and says what it wants of the replay socket ([`Sequence::ask`]). Every batch
//! is handed on once and in order, or what was known before it is given up.
//!
//! What is known is [`Known::All`] only where it can be proven: from batch 0 on, from an `AllBlocksCleared` on, or from a
//! history that the engine says is empty. A batch that is missing for good ends it.

mod note;

use std::collections::VecDeque;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

pub use note::Note;

/// Live batches held while a replay runs, and their bytes together; beyond, the socket is not read and the engine's queue
/// fills.
const MOST_HELD: usize = 4_096;
const MOST_HELD_BYTES: usize = 64 << 20;

/// What a batch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The engine emptied its cache: nothing from before counts.
    pub emptied: bool,
    /// A part of it could not be read that may have taken blocks away.
    pub doubtful: bool,
}

/// Who takes the batches.
pub trait Sink {
    /// Takes the next one.
    fn apply(&mut self, payload: &[u8]) -> Applied;
    /// Forgets everything.
    fn clear(&mut self);
    /// Counts something worth knowing.
    fn note(&mut self, note: Note);
}

/// How much of what the engine holds is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// All of it.
    All,
    /// A part, and nothing that is wrong.
    Part,
    /// What is known may have been removed in batches that are missing.
    Doubtful,
}

/// A replay that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Tells it from others.
    pub id: u64,
    /// The first batch wanted.
    pub from: u64,
}

/// Why a replay is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// To know what was before.
    Join,
    /// To see that the engine still is the one whose batch had this digest, and what came since.
    Resume(u64),
    /// Batches are missing.
    Gap,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    ask: Ask,
    why: Why,
    answered: bool,
}

/// A batch by number and digest. vLLM writes the time into every batch, so that no two are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    seq: u64,
    digest: u64,
}

/// The order of one rank's batches.
#[derive(Debug)]
pub struct Sequence {
    can_replay: bool,
    connected: bool,
    /// The number of the next batch, once one is known.
    next: Option<u64>,
    applied: Option<Mark>,
    /// The last on the live socket: there numbers only fall when the engine starts anew.
    live: Option<Mark>,
    held: VecDeque<(u64, Bytes)>,
    held_bytes: usize,
    asked: Option<Asked>,
    asks: u64,
    known: Known,
    /// The connection is new and has not shown yet that no batch was missed in between.
    unverified: bool,
    lost: bool,
    failed: bool,
}

impl Sequence {
    /// Knows nothing.
    pub fn new(can_replay: bool) -> Self {
        Self {
            can_replay,
            connected: false,
            next: None,
            applied: None,
            live: None,
            held: VecDeque::new(),
            held_bytes: 0,
            asked: None,
            asks: 0,
            known: Known::Part,
            unverified: false,
            lost: false,
            failed: false,
        }
    }

    /// The replay that is wanted now; one of another id has become useless.
    pub fn ask(&self) -> Option<Ask> {
        self.asked.map(|asked| asked.ask)
    }

    /// Whether the live socket may be read.
    pub fn takes_more(&self) -> bool {
        self.held.len() < MOST_HELD && self.held_bytes < MOST_HELD_BYTES
    }

    /// Whether the live socket is connected.
    pub fn is_connected(&self) -> bool {
        self.connected
    }

    /// Whether everything the engine holds is known.
    pub fn is_following(&self) -> bool {
        self.connected && self.asked.is_none() && !self.unverified && self.known == Known::All
    }

    /// Whether batches were lost, and what was there before is not known again.
    pub fn has_lost(&self) -> bool {
        self.lost && self.asked.is_none()
    }

    /// How much is known of what the engine holds, as far as batches came.
    pub fn known(&self) -> Known {
        self.known
    }

    /// Everything that the engine holds has shown itself; see `follower`.
    pub fn learnt_all(&mut self) {
        if self.next.is_some() {
            self.known = Known::All;
            self.lost = false;
        }
    }

    /// Batches came that were not used: no more than a part is known.
    pub fn knows_part(&mut self) {
        self.known = Known::Part;
    }

    /// What is known and may be wrong is given up; batches go on as they come.
    pub fn give_up(&mut self, sink: &mut impl Sink) {
        sink.clear();
        self.known = Known::Part;
    }

    /// The live socket is connected, for the first time or again.
    pub fn connected(&mut self, sink: &mut impl Sink) {
        self.connected = true;
        self.asked = None;
        if !self.can_replay {
            self.unverified = self.next.is_some();
            return;
        }
        self.resume(sink);
    }

    /// Asks for the last batch again, which shows whether the engine is the same, and for all after it.
    fn resume(&mut self, sink: &mut impl Sink) {
        match self.applied {
            Some(Mark { seq, digest }) => self.want(sink, Why::Resume(digest), seq),
            None => self.want(sink, Why::Join, 0),
        }
    }

    /// The live socket is gone.
    pub fn disconnected(&mut self) {
        self.connected = false;
        self.asked = None;
        self.drop_held();
    }

    /// The engine is said to have started anew.
    pub fn restarted(&mut self, sink: &mut impl Sink) {
        sink.note(Note::Restarted);
        self.drop_held();
        self.live = None;
        self.start_over(sink);
        if self.connected && self.can_replay {
            self.want(sink, Why::Join, 0);
        }
    }

    /// What is known is given up for reasons of our own; the history is wanted again.
    pub fn rejoin(&mut self, sink: &mut impl Sink) {
        self.drop_held();
        self.start_over(sink);
        if self.connected && self.can_replay {
            self.want(sink, Why::Join, 0);
        }
    }

    /// Asks once more if the replay socket did not answer when it was asked.
    pub fn retry(&mut self, sink: &mut impl Sink) {
        if !self.connected || self.asked.is_some() || !self.failed {
            return;
        }
        if self.known != Known::All {
            self.failed = false;
            self.want(sink, Why::Join, 0);
        } else if self.unverified {
            self.failed = false;
            self.resume(sink);
        }
    }

    /// A batch came on the live socket.
    pub fn live(&mut self, sink: &mut impl Sink, seq: u64, payload: Bytes) {
        let mark = Mark { seq, digest: xxh3_64(&payload) };
        if let Some(last) = self.live.replace(mark) {
            if last == mark {
                return sink.note(Note::Duplicate);
            }
            if seq <= last.seq {
                sink.note(Note::Restarted);
                self.drop_held();
                self.start_over(sink);
                if seq > 0 && self.can_replay {
                    self.want(sink, Why::Join, 0);
                }
            }
        }
        if self.asked.is_some() {
            self.held_bytes += payload.len();
            self.held.push_back((seq, payload));
        } else {
            self.accept(sink, seq, payload);
        }
    }

    /// A batch came by the replay of that id.
    pub fn replayed(&mut self, sink: &mut impl Sink, id: u64, seq: u64, payload: &[u8]) {
        let Some(asked) = self.asked.as_mut().filter(|asked| asked.ask.id == id) else { return };
        let (why, from) = (asked.why, asked.ask.from);
        if !std::mem::replace(&mut asked.answered, true) {
            match why {
                Why::Resume(digest) if seq == from => {
                    if digest != xxh3_64(payload) {
                        sink.note(Note::Restarted);
                        self.start_over(sink);
                        self.want(sink, Why::Join, 0);
                    }
                    self.unverified = false;
                    return;
                }
                Why::Join => {
                    sink.clear();
                    self.known = if seq == 0 { Known::All } else { Known::Part };
                    self.lost &= seq != 0;
                    self.next = Some(seq);
                }
                Why::Gap if seq == from => {}
                Why::Resume(_) | Why::Gap => self.lose(sink, Note::Lost),
            }
        }
        match self.next {
            Some(next) if seq < next => return,
            Some(next) if seq > next => self.lose(sink, Note::Lost),
            _ => {}
        }
        self.apply(sink, seq, payload);
    }

    /// The replay of that id is over: whole, or not.
    pub fn replay_ended(&mut self, sink: &mut impl Sink, id: u64, whole: bool) {
        let Some(Asked { why, answered, .. }) = self.asked.filter(|asked| asked.ask.id == id) else { return };
        self.asked = None;
        // A history that did not come is wanted again later; that other replays work does not bring it.
        self.failed = !whole || self.failed && why != Why::Join;
        match (why, whole) {
            // An engine that has published nothing since its start holds nothing. If that is not so, the next batch shows it.
            (Why::Join, true) if !answered => {
                sink.clear();
                self.next = Some(0);
                self.known = Known::All;
                self.lost = false;
            }
            // The engine has fewer batches than it once sent.
            (Why::Resume(_), true) if !answered => {
                sink.note(Note::Restarted);
                self.start_over(sink);
                return self.want(sink, Why::Join, 0);
            }
            (Why::Gap, true) if answered => sink.note(Note::Repaired),
            (Why::Gap, true) => self.lose(sink, Note::Lost),
            (Why::Gap, false) => self.lose(sink, Note::ReplayFailed),
            (Why::Resume(_), false) if !answered => {
                let missing = |(seq, _): &(u64, Bytes)| self.next.is_some_and(|next| *seq > next);
                if self.held.front().is_some_and(missing) {
                    self.lose(sink, Note::ReplayFailed);
                }
                self.unverified = self.next.is_some();
            }
            (Why::Join | Why::Resume(_), _) => {}
        }
        while self.asked.is_none()
            && let Some((seq, payload)) = self.held.pop_front()
        {
            self.held_bytes -= payload.len();
            self.accept(sink, seq, payload);
        }
    }

    fn accept(&mut self, sink: &mut impl Sink, seq: u64, payload: Bytes) {
        match self.next {
            None if seq == 0 => self.known = Known::All,
            None => self.known = Known::Part,
            Some(next) if seq < next => return sink.note(Note::Duplicate),
            Some(next) if seq > next => {
                sink.note(Note::Gap);
                if self.can_replay {
                    // What follows a batch of another engine closes no gap.
                    if self.unverified {
                        self.resume(sink);
                    } else {
                        self.want(sink, Why::Gap, next);
                    }
                    self.held_bytes += payload.len();
                    return self.held.push_front((seq, payload));
                }
                sink.note(Note::NoReplay);
                self.known = Known::Doubtful;
                self.lost = true;
            }
            Some(_) => {}
        }
        self.unverified = false;
        self.apply(sink, seq, &payload);
    }

    fn apply(&mut self, sink: &mut impl Sink, seq: u64, payload: &[u8]) {
        let done = sink.apply(payload);
        self.next = Some(seq.saturating_add(1));
        self.applied = Some(Mark { seq, digest: xxh3_64(payload) });
        if done.emptied {
            self.known = Known::All;
            self.lost = false;
        }
        if done.doubtful {
            self.known = Known::Doubtful;
            self.lost = true;
        }
    }

    fn want(&mut self, sink: &mut impl Sink, why: Why, from: u64) {
        sink.note(Note::Replay);
        self.asks += 1;
        self.asked = Some(Asked { ask: Ask { id: self.asks, from }, why, answered: false });
    }

    /// Gives up what was known, since batches are missing for good.
    fn lose(&mut self, sink: &mut impl Sink, why: Note) {
        sink.note(why);
        self.forget(sink);
        self.lost = true;
    }

    fn start_over(&mut self, sink: &mut impl Sink) {
        self.forget(sink);
        self.asked = None;
        self.lost = false;
        self.failed = false;
    }

    fn forget(&mut self, sink: &mut impl Sink) {
        sink.clear();
        self.unverified = false;
        self.known = Known::Part;
        self.next = None;
        self.applied = None;
    }

    fn drop_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
    }
}

#[cfg(test)]
mod tests;
