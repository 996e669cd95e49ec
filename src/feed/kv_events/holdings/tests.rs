use std::collections::BTreeMap;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::index::DepthSink;

const HOLDER: Holder = Holder { seat: 0, slot: 1 };

/// A block by the path of contents that leads to it.
type Path = Vec<u64>;

fn name(path: &[u64]) -> u64 {
    path.iter().fold(17, |name: u64, step| name.wrapping_mul(31).wrapping_add(step + 1))
}

fn blocks(path: &[u64], from: usize) -> Vec<Block> {
    (from..path.len()).map(|at| Block { name: name(&path[..=at]), content: path[at] }).collect()
}

/// Removes at once.
fn removed(holdings: &mut Holdings, index: &EventIndex, rank: usize, tier: Tier, name: u64) -> bool {
    let known = holdings.remove(index, rank, tier, name);
    holdings.flush(index);
    known
}

fn depth(index: &EventIndex, tier: Tier, path: &[u64]) -> u32 {
    let mut sink = DepthSink::default();
    sink.begin();
    index.score_into(tier, path, &mut sink);
    sink.depth(HOLDER)
}

/// The definition: for every rank and tier the copies of every path.
#[derive(Default)]
struct Model {
    copies: BTreeMap<(usize, Tier, Path), u32>,
}

impl Model {
    fn holds(&self, rank: usize, tier: Tier, path: &[u64]) -> bool {
        self.copies.contains_key(&(rank, tier, path.to_vec()))
    }

    fn depth(&self, tier: Tier, path: &[u64], ranks: usize) -> u32 {
        let held = |depth: &usize| (0..ranks).any(|rank| self.holds(rank, tier, &path[..*depth]));
        (1..=path.len()).take_while(held).count() as u32
    }
}

/// A random engine: stores at the start and on blocks that it holds, twins, stores again, removals that leave holes, clears
/// of a rank; announced to us in order. Blocks of one tier are built on that tier.
fn stream(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let index = EventIndex::new(1 << 20);
    let ranks = rng.random_range(1..=3);
    let (mut holdings, mut model) = (Holdings::new(HOLDER, ranks), Model::default());
    let mut paths: Vec<Path> = Vec::new();
    for _ in 0..rng.random_range(5..60) {
        let rank = rng.random_range(0..ranks);
        let tier = if rng.random_bool(0.8) { Tier::Gpu } else { Tier::Cpu };
        match rng.random_range(0..100) {
            0..55 => {
                let mut path = if paths.is_empty() || rng.random_bool(0.3) {
                    Path::new()
                } else {
                    paths[rng.random_range(0..paths.len())].clone()
                };
                path.truncate(rng.random_range(0..=path.len()));
                // An engine stores on what it holds, all the way from the start.
                let whole = (1..=path.len()).take_while(|&d| model.holds(rank, tier, &path[..d])).count();
                path.truncate(whole);
                let from = path.len();
                path.extend((0..rng.random_range(1..6)).map(|_| rng.random_range(0..3u64)));
                announce(&mut holdings, &index, &mut model, rank, tier, &path, from);
                paths.push(path);
            }
            55..95 if !paths.is_empty() => {
                let path = &paths[rng.random_range(0..paths.len())];
                for depth in 1..=path.len() {
                    if rng.random_bool(0.3) {
                        remove(&mut holdings, &index, &mut model, rank, tier, &path[..depth]);
                    }
                }
            }
            _ => {
                holdings.clear(&index, rank);
                model.copies.retain(|(other, _, _), _| *other != rank);
            }
        }
        for path in &paths {
            for tier in [Tier::Gpu, Tier::Cpu] {
                assert_eq!(depth(&index, tier, path), model.depth(tier, path, ranks), "seed {seed}");
            }
        }
    }
    assert_eq!(holdings.pending(), 0, "seed {seed}");
}

fn announce(
    holdings: &mut Holdings,
    index: &EventIndex,
    model: &mut Model,
    rank: usize,
    tier: Tier,
    path: &[u64],
    from: usize,
) {
    let whole_again = from == 0 && (1..=path.len()).all(|d| model.holds(rank, tier, &path[..d]));
    let parent = (from > 0).then(|| name(&path[..from]));
    let outcome = holdings.store(index, rank, tier, parent, &blocks(path, from));
    assert_eq!(outcome, Outcome::default());
    if !whole_again {
        for depth in from + 1..=path.len() {
            *model.copies.entry((rank, tier, path[..depth].to_vec())).or_default() += 1;
        }
    }
}

fn remove(
    holdings: &mut Holdings,
    index: &EventIndex,
    model: &mut Model,
    rank: usize,
    tier: Tier,
    path: &[u64],
) {
    let key = (rank, tier, path.to_vec());
    let known = model.copies.get_mut(&key).map(|copies| {
        *copies -= 1;
        *copies
    });
    if known == Some(0) {
        model.copies.remove(&key);
    }
    assert_eq!(removed(holdings, index, rank, tier, name(path)), known.is_some());
}

