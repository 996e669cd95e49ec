//! The index of record: runs of consecutive blocks with one bit a holder, so that a lookup compares arrays, not entries.
//!
//! Behind it stands the crate `kv-index`: exact depths, holes included, about 64 bytes a block and holder, lookups without
//! locks or allocation. It knows 1,024 holders at most, so every 1,024 seats have an index of their own and a lookup asks
//! each that holds the first block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use kv_index::{ChainBlockMap, ContentHash, SequenceHash, StoredBlock};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::{Block, BlockIndex, DepthSink, Size, UnknownParent};
use crate::state::endpoint::Holder;

/// Holders of one `kv-index`.
const SHARD: usize = 1_024;
/// Bytes of a slot in a holder's map of names: key, place, tag.
const SLOT: usize = 17;

/// Chains of blocks and their holders.
#[derive(Debug, Default)]
pub struct ChainIndex {
    shards: ArcSwap<Vec<Arc<Shard>>>,
    growing: Mutex<()>,
}

struct Shard {
    chains: kv_index::ChainIndex,
    lanes: Box<[Lane]>,
    /// Seats that have a number in `chains`. They are numbered in order, so that number and place in `lanes` are the same.
    numbered: AtomicUsize,
    numbering: Mutex<()>,
}

/// One seat.
#[derive(Default)]
struct Lane {
    /// The slot of the occupant, 0 for nobody.
    occupant: AtomicU64,
    /// Where its blocks are. Locked for the length of one operation of the occupant.
    map: Mutex<ChainBlockMap>,
}

impl std::fmt::Debug for Shard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shard").field("blocks", &self.chains.current_size()).finish_non_exhaustive()
    }
}

impl Shard {
    fn new() -> Self {
        Self {
            chains: kv_index::ChainIndex::with_max_workers(SHARD),
            lanes: (0..SHARD).map(|_| Lane::default()).collect(),
            numbered: AtomicUsize::new(0),
            numbering: Mutex::new(()),
        }
    }

    /// Runs `body` on the lane of `holder` once its former occupant, if it is another, is gone. Slots only grow, so a
    /// holder with a smaller one is a former occupant itself: nothing is run for it.
    fn occupied<R>(&self, holder: Holder, body: impl FnOnce(u32, &mut ChainBlockMap) -> R) -> Option<R> {
        let at = holder.seat as usize % SHARD;
        self.number(at);
        let lane = &self.lanes[at];
        let mut map = lane.map.lock();
        let occupant = lane.occupant.load(Ordering::Relaxed);
        if holder.slot < occupant {
            return None;
        }
        if holder.slot > occupant {
            // First nobody's, then empty, then the new one's: a lookup never credits the new with the old one's blocks.
            lane.occupant.store(0, Ordering::Release);
            self.chains.apply_cleared(at as u32, &mut map);
            lane.occupant.store(holder.slot, Ordering::Release);
        }
        Some(body(at as u32, &mut map))
    }

    /// Runs `body` on the lane of `holder` if it is the occupant.
    fn if_occupied<R>(&self, holder: Holder, body: impl FnOnce(u32, &mut ChainBlockMap) -> R) -> Option<R> {
        let at = holder.seat as usize % SHARD;
        let lane = &self.lanes[at];
        let mut map = lane.map.lock();
        (lane.occupant.load(Ordering::Relaxed) == holder.slot).then(|| body(at as u32, &mut map))
    }

    fn number(&self, at: usize) {
        if self.numbered.load(Ordering::Acquire) > at {
            return;
        }
        let _numbering = self.numbering.lock();
        for next in self.numbered.load(Ordering::Relaxed)..=at {
            let number = self.chains.intern_worker(&next.to_string());
            debug_assert_eq!(
                number.ok(),
                Some(next as u32),
                "numbers are given in order and never given back"
            );
            self.numbered.store(next + 1, Ordering::Release);
        }
    }
}

impl ChainIndex {
    fn shard_of(&self, holder: Holder) -> Option<Arc<Shard>> {
        self.shards.load().get(holder.seat as usize / SHARD).cloned()
    }

    fn shard_for(&self, holder: Holder) -> Arc<Shard> {
        if let Some(shard) = self.shard_of(holder) {
            return shard;
        }
        let at = holder.seat as usize / SHARD;
        let _growing = self.growing.lock();
        let mut shards = Vec::clone(&self.shards.load());
        while shards.len() <= at {
            shards.push(Arc::new(Shard::new()));
        }
        let shard = Arc::clone(&shards[at]);
        self.shards.store(Arc::new(shards));
        shard
    }
}

impl BlockIndex for ChainIndex {
    fn score_into(&self, contents: &[u64], sink: &mut DepthSink) {
        for (at, shard) in self.shards.load().iter().enumerate() {
            shard.chains.score_into(
                contents,
                |content| *content,
                false,
                |number, depth| {
                    let slot = shard.lanes[number as usize].occupant.load(Ordering::Acquire);
                    sink.report(Holder { seat: (at * SHARD) as u32 + number, slot }, depth);
                },
            );
        }
    }

