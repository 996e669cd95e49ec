//! A least-recently-used set of hashes, its nodes in one vector.

use ahash::AHashMap;

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    hash: u64,
    newer: u32,
    older: u32,
}

/// The set. Chains are entered from their deepest block to their first, so a block is always younger than every block
/// that builds on it, and the deepest is dropped first: what is held of a chain is always a leading part of it.
#[derive(Debug)]
pub struct Lru {
    capacity: usize,
    by_hash: AHashMap<u64, u32>,
    nodes: Vec<Node>,
    newest: u32,
    oldest: u32,
    /// Nodes that hold nothing, after the capacity fell.
    vacant: Vec<u32>,
}

impl Lru {
    /// An empty set of at most `capacity` hashes, at least one.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: within_reach(capacity),
            by_hash: AHashMap::new(),
            nodes: Vec::new(),
            newest: NONE,
            oldest: NONE,
            vacant: Vec::new(),
        }
    }

    /// Hashes held.
    pub fn len(&self) -> usize {
        self.by_hash.len()
    }

    /// Most hashes held.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the capacity; hashes beyond it are dropped, the oldest first, and handed to `dropped`.
    pub fn set_capacity(&mut self, capacity: usize, dropped: &mut Vec<u64>) {
        self.capacity = within_reach(capacity);
        while self.len() > self.capacity {
            let at = self.drop_oldest(dropped);
            self.vacant.push(at);
        }
    }

    /// Whether it holds a hash.
    pub fn holds(&self, hash: u64) -> bool {
        self.by_hash.contains_key(&hash)
    }

    /// How many leading hashes of a chain are held.
    pub fn depth(&self, chain: &[u64]) -> usize {
        chain.partition_point(|hash| self.by_hash.contains_key(hash))
    }

    /// Enters a chain, or makes it young again. Hashes dropped in exchange are handed to `dropped`.
    pub fn enter(&mut self, chain: &[u64], dropped: &mut Vec<u64>) {
        chain.iter().rev().for_each(|&hash| self.touch(hash, dropped));
    }

    fn touch(&mut self, hash: u64, dropped: &mut Vec<u64>) {
        let at = if let Some(&at) = self.by_hash.get(&hash) {
            self.unlink(at);
            at
        } else {
            let at = if self.len() >= self.capacity {
                self.drop_oldest(dropped)
            } else if let Some(at) = self.vacant.pop() {
                at
            } else {
                self.nodes.push(Node { hash, newer: NONE, older: NONE });
                (self.nodes.len() - 1) as u32
            };
            self.nodes[at as usize].hash = hash;
            self.by_hash.insert(hash, at);
            at
        };
        self.link_newest(at);
    }

    fn drop_oldest(&mut self, dropped: &mut Vec<u64>) -> u32 {
        let at = self.oldest;
        let hash = self.nodes[at as usize].hash;
        self.unlink(at);
        self.by_hash.remove(&hash);
        dropped.push(hash);
        at
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

/// Node numbers are u32.
fn within_reach(capacity: usize) -> usize {
    capacity.clamp(1, NONE as usize - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn enter(lru: &mut Lru, chain: &[u64]) -> Vec<u64> {
        let mut dropped = Vec::new();
        lru.enter(chain, &mut dropped);
        dropped
    }

    #[test]
    fn the_deepest_of_the_oldest_goes_first() {
        let mut lru = Lru::new(4);
        assert!(enter(&mut lru, &[1, 2, 3]).is_empty());
        assert_eq!(enter(&mut lru, &[1, 9, 8]), [3]);
        assert_eq!(enter(&mut lru, &[7]), [2]);
        assert_eq!((lru.depth(&[1, 2]), lru.depth(&[1, 9, 8])), (1, 3));
    }

    #[test]
    fn a_chain_longer_than_the_capacity_keeps_its_head() {
        let mut lru = Lru::new(2);
        assert_eq!(enter(&mut lru, &[1, 2, 3, 4]), [4, 3]);
        assert_eq!(lru.depth(&[1, 2, 3, 4]), 2);
    }

    #[test]
    fn a_smaller_capacity_drops_at_once_and_a_larger_one_is_filled() {
        let mut lru = Lru::new(4);
        enter(&mut lru, &[1, 2, 3, 4]);
        let mut dropped = Vec::new();
        lru.set_capacity(2, &mut dropped);
        assert_eq!((dropped, lru.len()), (vec![4, 3], 2));
        lru.set_capacity(3, &mut Vec::new());
        assert!(enter(&mut lru, &[1, 2, 5]).is_empty());
        assert_eq!(enter(&mut lru, &[6]), [5]);
    }

    proptest! {
        /// A chain is named by its path, so equal names mean equal paths.
        #[test]
        fn what_is_held_of_a_chain_is_a_leading_part(
            chains in prop::collection::vec(prop::collection::vec(0u64..3, 1..12), 1..40), capacity in 1usize..12
        ) {
            let named = |path: &[u64]| -> Vec<u64> {
                path.iter().scan(1u64, |name, &step| { *name = *name * 4 + step + 1; Some(*name) }).collect()
            };
            let mut lru = Lru::new(capacity);
            for chain in &chains {
                enter(&mut lru, &named(chain));
                prop_assert!(lru.len() <= capacity);
                for other in &chains {
                    let names = named(other);
                    let held: Vec<bool> = names.iter().map(|name| lru.by_hash.contains_key(name)).collect();
                    let lead = held.iter().take_while(|held| **held).count();
                    prop_assert!(held[lead..].iter().all(|held| !held));
                    prop_assert_eq!(lru.depth(&names), lead);
                }
            }
        }
    }
}
