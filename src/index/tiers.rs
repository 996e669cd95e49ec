//! What engines themselves announce: one chain index for each kind of memory they keep blocks in.

use std::sync::OnceLock;

use super::{Block, BlockIndex, ChainIndex, DepthSink, Size, UnknownParent};
use crate::state::endpoint::Holder;

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Device memory: a hit costs nothing.
    Gpu,
    /// Host memory: a hit costs a copy.
    Cpu,
    /// Disk or a store over the network: a hit costs a read.
    Disk,
}

impl Tier {
    /// Every tier, the fastest first.
    pub const ALL: [Tier; 3] = [Tier::Gpu, Tier::Cpu, Tier::Disk];

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Tier::Gpu => "gpu",
            Tier::Cpu => "cpu",
            Tier::Disk => "disk",
        }
    }
}

/// The index that engine events feed.
#[derive(Debug)]
pub struct EventIndex {
    tiers: [OnceLock<ChainIndex>; Tier::ALL.len()],
    most_blocks: usize,
}

impl EventIndex {
    /// An empty index that [is full](Self::is_full) with so many blocks, each counted once a holder.
    pub fn new(most_blocks: usize) -> Self {
        Self { tiers: Default::default(), most_blocks }
    }

    /// The index of one tier, for its writer.
    pub fn tier(&self, tier: Tier) -> &ChainIndex {
        self.tiers[tier as usize].get_or_init(ChainIndex::default)
    }

    /// Reports who holds the leading blocks in `tier`.
    pub fn score_into(&self, tier: Tier, contents: &[u64], sink: &mut DepthSink) {
        if let Some(index) = self.tiers[tier as usize].get() {
            index.score_into(contents, sink);
        }
    }

    /// Whether any engine ever announced a block in `tier`.
    pub fn uses(&self, tier: Tier) -> bool {
        self.tiers[tier as usize].get().is_some()
    }

    /// Stores blocks in `tier`; see [`BlockIndex::store`].
    pub fn store(
        &self,
        tier: Tier,
        holder: Holder,
        parent: Option<u64>,
        blocks: &[Block],
    ) -> Result<(), UnknownParent> {
        self.tier(tier).store(holder, parent, blocks)
    }

    /// `holder` holds nothing in any tier.
    pub fn clear(&self, holder: Holder) {
        self.tiers.iter().filter_map(OnceLock::get).for_each(|index| index.clear(holder));
    }

    /// Drops what is known of every endpoint but those whose slot is `live`.
    pub fn retain(&self, live: &dyn Fn(u64) -> bool) {
        self.tiers.iter().filter_map(OnceLock::get).for_each(|index| index.retain(live));
    }

    /// Blocks that `holder` holds in all tiers.
    pub fn blocks_of(&self, holder: Holder) -> usize {
        self.tiers.iter().filter_map(OnceLock::get).map(|index| index.blocks_of(holder)).sum()
    }

    /// Size of all tiers.
    pub fn size(&self) -> Size {
        self.tiers.iter().filter_map(OnceLock::get).map(BlockIndex::size).fold(
            Size::default(),
            |sum, size| Size { held: sum.held + size.held, bytes: sum.bytes + size.bytes },
        )
    }

    /// Whether no more may be stored: what engines announce beyond would be memory without bound.
    pub fn is_full(&self) -> bool {
        let held: usize = self.tiers.iter().filter_map(OnceLock::get).map(BlockIndex::held).sum();
        held >= self.most_blocks
    }
}
