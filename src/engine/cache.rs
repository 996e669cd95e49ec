//! The KV cache as block arithmetic: blocks held by live requests, blocks kept for reuse, least recently used first out.

use std::collections::BTreeMap;

use ahash::AHashMap;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::events::{Announcement, Stored};

/// Chain hash of a full block: it stands for the block and for everything before it.
pub type BlockHash = u64;

/// One block that a request holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// Full and shared through the prefix cache.
    Shared(BlockHash),
    /// Partly filled, or a copy of a block that was already cached.
    Private,
}

/// Chain start of a request: nothing is shared between adapters, nor between different `cache_salt` values.
pub fn chain_start(adapter: &str, salt: &str) -> BlockHash {
    xxh3_64_with_seed(salt.as_bytes(), xxh3_64(adapter.as_bytes()))
}

/// Hash of a block of tokens after `parent`.
pub fn chain(parent: BlockHash, tokens: &[u32], scratch: &mut Vec<u8>) -> BlockHash {
    scratch.clear();
    scratch.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    xxh3_64_with_seed(scratch, parent)
}

struct Entry {
    holders: u32,
    idle_since: u64,
}

/// All blocks of one engine.
pub struct BlockPool {
    capacity: u64,
    held: u64,
    entries: AHashMap<BlockHash, Entry>,
    idle: BTreeMap<u64, BlockHash>,
    clock: u64,
    announcements: Vec<Announcement>,
}

impl BlockPool {
    /// An empty pool of `capacity` blocks.
    pub fn new(capacity: u64) -> Self {
        Self {
            capacity,
            held: 0,
            entries: AHashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            announcements: Vec::new(),
        }
    }

    /// Share of the blocks that live requests hold, 0 to 1; cached blocks without a holder do not count.
    pub fn usage(&self) -> f64 {
        self.held as f64 / self.capacity as f64
    }

    /// Number of leading hashes that are cached.
    pub fn cached_prefix(&self, hashes: impl Iterator<Item = BlockHash>) -> usize {
        hashes.take_while(|hash| self.entries.contains_key(hash)).count()
    }

    /// Takes the cached blocks `shared` and `fresh` new ones for a request, or nothing when they do not fit.
    pub fn take(&mut self, shared: &[BlockHash], fresh: u64) -> bool {
        let revived =
            shared.iter().filter(|hash| self.entries.get(hash).is_some_and(|e| e.holders == 0)).count()
                as u64;
        if self.held + revived + fresh > self.capacity {
            return false;
        }
        for hash in shared {
            self.hold(*hash);
        }
        self.held += fresh;
        self.evict();
        true
    }

    /// Announces that a private block became full. Answers what the holder has from now on.
    pub fn fill(&mut self, hash: BlockHash) -> Block {
        if self.entries.contains_key(&hash) {
            return Block::Private;
        }
        self.entries.insert(hash, Entry { holders: 1, idle_since: 0 });
        Block::Shared(hash)
    }

    /// Gives back a request's blocks. The tail is the first to be evicted later, as in vLLM.
    pub fn release(&mut self, blocks: &[Block]) {
        for block in blocks.iter().rev() {
            match block {
                Block::Private => self.held -= 1,
                Block::Shared(hash) => {
                    self.clock += 1;
                    let Some(entry) = self.entries.get_mut(hash) else { continue };
                    entry.holders -= 1;
                    if entry.holders == 0 {
                        entry.idle_since = self.clock;
                        self.idle.insert(self.clock, *hash);
                        self.held -= 1;
                    }
                }
            }
        }
    }

    /// Forgets every block that nobody holds.
    pub fn clear_idle(&mut self) {
        let idle = std::mem::take(&mut self.idle);
        for hash in idle.values() {
            self.entries.remove(hash);
        }
        if self.entries.is_empty() {
            self.announcements.push(Announcement::Cleared);
        } else {
            self.announcements.extend(idle.into_values().map(Announcement::Removed));
        }
    }

