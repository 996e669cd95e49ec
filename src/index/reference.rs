//! The index as a definition: for every holder the path of contents that leads to each of its blocks, nothing clever.
//! The real one must give the same depths.

use std::collections::{BTreeMap, BTreeSet};

use super::{Block, UnknownParent};

/// Blocks of one holder: the path from the start of the chain to the block, by name.
type Held = BTreeMap<u64, Vec<u64>>;

/// All holders by slot.
#[derive(Clone, Debug, Default)]
pub struct ReferenceIndex {
    holders: BTreeMap<u64, Held>,
}

impl ReferenceIndex {
    /// See [`super::BlockIndex::store`].
    pub fn store(&mut self, slot: u64, parent: Option<u64>, blocks: &[Block]) -> Result<(), UnknownParent> {
        let held = self.holders.entry(slot).or_default();
        let mut path = match parent {
            Some(name) => held.get(&name).ok_or(UnknownParent)?.clone(),
            None => Vec::new(),
        };
        for block in blocks {
            path.push(block.content);
            held.insert(block.name, path.clone());
        }
        Ok(())
    }

    /// See [`super::BlockIndex::remove`].
    pub fn remove(&mut self, slot: u64, names: &[u64]) {
        if let Some(held) = self.holders.get_mut(&slot) {
            for name in names {
                held.remove(name);
            }
        }
    }

    /// See [`super::BlockIndex::clear`].
    pub fn clear(&mut self, slot: u64) {
        self.holders.remove(&slot);
    }

    /// Leading blocks of `contents` that `slot` holds.
    pub fn depth(&self, slot: u64, contents: &[u64]) -> u32 {
        let Some(held) = self.holders.get(&slot) else { return 0 };
        let paths: BTreeSet<&[u64]> = held.values().map(Vec::as_slice).collect();
        (1..=contents.len()).take_while(|&depth| paths.contains(&contents[..depth])).count() as u32
    }

    /// Blocks that `slot` holds.
    pub fn blocks_of(&self, slot: u64) -> usize {
        self.holders.get(&slot).map_or(0, BTreeMap::len)
    }
}
