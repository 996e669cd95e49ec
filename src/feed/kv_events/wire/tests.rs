use proptest::prelude::*;
use serde_json::Value;

use super::*;

/// An event that outlives the payload.
#[derive(Debug, PartialEq)]
enum Owned {
    Stored { hashes: Vec<u64>, parent: Option<u64>, tokens: Vec<u32>, block_size: usize },
    Removed { hashes: Vec<u64>, group: u64 },
    Cleared,
}

fn owned(event: Event<'_>) -> Owned {
    match event {
        Event::Stored(Stored { hashes, parent, tokens, block_size, .. }) => {
            Owned::Stored { hashes: hashes.into(), parent, tokens: tokens.into(), block_size }
        }
        Event::Removed(Removed { hashes, group, .. }) => Owned::Removed { hashes: hashes.into(), group },
        Event::Cleared => Owned::Cleared,
    }
}

fn read(payload: &[u8]) -> (Result<Head, Unreadable>, Vec<Owned>, Vec<BadEvent>) {
    let (mut events, mut bad) = (Vec::new(), Vec::new());
    let head = Decoder::default().decode(payload, |event| match event {
        Ok(event) => events.push(owned(event)),
        Err(why) => bad.push(why),
    });
    (head, events, bad)
}

/// `BlockStored` as an array.
pub(crate) fn store_event(hashes: &[u64], parent: Option<u64>, tokens: &[u32], size: u8) -> Vec<u8> {
    let mut event = b"\x95\xabBlockStored".to_vec();
    hashes_into(hashes, &mut event);
    match parent {
        Some(parent) => drop(rmp::encode::write_u64(&mut event, parent)),
        None => event.push(0xc0),
    }
    rmp::encode::write_array_len(&mut event, tokens.len() as u32).unwrap();
    for token in tokens {
        rmp::encode::write_uint(&mut event, u64::from(*token)).unwrap();
    }
    event.push(size);
    event
}

fn hashes_into(hashes: &[u64], event: &mut Vec<u8>) {
    rmp::encode::write_array_len(event, hashes.len() as u32).unwrap();
    for hash in hashes {
        rmp::encode::write_u64(event, *hash).unwrap();
    }
}

/// `BlockRemoved` as an array.
pub(crate) fn removal(hashes: &[u64]) -> Vec<u8> {
    let mut event = b"\x92\xacBlockRemoved".to_vec();
    hashes_into(hashes, &mut event);
    event
}

/// A batch of these events.
pub(crate) fn batch_of(events: &[Vec<u8>]) -> Vec<u8> {
    [&[0x92, 0x01, 0x90 | events.len() as u8][..], &events.concat()].concat()
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// What Python's msgpack read in place of a hash.
fn hash(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| {
        let text = value["$bytes_hex"].as_str().unwrap();
        u64::from_str_radix(&text[text.len() - 16..], 16).unwrap()
    })
}

fn hashes(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(hash).collect()
}

fn expected(event: &Value) -> Owned {
    match event["type"].as_str().unwrap() {
        "BlockStored" => Owned::Stored {
            hashes: hashes(&event["block_hashes"]),
            parent: (!event["parent_block_hash"].is_null()).then(|| hash(&event["parent_block_hash"])),
            tokens: serde_json::from_value(event["token_ids"].clone()).unwrap(),
            block_size: event["block_size"].as_u64().unwrap() as usize,
        },
        "BlockRemoved" => Owned::Removed {
            hashes: hashes(&event["block_hashes"]),
            group: event["group_idx"].as_u64().unwrap(),
        },
        "AllBlocksCleared" => Owned::Cleared,
        other => panic!("{other}"),
    }
}

#[test]
fn every_captured_frame_is_read_as_python_reads_it() {
    let files = [
        include_str!("../../../../tests/data/kv-events/vllm-map-int-hash.jsonl"),
        include_str!("../../../../tests/data/kv-events/vllm-map-bytes-hash.jsonl"),
        include_str!("../../../../tests/data/kv-events/vllm-map-second-engine.jsonl"),
        include_str!("../../../../tests/data/kv-events/vllm-map-xxhash.jsonl"),
    ];
    let mut kinds = [0; 3];
    for line in files.iter().flat_map(|file| file.lines()) {
        let frame: Value = serde_json::from_str(line).unwrap();
        let (head, events, bad) = read(&hex(frame["payload_hex"].as_str().unwrap()));
        let head = head.unwrap();
        // The JSON reader rounds in the last place.
        assert!((head.time.unwrap() - frame["decoded"][0].as_f64().unwrap()).abs() < 1e-5);
        assert_eq!((head.rank, head.shape, bad), (Some(0), Some(Shape::Map), vec![]));
        let wanted: Vec<Owned> = frame["decoded"][1].as_array().unwrap().iter().map(expected).collect();
        assert_eq!(events, wanted);
        for event in events {
            kinds[match event {
                Owned::Stored { .. } => 0,
                Owned::Removed { .. } => 1,
                Owned::Cleared => 2,
            }] += 1;
        }
    }
    assert!(kinds.iter().all(|n| *n > 0), "{kinds:?}");
}

