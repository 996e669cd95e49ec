use std::fmt::Write as _;

use super::super::wire::tests::{batch_of, store_event};
use super::*;
use crate::index::DepthSink;
use crate::prompt::{Blocks, Namespace};
use crate::state::endpoint::tests::endpoint;

fn followed(ranks: usize, can_replay: bool) -> Follower {
    let mut follower = Follower::new(endpoint("a", "10.0.0.1:8000"), Arc::default(), ranks, can_replay);
    (0..ranks).for_each(|rank| follower.connected(rank));
    follower
}

fn depth(follower: &Follower, tokens: &[u32], size: usize, space: Namespace<'_>) -> u32 {
    let blocks = Blocks::of_tokens(&[tokens, &[0]].concat(), size, space);
    let mut sink = DepthSink::default();
    sink.begin();
    follower.core.index.events.score_into(Tier::Gpu, blocks.contents(), &mut sink);
    sink.depth(follower.core.endpoint.holder())
}

fn tokens(n: u32) -> Vec<u32> {
    (0..n).collect()
}

fn live(follower: &mut Follower, seq: u64, events: &[Vec<u8>]) {
    follower.live(0, &Bytes::new(), seq, batch_of(events).into());
}

#[test]
fn blocks_of_another_size_than_the_metrics_say_are_ignored_until_they_agree() {
    let mut follower = followed(1, false);
    let set = |follower: &Follower, size| {
        follower.core.endpoint.signals.set(SignalKind::BlockSize, size, Millis::now());
    };
    set(&follower, 32.0);
    live(&mut follower, 0, &[store_event(&[1], None, &tokens(32), 32)]);
    assert_eq!(
        (follower.state(), depth(&follower, &tokens(32), 32, Namespace::default())),
        (Events::Following, 1)
    );
    live(&mut follower, 1, &[store_event(&[2], Some(1), &tokens(16), 16)]);
    assert_eq!(
        (follower.state(), depth(&follower, &tokens(32), 32, Namespace::default())),
        (Events::BlockSize, 0)
    );
    live(&mut follower, 2, &[store_event(&[3], None, &tokens(32), 32)]);
    assert_eq!(follower.state(), Events::Joining, "what was missed is not known");
    live(&mut follower, 3, &[store_event(&[3], None, &tokens(32), 32)]);
    assert_eq!(depth(&follower, &tokens(32), 32, Namespace::default()), 1);
    let mut small = followed(1, false);
    live(&mut small, 0, &[store_event(&[1], None, &tokens(8), 8)]);
    assert_eq!(small.state(), Events::BlockSize);
}

#[test]
fn a_history_with_blocks_of_two_sizes_is_asked_for_once() {
    let mut follower = followed(1, true);
    follower.core.endpoint.signals.set(SignalKind::BlockSize, 16.0, Millis::now());
    let batches: Vec<Bytes> = [32, 16]
        .map(|size| batch_of(&[store_event(&[u64::from(size)], None, &tokens(u32::from(size)), size)]).into())
        .into();
    let mut asked = 0;
    while let Some(ask) = follower.ask(0) {
        asked += 1;
        assert!(asked < 5);
        for (seq, batch) in batches.iter().enumerate() {
            follower.replayed(0, ask.id, seq as u64, batch);
        }
        follower.replay_ended(0, ask.id, true);
    }
    assert_eq!(
        (follower.state(), depth(&follower, &tokens(16), 16, Namespace::default())),
        (Events::Joining, 1)
    );
}

#[test]
fn a_cache_that_has_turned_over_is_known_again() {
    let mut follower = followed(1, false);
    follower.core.endpoint.signals.set(SignalKind::Blocks, 8.0, Millis::now());
    let store = |name: u64| {
        store_event(&[name], None, &tokens(16).iter().map(|t| t + name as u32).collect::<Vec<_>>(), 16)
    };
    for seq in 100..107 {
        live(&mut follower, seq, &[store(seq)]);
    }
    assert_eq!(follower.state(), Events::Joining);
    // A removal of something unknown: there is more than was seen.
    live(&mut follower, 107, &[super::super::wire::tests::removal(&[5])]);
    live(&mut follower, 108, &[store(108)]);
    assert_eq!(follower.state(), Events::Joining);
    for seq in 109..116 {
        live(&mut follower, seq, &[store(seq)]);
    }
    assert_eq!(follower.state(), Events::Following);
    // Lost without a replay socket: what may be wrong goes first, then a whole cache must come.
    for seq in 200..208 {
        live(&mut follower, seq, &[store(seq)]);
        assert_eq!(follower.state(), Events::Gap);
    }
    assert_eq!(
        depth(&follower, &tokens(16).iter().map(|t| t + 100).collect::<Vec<_>>(), 16, Namespace::default()),
        0
    );
    for seq in 208..216 {
        assert_eq!(follower.state(), Events::Gap);
        live(&mut follower, seq, &[store(seq)]);
    }
    assert_eq!(follower.state(), Events::Following);
}

