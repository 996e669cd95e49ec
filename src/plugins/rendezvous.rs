//! Which endpoint a hash of the prompt's beginning chooses, so that equal beginnings meet at one endpoint without anybody
//! remembering anything.
//!
//! Every endpoint draws a number from the key and its own name; the highest wins (rendezvous hashing, weighted by
//! `ln u / w`). An endpoint that comes or goes moves only the keys it wins. A bound keeps a popular key from overloading its
//! winner: those above it are passed over, in the order of the draw.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::prompt::Blocks;
use crate::schedule::{Candidate, Cycle};
use crate::state::Endpoint;

/// Load above the mean at which an endpoint is passed over: consistent hashing with bounded loads uses 1.25.
const FACTOR: f64 = 1.25;
/// Blocks of the prompt that make the key: enough to tell conversations apart behind a short common head.
const KEY_BLOCKS: usize = 4;

/// The key of a prompt; none if nothing is known of it.
pub fn key(cx: &Cycle<'_>) -> Option<u64> {
    let prompt = cx.ask.prompt;
    let blocks = if prompt.text.is_empty() { &prompt.ids } else { &prompt.text };
    key_at(blocks, KEY_BLOCKS)
}

/// The name of block `depth` of a prompt, or of its last if it is shorter.
pub fn key_at(blocks: &Blocks, depth: usize) -> Option<u64> {
    let last = blocks.len().min(depth).checked_sub(1)?;
    blocks.names().get(last).copied()
}

/// An endpoint's draw for a key, above 0, at most 1: the highest wins.
pub fn draw(key: u64, endpoint: &Endpoint) -> f64 {
    // The name, not the slot: replicas and restarts of the picker choose alike.
    let hash = xxh3_64_with_seed(endpoint.destination.as_bytes(), key);
    let uniform = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    uniform.powf(1.0 / f64::from(endpoint.weight))
}

/// Most load an endpoint of weight `w` may have with one more: `ceil(factor x (all + 1) x w / sum of weights)`, in units of
/// requests, so that it is at least 1.
pub fn bound(factor: f64, all: f64, weight: f64, weights: f64) -> f64 {
    (factor * (all + 1.0) * weight / weights.max(f64::MIN_POSITIVE)).ceil().max(1.0)
}

/// The winner, the bound on requests observed; none if nothing is known of the prompt.
pub fn choice(cx: &Cycle<'_>, candidates: &[Candidate]) -> Option<usize> {
    let key = key(cx)?;
    let all: f64 = candidates.iter().map(|candidate| f64::from(candidate.load.requests())).sum();
    let weights: f64 = candidates.iter().map(|candidate| f64::from(cx.endpoint(candidate).weight)).sum();
    candidates
        .iter()
        .enumerate()
        .filter(|(_, candidate)| {
            let weight = f64::from(cx.endpoint(candidate).weight);
            f64::from(candidate.load.requests()) + 1.0 <= bound(FACTOR, all, weight, weights)
        })
        .map(|(at, candidate)| (at, draw(key, cx.endpoint(candidate))))
        .max_by(|a, b| a.1.total_cmp(&b.1))
        .map(|(at, _)| at)
}
