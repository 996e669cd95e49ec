//! A least-recently-used set of block names that knows chains: what is held of a chain is always a leading part of it.

use ahash::AHashMap;
use smallvec::SmallVec;

use crate::state::signals::Millis;

const NONE: u32 = u32::MAX;
/// Bytes of a slot of the hash table: key, value, control byte.
const HEAD: usize = 17;

/// Names that follow each other in a chain, found by the first of them. Prompts come and go as a whole, so a prompt of
/// 1,000 blocks is one or two of these and costs one or two lookups, not 1,000.
#[derive(Debug)]
struct Run {
    /// Never empty while linked.
    names: Vec<u64>,
    newer: u32,
    older: u32,
    /// When its names were entered.
    entered: Millis,
}

/// The set. A chain becomes young from its deepest run to its first, so a run is younger than every run that builds on it,
/// and the deepest name of the oldest run is dropped first.
#[derive(Debug)]
pub struct Lru {
    capacity: usize,
    held: usize,
    heads: AHashMap<u64, u32>,
    runs: Vec<Run>,
    newest: u32,
    oldest: u32,
    vacant: Vec<u32>,
}

/// What entering a chain did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entered {
    /// Leading names of the chain that were held before.
    pub known: usize,
    /// Those that are now: all that the capacity takes.
    pub held: usize,
}

/// What is held of a chain.
#[derive(Default)]
struct Walked {
    /// The runs that it passes, first to deepest.
    path: SmallVec<[u32; 16]>,
    /// How many names that is.
    known: usize,
    /// The run that goes on elsewhere or further, and after how many of its names the chain leaves it.
    left: Option<(u32, usize)>,
}

