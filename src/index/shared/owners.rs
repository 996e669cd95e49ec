//! Who holds how many leading blocks of a prompt, as of the newest process of each owner.

use smallvec::SmallVec;

use super::Chunks;
use crate::state::{Endpoint, SignalKind, signals::Millis};

/// The owners of one block as the index has them: name, and the time of the claim as it is written.
pub type BlockOwners = Vec<(String, String)>;

/// Claims that cannot be read never expire.
const FOREVER: i64 = i64::MAX;

/// What the index answered for one prompt, without what no score needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// Owners of the first block, by name.
    runs: Vec<Run>,
}

/// An owner's unbroken run of blocks from the first on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    owner: Box<str>,
    /// `(depth, oldest)`: of the first `depth` blocks the oldest claim is of that Unix time. Times fall as depths grow.
    steps: SmallVec<[(u32, i64); 1]>,
}

impl Run {
    /// Leading blocks claimed after `started`; all of them if that is not known.
    fn depth(&self, started: Option<f64>) -> u32 {
        let is_fresh =
            |oldest: i64| started.is_none_or(|started| oldest == FOREVER || oldest as f64 > started);
        self.steps.iter().take_while(|(_, oldest)| is_fresh(*oldest)).last().map_or(0, |(depth, _)| *depth)
    }

    fn len(&self) -> u32 {
        self.steps.last().map_or(0, |(depth, _)| *depth)
    }

    fn extend(&mut self, written: i64) {
        match self.steps.last_mut() {
            Some((depth, oldest)) if *oldest <= written => *depth += 1,
            last => {
                let depth = last.map_or(0, |(depth, _)| *depth) + 1;
                self.steps.push((depth, written));
            }
        }
    }
}

impl Answer {
    /// Puts the owners of every block together, in the order of the blocks.
    pub fn of(blocks: impl IntoIterator<Item = BlockOwners>) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for (at, owners) in (0..).zip(blocks) {
            let mut goes_on = false;
            for (owner, written) in owners {
                let written = written.parse().unwrap_or(FOREVER);
                if at == 0 {
                    runs.push(Run { owner: owner.into(), steps: SmallVec::from_elem((1, written), 1) });
                } else if let Ok(found) = runs.binary_search_by(|run| (*run.owner).cmp(&owner)) {
                    if runs[found].len() != at {
                        continue;
                    }
                    runs[found].extend(written);
                } else {
                    continue;
                }
                goes_on = true;
            }
            if !goes_on {
                break;
            }
            if at == 0 {
                runs.sort_unstable_by(|a, b| a.owner.cmp(&b.owner));
                runs.dedup_by(|a, b| a.owner == b.owner);
            }
        }
        Self { runs }
    }

    /// Whether nobody holds the first block.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Leading blocks that the owner of that name claimed after `started`, a Unix time; none known: all it claims.
    pub fn depth(&self, owner: &str, started: Option<f64>) -> u32 {
        let found = self.runs.binary_search_by(|run| (*run.owner).cmp(owner));
        found.map_or(0, |at| self.runs[at].depth(started))
    }
}

/// What the endpoints of a pool hold of one prompt, as the shared index says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedOwners {
    /// Blocks looked up, the shorter last one among them.
    pub blocks: u32,
    /// Tokens in a whole block.
    pub block_tokens: u32,
    /// Blocks that engines can use again, those among them that were not looked up.
    pub reusable: u32,
    /// Slots of those who hold something, with the number of leading blocks.
    depths: Vec<(u64, u32)>,
}

