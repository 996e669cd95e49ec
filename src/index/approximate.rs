//! What endpoints are believed to hold because we sent it there: a chain index fed by picks, each endpoint's part an LRU as
//! large as the engine's cache.

use std::sync::Arc;

use ahash::AHashMap;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::answers::Answers;
use super::lru::Lru;
use super::{Block, BlockIndex, ChainIndex, DepthSink, Size};
use crate::prompt::Blocks;
use crate::prompt::blocks::Ending;
use crate::state::endpoint::Holder;
use crate::state::signals::Millis;

/// Knowledge by endpoint slot, so that a reused address inherits nothing and readiness flaps lose nothing.
#[derive(Debug)]
pub struct ApproximateIndex {
    chains: ChainIndex,
    most_blocks: usize,
    endpoints: RwLock<AHashMap<u64, Arc<Mutex<Remembered>>>>,
}

#[derive(Debug)]
struct Remembered {
    holder: Holder,
    lru: Lru,
    answers: Answers,
    /// Names on their way out; kept for its capacity.
    dropped: Vec<u64>,
}

impl ApproximateIndex {
    /// An empty index of at most `most_blocks` blocks, shared evenly among the endpoints.
    pub fn new(most_blocks: usize) -> Self {
        Self { chains: ChainIndex::default(), most_blocks, endpoints: RwLock::default() }
    }

    /// Reports what each endpoint holds of a prompt.
    pub fn score_into(&self, blocks: &Blocks, sink: &mut DepthSink) {
        self.chains.score_into(blocks.contents(), sink);
    }

    /// A request with these blocks was sent to `holder`, which keeps `capacity` blocks. Blocks remembered for it now.
    pub fn routed(&self, blocks: &Blocks, holder: Holder, capacity: usize, now: Millis) -> usize {
        if blocks.is_empty() {
            return self.blocks_of(holder.slot).0;
        }
        let known = self.endpoints.read().get(&holder.slot).cloned();
        let remembered = known.unwrap_or_else(|| self.admit(holder));
        let capacity = capacity.min(self.share());
        let mut remembered = remembered.lock();
        remembered.enter(&self.chains, blocks, capacity, now);
        remembered.lru.len()
    }

    /// Most blocks of one endpoint.
    fn share(&self) -> usize {
        (self.most_blocks / self.endpoints.read().len().max(1)).max(1)
    }

    /// Makes room for one more endpoint: the shares of the others shrink now, since nothing may ever be sent to them again.
    fn admit(&self, holder: Holder) -> Arc<Mutex<Remembered>> {
        let new =
            || Remembered { holder, lru: Lru::new(1), answers: Answers::default(), dropped: Vec::new() };
        let admitted = Arc::clone(
            self.endpoints.write().entry(holder.slot).or_insert_with(|| Arc::new(Mutex::new(new()))),
        );
        let share = self.share();
        let all: Vec<_> = self.endpoints.read().values().cloned().collect();
        for remembered in all {
            let mut remembered = remembered.lock();
            if remembered.lru.capacity() > share {
                remembered.resize(&self.chains, share);
            }
        }
        admitted
    }

    /// The endpoint of that slot answered a prompt that ends so with `tokens`.
    pub fn answered(&self, slot: u64, ending: Ending, tokens: u32) {
        let Some(remembered) = self.endpoints.read().get(&slot).cloned() else { return };
        let mut remembered = remembered.lock();
        if self.chains.holds(remembered.holder, ending.name) {
            remembered.answers.add(ending, tokens);
        }
    }

    /// Blocks that the endpoint of that slot holds beyond the first `depth`, because they were its answer to the turn before.
    pub fn answer_blocks(&self, slot: u64, blocks: &Blocks, ids: &[u32], depth: u32) -> u32 {
        let Some(remembered) = self.endpoints.read().get(&slot).cloned() else { return 0 };
        let beyond = remembered.lock().answers.beyond(blocks, ids, depth);
        beyond.min((blocks.len() as u32).saturating_sub(depth))
    }