impl Lru {
    /// An empty set of at most `capacity` names, at least one.
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: within_reach(capacity),
            held: 0,
            heads: AHashMap::new(),
            runs: Vec::new(),
            newest: NONE,
            oldest: NONE,
            vacant: Vec::new(),
        }
    }

    /// Names held.
    pub fn len(&self) -> usize {
        self.held
    }

    /// Most names held.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the capacity; names beyond it are dropped, the oldest first, and handed to `dropped`.
    pub fn set_capacity(&mut self, capacity: usize, dropped: &mut Vec<u64>) {
        self.capacity = within_reach(capacity);
        self.make_room(0, dropped);
    }

    /// Enters a chain, or makes it young again. Names dropped in exchange are handed to `dropped`; they are none of the
    /// chain's own.
    pub fn enter(&mut self, chain: &[u64], now: Millis, dropped: &mut Vec<u64>) -> Entered {
        let chain = &chain[..chain.len().min(self.capacity)];
        let Walked { path, known, left } = self.walk(chain);
        if let Some((run, after)) = left {
            self.part(run, after);
        }
        // Young first, lest it is dropped for its own continuation.
        self.make_young(&path);
        let new = &chain[known..];
        self.make_room(new.len(), dropped);
        if !new.is_empty() {
            self.held += new.len();
            let run = self.admit(new.to_vec(), now);
            self.link_newest(run);
            self.make_young(&path);
        }
        Entered { known, held: chain.len() }
    }

    /// The runs that a chain passes, first to deepest, and how many names it has in common with each.
    fn passed<'a>(&'a self, chain: &'a [u64]) -> impl Iterator<Item = (u32, usize)> + 'a {
        let mut rest = Some(chain);
        std::iter::from_fn(move || {
            let chain = rest.take()?;
            let &at = self.heads.get(chain.first()?)?;
            let names = &self.runs[at as usize].names;
            let same = names.iter().zip(chain).take_while(|(name, other)| name == other).count();
            rest = (same == names.len()).then(|| &chain[same..]);
            Some((at, same))
        })
    }

    fn walk(&self, chain: &[u64]) -> Walked {
        let mut walked = Walked::default();
        for (at, same) in self.passed(chain) {
            walked.path.push(at);
            walked.known += same;
            walked.left = (same < self.runs[at as usize].names.len()).then_some((at, same));
        }
        walked
    }

    /// How many leading names of a chain are held, of which those beyond the first `known` were entered at `since` or later.
    pub fn entered_since(&self, chain: &[u64], known: usize, since: Millis) -> usize {
        let mut depth = 0;
        for (at, same) in self.passed(chain) {
            if depth + same > known && self.runs[at as usize].entered < since {
                break;
            }
            depth += same;
        }
        depth
    }

    /// Bytes of memory, estimated.
    pub fn bytes(&self) -> usize {
        let names: usize = self.held * size_of::<u64>();
        names + self.runs.capacity() * size_of::<Run>() + self.heads.capacity() * HEAD
    }

    /// How many leading names of a chain are held.
    #[cfg(test)]
    pub fn depth(&self, chain: &[u64]) -> usize {
        self.walk(chain).known
    }

    /// Makes a run end after its first `len` names; the rest is a run of its own, as young.
    fn part(&mut self, at: u32, len: usize) {
        let run = &mut self.runs[at as usize];
        let rest = run.names.split_off(len);
        run.names.shrink_to_fit();
        let (older, entered) = (run.older, run.entered);
        let rest = self.admit(rest, entered);
        self.link(rest, at, older);
    }

    /// A run that is found by its first name, not yet linked.
    fn admit(&mut self, names: Vec<u64>, entered: Millis) -> u32 {
        let head = names[0];
        let run = Run { names, newer: NONE, older: NONE, entered };
        let at = if let Some(at) = self.vacant.pop() {
            self.runs[at as usize] = run;
            at
        } else {
            self.runs.push(run);
            (self.runs.len() - 1) as u32
        };
        self.heads.insert(head, at);
        at
    }

    /// Drops names until `coming` more fit.
    fn make_room(&mut self, coming: usize, dropped: &mut Vec<u64>) {
        while self.held + coming > self.capacity {
            let oldest = self.oldest;
            let names = &mut self.runs[oldest as usize].names;
            let going = names.len().min(self.held + coming - self.capacity);
            let stays = names.len() - going;
            let head = names[0];
            dropped.extend(names.drain(stays..).rev());
            self.held -= going;
            if stays == 0 {
                *names = Vec::new();
                self.heads.remove(&head);
                self.unlink(oldest);
                self.vacant.push(oldest);
            } else if stays < names.capacity() / 2 {
                names.shrink_to_fit();
            }
        }
    }

    fn make_young(&mut self, path: &[u32]) {
        for &at in path.iter().rev() {
            self.unlink(at);
            self.link_newest(at);
        }
    }

    fn unlink(&mut self, at: u32) {
        let Run { newer, older, .. } = self.runs[at as usize];
        *self.older_of(newer) = older;
        *self.newer_of(older) = newer;
    }

    fn link_newest(&mut self, at: u32) {
        self.link(at, NONE, self.newest);
    }

    /// Puts a run between two neighbours.
    fn link(&mut self, at: u32, newer: u32, older: u32) {
        let run = &mut self.runs[at as usize];
        (run.newer, run.older) = (newer, older);
        *self.older_of(newer) = at;
        *self.newer_of(older) = at;
    }

    /// What comes after a run towards the oldest; of no run, the newest of all.
    fn older_of(&mut self, at: u32) -> &mut u32 {
        if at == NONE { &mut self.newest } else { &mut self.runs[at as usize].older }
    }

    /// What comes after a run towards the newest; of no run, the oldest of all.
    fn newer_of(&mut self, at: u32) -> &mut u32 {
        if at == NONE { &mut self.oldest } else { &mut self.runs[at as usize].newer }
    }
}

