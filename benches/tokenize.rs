//! What token ids cost: a prompt seen before, a long one never seen, the next turn, and the chat template alone.
//!
//! With a real tokenizer if `scripts/tokenizers.py` fetched one, else with the small one of the tests.

#![allow(clippy::expect_used, reason = "a bench fails where it stands")]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use divan::{Bencher, black_box};
use pilotfish::prompt::token_cache::TokenCache;
use pilotfish::prompt::tokenize::prompt_ids;
use pilotfish::prompt::tokenizer::{Around, LocalTokenizer};
use pilotfish::request::Api;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const LONG: usize = 128 << 10;

fn main() {
    eprintln!("{}", folder().display());
    divan::main();
}

fn folder() -> PathBuf {
    let cache = std::env::var_os("PILOTFISH_CACHE").map(PathBuf::from).unwrap_or_default();
    let real = cache.join("tokenizers/qwen3");
    if real.exists() { real } else { PathBuf::from("tests/data/tokenizers/small") }
}

fn tokenizer() -> LocalTokenizer {
    LocalTokenizer::load(&folder()).expect("the tokenizer is there")
}

/// Code of this repository, `bytes` of it from `from` on: long enough not to repeat itself.
fn text(from: usize, bytes: usize) -> &'static str {
    static ALL: LazyLock<String> = LazyLock::new(|| {
        let mut text = String::new();
        add(Path::new("src"), &mut text);
        text
    });
    &ALL[from..from + bytes]
}

/// The ASCII of all sources, in the order of their names.
fn add(folder: &Path, text: &mut String) {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
        .expect("the sources")
        .map(|entry| entry.expect("a source").path())
        .collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            add(&path, text);
        } else {
            text.extend(std::fs::read_to_string(path).expect("a source").chars().filter(char::is_ascii));
        }
    }
}

fn cache() -> TokenCache {
    TokenCache::new(256 << 20)
}

/// A chat of so many turns whose messages make `bytes` together.
fn chat(turns: usize, bytes: usize) -> String {
    let messages: Vec<_> = (0..turns)
        .map(|turn| {
            let role = if turn % 2 == 0 { "user" } else { "assistant" };
            serde_json::json!({"role": role, "content": text(turn * bytes / turns, bytes / turns)})
        })
        .collect();
    serde_json::json!({"model": "m", "messages": messages}).to_string()
}

#[divan::bench]
fn repeated_body_128k(bencher: Bencher<'_, '_>) {
    let (tokenizer, cache, body) = (tokenizer(), cache(), chat(40, LONG));
    let ids = || prompt_ids(&tokenizer, &cache, Api::Chat, black_box(body.as_bytes()), None).expect("ids");
    ids();
    bencher.bench_local(ids);
}

#[divan::bench(sample_count = 20)]
fn cold_128k(bencher: Bencher<'_, '_>) {
    let (tokenizer, text) = (tokenizer(), text(0, LONG));
    bencher.with_inputs(cache).bench_local_values(|cache| {
        tokenizer.encode_cached(&cache, black_box(text), Around::Added).expect("ids")
    });
}

/// The conversation before is in the cache; a tenth is new.
#[divan::bench(sample_count = 20)]
fn next_turn_of_128k(bencher: Bencher<'_, '_>) {
    let (tokenizer, text) = (tokenizer(), text(0, LONG));
    let warm = || {
        let cache = cache();
        tokenizer.encode_cached(&cache, &text[..LONG / 10 * 9], Around::Added).expect("ids");
        cache
    };
    bencher.with_inputs(warm).bench_local_values(|cache| {
        tokenizer.encode_cached(&cache, black_box(text), Around::Added).expect("ids")
    });
}

/// Body to ids where all pieces are known and the body is not: JSON, template and look-ups.
#[divan::bench]
fn template_of_40_turns(bencher: Bencher<'_, '_>) {
    let (tokenizer, cache) = (tokenizer(), cache());
    let body = chat(40, 40 * 400);
    let mut number = 0_u32;
    bencher.bench_local(|| {
        number += 1;
        let body = format!("{},\"user\":\"{number}\"}}", &body[..body.len() - 1]);
        prompt_ids(&tokenizer, &cache, Api::Chat, black_box(body.as_bytes()), None).expect("ids")
    });
}
