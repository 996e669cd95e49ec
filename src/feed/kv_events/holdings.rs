//! What one engine holds, written to the index: copies counted, so that a block goes with its last copy.
//!
//! vLLM does not share equal blocks: it announces the same hash once for every copy it makes, and as often that one is gone.
//! Nearly all blocks have one copy, and of those the index alone knows. Only further copies are counted here. An engine with
//! several data-parallel ranks has a cache for each rank and one name in the index, so there every rank's blocks are listed.

use ahash::{AHashMap, AHashSet};

use super::pending::Pending;
use crate::index::{Block, BlockIndex, EventIndex, Tier};
use crate::state::endpoint::Holder;

/// The blocks of one engine.
#[derive(Debug)]
pub struct Holdings {
    holder: Holder,
    ranks: Vec<Rank>,
    /// Removed and still in the index: vLLM removes blocks one event each, and the index takes many at once far quicker.
    gone: [Vec<u64>; Tier::ALL.len()],
}

#[derive(Debug, Default)]
struct Rank {
    /// Copies beyond the first.
    more: AHashMap<(Tier, u64), u32>,
    /// Every block, where there are several ranks.
    all: Option<AHashSet<(Tier, u64)>>,
    pending: Pending,
}

/// What became of blocks that were announced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Blocks whose parent is not known: they wait.
    pub pending: usize,
    /// Waiting blocks that were given up, since too many wait.
    pub dropped: usize,
}

impl Holdings {
    /// Nothing, of an engine with so many ranks.
    pub fn new(holder: Holder, ranks: usize) -> Self {
        let rank = || Rank { all: (ranks > 1).then(AHashSet::new), ..Rank::default() };
        Self { holder, ranks: (0..ranks.max(1)).map(|_| rank()).collect(), gone: Default::default() }
    }

    /// Data-parallel ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Blocks that wait for their parent.
    pub fn pending(&self) -> usize {
        self.ranks.iter().map(|rank| rank.pending.len()).sum()
    }

    /// Blocks of one rank that wait for their parent in `tier`.
    pub fn pending_in(&self, rank: usize, tier: Tier) -> usize {
        self.ranks[rank].pending.len_in(tier)
    }

    fn holds(&self, index: &EventIndex, rank: usize, tier: Tier, name: u64) -> bool {
        match &self.ranks[rank].all {
            Some(all) => all.contains(&(tier, name)),
            None => index.uses(tier) && index.tier(tier).holds(self.holder, name),
        }
    }

    /// `rank` announces `blocks`, which follow each other, the first after `parent`.
    ///
    /// A chain from its very start of which every block is held already raises no count: an engine in
    /// `kv_cache_report_mode: full` announces so what a request used again, and will not remove it once more. A true second
    /// copy of a whole chain looks the same; it is then forgotten with its first copy, which promises too little, not too
    /// much.
    pub fn store(
        &mut self,
        index: &EventIndex,
        rank: usize,
        tier: Tier,
        parent: Option<u64>,
        blocks: &[Block],
    ) -> Outcome {
        self.flush(index);
        let mut outcome = Outcome::default();
        if parent.is_none() && blocks.iter().all(|block| self.holds(index, rank, tier, block.name)) {
            return outcome;
        }
        let (mut at, mut before) = (0, parent);
        while let Some(block) = blocks.get(at) {
            if self.holds(index, rank, tier, block.name) {
                *self.ranks[rank].more.entry((tier, block.name)).or_default() += 1;
                at += 1;
            } else {
                let held = |block: &Block| self.holds(index, rank, tier, block.name);
                let end = at + 1 + blocks[at + 1..].iter().take_while(|block| !held(block)).count();
                self.store_new(index, rank, tier, before, &blocks[at..end], &mut outcome);
                at = end;
            }
            before = Some(blocks[at - 1].name);
        }
        outcome
    }