/// Run numbers are u32.
fn within_reach(capacity: usize) -> usize {
    capacity.clamp(1, NONE as usize - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NOW: Millis = Millis(1);

    fn enter(lru: &mut Lru, chain: &[u64]) -> Vec<u64> {
        let mut dropped = Vec::new();
        lru.enter(chain, NOW, &mut dropped);
        dropped
    }

    /// The same set with an entry a name, as plain as can be.
    #[derive(Default)]
    struct Literal {
        /// Oldest first.
        names: Vec<u64>,
    }

    impl Literal {
        fn enter(&mut self, chain: &[u64], capacity: usize) {
            for &name in chain.iter().rev() {
                self.names.retain(|&held| held != name);
                self.names.push(name);
                self.shrink(capacity);
            }
        }

        fn shrink(&mut self, capacity: usize) {
            let beyond = self.names.len().saturating_sub(capacity);
            self.names.drain(..beyond);
        }
    }

    #[test]
    fn the_deepest_of_the_oldest_goes_first() {
        let mut lru = Lru::new(4);
        assert!(enter(&mut lru, &[1, 2, 3]).is_empty());
        assert_eq!(enter(&mut lru, &[1, 9, 8]), [3]);
        assert_eq!(enter(&mut lru, &[7]), [2]);
        assert_eq!(lru.enter(&[1, 9, 8], NOW, &mut Vec::new()), Entered { known: 3, held: 3 });
        assert_eq!(lru.enter(&[1, 2], NOW, &mut Vec::new()), Entered { known: 1, held: 2 });
    }

    #[test]
    fn a_chain_longer_than_the_capacity_keeps_its_head() {
        let mut lru = Lru::new(2);
        assert!(enter(&mut lru, &[1, 2, 3, 4]).is_empty());
        assert_eq!(lru.enter(&[1, 2, 3, 4], NOW, &mut Vec::new()), Entered { known: 2, held: 2 });
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

    #[test]
    fn what_was_entered_lately_is_told_from_what_is_held() {
        let mut lru = Lru::new(10);
        lru.enter(&[1, 2, 3], Millis(100), &mut Vec::new());
        for again in [200, 300] {
            lru.enter(&[1, 2, 4, 5], Millis(again), &mut Vec::new());
        }
        let since = |chain: &[u64], known, since| lru.entered_since(chain, known, Millis(since));
        assert_eq!((since(&[1, 2, 3], 0, 100), since(&[1, 2, 3], 0, 101)), (3, 0));
        assert_eq!(since(&[1, 2, 4, 9], 2, 200), 3, "behind what is known anyway");
        assert_eq!(since(&[1, 2, 4, 5], 2, 201), 2, "entered again is not entered lately");
        assert_eq!((since(&[8], 0, 0), since(&[], 0, 0)), (0, 0));
    }

    #[test]
    fn memory_follows_what_is_held_however_chains_part() {
        let name = |chain: u64, at: u64| if at <= chain { at } else { chain * 10_000 + at };
        let mut lru = Lru::new(10_000);
        for chain in 0..1_000 {
            let chain: Vec<u64> = (1..2_000).map(|at| name(chain, at)).collect();
            lru.enter(&chain, NOW, &mut Vec::new());
            lru.enter(&chain[..1], NOW, &mut Vec::new());
        }
        let allocated: usize = lru.runs.iter().map(|run| run.names.capacity()).sum();
        assert!(allocated <= 2 * lru.len() + 4_000, "{allocated} for {}", lru.len());
    }

    proptest! {
        /// A chain is named by its path, so equal names mean equal paths.
        #[test]
        fn it_holds_what_a_set_of_single_names_would(
            steps in prop::collection::vec((prop::collection::vec(0u64..3, 0..12), 1usize..24, prop::bool::ANY), 1..60)
        ) {
            let named = |path: &[u64]| -> Vec<u64> {
                path.iter().scan(1u64, |name, &step| { *name = *name * 4 + step + 1; Some(*name) }).collect()
            };
            let mut lru = Lru::new(12);
            let mut literal = Literal::default();
            let mut held = std::collections::BTreeSet::new();
            for (path, capacity, resize) in &steps {
                let chain = named(path);
                let mut dropped = Vec::new();
                if *resize {
                    lru.set_capacity(*capacity, &mut dropped);
                    literal.shrink(*capacity);
                    dropped.drain(..).for_each(|name| assert!(held.remove(&name)));
                }
                let known = chain.iter().take_while(|name| literal.names.contains(name)).count();
                literal.enter(&chain, lru.capacity());
                let entered = lru.enter(&chain, NOW, &mut dropped);
                prop_assert_eq!(entered, Entered { known: known.min(entered.held), held: chain.len().min(lru.capacity()) });
                for name in dropped {
                    assert!(held.remove(&name));
                }
                held.extend(&chain[..entered.held]);
                let expected: std::collections::BTreeSet<u64> = literal.names.iter().copied().collect();
                prop_assert_eq!(&held, &expected);
                prop_assert_eq!(lru.len(), held.len());
            }
        }
    }
}
