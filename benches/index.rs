//! Who holds which blocks, at the size of a large fleet.

use std::sync::LazyLock;

use divan::{Bencher, black_box};
use pilotfish::index::{Block, BlockIndex, ChainIndex, DepthSink};
use pilotfish::prompt::blocks::chain_name;
use pilotfish::prompt::{Blocks, Namespace};
use pilotfish::state::endpoint::Holder;

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler<mimalloc::MiMalloc> = divan::AllocProfiler::new(mimalloc::MiMalloc);

fn main() {
    divan::main();
}

const ENDPOINTS: u32 = 1_000;
/// Blocks of a prompt of 32,768 tokens.
const PROMPT: u64 = 2_048;
/// Blocks of a system prompt of 6,000 tokens.
const SYSTEM: u64 = 375;
const SYSTEMS: u64 = 200;

/// A well-mixed number for every pair: the content of block `at` of text `text`.
fn content(text: u64, at: u64) -> u64 {
    let mut x = (text << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x.wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 32)
}

fn chain(contents: impl Iterator<Item = u64>) -> Vec<Block> {
    let mut previous = None;
    contents
        .map(|content| {
            let name = previous.map_or(content, |previous| chain_name(previous, content));
            previous = Some(name);
            Block { name, content }
        })
        .collect()
}

/// A session: a system prompt that others share, and its own turns behind it.
fn session(number: u64, own: u64) -> Vec<Block> {
    let system = number % SYSTEMS;
    let shared = (0..SYSTEM).map(move |at| content(system, at));
    chain(shared.chain((0..own).map(move |at| content(1_000_000 + number, at))))
}

/// An index in which every endpoint holds 20 system prompts, sessions of 20 to 100 blocks, and some long ones.
fn filled(each: usize) -> ChainIndex {
    let index = ChainIndex::default();
    for endpoint in 0..ENDPOINTS {
        let holder = Holder { seat: endpoint, slot: u64::from(endpoint) + 1 };
        let mut held = 0;
        let mut at = 0;
        while held < each {
            let number = u64::from(endpoint) * 20 + at % 20 + (at / 20) * u64::from(ENDPOINTS) * SYSTEMS;
            let own = if at % 20 == 19 { PROMPT - SYSTEM } else { 20 + (at * 7) % 80 };
            let blocks = session(number, own);
            let known = blocks.iter().take_while(|block| index.holds(holder, block.name)).count();
            let parent = known.checked_sub(1).map(|last| blocks[last].name);
            let stored = index.store(holder, parent, &blocks[known..]);
            assert!(stored.is_ok());
            held += blocks.len() - known;
            at += 1;
        }
    }
    let size = index.size();
    eprintln!("{} blocks held, {:.1} bytes each", size.held, size.bytes as f64 / size.held as f64);
    index
}

static TEN_MILLION: LazyLock<ChainIndex> = LazyLock::new(|| filled(10_000));
static HUNDRED_MILLION: LazyLock<ChainIndex> = LazyLock::new(|| filled(100_000));

fn lookup(bencher: Bencher<'_, '_>, index: &ChainIndex) {
    // Long sessions, each at another endpoint, so that what is looked up is not in the cache of the processor already.
    let prompts: Vec<Vec<u64>> = (0..64u64)
        .map(|n| session(n * 15 * 20 + 19, PROMPT - SYSTEM).iter().map(|block| block.content).collect())
        .collect();
    let mut sink = DepthSink::default();
    for prompt in &prompts {
        sink.begin();
        index.score_into(prompt, &mut sink);
        assert_eq!(u64::from(sink.deepest()), PROMPT, "the prompt is held whole somewhere");
    }
    let mut at = 0;
    bencher.bench_local(|| {
        at = (at + 1) % prompts.len();
        sink.begin();
        index.score_into(black_box(&prompts[at]), &mut sink);
        sink.holders()
    });
}

#[divan::bench]
fn lookup_2048_blocks_of_10_million(bencher: Bencher<'_, '_>) {
    lookup(bencher, &TEN_MILLION);
}

/// Needs 8 GB and some minutes: `INDEX_100M=1 cargo bench --bench index`.
#[divan::bench(ignore = std::env::var_os("INDEX_100M").is_none())]
fn lookup_2048_blocks_of_100_million(bencher: Bencher<'_, '_>) {
    lookup(bencher, &HUNDRED_MILLION);
}

#[divan::bench]
fn hash_32768_tokens_into_blocks_of_16(bencher: Bencher<'_, '_>) {
    let ids: Vec<u32> = (0..32_768).collect();
    bencher.bench_local(|| Blocks::of_tokens(black_box(&ids), 16, Namespace::default()));
}

#[divan::bench]
fn store_and_remove_a_prompt_of_2048_blocks(bencher: Bencher<'_, '_>) {
    let holder = Holder { seat: ENDPOINTS, slot: 1_000_000 };
    let blocks = session(77_777_777, PROMPT - SYSTEM);
    let names: Vec<u64> = blocks.iter().map(|block| block.name).collect();
    let index = &*TEN_MILLION;
    bencher.counter(divan::counter::ItemsCount::new(2 * PROMPT)).bench_local(|| {
        let stored = index.store(holder, None, &blocks);
        index.remove(holder, &names);
        stored
    });
}
