use std::collections::{BTreeSet, VecDeque};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

/// Batches of the model: life of the engine, number, then add (1), remove (0) or clear (2), and an item.
fn payload(life: u8, seq: u64, op: u8, item: u8) -> Bytes {
    [&[life][..], &seq.to_be_bytes(), &[op, item]].concat().into()
}

/// Follows the items of batches.
#[derive(Default)]
struct Taken {
    items: BTreeSet<u8>,
    order: Vec<u64>,
    last: Option<(u8, u64)>,
    notes: Vec<Note>,
}

impl Sink for Taken {
    fn apply(&mut self, payload: &[u8]) -> Applied {
        let seq = u64::from_be_bytes(payload[1..9].try_into().unwrap());
        self.order.push(seq);
        self.last = Some((payload[0], seq));
        let (op, item) = (payload[9], payload[10]);
        match op {
            0 => {
                self.items.remove(&item);
            }
            1 => {
                self.items.insert(item);
            }
            _ => self.items.clear(),
        }
        Applied { emptied: op == 2, doubtful: false }
    }

    fn clear(&mut self) {
        self.items.clear();
    }

    fn note(&mut self, note: Note) {
        self.notes.push(note);
    }
}

fn store(seq: u64) -> Bytes {
    payload(0, seq, 1, seq as u8)
}

/// A sequence that is connected to an engine which has published nothing yet.
fn fresh() -> (Sequence, Taken) {
    let (mut sequence, mut taken) = (Sequence::new(true), Taken::default());
    sequence.connected(&mut taken);
    let ask = sequence.ask().unwrap();
    assert_eq!(ask.from, 0);
    sequence.replay_ended(&mut taken, ask.id, true);
    assert!(sequence.is_following(), "an engine that has published nothing holds nothing");
    (sequence, taken)
}