    /// How many leading blocks an endpoint was sent, of which those beyond the first `known` at `since` or later.
    pub fn sent_since(&self, slot: u64, blocks: &Blocks, known: u32, since: Millis) -> u32 {
        let Some(remembered) = self.endpoints.read().get(&slot).cloned() else { return 0 };
        let depth = remembered.lock().lru.entered_since(blocks.names(), known as usize, since);
        depth as u32
    }

    /// Drops what is known of an endpoint: it is gone, or its process started anew.
    pub fn forget(&self, slot: u64) {
        if let Some(remembered) = self.endpoints.write().remove(&slot) {
            self.chains.clear(remembered.lock().holder);
        }
    }

    /// Drops what is known of every endpoint but those.
    pub fn retain(&self, live: impl Fn(u64) -> bool) {
        let gone: Vec<u64> = self.endpoints.read().keys().copied().filter(|&slot| !live(slot)).collect();
        for slot in gone {
            self.forget(slot);
        }
    }

    /// Blocks remembered for an endpoint, and the most that may be.
    pub fn blocks_of(&self, slot: u64) -> (usize, usize) {
        self.endpoints.read().get(&slot).map_or((0, 0), |remembered| {
            let remembered = remembered.lock();
            (remembered.lru.len(), remembered.lru.capacity())
        })
    }

    /// Blocks and memory.
    pub fn size(&self) -> Size {
        let mut size = self.chains.size();
        let all: Vec<_> = self.endpoints.read().values().cloned().collect();
        size.bytes += all.iter().map(|remembered| remembered.lock().lru.bytes()).sum::<usize>();
        size
    }
}

impl Remembered {
    fn resize(&mut self, chains: &ChainIndex, capacity: usize) {
        self.dropped.clear();
        self.lru.set_capacity(capacity, &mut self.dropped);
        chains.remove(self.holder, &self.dropped);
        self.answers.forget(&self.dropped);
    }

