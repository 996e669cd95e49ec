//! Blocks whose parent is not known: where they belong will show when the parent is announced, or never.

use ahash::AHashMap;
use smallvec::SmallVec;

use crate::index::{Block, Tier};

/// Blocks of one engine that may wait; about 100 bytes each.
pub const MOST_PENDING: usize = 16_384;

type Key = (Tier, u64);

/// A forest that hangs below parents which nobody holds.
#[derive(Debug, Default)]
pub struct Pending {
    nodes: AHashMap<Key, Node>,
    children: AHashMap<Key, SmallVec<[u64; 2]>>,
    copies: [usize; Tier::ALL.len()],
}

#[derive(Clone, Copy, Debug)]
struct Node {
    content: u64,
    parent: u64,
    /// 0 for a block that was removed while others waited below it.
    copies: u32,
}

/// A waiting block that found its place, below `parent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its parent, which comes first.
    pub parent: u64,
    /// The block.
    pub block: Block,
    /// How many copies of it the engine has; 0 if it only leads to others.
    pub copies: u32,
}

impl Pending {
    /// Whether nothing waits, not even a block that was removed.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Blocks that wait, in all tiers.
    pub fn len(&self) -> usize {
        self.copies.iter().sum()
    }

    /// Blocks that wait in `tier`.
    pub fn len_in(&self, tier: Tier) -> usize {
        self.copies[tier as usize]
    }

    /// `blocks` follow each other, the first after `parent`, which is not held. If there are too many, all waiting blocks
    /// are dropped; how many is the error.
    pub fn add(&mut self, tier: Tier, mut parent: u64, blocks: &[Block]) -> Result<(), usize> {
        if self.nodes.len() + blocks.len() > MOST_PENDING {
            return Err(self.clear() + blocks.len());
        }
        for block in blocks {
            self.copies[tier as usize] += 1;
            let fresh = Node { content: block.content, parent, copies: 0 };
            let node = self.nodes.entry((tier, block.name)).or_insert_with(|| {
                self.children.entry((tier, parent)).or_default().push(block.name);
                fresh
            });
            node.copies += 1;
            parent = block.name;
        }
        Ok(())
    }

    /// One copy of a waiting block is gone. False if it does not wait.
    pub fn remove(&mut self, tier: Tier, name: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&(tier, name)).filter(|node| node.copies > 0) else {
            return false;
        };
        node.copies -= 1;
        self.copies[tier as usize] -= 1;
        self.trim(tier, name);
        true
    }

    /// Forgets a node that is no block any more and leads nowhere, and its parents like that.
    fn trim(&mut self, tier: Tier, mut name: u64) {
        while self.nodes.get(&(tier, name)).is_some_and(|node| node.copies == 0)
            && !self.children.contains_key(&(tier, name))
        {
            let Some(Node { parent, .. }) = self.nodes.remove(&(tier, name)) else { return };
            if let Some(siblings) = self.children.get_mut(&(tier, parent)) {
                siblings.retain(|sibling| *sibling != name);
                if siblings.is_empty() {
                    self.children.remove(&(tier, parent));
                }
            }
            name = parent;
        }
    }

    /// `parent` is held now: takes everything below it out, parents before children.
    pub fn take_below(&mut self, tier: Tier, parent: u64) -> Vec<Found> {
        let mut found = Vec::new();
        let mut open = vec![parent];
        while let Some(parent) = open.pop() {
            for name in self.children.remove(&(tier, parent)).unwrap_or_default() {
                if let Some(node) = self.nodes.remove(&(tier, name)) {
                    self.copies[tier as usize] -= node.copies as usize;
                    let block = Block { name, content: node.content };
                    found.push(Found { parent, block, copies: node.copies });
                    open.push(name);
                }
            }
        }
        found
    }

    /// Drops everything; how many blocks that were.
    pub fn clear(&mut self) -> usize {
        let dropped = self.len();
        self.copies = Default::default();
        self.nodes.clear();
        self.children.clear();
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(names: std::ops::Range<u64>) -> Vec<Block> {
        names.map(|name| Block { name, content: name + 100 }).collect()
    }

    #[test]
    fn what_waits_comes_out_below_its_parent_with_its_copies() {
        let mut pending = Pending::default();
        pending.add(Tier::Gpu, 1, &blocks(2..5)).unwrap();
        pending.add(Tier::Gpu, 3, &blocks(4..5)).unwrap();
        pending.add(Tier::Cpu, 1, &blocks(7..8)).unwrap();
        assert!(pending.remove(Tier::Gpu, 3));
        assert!(!pending.remove(Tier::Gpu, 3), "its only copy is gone");
        assert_eq!(pending.len(), 4);
        let found = pending.take_below(Tier::Gpu, 1);
        let shown: Vec<_> = found.iter().map(|f| (f.parent, f.block.name, f.copies)).collect();
        assert_eq!(shown, [(1, 2, 1), (2, 3, 0), (3, 4, 2)]);
        assert_eq!((pending.len(), pending.is_empty()), (1, false));
    }

    #[test]
    fn what_leads_nowhere_is_forgotten() {
        let mut pending = Pending::default();
        pending.add(Tier::Gpu, 1, &blocks(2..5)).unwrap();
        for name in [2, 3, 4] {
            assert!(pending.remove(Tier::Gpu, name));
        }
        assert!(pending.is_empty() && pending.children.is_empty());
    }

    #[test]
    fn too_many_are_dropped_and_counted() {
        let mut pending = Pending::default();
        pending.add(Tier::Gpu, 0, &blocks(1..MOST_PENDING as u64 + 1)).unwrap();
        assert_eq!(pending.add(Tier::Gpu, 90_000, &blocks(90_001..90_002)), Err(MOST_PENDING + 1));
        assert!(pending.is_empty());
    }
}