    /// Announces that blocks of one request became full and are cached.
    pub fn announce(&mut self, stored: Stored) {
        self.announcements.push(Announcement::Stored(stored));
    }

    /// What happened since the last call.
    pub fn take_announcements(&mut self) -> Vec<Announcement> {
        std::mem::take(&mut self.announcements)
    }

    fn hold(&mut self, hash: BlockHash) {
        let Some(entry) = self.entries.get_mut(&hash) else { return };
        if entry.holders == 0 {
            self.idle.remove(&entry.idle_since);
            self.held += 1;
        }
        entry.holders += 1;
    }

    fn evict(&mut self) {
        while self.held + self.idle.len() as u64 > self.capacity {
            let Some((_, hash)) = self.idle.pop_first() else { return };
            self.entries.remove(&hash);
            self.announcements.push(Announcement::Removed(hash));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(adapter: &str, salt: &str, tokens: &[u32]) -> Vec<BlockHash> {
        let mut parent = chain_start(adapter, salt);
        let mut scratch = Vec::new();
        let mut out = Vec::new();
        for block in tokens.chunks_exact(2) {
            parent = chain(parent, block, &mut scratch);
            out.push(parent);
        }
        out
    }

    fn fill_all(pool: &mut BlockPool, hashes: &[BlockHash]) -> Vec<Block> {
        hashes.iter().map(|hash| pool.fill(*hash)).collect()
    }

    #[test]
    fn a_hash_depends_on_the_prefix_the_adapter_and_the_salt() {
        let base = hashes("m", "", &[1, 2, 3, 4]);
        assert_eq!(base, hashes("m", "", &[1, 2, 3, 4]));
        assert_ne!(base[1], hashes("m", "", &[9, 2, 3, 4])[1]);
        assert_ne!(base[0], hashes("lora", "", &[1, 2])[0]);
        assert_ne!(base[0], hashes("m", "tenant", &[1, 2])[0]);
    }

    #[test]
    fn held_blocks_count_and_idle_ones_do_not() {
        let mut pool = BlockPool::new(4);
        let chain = hashes("m", "", &[1, 2, 3, 4]);
        assert!(pool.take(&[], 3));
        let mut blocks = fill_all(&mut pool, &chain);
        blocks.push(Block::Private);
        assert!((pool.usage() - 0.75).abs() < 1e-9);
        pool.release(&blocks);
        assert!(pool.usage().abs() < 1e-9);
        assert_eq!(pool.cached_prefix(chain.iter().copied()), 2);
    }

    #[test]
    fn a_shared_block_is_counted_once_and_stays_until_its_last_holder_leaves() {
        let mut pool = BlockPool::new(4);
        let chain = hashes("m", "", &[1, 2, 3, 4]);
        assert!(pool.take(&[], 2));
        let first = fill_all(&mut pool, &chain);
        assert!(pool.take(&chain, 2));
        assert!((pool.usage() - 1.0).abs() < 1e-9);
        assert!(!pool.take(&chain, 1));
        pool.release(&first);
        assert!((pool.usage() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_tail_of_the_oldest_request_goes_first() {
        let mut pool = BlockPool::new(3);
        let chain = hashes("m", "", &[1, 2, 3, 4, 5, 6]);
        assert!(pool.take(&[], 3));
        let blocks = fill_all(&mut pool, &chain);
        pool.release(&blocks);
        assert!(pool.take(&[], 1));
        assert_eq!(pool.cached_prefix(chain.iter().copied()), 2);
    }

    #[test]
    fn a_second_copy_of_a_block_stays_private() {
        let mut pool = BlockPool::new(4);
        let chain = hashes("m", "", &[1, 2]);
        assert!(pool.take(&[], 2));
        assert_eq!(pool.fill(chain[0]), Block::Shared(chain[0]));
        assert_eq!(pool.fill(chain[0]), Block::Private);
        pool.release(&[Block::Shared(chain[0]), Block::Private]);
        assert!(pool.usage().abs() < 1e-9);
    }
}
