//! Who holds which prompt blocks.
//!
//! A prompt is a chain of blocks, each named by a hash. An index answers, for one chain, how many leading blocks every
//! endpoint holds. [`ChainIndex`] is fed by whoever knows: engine events feed one ([`EventIndex`]), our own picks another
//! ([`ApproximateIndex`]).

mod answers;
pub mod approximate;
pub mod chain;
pub mod depth;
pub mod knowledge;
mod lru;
#[cfg(test)]
pub mod reference;
pub mod shared;
pub mod tiers;

pub use approximate::ApproximateIndex;
pub use chain::ChainIndex;
pub use depth::DepthSink;
pub use knowledge::{Held, TextIndex, TokenIndexes};
pub use tiers::{EventIndex, Tier};

use crate::state::endpoint::Holder;

/// A block as its holder announces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// What the holder calls it when it removes it or builds on it; unique to the holder.
    pub name: u64,
    /// Hash of what is in it; equal contents on equal paths are the same block to a lookup.
    pub content: u64,
}

/// A store named a parent that its holder does not hold: where the blocks belong is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block to build on is not held")]
pub struct UnknownParent;

/// An index of chains. Operations of one holder must come in order; holders do not wait for each other, lookups wait for
/// nobody.
pub trait BlockIndex {
    /// Reports to `sink` every holder of at least the first block, with the number of leading blocks it holds.
    fn score_into(&self, contents: &[u64], sink: &mut DepthSink);

    /// `holder` holds `blocks`, which follow each other, the first after `parent` (`None`: at the start of a chain).
    fn store(&self, holder: Holder, parent: Option<u64>, blocks: &[Block]) -> Result<(), UnknownParent>;

    /// `holder` holds those no longer. Names it does not hold are ignored. What is deeper on their chains stays, but no
    /// lookup reaches it.
    fn remove(&self, holder: Holder, names: &[u64]);

    /// `holder` holds nothing, in time proportional to what it held.
    fn clear(&self, holder: Holder);

    /// Everyone holds nothing but those whose slot is `live`.
    fn retain(&self, live: &dyn Fn(u64) -> bool);

    /// Whether `holder` holds the block of that name.
    fn holds(&self, holder: Holder, name: u64) -> bool;

    /// Blocks that `holder` holds.
    fn blocks_of(&self, holder: Holder) -> usize;

    /// Blocks of all holders.
    fn held(&self) -> usize;

    /// Blocks and memory of all holders. Waits for every holder's operation under way.
    fn size(&self) -> Size;
}

/// How large an index is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Blocks, each counted once a holder.
    pub held: usize,
    /// Bytes of memory, estimated.
    pub bytes: usize,
}