    /// Stores blocks that `rank` does not hold, or lets them wait.
    fn store_new(
        &mut self,
        index: &EventIndex,
        rank: usize,
        tier: Tier,
        parent: Option<u64>,
        blocks: &[Block],
        outcome: &mut Outcome,
    ) {
        match (index.store(tier, self.holder, parent, blocks), parent) {
            (Ok(()), _) => {
                let Rank { all, pending, .. } = &mut self.ranks[rank];
                if let Some(all) = all {
                    all.extend(blocks.iter().map(|block| (tier, block.name)));
                }
                if !pending.is_empty() {
                    for block in blocks {
                        self.adopt(index, rank, tier, block.name);
                    }
                }
            }
            (Err(_), Some(parent)) => match self.ranks[rank].pending.add(tier, parent, blocks) {
                Ok(()) => outcome.pending += blocks.len(),
                Err(dropped) => outcome.dropped += dropped,
            },
            // The seat has another occupant: this endpoint is gone.
            (Err(_), None) => {}
        }
    }

    /// Stores what waited below `parent`, which is held now.
    fn adopt(&mut self, index: &EventIndex, rank: usize, tier: Tier, parent: u64) {
        let found = self.ranks[rank].pending.take_below(tier, parent);
        let mut gone = Vec::new();
        for found in &found {
            let key = (tier, found.block.name);
            let held = self.holds(index, rank, tier, found.block.name);
            if !held && index.store(tier, self.holder, Some(found.parent), &[found.block]).is_err() {
                continue;
            }
            let further = if held { found.copies } else { found.copies.saturating_sub(1) };
            let Rank { more, all, .. } = &mut self.ranks[rank];
            if further > 0 {
                *more.entry(key).or_default() += further;
            }
            if held {
                continue;
            }
            if found.copies == 0 {
                gone.push(found.block.name);
            } else if let Some(all) = all {
                all.insert(key);
            }
        }
        // They had to be there for those below them to find their place.
        gone.retain(|name| !self.held_elsewhere(rank, tier, *name));
        if !gone.is_empty() {
            index.tier(tier).remove(self.holder, &gone);
        }
    }

    fn held_elsewhere(&self, rank: usize, tier: Tier, name: u64) -> bool {
        let others = self.ranks.iter().enumerate().filter(|(other, _)| *other != rank);
        others.filter_map(|(_, rank)| rank.all.as_ref()).any(|all| all.contains(&(tier, name)))
    }

    /// Takes what was removed out of the index.
    pub fn flush(&mut self, index: &EventIndex) {
        for tier in Tier::ALL {
            let gone = &mut self.gone[tier as usize];
            if !gone.is_empty() {
                index.tier(tier).remove(self.holder, gone);
                gone.clear();
            }
        }
    }

    /// One copy is gone. False if `rank` never announced it. The index follows with the next [`flush`](Self::flush) or
    /// store.
    pub fn remove(&mut self, index: &EventIndex, rank: usize, tier: Tier, name: u64) -> bool {
        let key = (tier, name);
        let Rank { more, pending, .. } = &mut self.ranks[rank];
        if !more.is_empty()
            && let Some(copies) = more.get_mut(&key)
        {
            *copies -= 1;
            if *copies == 0 {
                more.remove(&key);
            }
            return true;
        }
        if !pending.is_empty() && pending.remove(tier, name) {
            return true;
        }
        if !self.holds(index, rank, tier, name) {
            return false;
        }
        if let Some(all) = &mut self.ranks[rank].all {
            all.remove(&key);
        }
        if !self.held_elsewhere(rank, tier, name) {
            self.gone[tier as usize].push(name);
        }
        true
    }

    /// `rank` holds nothing. How many blocks waited in vain.
    pub fn clear(&mut self, index: &EventIndex, rank: usize) -> usize {
        self.flush(index);
        let Rank { more, all, pending } = &mut self.ranks[rank];
        more.clear();
        let dropped = pending.clear();
        match all.as_mut().map(std::mem::take) {
            None => index.clear(self.holder),
            Some(all) => {
                for (tier, name) in all {
                    if !self.held_elsewhere(rank, tier, name) {
                        index.tier(tier).remove(self.holder, &[name]);
                    }
                }
            }
        }
        dropped
    }
}

#[cfg(test)]
mod tests;