#[test]
fn extra_keys_are_told_apart_by_their_places() {
    let frames = include_str!("../../../../tests/data/kv-events/vllm-map-int-hash.jsonl").lines();
    let mut seen = Vec::new();
    for line in frames.take(9) {
        let frame: Value = serde_json::from_str(line).unwrap();
        let payload = hex(frame["payload_hex"].as_str().unwrap());
        Decoder::default()
            .decode(&payload, |event| {
                if let Ok(Event::Stored(mut stored)) = event {
                    let extra = stored.extra.next(stored.adapter, stored.parent.is_none());
                    seen.push((
                        stored.adapter.map(str::to_owned),
                        extra.salt.map(str::to_owned),
                        extra.further,
                    ));
                }
            })
            .unwrap();
    }
    let with =
        |adapter: Option<&str>, salt: Option<&str>| (adapter.map(str::to_owned), salt.map(str::to_owned), 0);
    assert_eq!(
        seen[6..9],
        [with(Some("lora1"), None), with(None, Some("tenant-a")), with(Some("lora2"), Some("tenant-b"))]
    );
    assert_eq!(seen[0], with(None, None));
}

/// `[ts, [event]]` with these bytes as the event.
fn batch(event: &[u8]) -> Vec<u8> {
    [&[0x92, 0x01, 0x91][..], event].concat()
}

#[test]
fn media_and_what_follows_a_salt_are_part_of_the_content() {
    // Two blocks: ["t", ["img", 4]] and [["img", 4]].
    let event = b"\x98\xabBlockStored\x92\x01\x02\xc0\x92\x07\x08\x01\xc0\xc0\xc0";
    let mut event = event.to_vec();
    event[0] = 0x99;
    event.extend_from_slice(b"\x92\x92\xa1t\x92\xa3img\x04\x91\x92\xa3img\x04");
    let mut extras = Vec::new();
    let payload = batch(&event);
    Decoder::default()
        .decode(&payload, |event| {
            let Ok(Event::Stored(mut stored)) = event else { panic!("{event:?}") };
            for first in [true, false, false] {
                let extra = stored.extra.next(None, first);
                extras.push((extra.salt.map(str::to_owned), extra.further));
            }
        })
        .unwrap();
    assert_eq!(extras[0].0.as_deref(), Some("t"));
    assert_ne!(extras[0].1, 0);
    assert_eq!((extras[1].1, &extras[1].0, &extras[2]), (extras[0].1, &None, &(None, 0)));
}

#[test]
fn hashes_of_every_form_are_the_same_number() {
    let removed = |hash: &[u8]| batch(&[b"\x92\xacBlockRemoved\x91", hash].concat());
    let bytes = [b"\xc4\x20".to_vec(), (0..32).collect()].concat();
    for (hash, number) in [
        (&b"\xcf\xf9\x45\x98\x96\x05\xc9\xf4\x5f"[..], 0xf945_9896_05c9_f45f),
        (b"\xd3\xf9\x45\x98\x96\x05\xc9\xf4\x5f", 0xf945_9896_05c9_f45f),
        (b"\xff", u64::MAX),
        (b"\xd0\xff", u64::MAX),
        (b"\xd2\xff\xff\xff\xfe", u64::MAX - 1),
        (b"\x05", 5),
        (&bytes, 0x1819_1a1b_1c1d_1e1f),
    ] {
        assert_eq!(read(&removed(hash)).1, [Owned::Removed { hashes: vec![number], group: 0 }]);
    }
    for no_hash in [&b"\xc4\x00"[..], b"\xc0", b"\xca\0\0\0\0"] {
        let (head, events, bad) = read(&removed(no_hash));
        assert_eq!((head.is_ok(), events, bad), (true, vec![], vec![BadEvent::Other]));
    }
}

#[test]
fn of_token_pairs_the_first_counts() {
    let event = b"\x95\xabBlockStored\x91\x01\xc0\x92\x92\x05\x06\x92\xce\x00\x01\x00\x00\x07\x02";
    let stored = Owned::Stored { hashes: vec![1], parent: None, tokens: vec![5, 65_536], block_size: 2 };
    assert_eq!(read(&batch(event)).1, [stored]);
}

#[test]
fn lengths_and_depths_beyond_the_payload_are_refused_without_taking_memory() {
    assert_eq!(read(b"\x92\x01\xdd\xff\xff\xff\xff").0, Err(Unreadable));
    assert_eq!(read(b"\xdf\xff\xff\xff\xff").0, Err(Unreadable));
    assert_eq!(read(&batch(b"\x92\xacBlockRemoved\xdd\xff\xff\xff\xff")).0, Err(Unreadable));
    assert_eq!(read(&batch(&[0x91; 10_000])).0, Err(Unreadable));
    assert_eq!(read(b"").0, Err(Unreadable));
    assert_eq!(read(b"\x90").0, Err(Unreadable));
}

proptest! {
    #[test]
    fn no_payload_brings_the_decoder_down(mut payload in prop::collection::vec(any::<u8>(), 0..200), real in 0..3usize, at in 0..100usize) {
        let _ = read(&payload);
        // Damage to a real frame reaches deeper.
        let lines = include_str!("../../../../tests/data/kv-events/vllm-map-xxhash.jsonl");
        let frame: Value = serde_json::from_str(lines.lines().nth(real.min(1)).unwrap()).unwrap();
        let mut whole = hex(frame["payload_hex"].as_str().unwrap());
        payload.truncate(4);
        let at = at * whole.len() / 100;
        whole.splice(at..(at + payload.len()).min(whole.len()), payload);
        let _ = read(&whole);
    }
}
