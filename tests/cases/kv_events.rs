//! What engines announce of their caches.

use bytes::Bytes;
use pilotfish::feed::kv_events::Skip;
use pilotfish::feed::kv_events::sequence::Note;
use pilotfish::prompt::Namespace;
use pilotfish::state::cache::Events;
use serde_json::{Value, json};

use crate::kit::case::{input, list, text};
use crate::kit::kv_events::{Engines, hex};

/// Plays the steps of a case; the depth that every query found at `name`.
fn play(engines: &mut Engines, steps: &[Value], name: &str) -> Vec<u32> {
    let mut depths = Vec::new();
    for step in steps {
        if step["zmq"].is_object() {
            engines.send(&step["zmq"]);
        } else if let Some(name) = step["zmq_reconnect"].as_str() {
            engines.follower(name).disconnected(0);
            engines.follower(name).connected(0);
        } else {
            depths.push(engines.depth(name, &step["query"]));
        }
    }
    depths
}

#[test]
fn kve_01_events_of_every_shape_are_read_and_bad_ones_skipped_one_by_one() {
    let case = input("KVE-01");
    for (name, frame) in case["frames"].as_object().unwrap() {
        let mut engines = Engines::of(case, 1, false);
        engines.send(&frame["zmq"]);
        assert_eq!(
            (engines.depth("p0", &case["query"]), engines.depth("p1", &case["query"])),
            (2, 0),
            "{name}"
        );
        let counts = *engines.follower("p0").counts();
        let skipped = |why: Skip| counts.skipped[why as usize];
        let expected = if name == "E_mixed" { (2, 1) } else { (0, 0) };
        assert_eq!((skipped(Skip::UnknownKind), skipped(Skip::NoTokens)), expected, "{name}");
        let shape = engines.follower("p0").status().shape.unwrap().name();
        let expected = if matches!(&name[..1], "A" | "D" | "E") { "array" } else { "map" };
        assert_eq!(shape, expected, "{name}: the last event's");
    }
}

#[test]
fn kve_02_a_block_is_the_same_by_whatever_kind_of_hash_it_is_named() {
    let case = input("KVE-02");
    let mut engines = Engines::of(case, 1, false);
    let steps = list(case, "steps");
    assert_eq!(play(&mut engines, &steps[..4], "p0"), [2, 1]);
    let mut engines = Engines::of(case, 1, false);
    let with_query = [steps[4].clone(), steps[1].clone(), steps[5].clone(), steps[1].clone()];
    assert_eq!(play(&mut engines, &with_query, "p0"), [1, 0]);

    let mut engines = Engines::of(case, 1, false);
    let no_hash = "93cb41daa8dbe02000009198ab426c6f636b53746f72656491c400c091cd012c10c0a3475055c000";
    engines.send(&json!({"endpoint": "p0", "topic": "", "seq": 0, "payload_hex": no_hash}));
    assert_eq!(engines.follower("p0").counts().skipped[Skip::BadEvent as usize], 1);
}

#[test]
fn kve_03_an_engine_that_starts_anew_holds_nothing_of_before() {
    let case = input("KVE-03");
    let mut engines = Engines::of(case, 1, false);
    let steps = list(case, "steps");
    assert_eq!(play(&mut engines, &steps[..3], "p0"), [2]);
    let follower = engines.follower("p0");
    assert_eq!((follower.state(), follower.counts().noted(Note::Gap)), (Events::Gap, 1));
    assert_eq!(play(&mut engines, &steps[3..], "p0"), [0]);
    let new = json!({"token_ids": (100..116).collect::<Vec<u32>>()});
    assert_eq!((engines.depth("p0", &new), engines.follower("p0").state()), (1, Events::Following));

    // Without any new event, the scraper tells.
    engines.follower("p0").restarted();
    let seen_by_the_stream = engines.depth("p0", &new);
    assert_eq!(seen_by_the_stream, 1, "it is the restart that the stream showed");

    // Only the connection drops.
    let mut engines = Engines::of(case, 1, false);
    play(&mut engines, &steps[..2], "p0");
    engines.follower("p0").disconnected(0);
    engines.follower("p0").connected(0);
    let mut next = steps[1]["zmq"].clone();
    next["seq"] = json!(42);
    engines.send(&next);
    assert_eq!(play(&mut engines, &steps[2..3], "p0"), [2]);

    // A publisher that starts anywhere.
    let mut engines = Engines::of(case, 1, false);
    let mut first = steps[0]["zmq"].clone();
    first["seq"] = json!(123_456);
    engines.send(&first);
    assert_eq!(engines.follower("p0").state(), Events::Joining);
}

/// Follows the case up to the gap: frames 0 and 1, then 5.
fn with_gap(case: &Value, can_replay: bool) -> Engines {
    let mut engines = Engines::of(case, 1, can_replay);
    if let Some(ask) = engines.follower("p0").ask(0) {
        engines.follower("p0").replay_ended(0, ask.id, true);
    }
    assert!(play(&mut engines, &list(case, "steps")[..3], "p0").is_empty());
    engines
}