    fn enter(&mut self, chains: &ChainIndex, blocks: &Blocks, capacity: usize, now: Millis) {
        let names = blocks.names();
        self.dropped.clear();
        if self.lru.capacity() != capacity {
            self.lru.set_capacity(capacity, &mut self.dropped);
        }
        let entered = self.lru.enter(names, now, &mut self.dropped);
        chains.remove(self.holder, &self.dropped);
        self.answers.forget(&self.dropped);
        let stored = |from: usize| {
            let blocks: SmallVec<[Block; 64]> = names[from..entered.held]
                .iter()
                .zip(&blocks.contents()[from..entered.held])
                .map(|(&name, &content)| Block { name, content })
                .collect();
            let parent = from.checked_sub(1).map(|at| names[at]);
            chains.store(self.holder, parent, &blocks)
        };
        if entered.known < entered.held && stored(entered.known).is_err() {
            // The holder's seat was taken over and given back: what the LRU holds is the truth.
            let _ = stored(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::reference::ReferenceIndex;
    use crate::prompt::Namespace;
    use proptest::prelude::*;

    const NOW: Millis = Millis(1);

    const A: Holder = Holder { seat: 90_000, slot: 1_000_001 };
    const B: Holder = Holder { seat: 90_001, slot: 1_000_002 };

    fn blocks(text: &str) -> Blocks {
        // Four tokens a byte.
        let ids: Vec<u32> = text.bytes().flat_map(|byte| [u32::from(byte); 4]).collect();
        Blocks::of_tokens(&ids, 16, Namespace::default())
    }

    fn depth(index: &ApproximateIndex, holder: Holder, text: &str) -> u32 {
        let mut sink = DepthSink::default();
        sink.begin();
        index.score_into(&blocks(text), &mut sink);
        sink.depth(holder)
    }

    #[test]
    fn the_deepest_blocks_go_first_and_a_forgotten_endpoint_holds_nothing() {
        let index = ApproximateIndex::new(1_000);
        index.routed(&blocks("aaaabbbbccccdddd"), A, 8, NOW);
        assert_eq!(depth(&index, A, "aaaabbbbccccdddd"), 4);
        assert_eq!(depth(&index, A, "aaaabbbbXXXX"), 2);
        assert_eq!(depth(&index, B, "aaaabbbb"), 0);
        index.routed(&blocks("111122223333444455556666"), A, 8, NOW);
        assert_eq!(depth(&index, A, "aaaabbbbccccdddd"), 2, "8 blocks fit, 10 were sent");
        assert_eq!(index.blocks_of(A.slot), (8, 8));
        index.forget(A.slot);
        assert_eq!(depth(&index, A, "aaaabbbb"), 0);
        assert_eq!(index.size().held, 0);
    }

    #[test]
    fn a_smaller_cache_forgets_and_the_cap_is_shared() {
        let index = ApproximateIndex::new(8);
        index.routed(&blocks("aaaabbbbccccdddd"), A, 8, NOW);
        index.routed(&blocks("aaaa"), A, 2, NOW);
        assert_eq!(depth(&index, A, "aaaabbbbccccdddd"), 2);
        index.routed(&blocks("111122223333444455556666"), B, 100, NOW);
        index.routed(&blocks("111122223333444455556666"), B, 100, NOW);
        assert_eq!(depth(&index, B, "111122223333444455556666"), 4, "8 blocks among two endpoints");
    }

    #[test]
    fn all_endpoints_together_stay_within_the_cap_also_those_that_nothing_is_sent_to_any_more() {
        let index = ApproximateIndex::new(64);
        for number in 0..16 {
            let holder = Holder { seat: 91_000 + number, slot: 2_000_000 + u64::from(number) };
            for prompt in 0..20 {
                let ids: Vec<u32> = (0..64).map(|at| number * 10_000 + prompt * 64 + at).collect();
                index.routed(&Blocks::of_tokens(&ids, 16, Namespace::default()), holder, 1_000, NOW);
                assert!(index.size().held <= 64, "{} blocks at endpoint {number}", index.size().held);
            }
        }
        assert_eq!(index.size().held, 64);
        for number in 0..16 {
            assert_eq!(index.blocks_of(2_000_000 + number), (4, 4));
        }
    }

    proptest! {
        /// The chain index behind says what a plain LRU of whole paths says.
        #[test]
        fn depths_follow_the_lru(
            prompts in prop::collection::vec(("[ab]{0,40}", prop::bool::ANY, 1usize..14), 1..40)
        ) {
            let index = ApproximateIndex::new(1_000);
            let mut reference = ReferenceIndex::default();
            let mut lrus = [Lru::new(1), Lru::new(1)];
            for (prompt, second, capacity) in &prompts {
                let holder = if *second { B } else { A };
                let cut = blocks(prompt);
                index.routed(&cut, holder, *capacity, NOW);
                if !cut.is_empty() {
                    let lru = &mut lrus[usize::from(*second)];
                    lru.set_capacity(*capacity, &mut Vec::new());
                    lru.enter(cut.names(), NOW, &mut Vec::new());
                    reference.clear(holder.slot);
                    for (other, ..) in &prompts {
                        let other = blocks(other);
                        let held: Vec<Block> = (0..lru.depth(other.names()))
                            .map(|i| Block { name: other.names()[i], content: other.contents()[i] })
                            .collect();
                        reference.store(holder.slot, None, &held).unwrap();
                    }
                }
                for (other, ..) in &prompts {
                    for holder in [A, B] {
                        prop_assert_eq!(
                            depth(&index, holder, other),
                            reference.depth(holder.slot, blocks(other).contents())
                        );
                    }
                }
            }
        }
    }
}