    fn store(&self, holder: Holder, parent: Option<u64>, blocks: &[Block]) -> Result<(), UnknownParent> {
        let stored: SmallVec<[StoredBlock; 64]> = blocks
            .iter()
            .map(|block| StoredBlock {
                seq_hash: SequenceHash(block.name),
                content_hash: ContentHash(block.content),
            })
            .collect();
        let shard = self.shard_for(holder);
        let parent = parent.map(SequenceHash);
        shard
            .occupied(holder, |number, map| shard.chains.apply_stored(number, &stored, parent, map).ok())
            .flatten()
            .ok_or(UnknownParent)
    }

    fn remove(&self, holder: Holder, names: &[u64]) {
        let names: SmallVec<[SequenceHash; 64]> = names.iter().copied().map(SequenceHash).collect();
        if let Some(shard) = self.shard_of(holder) {
            shard.if_occupied(holder, |number, map| shard.chains.apply_removed(number, &names, map));
        }
    }

    fn clear(&self, holder: Holder) {
        if let Some(shard) = self.shard_of(holder) {
            shard.if_occupied(holder, |number, map| shard.chains.apply_cleared(number, map));
        }
    }

    fn retain(&self, live: &dyn Fn(u64) -> bool) {
        for shard in self.shards.load().iter() {
            for (number, lane) in shard.lanes.iter().enumerate() {
                let occupant = lane.occupant.load(Ordering::Acquire);
                if occupant != 0 && !live(occupant) {
                    let mut map = lane.map.lock();
                    if lane.occupant.load(Ordering::Relaxed) == occupant {
                        lane.occupant.store(0, Ordering::Release);
                        shard.chains.apply_cleared(number as u32, &mut map);
                    }
                }
            }
        }
    }

    fn holds(&self, holder: Holder, name: u64) -> bool {
        self.shard_of(holder).is_some_and(|shard| {
            shard.if_occupied(holder, |_, map| map.contains_key(SequenceHash(name))) == Some(true)
        })
    }

    fn blocks_of(&self, holder: Holder) -> usize {
        let count = |shard: Arc<Shard>| {
            shard.if_occupied(holder, |number, _| shard.chains.worker_block_count(number))
        };
        self.shard_of(holder).and_then(count).unwrap_or(0)
    }

    fn held(&self) -> usize {
        self.shards.load().iter().map(|shard| shard.chains.current_size()).sum()
    }

    fn size(&self) -> Size {
        let mut size = Size { held: self.held(), bytes: 0 };
        for shard in self.shards.load().iter() {
            let stats = shard.chains.stats();
            let slots: usize = shard.lanes.iter().map(|lane| lane.map.lock().capacity()).sum();
            size.bytes += stats.arena_chunk_bytes + stats.slab_bytes + slots * SLOT;
        }
        size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::reference::ReferenceIndex;
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    fn depths(index: &ChainIndex, contents: &[u64], holders: &[Holder]) -> Vec<u32> {
        let mut sink = DepthSink::default();
        sink.begin();
        index.score_into(contents, &mut sink);
        holders.iter().map(|&holder| sink.depth(holder)).collect()
    }

    fn chain(names: std::ops::Range<u64>) -> Vec<Block> {
        names.map(|n| Block { name: n, content: n + 1_000 }).collect()
    }

    fn contents(blocks: &[Block]) -> Vec<u64> {
        blocks.iter().map(|block| block.content).collect()
    }

    /// Streams of a few holders over a small alphabet, so that prefixes are shared and diverge: stores at roots and under
    /// parents, stores again, removals that leave holes, clears, and successors that take over a seat.
    fn stream(seed: u64, seats: &[u32]) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let index = ChainIndex::default();
        let mut reference = ReferenceIndex::default();
        let mut holders: Vec<Holder> =
            seats.iter().enumerate().map(|(at, &seat)| Holder { seat, slot: at as u64 + 1 }).collect();
        let mut next_slot = 100;
        // A path is named by its contents, as an engine's chained hash does.
        let named =
            |path: &[u64]| path.iter().fold(17u64, |name, step| name.wrapping_mul(31).wrapping_add(step + 1));
        let mut paths: Vec<Vec<u64>> = Vec::new();
        for _ in 0..rng.random_range(5..40) {
            let at = rng.random_range(0..holders.len());
            let holder = holders[at];
            match rng.random_range(0..100) {
                0..60 => {
                    let mut path = if paths.is_empty() || rng.random_bool(0.3) {
                        Vec::new()
                    } else {
                        paths[rng.random_range(0..paths.len())].clone()
                    };
                    path.truncate(rng.random_range(0..=path.len()));
                    let parent = (!path.is_empty()).then(|| named(&path));
                    let blocks: Vec<Block> = (0..rng.random_range(1..8))
                        .map(|_| {
                            let content = rng.random_range(0..3);
                            path.push(content);
                            Block { name: named(&path), content }
                        })
                        .collect();
                    assert_eq!(
                        index.store(holder, parent, &blocks),
                        reference.store(holder.slot, parent, &blocks),
                        "seed {seed}"
                    );
                    paths.push(path);
                }
                60..92 if !paths.is_empty() => {
                    let path = &paths[rng.random_range(0..paths.len())];
                    let names: Vec<u64> = (1..=path.len())
                        .filter(|_| rng.random_bool(0.3))
                        .map(|depth| named(&path[..depth]))
                        .collect();
                    index.remove(holder, &names);
                    reference.remove(holder.slot, &names);
                }
                92..96 => {
                    index.clear(holder);
                    reference.clear(holder.slot);
                }
                _ => {
                    reference.clear(holder.slot);
                    holders[at].slot = next_slot;
                    next_slot += 1;
                }
            }
            for path in &paths {
                let expected: Vec<u32> = holders.iter().map(|h| reference.depth(h.slot, path)).collect();
                assert_eq!(depths(&index, path, &holders), expected, "seed {seed}");
            }
        }
        for holder in holders {
            assert_eq!(index.blocks_of(holder), reference.blocks_of(holder.slot), "seed {seed}");
        }
    }