#[test]
fn a_gap_is_asked_for_once_from_the_first_missing_one_and_each_batch_counts_once() {
    let (mut sequence, mut taken) = fresh();
    for seq in [0, 1, 5, 6] {
        sequence.live(&mut taken, seq, store(seq));
    }
    let ask = sequence.ask().unwrap();
    assert_eq!((ask.from, sequence.is_following(), &taken.order[..]), (2, false, &[0, 1][..]));
    for seq in 2..=5 {
        sequence.replayed(&mut taken, ask.id, seq, &store(seq));
    }
    sequence.live(&mut taken, 7, store(7));
    sequence.replay_ended(&mut taken, ask.id, true);
    assert_eq!((sequence.ask(), sequence.is_following()), (None, true));
    assert_eq!(taken.order, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(taken.notes, [Note::Replay, Note::Gap, Note::Replay, Note::Repaired, Note::Duplicate]);
}

#[test]
fn history_that_is_lost_clears_once_and_only_a_clear_brings_trust_back() {
    let (mut sequence, mut taken) = fresh();
    for seq in [0, 1, 5] {
        sequence.live(&mut taken, seq, store(seq));
    }
    let ask = sequence.ask().unwrap();
    for seq in [4, 5] {
        sequence.replayed(&mut taken, ask.id, seq, &store(seq));
    }
    sequence.replay_ended(&mut taken, ask.id, true);
    assert_eq!(taken.items, BTreeSet::from([4, 5]));
    assert_eq!(taken.notes.iter().filter(|note| **note == Note::Lost).count(), 1);
    sequence.live(&mut taken, 6, store(6));
    assert_eq!((sequence.ask(), sequence.is_following(), sequence.has_lost()), (None, false, true));
    sequence.live(&mut taken, 7, payload(0, 7, 2, 0));
    assert!(sequence.is_following());
}

#[test]
fn a_replay_that_fails_clears_once_and_does_not_loop() {
    let (mut sequence, mut taken) = fresh();
    for seq in [0, 1, 5] {
        sequence.live(&mut taken, seq, store(seq));
    }
    let ask = sequence.ask().unwrap();
    sequence.replay_ended(&mut taken, ask.id, false);
    assert_eq!((sequence.ask(), sequence.has_lost(), &taken.items), (None, true, &BTreeSet::from([5])));
    sequence.live(&mut taken, 6, store(6));
    assert_eq!(sequence.ask(), None);
    sequence.retry(&mut taken);
    assert_eq!(sequence.ask().map(|ask| ask.from), Some(0), "asked again when it is time");
}

#[test]
fn without_a_replay_socket_a_gap_is_taken_and_not_trusted() {
    let (mut sequence, mut taken) = (Sequence::new(false), Taken::default());
    sequence.connected(&mut taken);
    sequence.live(&mut taken, 0, store(0));
    assert!(sequence.is_following());
    sequence.live(&mut taken, 41, store(41));
    assert_eq!(
        (sequence.is_following(), sequence.has_lost(), sequence.known()),
        (false, true, Known::Doubtful)
    );
    assert_eq!((sequence.ask(), taken.items.len()), (None, 2));
}

#[test]
fn a_number_that_falls_is_a_new_engine() {
    for (before, after, follows) in [(41, 0, true), (5, 4, false), (0, 0, true)] {
        let (mut sequence, mut taken) = (Sequence::new(false), Taken::default());
        sequence.connected(&mut taken);
        sequence.live(&mut taken, before, payload(0, before, 1, 1));
        sequence.live(&mut taken, after, payload(1, after, 1, 2));
        assert_eq!((sequence.is_following(), &taken.items), (follows, &BTreeSet::from([2])));
    }
}

#[test]
fn a_connection_that_drops_and_goes_on_keeps_everything_once_the_next_batch_shows_it() {
    let (mut sequence, mut taken) = (Sequence::new(false), Taken::default());
    sequence.connected(&mut taken);
    sequence.live(&mut taken, 0, store(0));
    sequence.disconnected();
    sequence.connected(&mut taken);
    assert!(!sequence.is_following());
    sequence.live(&mut taken, 1, store(1));
    assert_eq!((sequence.is_following(), taken.items.len()), (true, 2));
}

#[test]
fn after_a_reconnect_the_last_batch_shows_whether_the_engine_is_the_same() {
    let reconnected = || {
        let (mut sequence, mut taken) = fresh();
        (0..3).for_each(|seq| sequence.live(&mut taken, seq, store(seq)));
        sequence.disconnected();
        sequence.connected(&mut taken);
        let ask = sequence.ask().unwrap();
        assert_eq!(ask.from, 2);
        (sequence, taken, ask)
    };
    let (mut same, mut taken, ask) = reconnected();
    same.replayed(&mut taken, ask.id, 2, &store(2));
    same.replayed(&mut taken, ask.id, 3, &store(3));
    same.replay_ended(&mut taken, ask.id, true);
    assert_eq!((same.is_following(), taken.items.len()), (true, 4));
    // Another engine at the same address, further than the old one was.
    let (mut other, mut taken, ask) = reconnected();
    other.replayed(&mut taken, ask.id, 2, &payload(1, 2, 1, 9));
    assert_eq!((other.ask().map(|ask| ask.from), taken.items.len()), (Some(0), 0));
    // One that is not as far.
    let (mut other, mut taken, ask) = reconnected();
    other.replay_ended(&mut taken, ask.id, true);
    assert_eq!((other.ask().map(|ask| ask.from), taken.items.len()), (Some(0), 0));
}

#[test]
fn a_late_joiner_follows_if_the_history_reaches_back_to_the_start() {
    for (first, follows) in [(0, true), (7, false)] {
        let (mut sequence, mut taken) = (Sequence::new(true), Taken::default());
        sequence.connected(&mut taken);
        let ask = sequence.ask().unwrap();
        sequence.live(&mut taken, 12, store(12));
        (first..=12).for_each(|seq| sequence.replayed(&mut taken, ask.id, seq, &store(seq)));
        sequence.replay_ended(&mut taken, ask.id, true);
        assert_eq!((sequence.is_following(), sequence.has_lost()), (follows, false));
        assert_eq!(taken.order, (first..=12).collect::<Vec<_>>());
    }
}

#[test]
fn numbers_at_the_end_of_their_range_bring_nothing_down() {
    let (mut sequence, mut taken) = fresh();
    for seq in [u64::MAX, u64::MAX - 1, u64::MAX, 0] {
        sequence.live(&mut taken, seq, payload(seq as u8, seq, 1, 1));
    }
}

/// An engine as it is, its sockets, and what of its batches is on the way.
struct Engine {
    life: u8,
    items: BTreeSet<u8>,
    /// What it held after every batch of this life.
    after: Vec<BTreeSet<u8>>,
    history: VecDeque<(u64, Bytes)>,
    buffer: usize,
    /// Published and not yet received.
    wire: VecDeque<(u64, Bytes)>,
}

impl Engine {
    fn publish(&mut self, rng: &mut SmallRng, heard: bool) {
        let seq = self.after.len() as u64;
        let (op, item) = match rng.random_range(0..20) {
            0 => (2, 0),
            1..13 => (1, rng.random_range(0..30)),
            _ => (0, rng.random_range(0..30)),
        };
        match op {
            0 => drop(self.items.remove(&item)),
            1 => drop(self.items.insert(item)),
            _ => self.items.clear(),
        }
        self.after.push(self.items.clone());
        let batch = payload(self.life, seq, op, item);
        self.history.push_back((seq, batch.clone()));
        if self.history.len() > self.buffer {
            self.history.pop_front();
        }
        if heard {
            self.wire.push_back((seq, batch));
        }
    }

    fn restart(&mut self) {
        self.life += 1;
        self.items.clear();
        self.after.clear();
        self.history.clear();
        self.wire.clear();
    }

    fn answer(&self, from: u64) -> Vec<(u64, Bytes)> {
        self.history.iter().filter(|(seq, _)| *seq >= from).cloned().collect()
    }
}

fn answer_all(sequence: &mut Sequence, taken: &mut Taken, engine: &Engine) {
    while let Some(ask) = sequence.ask() {
        for (seq, batch) in engine.answer(ask.from) {
            sequence.replayed(taken, ask.id, seq, &batch);
        }
        sequence.replay_ended(taken, ask.id, true);
    }
}

/// Random losses, restarts, reconnects and replays. Whenever the sequence says that it follows, what was taken is what the
/// engine held after that very batch; once the wire is quiet and replays work, that is what it holds now.
fn run(seed: u64, can_replay: bool) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let buffer = rng.random_range(2..40);
    let mut engine = Engine {
        life: 0,
        items: BTreeSet::new(),
        after: Vec::new(),
        history: VecDeque::new(),
        buffer,
        wire: VecDeque::new(),
    };
    for _ in 0..rng.random_range(0..60) {
        engine.publish(&mut rng, false);
    }
    let (mut sequence, mut taken) = (Sequence::new(can_replay), Taken::default());
    sequence.connected(&mut taken);
    let mut connected = true;
    // The replay under way: its id, what is still to come of it.
    let mut replay: Option<(u64, VecDeque<(u64, Bytes)>)> = None;
    let mut settling = 0;
    for step in 0..400 {
        settling += usize::from(step > 300);
        match rng.random_range(0..100) {
            0..35 if settling == 0 => {
                let heard = connected && rng.random_bool(0.95);
                engine.publish(&mut rng, heard);
            }
            35..38 if settling == 0 && connected => {
                connected = false;
                engine.wire.clear();
                sequence.disconnected();
            }
            38..40 if settling == 0 => {
                engine.restart();
                connected = false;
                sequence.disconnected();
                // Without a replay socket only the scraper can tell.
                sequence.restarted(&mut taken);
            }
            40..50 if !connected => {
                connected = true;
                sequence.connected(&mut taken);
            }
            50..90 => {
                if sequence.takes_more()
                    && let Some((seq, batch)) = engine.wire.pop_front()
                {
                    sequence.live(&mut taken, seq, batch.clone());
                    if rng.random_bool(0.05) {
                        sequence.live(&mut taken, seq, batch);
                    }
                }
            }
            _ => {}
        }
        if sequence.ask().map(|ask| ask.id) != replay.as_ref().map(|(id, _)| *id) {
            replay = sequence.ask().map(|ask| (ask.id, engine.answer(ask.from).into()));
        }
        if let Some((id, answers)) = &mut replay {
            let id = *id;
            if settling == 0 && rng.random_bool(0.05) {
                sequence.replay_ended(&mut taken, id, false);
            } else {
                for _ in 0..rng.random_range(0..10) {
                    if let Some((seq, batch)) = answers.pop_front() {
                        sequence.replayed(&mut taken, id, seq, &batch);
                    } else {
                        sequence.replay_ended(&mut taken, id, true);
                    }
                }
            }
        }
        if sequence.is_following()
            && let Some((life, seq)) = taken.last
            && life == engine.life
            && (seq as usize) < engine.after.len()
            && !engine.after.is_empty()
        {
            assert_eq!(taken.items, engine.after[seq as usize], "seed {seed}, step {step}");
        }
    }
    settle(seed, &mut rng, &mut sequence, &mut taken, &mut engine, connected);
}