#[test]
fn a_sleeping_engine_holds_nothing() {
    let mut follower = followed(1, false);
    follower.core.endpoint.health.accepted();
    live(&mut follower, 0, &[store_event(&[1], None, &tokens(16), 16)]);
    follower.core.endpoint.health.set_asleep(true);
    follower.look();
    assert_eq!(
        (follower.state(), depth(&follower, &tokens(16), 16, Namespace::default())),
        (Events::Asleep, 0)
    );
    follower.core.endpoint.health.set_asleep(false);
    follower.look();
    assert_eq!(follower.state(), Events::Following);
    // Its first step after waking says what it did before.
    live(
        &mut follower,
        1,
        &[b"\x81\xa4type\xb0AllBlocksCleared".to_vec(), store_event(&[2], None, &tokens(16), 16)],
    );
    assert_eq!(depth(&follower, &tokens(16), 16, Namespace::default()), 1);
}

#[test]
fn frames_that_say_nothing_readable_are_shown_as_that() {
    let mut follower = followed(1, false);
    live(&mut follower, 0, &[]);
    for seq in 1..=8 {
        assert_ne!(follower.state(), Events::Unreadable);
        follower.live(0, &Bytes::new(), seq, Bytes::from_static(b"\xc1"));
    }
    assert_eq!(follower.state(), Events::Unreadable);
    assert_eq!(follower.counts().skipped[Skip::UnreadableFrame as usize], 8);
    live(&mut follower, 9, &[b"\x81\xa4type\xb0AllBlocksCleared".to_vec()]);
    assert_eq!(follower.state(), Events::Following);
}

#[test]
fn every_rank_has_a_cache_of_its_own() {
    let mut follower = followed(2, false);
    let (prompt, none) = (tokens(16), Bytes::new());
    let store: Bytes = batch_of(&[store_event(&[1], None, &prompt, 16)]).into();
    follower.live(0, &none, 0, store.clone());
    assert_eq!(follower.state(), Events::Joining, "the other rank has not said anything");
    follower.live(1, &none, 0, store);
    assert_eq!(follower.state(), Events::Following);
    let remove: Bytes = batch_of(&[super::super::wire::tests::removal(&[1])]).into();
    follower.live(0, &none, 1, remove);
    assert_eq!(depth(&follower, &prompt, 16, Namespace::default()), 1);
    // The second starts anew.
    follower.live(1, &none, 0, batch_of(&[]).into());
    assert_eq!(depth(&follower, &prompt, 16, Namespace::default()), 0);
}

#[test]
fn an_index_that_is_full_takes_nothing_and_gives_up_what_it_had_of_the_engine() {
    let index = Arc::new(TokenIndexes::new(2));
    let mut follower = Follower::new(endpoint("a", "10.0.0.1:8000"), index, 1, false);
    follower.connected(0);
    live(&mut follower, 0, &[store_event(&[1, 2], None, &tokens(32), 16)]);
    assert_eq!(follower.state(), Events::Following);
    follower.core.unchecked = UNCHECKED_AT_MOST;
    live(&mut follower, 1, &[store_event(&[3], Some(2), &tokens(16), 16)]);
    assert_eq!((follower.state(), follower.status().blocks), (Events::Full, 0));
    follower.retry();
    assert_eq!(follower.state(), Events::Joining, "there is room again");
}

const UNCHECKED_AT_MOST: usize = 4_096;

#[test]
fn a_restart_that_the_stream_showed_first_is_not_taken_for_another() {
    let mut follower = followed(1, false);
    let batch = |time: u8| -> Bytes {
        [&[0x92, time, 0x91][..], &store_event(&[1], None, &tokens(16), 16)].concat().into()
    };
    follower.live(0, &Bytes::new(), 0, batch(10));
    follower.live(0, &Bytes::new(), 0, batch(20));
    let prompt = tokens(16);
    let started = |follower: &mut Follower, at| {
        follower.core.endpoint.signals.set(SignalKind::ProcessStart, at, Millis::now());
        follower.restarted();
        depth(follower, &prompt, 16, Namespace::default())
    };
    assert_eq!(started(&mut follower, 15.0), 1);
    assert_eq!(started(&mut follower, 25.0), 0);
}

#[test]
fn topics_are_compared_with_the_address_they_name() {
    let endpoint = endpoint("a", "10.0.0.1:8000");
    for (topic, other) in [
        ("", false),
        ("kv-events", false),
        ("kv@10.0.0.1:8000@org/m@rev1", false),
        ("kv@10.0.0.1@m", false),
        ("kv@some-host:8000@m", false),
        ("kv@10.0.0.1:80@m", true),
        ("kv@10.0.0.99:8000@m", true),
        ("kv@10.0.0.99@m", true),
    ] {
        assert_eq!(names_another(topic.as_bytes(), &endpoint), other, "{topic}");
    }
}

/// Salts and adapters are never shown.
#[test]
fn what_a_follower_shows_holds_nothing_of_a_prompt() {
    let mut follower = followed(1, false);
    let mut event = store_event(&[1], None, &tokens(16), 16);
    event[0] = 0x99;
    event.extend_from_slice(b"\xc0\xa3GPU\xc0\x91\x91\xa9tenant-zz");
    live(&mut follower, 0, &[event]);
    let salted = Namespace { adapter: None, salt: Some("tenant-zz") };
    assert_eq!(depth(&follower, &tokens(16), 16, salted), 1);
    assert_eq!(depth(&follower, &tokens(16), 16, Namespace::default()), 0);
    let mut shown = String::new();
    write!(shown, "{:?}", follower.status()).unwrap();
    assert!(!shown.contains("tenant-zz"));
}
