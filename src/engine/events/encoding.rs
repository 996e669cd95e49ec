//! Batches as msgpack.

use rmp::encode;

use super::{Announcement, Stored};

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EventShape {
    /// Members by name, as vLLM writes them since 2026.
    Map,
    /// Members by place, as before.
    Array,
}

/// How block hashes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EventHashes {
    /// 64-bit numbers.
    Int,
    /// 32 bytes, of which the last eight are the number.
    Bytes,
}

/// What shapes a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub shape: EventShape,
    pub hashes: EventHashes,
    /// Tokens in a block as announced, and as they are.
    pub block_size: (u32, u32),
    /// Added to every hash.
    pub seed: u64,
}

/// Writing to memory cannot fail.
fn done<T, E>(_: Result<T, E>) {}

/// `[time, events, 0]`
pub(super) fn batch(time: f64, announcements: &[Announcement], style: Style) -> Vec<u8> {
    let mut out = Vec::new();
    done(encode::write_array_len(&mut out, 3));
    done(encode::write_f64(&mut out, time));
    done(encode::write_array_len(&mut out, announcements.len() as u32));
    for announcement in announcements {
        match announcement {
            Announcement::Stored(block) => stored(&mut out, block, style),
            Announcement::Removed(hash) => removed(&mut out, *hash, style),
            Announcement::Cleared => {
                head(&mut out, style, "AllBlocksCleared", 0);
            }
        }
    }
    done(encode::write_uint(&mut out, 0));
    out
}

/// The beginning of an event with so many further members.
fn head(out: &mut Vec<u8>, style: Style, kind: &str, members: u32) {
    match style.shape {
        EventShape::Array => done(encode::write_array_len(out, members + 1)),
        EventShape::Map => {
            done(encode::write_map_len(out, members + 1));
            text(out, "type");
        }
    }
    text(out, kind);
}

fn member(out: &mut Vec<u8>, style: Style, name: &str) {
    if style.shape == EventShape::Map {
        text(out, name);
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    done(encode::write_str(out, text));
}

fn text_or_nil(out: &mut Vec<u8>, value: &str) {
    if value.is_empty() { done(encode::write_nil(out)) } else { text(out, value) }
}

fn hash(out: &mut Vec<u8>, style: Style, hash: u64) {
    let hash = hash.wrapping_add(style.seed);
    match style.hashes {
        EventHashes::Int => done(encode::write_u64(out, hash)),
        EventHashes::Bytes => {
            let mut bytes = [0x5a; 32];
            bytes[24..].copy_from_slice(&hash.to_be_bytes());
            done(encode::write_bin(out, &bytes));
        }
    }
}

fn stored(out: &mut Vec<u8>, block: &Stored, style: Style) {
    head(out, style, "BlockStored", 10);
    member(out, style, "block_hashes");
    done(encode::write_array_len(out, block.hashes.len() as u32));
    block.hashes.iter().for_each(|name| hash(out, style, *name));
    member(out, style, "parent_block_hash");
    match block.parent {
        Some(parent) => hash(out, style, parent),
        None => done(encode::write_nil(out)),
    }
    member(out, style, "token_ids");
    let (announced, real) = style.block_size;
    done(encode::write_array_len(out, block.hashes.len() as u32 * announced));
    for tokens in block.tokens.chunks(real as usize) {
        for token in tokens.iter().cycle().take(announced as usize) {
            done(encode::write_uint(out, u64::from(*token)));
        }
    }
    member(out, style, "block_size");
    done(encode::write_uint(out, u64::from(announced)));
    member(out, style, "lora_id");
    if block.adapter.is_empty() {
        done(encode::write_nil(out));
    } else {
        done(encode::write_uint(out, 1));
    }
    member(out, style, "medium");
    text(out, "GPU");
    member(out, style, "lora_name");
    text_or_nil(out, &block.adapter);
    member(out, style, "extra_keys");
    extra_keys(out, block);
    member(out, style, "group_idx");
    done(encode::write_uint(out, 0));
    member(out, style, "kv_cache_spec_kind");
    text(out, "full_attention");
}

/// Of every block the adapter, of the first of a request its salt.
fn extra_keys(out: &mut Vec<u8>, block: &Stored) {
    done(encode::write_array_len(out, block.hashes.len() as u32));
    for at in 0..block.hashes.len() {
        let salt = if at == 0 && block.parent.is_none() { &*block.salt } else { "" };
        let keys = [&*block.adapter, salt];
        let keys = || keys.iter().filter(|key| !key.is_empty());
        if keys().count() == 0 {
            done(encode::write_nil(out));
            continue;
        }
        done(encode::write_array_len(out, keys().count() as u32));
        keys().for_each(|key| text(out, key));
    }
}

fn removed(out: &mut Vec<u8>, name: u64, style: Style) {
    head(out, style, "BlockRemoved", 3);
    member(out, style, "block_hashes");
    done(encode::write_array_len(out, 1));
    hash(out, style, name);
    member(out, style, "medium");
    text(out, "GPU");
    member(out, style, "group_idx");
    done(encode::write_uint(out, 0));
}