    #[test]
    fn depths_are_those_of_the_reference() {
        (0..10_000).for_each(|seed| stream(seed, &[0, 1, 2, 70]));
    }

    #[test]
    fn more_holders_than_one_shard_takes_are_the_same_to_a_lookup() {
        (0..200).for_each(|seed| stream(seed, &[0, 1_023, 1_024, 5_000]));
        let index = ChainIndex::default();
        let blocks = chain(0..40);
        let holders: Vec<Holder> = (0..3_000).map(|n| Holder { seat: n, slot: u64::from(n) + 1 }).collect();
        for holder in &holders {
            index.store(*holder, None, &blocks[..=holder.seat as usize % 40]).unwrap();
        }
        let expected: Vec<u32> = holders.iter().map(|h| 1 + h.seat % 40).collect();
        assert_eq!(depths(&index, &contents(&blocks), &holders), expected);
    }

    #[test]
    fn a_hole_ends_the_match_and_equal_contents_after_another_beginning_do_not_count() {
        let index = ChainIndex::default();
        let holder = Holder { seat: 0, slot: 1 };
        let blocks = chain(0..128);
        index.store(holder, None, &blocks).unwrap();
        index.remove(holder, &[10]);
        assert_eq!(depths(&index, &contents(&blocks), &[holder]), [10]);
        let mut other = contents(&blocks);
        other[1..64].iter_mut().for_each(|content| *content += 5_000);
        assert_eq!(depths(&index, &other, &[holder]), [1]);
    }

    #[test]
    fn removing_one_holder_leaves_the_other() {
        let index = ChainIndex::default();
        let (a, b) = (Holder { seat: 0, slot: 1 }, Holder { seat: 1, slot: 2 });
        let blocks = chain(0..8);
        index.store(a, None, &blocks).unwrap();
        index.store(b, None, &blocks).unwrap();
        index.remove(a, &[3, 4]);
        assert_eq!(depths(&index, &contents(&blocks), &[a, b]), [3, 8]);
        index.clear(b);
        assert_eq!(depths(&index, &contents(&blocks), &[a, b]), [3, 0]);
        assert_eq!((index.size().held, index.blocks_of(a), index.blocks_of(b)), (6, 6, 0));
    }

    #[test]
    fn those_not_live_are_dropped_and_a_successor_inherits_nothing() {
        let index = ChainIndex::default();
        let (old, new, other) =
            (Holder { seat: 4, slot: 1 }, Holder { seat: 4, slot: 9 }, Holder { seat: 5, slot: 2 });
        let blocks = chain(0..8);
        index.store(old, None, &blocks).unwrap();
        index.store(other, None, &blocks).unwrap();
        assert_eq!(depths(&index, &contents(&blocks), &[old, new, other]), [8, 0, 8]);
        index.store(new, None, &blocks[..2]).unwrap();
        assert_eq!(depths(&index, &contents(&blocks), &[old, new, other]), [0, 2, 8]);
        index.remove(old, &[0]);
        assert_eq!(index.store(old, None, &blocks), Err(UnknownParent), "a late event of the dead one");
        assert_eq!(depths(&index, &contents(&blocks), &[old, new]), [0, 2]);
        index.retain(&|slot| slot == 2);
        assert_eq!(depths(&index, &contents(&blocks), &[old, new, other]), [0, 0, 8]);
        assert_eq!(index.size().held, 8);
    }
}