impl SharedOwners {
    /// What each of `endpoints` holds: its name in the index is `NAME.NAMESPACE`, and claims from before its process
    /// started are void.
    pub fn of<'a>(
        chunks: &Chunks,
        answer: &Answer,
        endpoints: impl IntoIterator<Item = &'a Endpoint>,
    ) -> Self {
        let now = Millis::now();
        let mut name = String::new();
        let mut depths = Vec::new();
        for endpoint in endpoints.into_iter().take_while(|_| !answer.is_empty()) {
            name.clear();
            name.extend([&*endpoint.name.name, ".", &*endpoint.name.namespace]);
            let started = endpoint.signals.last(SignalKind::ProcessStart, now).map(|(started, _)| started);
            let depth = answer.depth(&name, started);
            if depth > 0 {
                depths.push((endpoint.slot, depth));
            }
        }
        depths.sort_unstable();
        Self {
            blocks: chunks.hashes.len() as u32,
            block_tokens: chunks.block_tokens as u32,
            reusable: chunks.reusable() as u32,
            depths,
        }
    }

    /// Leading blocks that the endpoint of that slot holds.
    pub fn depth(&self, slot: u64) -> u32 {
        self.depths.binary_search_by_key(&slot, |(slot, _)| *slot).map_or(0, |at| self.depths[at].1)
    }

    /// Of so many leading blocks those that an engine can use again.
    pub fn whole(&self, depth: u32) -> u32 {
        depth.min(self.reusable)
    }

    /// Tokens that an engine with so many leading blocks need not compute.
    pub fn tokens(&self, depth: u32) -> u64 {
        u64::from(self.whole(depth)) * u64::from(self.block_tokens)
    }

    /// Whether an engine with so many leading blocks may hold more of the prompt than was looked up.
    pub fn is_cut_off(&self, depth: u32) -> bool {
        depth >= self.blocks && self.reusable > self.blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::endpoint::tests::endpoint;
    use proptest::prelude::*;

    fn block(owners: &[(&str, &str)]) -> BlockOwners {
        owners.iter().map(|(name, written)| ((*name).to_owned(), (*written).to_owned())).collect()
    }

    #[test]
    fn only_an_unbroken_run_from_the_first_block_counts() {
        let answer = Answer::of([
            block(&[("a.ns", "10"), ("b.ns", "10")]),
            block(&[("a.ns", "10"), ("c.ns", "10")]),
            block(&[("b.ns", "10"), ("a.ns", "10")]),
            block(&[("b.ns", "10")]),
            block(&[("a.ns", "10")]),
        ]);
        let depth = |name| answer.depth(name, None);
        assert_eq!((depth("a.ns"), depth("b.ns"), depth("c.ns"), depth("d.ns")), (3, 1, 0, 0));
        assert!(Answer::of([block(&[]), block(&[("a.ns", "10")])]).is_empty());
    }

    #[test]
    fn claims_not_newer_than_the_process_are_void_and_unreadable_ones_are_kept() {
        let answer = Answer::of([
            block(&[("a", "20"), ("b", "soon")]),
            block(&[("a", "30"), ("b", "")]),
            block(&[("a", "10"), ("b", "5")]),
            block(&[("a", "30"), ("b", "x")]),
        ]);
        let a = |started| answer.depth("a", started);
        assert_eq!([a(None), a(Some(9.5)), a(Some(10.0)), a(Some(19.9)), a(Some(20.0))], [4, 4, 2, 2, 0]);
        assert_eq!((answer.depth("b", Some(4.0)), answer.depth("b", Some(1e12))), (4, 2));
    }

    #[test]
    fn an_endpoint_is_known_by_name_and_namespace_and_its_tokens_are_bounded_by_the_prompt() {
        let (one, two) = (endpoint("one", "10.0.0.1:8000"), endpoint("two", "10.0.0.2:8000"));
        let ids: Vec<u32> = (0..50).collect();
        let held = || block(&[("one.default", "100"), ("two.other", "100")]);
        let answer = Answer::of((0..4).map(|_| held()));
        let chunks = Chunks::of(&ids, 16, 128);
        let owners = SharedOwners::of(&chunks, &answer, [&*one, &*two]);
        assert_eq!((owners.depth(one.slot), owners.depth(two.slot), owners.blocks), (4, 0, 4));
        assert_eq!((owners.tokens(4), owners.tokens(2), owners.is_cut_off(4)), (48, 32, false));
        assert!(SharedOwners::of(&Chunks::of(&ids, 16, 2), &answer, []).is_cut_off(2));
        one.signals.set(SignalKind::ProcessStart, 100.0, Millis::now());
        assert_eq!(SharedOwners::of(&chunks, &answer, [&*one]).depth(one.slot), 0);
    }

    proptest! {
        /// Kthena's rule, word for word: count(pod) becomes i + 1 at block i if it was i.
        #[test]
        fn depths_are_what_kthena_counts(
            blocks in prop::collection::vec(prop::collection::btree_map(0u8..4, 0i64..40, 0..4), 0..6),
            started in prop::option::of(0f64..40.0),
        ) {
            let mut counts = [0u32; 4];
            for (at, owners) in (0..).zip(&blocks) {
                let fresh = owners.iter().filter(|(_, written)| started.is_none_or(|start| **written as f64 > start));
                let going_on: Vec<_> = fresh.filter(|(pod, _)| counts[usize::from(**pod)] == at).collect();
                if going_on.is_empty() {
                    break;
                }
                for (pod, _) in going_on {
                    counts[usize::from(*pod)] += 1;
                }
            }
            let written = |owners: &std::collections::BTreeMap<u8, i64>| {
                owners.iter().map(|(pod, written)| (pod.to_string(), written.to_string())).collect::<BlockOwners>()
            };
            let answer = Answer::of(blocks.iter().map(written));
            for (pod, count) in counts.iter().enumerate() {
                prop_assert_eq!(answer.depth(&pod.to_string(), started), *count);
            }
        }
    }
}
