//! Time to read a batch of KV events, and to put stores and removals into an index that holds a million blocks.

#![allow(clippy::unwrap_used, reason = "writing to memory cannot fail")]

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use pilotfish::feed::kv_events::Follower;
use pilotfish::feed::kv_events::wire::Decoder;
use pilotfish::index::TokenIndexes;
use pilotfish::state::ObjectName;
use pilotfish::state::endpoint::{Endpoint, EndpointSpec, EngineKind, EventPorts};
use rmp::encode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

const BLOCK: u64 = 16;
/// Blocks of one request's prompt.
const PROMPT: u64 = 128;
/// Requests in one batch, each with a prompt and as many removals.
const REQUESTS: u64 = 4;
/// Blocks that are there when the time is taken.
const HELD: u64 = 1_000_000;

fn key(out: &mut Vec<u8>, name: &str) {
    encode::write_str(out, name).unwrap();
}

fn hash(out: &mut Vec<u8>, block: u64) {
    encode::write_u64(out, block.wrapping_mul(0x9e37_79b9_7f4a_7c15)).unwrap();
}

/// The prompt whose first block is number `first`, as vLLM announces it.
fn stored(out: &mut Vec<u8>, first: u64) {
    encode::write_map_len(out, 11).unwrap();
    key(out, "type");
    key(out, "BlockStored");
    key(out, "block_hashes");
    encode::write_array_len(out, PROMPT as u32).unwrap();
    (first..first + PROMPT).for_each(|block| hash(out, block));
    key(out, "parent_block_hash");
    encode::write_nil(out).unwrap();
    key(out, "token_ids");
    encode::write_array_len(out, (PROMPT * BLOCK) as u32).unwrap();
    for token in first * BLOCK..(first + PROMPT) * BLOCK {
        // Ids of a vocabulary of 128,000: three bytes for half of them, five for the others.
        encode::write_uint(out, token.wrapping_mul(2_654_435_761) % 128_000).unwrap();
    }
    key(out, "block_size");
    encode::write_uint(out, BLOCK).unwrap();
    for (name, value) in [("lora_id", None), ("medium", Some("GPU")), ("lora_name", None)] {
        key(out, name);
        match value {
            Some(value) => key(out, value),
            None => encode::write_nil(out).unwrap(),
        }
    }
    key(out, "extra_keys");
    encode::write_array_len(out, PROMPT as u32).unwrap();
    (0..PROMPT).for_each(|_| encode::write_nil(out).unwrap());
    key(out, "group_idx");
    encode::write_uint(out, 0).unwrap();
    key(out, "kv_cache_spec_kind");
    key(out, "full_attention");
}

/// One removal, as vLLM announces each.
fn removed(out: &mut Vec<u8>, block: u64) {
    encode::write_map_len(out, 4).unwrap();
    key(out, "type");
    key(out, "BlockRemoved");
    key(out, "block_hashes");
    encode::write_array_len(out, 1).unwrap();
    hash(out, block);
    key(out, "medium");
    key(out, "GPU");
    key(out, "group_idx");
    encode::write_uint(out, 0).unwrap();
}

/// A batch: `stores` prompts from block `store` on, and the removal of blocks from `remove` on.
fn batch(stores: u64, store: u64, removals: u64, remove: u64) -> Bytes {
    let mut out = Vec::new();
    encode::write_array_len(&mut out, 3).unwrap();
    encode::write_f64(&mut out, 1.0).unwrap();
    encode::write_array_len(&mut out, (stores + removals) as u32).unwrap();
    (0..stores).for_each(|n| stored(&mut out, store + n * PROMPT));
    (0..removals).for_each(|n| removed(&mut out, remove + n));
    encode::write_uint(&mut out, 0).unwrap();
    out.into()
}

#[divan::bench]
fn decode(bencher: Bencher<'_, '_>) {
    let payload = batch(REQUESTS, 0, REQUESTS * PROMPT, 0);
    let mut decoder = Decoder::default();
    bencher.counter(BytesCount::new(payload.len())).bench_local(|| {
        let mut events = 0;
        let head = decoder.decode(black_box(&payload), |event| events += usize::from(event.is_ok()));
        (head, events)
    });
}

/// A follower of an engine that holds [`HELD`] blocks.
fn follower() -> Follower {
    let endpoint = Arc::new(Endpoint::new(EndpointSpec {
        name: ObjectName::new("default", "a"),
        address: ([10, 0, 0, 1], 8000).into(),
        weight: 1.0,
        gpu: pilotfish::state::rates::Speed::default(),
        labels: std::collections::BTreeMap::new(),
        engine: EngineKind::Vllm,
        event_ports: EventPorts::default(),
        transfer: pilotfish::state::disaggregation::TransferSpec::default(),
        drain: false,
        pod: None,
    }));
    let mut follower = Follower::new(endpoint, Arc::new(TokenIndexes::default()), 1, false);
    follower.connected(0);
    for seq in 0..HELD / PROMPT {
        follower.live(0, &Bytes::new(), seq, batch(1, seq * PROMPT, 0, 0));
    }
    follower
}

/// Stores and removals in equal numbers, oldest out, as an engine does whose cache is full. Items are blocks stored or
/// removed.
#[divan::bench(sample_count = 200, sample_size = 1)]
fn apply(bencher: Bencher<'_, '_>) {
    let mut follower = follower();
    let mut seq = HELD / PROMPT;
    let (mut next, mut oldest) = (seq * PROMPT, 0);
    bencher
        .counter(ItemsCount::new(2 * REQUESTS * PROMPT))
        .with_inputs(|| {
            let payload = batch(REQUESTS, next, REQUESTS * PROMPT, oldest);
            next += REQUESTS * PROMPT;
            oldest += REQUESTS * PROMPT;
            payload
        })
        .bench_local_values(|payload| {
            follower.live(0, &Bytes::new(), seq, payload);
            seq += 1;
        });
}