#[test]
fn holdings_are_those_of_the_definition() {
    (0..10_000).for_each(stream);
}

/// The same store events in another order: children before parents. Once all are there, nothing is missing and nothing is
/// there that was removed meanwhile.
#[test]
fn blocks_that_came_before_their_parents_find_their_place() {
    for seed in 0..2_000 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let index = EventIndex::new(1 << 20);
        let mut holdings = Holdings::new(HOLDER, 1);
        let path: Path = (0..12).map(|_| rng.random_range(0..3)).collect();
        let mut cuts: Vec<usize> = (1..path.len()).filter(|_| rng.random_bool(0.4)).collect();
        cuts.extend([0, path.len()]);
        cuts.sort_unstable();
        let mut pieces: Vec<(usize, usize)> = cuts.windows(2).map(|cut| (cut[0], cut[1])).collect();
        for at in (1..pieces.len()).rev() {
            pieces.swap(at, rng.random_range(0..=at));
        }
        let mut copies = vec![0u32; path.len()];
        let mut announced = vec![false; path.len()];
        for (from, to) in pieces {
            let parent = (from > 0).then(|| name(&path[..from]));
            holdings.store(&index, 0, Tier::Gpu, parent, &blocks(&path[..to], from));
            (from..to).for_each(|at| copies[at] += 1);
            announced[from..to].fill(true);
            let at = rng.random_range(0..path.len());
            // An engine keeps a block as long as it stores below it.
            if announced.get(at + 1) == Some(&false) {
                continue;
            }
            assert_eq!(
                removed(&mut holdings, &index, 0, Tier::Gpu, name(&path[..=at])),
                copies[at] > 0,
                "seed {seed}"
            );
            copies[at] = copies[at].saturating_sub(1);
        }
        let held = copies.iter().take_while(|copies| **copies > 0).count() as u32;
        assert_eq!((depth(&index, Tier::Gpu, &path), holdings.pending()), (held, 0), "seed {seed}");
        let all = copies.iter().filter(|copies| **copies > 0).count();
        assert_eq!(index.blocks_of(HOLDER), all, "seed {seed}");
    }
}

#[test]
fn a_block_announced_four_times_stays_until_its_fourth_removal() {
    let (index, mut holdings) = (EventIndex::new(1 << 20), Holdings::new(HOLDER, 1));
    let path = [5, 6];
    holdings.store(&index, 0, Tier::Gpu, None, &blocks(&path[..1], 0));
    for _ in 0..4 {
        holdings.store(&index, 0, Tier::Gpu, Some(name(&path[..1])), &blocks(&path, 1));
    }
    for left in [2, 2, 2, 1] {
        assert!(removed(&mut holdings, &index, 0, Tier::Gpu, name(&path)));
        assert_eq!(depth(&index, Tier::Gpu, &path), left);
    }
    assert!(!removed(&mut holdings, &index, 0, Tier::Gpu, name(&path)));
    assert!(holdings.ranks[0].more.is_empty());
}

#[test]
fn a_chain_that_is_reported_again_from_its_start_has_no_more_copies_than_before() {
    let (index, mut holdings) = (EventIndex::new(1 << 20), Holdings::new(HOLDER, 1));
    let path = [5, 6, 7];
    for _ in 0..5 {
        holdings.store(&index, 0, Tier::Gpu, None, &blocks(&path, 0));
    }
    removed(&mut holdings, &index, 0, Tier::Gpu, name(&path[..2]));
    assert_eq!(depth(&index, Tier::Gpu, &path), 1);
}

#[test]
fn what_is_removed_and_stored_in_one_batch_is_there() {
    let (index, mut holdings) = (EventIndex::new(1 << 20), Holdings::new(HOLDER, 1));
    let path = [5, 6, 7];
    holdings.store(&index, 0, Tier::Gpu, None, &blocks(&path, 0));
    for depth in 1..=3 {
        assert!(holdings.remove(&index, 0, Tier::Gpu, name(&path[..depth])));
    }
    holdings.store(&index, 0, Tier::Gpu, None, &blocks(&path[..2], 0));
    holdings.flush(&index);
    assert_eq!((depth(&index, Tier::Gpu, &path), index.blocks_of(HOLDER)), (2, 2));
}

#[test]
fn an_unknown_parent_is_never_taken_for_the_start() {
    let (index, mut holdings) = (EventIndex::new(1 << 20), Holdings::new(HOLDER, 1));
    let outcome = holdings.store(&index, 0, Tier::Gpu, Some(99), &blocks(&[5, 6], 0));
    assert_eq!(outcome, Outcome { pending: 2, dropped: 0 });
    assert_eq!((depth(&index, Tier::Gpu, &[5, 6]), holdings.pending()), (0, 2));
    assert_eq!(holdings.clear(&index, 0), 2);
    holdings.store(&index, 0, Tier::Gpu, None, &[Block { name: 99, content: 4 }]);
    assert_eq!(depth(&index, Tier::Gpu, &[4, 5, 6]), 1, "what waited went with the clear");
}