/// Everything on the way arrives, and every question is answered.
fn settle(
    seed: u64,
    rng: &mut SmallRng,
    sequence: &mut Sequence,
    taken: &mut Taken,
    engine: &mut Engine,
    connected: bool,
) {
    while let Some((seq, batch)) = engine.wire.pop_front() {
        sequence.live(taken, seq, batch);
    }
    answer_all(sequence, taken, engine);
    sequence.retry(taken);
    answer_all(sequence, taken, engine);
    // One more batch shows what the last ones were.
    if connected {
        engine.publish(rng, true);
        let (seq, batch) = engine.wire.pop_front().unwrap();
        sequence.live(taken, seq, batch);
        answer_all(sequence, taken, engine);
        if sequence.known() != Known::Doubtful {
            assert!(taken.items.is_subset(&engine.items), "seed {seed}: more than the truth");
        }
        if sequence.is_following() {
            assert_eq!(taken.items, engine.items, "seed {seed}");
        }
        if sequence.can_replay {
            let whole = engine.after.len() <= engine.buffer;
            assert!(
                !whole || sequence.is_following(),
                "seed {seed}: the whole history was there: {sequence:?} {:?}",
                taken.notes
            );
        }
    }
}

#[test]
fn following_means_that_what_was_taken_is_what_the_engine_holds() {
    for seed in 0..5_000 {
        run(seed, true);
        run(seed, false);
    }
}
