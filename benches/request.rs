//! Time to read a chat body, to walk its canonical text and to change its model.

#![allow(clippy::unwrap_used, reason = "a benchmark whose input is wrong has to stop")]

use std::fmt::Write;
use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use pilotfish::request::{Edits, parse};

fn main() {
    divan::main();
}

const PATH: &str = "/v1/chat/completions";

/// A conversation of turns of 2 KB (or one of 1 KB); the escaped one is code, with a line break every 40 bytes.
fn body(kilobytes: usize, escaped: bool) -> Vec<u8> {
    let line = if escaped {
        "    let answer = \\\"forty two\\\"; // ok\\n"
    } else {
        "The quick brown fox jumps over the lazy dog. "
    };
    let turn = (kilobytes << 10).min(2048) - 64;
    let mut messages = String::new();
    while messages.len() + turn < kilobytes << 10 {
        let role = if messages.is_empty() { "system" } else { "user" };
        let comma = if messages.is_empty() { "" } else { "," };
        let text = line.repeat(turn / line.len());
        write!(messages, "{comma}{{\"role\":\"{role}\",\"content\":\"{text}\"}}").unwrap();
    }
    format!("{{\"model\":\"llama\",\"stream\":true,\"max_tokens\":256,\"messages\":[{messages}]}}")
        .into_bytes()
}

const SHAPES: [(usize, bool); 4] = [(1, false), (1, true), (128, false), (128, true)];

#[divan::bench(args = SHAPES)]
fn parse_chat(bencher: Bencher<'_, '_>, (kilobytes, escaped): (usize, bool)) {
    let body = body(kilobytes, escaped);
    bencher
        .counter(BytesCount::new(body.len()))
        .bench_local(|| parse(PATH, Some("application/json"), black_box(&body)).unwrap());
}

#[divan::bench(args = SHAPES)]
fn render_chat(bencher: Bencher<'_, '_>, (kilobytes, escaped): (usize, bool)) {
    let body = body(kilobytes, escaped);
    let request = parse(PATH, None, &body).unwrap();
    bencher.counter(BytesCount::new(body.len())).bench_local(|| {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        request.prompt.render(&body, &mut |piece| hash.update(piece));
        hash.digest()
    });
}

#[divan::bench(args = [1, 128])]
fn rename_model(bencher: Bencher<'_, '_>, kilobytes: usize) {
    let body = body(kilobytes, false);
    let request = parse(PATH, None, &body).unwrap();
    bencher.with_inputs(|| body.chunks(16 << 10).map(<[u8]>::to_vec).collect::<Vec<_>>()).bench_local_values(
        |chunks| {
            let mut edits = Edits::new();
            request.rename_model("meta/llama-3", &mut edits);
            request.ask_for_usage(&mut edits);
            edits.apply_pieces(chunks, 64 << 10)
        },
    );
}