#[test]
fn kve_04_a_gap_is_closed_by_one_replay_or_said_to_be_open() {
    let case = input("KVE-04");
    let (steps, query) = (list(case, "steps"), &list(case, "steps")[3]);
    let last = hex(text(&steps[2]["zmq"], "payload_hex"));
    let empty = hex("93cb41daa8dbe02000009000");

    let mut engines = with_gap(case, true);
    let follower = engines.follower("p0");
    let ask = follower.ask(0).unwrap();
    assert_eq!((ask.from, follower.state()), (2, Events::Joining));
    // The same number comes live and by replay; live frames wait meanwhile.
    follower.live(0, &Bytes::new(), 6, empty.clone());
    for seq in 2..=5 {
        follower.replayed(0, ask.id, seq, if seq == 5 { &last } else { &empty });
    }
    follower.replay_ended(0, ask.id, true);
    assert_eq!((follower.ask(0), follower.state()), (None, Events::Following));
    let counts = *follower.counts();
    assert_eq!((counts.frames, counts.noted(Note::Duplicate), counts.noted(Note::Repaired)), (7, 1, 1));
    assert_eq!(play(&mut engines, std::slice::from_ref(query), "p0"), [2]);

    // No replay socket: taken, and not trusted.
    let mut engines = with_gap(case, false);
    assert_eq!(engines.follower("p0").state(), Events::Gap);
    assert_eq!(
        (engines.follower("p0").ask(0), play(&mut engines, std::slice::from_ref(query), "p0")),
        (None, vec![2])
    );

    // The replay times out: forgotten once, and not asked for again at once.
    let mut engines = with_gap(case, true);
    let follower = engines.follower("p0");
    let ask = follower.ask(0).unwrap();
    follower.replay_ended(0, ask.id, false);
    assert_eq!((follower.ask(0), follower.state()), (None, Events::Gap));
    assert_eq!(play(&mut engines, std::slice::from_ref(query), "p0"), [0]);

    // The history begins behind the gap.
    let mut engines = with_gap(case, true);
    let follower = engines.follower("p0");
    let ask = follower.ask(0).unwrap();
    for seq in 4..=5 {
        follower.replayed(0, ask.id, seq, if seq == 5 { &last } else { &empty });
    }
    follower.replay_ended(0, ask.id, true);
    assert_eq!(
        (follower.counts().noted(Note::Lost), follower.ask(0), follower.state()),
        (1, None, Events::Gap)
    );
    assert_eq!(play(&mut engines, std::slice::from_ref(query), "p0"), [0]);

    // 5, then 4: another engine.
    let mut engines = with_gap(case, false);
    let mut back = steps[2]["zmq"].clone();
    back["seq"] = json!(4);
    engines.send(&back);
    assert_eq!(engines.follower("p0").counts().noted(Note::Restarted), 1);
}

#[test]
fn kve_07_layers_that_see_a_window_only_neither_add_to_a_prefix_nor_cut_it() {
    let case = input("KVE-07");
    let mut engines = Engines::of(case, 1, false);
    assert_eq!(play(&mut engines, list(case, "steps"), "p0"), [1, 0]);
    assert_eq!(engines.follower("p0").counts().skipped[Skip::OtherGroup as usize], 2);
}

#[test]
fn kve_08_the_dialled_endpoint_is_credited_whatever_the_topic_says() {
    let case = input("KVE-08");
    for frame in list(case, "frames") {
        let mut engines = Engines::of(case, 2, false);
        engines.send(&frame["zmq"]);
        let sender = text(&frame["zmq"], "endpoint").split(':').next().unwrap();
        for name in engines.names() {
            let expected = u32::from(name == sender);
            assert_eq!(engines.depth(&name, &case["query"]), expected, "{name} after {frame}");
        }
        let wrong = text(&frame["zmq"], "topic").starts_with("kv@10.0.0.99");
        assert_eq!(engines.follower(sender).counts().topic_mismatches, u64::from(wrong), "{frame}");
    }
}

#[test]
fn kve_10_adapters_and_salts_share_no_block() {
    let case = input("KVE-10");
    let mut engines = Engines::of(case, 1, false);
    engines.send(&case["event"]["zmq"]);
    let query = json!({"token_ids": (1..=16).collect::<Vec<u32>>()});
    let depth = |space| engines.depth_in("p0", &query, space);
    let salted = |salt| Namespace { adapter: None, salt: Some(salt) };
    assert_eq!(depth(Namespace { adapter: Some("t1"), salt: None }), 1);
    assert_eq!([depth(Namespace::default()), depth(salted("t1")), depth(salted("t2"))], [0, 0, 0]);
    assert_eq!(depth(Namespace { adapter: Some("t1"), salt: Some("t1") }), 0);
    for name in ["p1", "p2", "p3"] {
        assert_eq!(engines.depth_in(name, &query, Namespace { adapter: Some("t1"), salt: None }), 0);
    }
}
