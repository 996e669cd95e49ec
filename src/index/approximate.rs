//! What endpoints are believed to hold because we sent it there: one LRU of block hashes an endpoint.
//!
//! A chain is entered from its deepest block to its first, so a block is always younger than every block that builds on
//! it and the LRU drops the deepest first. What an endpoint holds of a chain is therefore always a leading part of it,
//! and its length can be found by bisection.

use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::{Mutex, RwLock};

use crate::prompt::Blocks;
use crate::schedule::Candidate;
use crate::schedule::plugin::BlockNeeds;
use crate::state::{Endpoint, Pool};

/// Knowledge by endpoint slot, so that a reused address inherits nothing and readiness flaps lose nothing.
#[derive(Debug)]
pub struct ApproximateIndex {
    needs: BlockNeeds,
    endpoints: RwLock<AHashMap<u64, Arc<Mutex<Lru>>>>,
}

impl ApproximateIndex {
    /// An empty index.
    pub fn new(needs: BlockNeeds) -> Self {
        Self { needs, endpoints: RwLock::default() }
    }

    /// How it wants prompts cut.
    pub fn needs(&self) -> BlockNeeds {
        self.needs
    }

    /// Writes the depth of every candidate.
    pub fn depths(&self, blocks: &Blocks, pool: &Pool, candidates: &mut [Candidate]) {
        if blocks.is_empty() {
            return;
        }
        let endpoints = self.endpoints.read();
        for candidate in candidates {
            let slot = pool.members[candidate.member as usize].endpoint.slot;
            candidate.depth = endpoints.get(&slot).map_or(0, |lru| lru.lock().depth(&blocks.hashes));
        }
    }

    /// A request with these blocks was sent to `endpoint`.
    pub fn routed(&self, blocks: &Blocks, endpoint: &Endpoint) {
        if blocks.is_empty() {
            return;
        }
        let known = self.endpoints.read().get(&endpoint.slot).cloned();
        let lru = known.unwrap_or_else(|| {
            let mut endpoints = self.endpoints.write();
            Arc::clone(
                endpoints
                    .entry(endpoint.slot)
                    .or_insert_with(|| Arc::new(Mutex::new(Lru::new(self.needs.capacity)))),
            )
        });
        let mut lru = lru.lock();
        blocks.hashes.iter().rev().for_each(|&hash| lru.touch(hash));
    }

    /// Drops what is known of an endpoint: it is gone, or its process started anew.
    pub fn forget(&self, slot: u64) {
        self.endpoints.write().remove(&slot);
    }

    /// Drops what is known of every endpoint but those.
    pub fn retain(&self, live: impl Fn(u64) -> bool) {
        self.endpoints.write().retain(|&slot, _| live(slot));
    }

    /// Blocks remembered for an endpoint.
    pub fn blocks_of(&self, slot: u64) -> usize {
        self.endpoints.read().get(&slot).map_or(0, |lru| lru.lock().by_hash.len())
    }
}

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    hash: u64,
    newer: u32,
    older: u32,
}

/// A least-recently-used set of hashes, its nodes in one vector.
#[derive(Debug)]
struct Lru {
    capacity: usize,
    by_hash: AHashMap<u64, u32>,
    nodes: Vec<Node>,
    newest: u32,
    oldest: u32,
}

impl Lru {
    fn new(capacity: usize) -> Self {
        // Node numbers are u32.
        let capacity = capacity.clamp(1, NONE as usize - 1);
        Self { capacity, by_hash: AHashMap::new(), nodes: Vec::new(), newest: NONE, oldest: NONE }
    }

    fn depth(&self, hashes: &[u64]) -> u32 {
        hashes.partition_point(|hash| self.by_hash.contains_key(hash)) as u32
    }

    fn touch(&mut self, hash: u64) {
        if let Some(&at) = self.by_hash.get(&hash) {
            self.unlink(at);
            self.link_newest(at);
            return;
        }
        let at = if self.nodes.len() < self.capacity {
            self.nodes.push(Node { hash, newer: NONE, older: NONE });
            (self.nodes.len() - 1) as u32
        } else {
            let at = self.oldest;
            self.unlink(at);
            self.by_hash.remove(&self.nodes[at as usize].hash);
            self.nodes[at as usize].hash = hash;
            at
        };
        self.by_hash.insert(hash, at);
        self.link_newest(at);
    }

    fn unlink(&mut self, at: u32) {
        let Node { newer, older, .. } = self.nodes[at as usize];
        match newer {
            NONE => self.newest = older,
            newer => self.nodes[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.nodes[older as usize].newer = newer,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let node = &mut self.nodes[at as usize];
        node.newer = NONE;
        node.older = self.newest;
        match self.newest {
            NONE => self.oldest = at,
            newest => self.nodes[newest as usize].newer = at,
        }
        self.newest = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::endpoint::tests::endpoint;
    use proptest::prelude::*;

    const NEEDS: BlockNeeds = BlockNeeds { block_bytes: 4, max_blocks: 100, capacity: 8 };

    fn blocks(text: &str) -> Blocks {
        Blocks::of_text(NEEDS, "m", None, |sink| sink(text.as_bytes()))
    }

    fn depth(index: &ApproximateIndex, slot: u64, text: &str) -> u32 {
        index.endpoints.read().get(&slot).map_or(0, |lru| lru.lock().depth(&blocks(text).hashes))
    }

    #[test]
    fn the_deepest_blocks_go_first_and_a_forgotten_endpoint_holds_nothing() {
        let index = ApproximateIndex::new(NEEDS);
        let a = endpoint("a", "10.0.0.1:1");
        index.routed(&blocks("aaaabbbbccccdddd"), &a);
        assert_eq!(depth(&index, a.slot, "aaaabbbbccccdddd"), 4);
        assert_eq!(depth(&index, a.slot, "aaaabbbbXXXX"), 2);
        index.routed(&blocks("111122223333444455556666"), &a);
        assert_eq!(depth(&index, a.slot, "aaaabbbbccccdddd"), 2, "8 blocks fit, 10 were sent");
        assert_eq!(index.blocks_of(a.slot), 8);
        index.forget(a.slot);
        assert_eq!(depth(&index, a.slot, "aaaabbbb"), 0);
    }

    proptest! {
        /// The bisection equals a walk, since what is held is always a leading part.
        #[test]
        fn held_blocks_are_a_leading_part(prompts in prop::collection::vec("[ab]{0,60}", 1..30)) {
            let index = ApproximateIndex::new(NEEDS);
            let a = endpoint("a", "10.0.0.1:1");
            for prompt in &prompts {
                index.routed(&blocks(prompt), &a);
                for other in &prompts {
                    let hashes = blocks(other).hashes;
                    let endpoints = index.endpoints.read();
                    let walked = endpoints.get(&a.slot).map_or(0, |lru| {
                        let lru = lru.lock();
                        let held: Vec<bool> = hashes.iter().map(|h| lru.by_hash.contains_key(h)).collect();
                        let lead = held.iter().take_while(|h| **h).count();
                        assert!(held[lead..].iter().all(|h| !h), "a block is held without the one before it");
                        lead
                    });
                    drop(endpoints);
                    prop_assert_eq!(depth(&index, a.slot, other) as usize, walked);
                }
            }
        }
    }
}
