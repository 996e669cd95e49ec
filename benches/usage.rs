//! Time to read the usage of a stream of 200 events.

#![allow(clippy::format_push_string, reason = "the input is made once")]

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use pilotfish::usage::{Forward, Scanner};

fn main() {
    divan::main();
}

fn stream(usage_everywhere: bool) -> Vec<u8> {
    let mut body = String::new();
    for n in 0..200 {
        let usage = if usage_everywhere {
            format!(
                ",\"usage\":{{\"prompt_tokens\":62,\"total_tokens\":{},\"completion_tokens\":{n}}}",
                62 + n
            )
        } else {
            String::new()
        };
        body += &format!(
            "data: {{\"id\":\"chatcmpl-9e1de64555477387\",\"object\":\"chat.completion.chunk\",\"created\":1795978618,\"model\":\"tiny\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\" word\"}},\"logprobs\":null,\"finish_reason\":null,\"token_ids\":null}}]{usage}}}\n\n"
        );
    }
    body += "data: {\"id\":\"chatcmpl-9e1de64555477387\",\"choices\":[],\"usage\":{\"prompt_tokens\":62,\"total_tokens\":262,\"completion_tokens\":200}}\n\ndata: [DONE]\n\n";
    body.into_bytes()
}

fn run(bencher: Bencher<'_, '_>, body: &[u8], size: usize, withhold: bool) {
    bencher.counter(BytesCount::new(body.len())).bench_local(|| {
        let mut scanner = Scanner::new(Some("text/event-stream"), None, withhold);
        let mut replaced = 0;
        for chunk in black_box(body).chunks(size) {
            if let Forward::Replaced(bytes) = scanner.push(chunk) {
                replaced += bytes.len();
            }
        }
        scanner.finish();
        (scanner.usage(), replaced)
    });
}

/// One event a chunk is how engines stream; 64 KiB is what a slow client sees; 100 bytes split every event.
const CHUNK_SIZES: [usize; 2] = [100, 64 << 10];

#[divan::bench(args = CHUNK_SIZES)]
fn usage_at_the_end(bencher: Bencher<'_, '_>, size: usize) {
    run(bencher, &stream(false), size, false);
}

#[divan::bench(args = CHUNK_SIZES)]
fn usage_in_every_event(bencher: Bencher<'_, '_>, size: usize) {
    run(bencher, &stream(true), size, false);
}

#[divan::bench(args = CHUNK_SIZES)]
fn usage_withheld(bencher: Bencher<'_, '_>, size: usize) {
    run(bencher, &stream(false), size, true);
}

#[divan::bench]
fn one_event_a_chunk(bencher: Bencher<'_, '_>) {
    let body = stream(false);
    let chunks: Vec<&[u8]> = body.split_inclusive(|byte| *byte == b'\n').collect();
    // Each event with its blank line.
    let events: Vec<Vec<u8>> = chunks.chunks(2).map(<[&[u8]]>::concat).collect();
    bencher.counter(BytesCount::new(body.len())).bench_local(|| {
        let mut scanner = Scanner::new(Some("text/event-stream"), None, true);
        for event in black_box(&events) {
            black_box(scanner.push(event));
        }
        scanner.usage()
    });
}
