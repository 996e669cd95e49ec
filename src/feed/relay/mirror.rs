//! What one engine holds, as fields of the shared index, and which of them Redis may not know yet.
//!
//! A field is named by a block's tokens. Blocks with equal tokens on different paths share one, and so do a block's copies
//! in several tiers and ranks: the field goes with the last of them.

use std::sync::Arc;

use ahash::{AHashMap, AHashSet};

use crate::index::Tier;

/// Blocks kept at most, all ranks together; an engine has some hundred thousand. About 100 bytes each.
const MOST_BLOCKS: usize = 4 << 20;
/// Fields that wait to be removed at most; beyond, they are looked for in Redis instead.
const MOST_REMOVALS: usize = 1 << 20;
/// Models at most: the base and its adapters.
const MOST_MODELS: usize = 1_024;

/// A field of the index: the block `hash` of one of the models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Field {
    /// Which model, see [`Mirror::model`].
    pub model: u16,
    /// The block's name in the index.
    pub hash: u64,
}

/// A block as the engine names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Name {
    /// Data-parallel rank.
    pub rank: usize,
    /// Where it is.
    pub tier: Tier,
    /// The engine's hash.
    pub hash: u64,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    /// None if the index cannot name it.
    field: Option<Field>,
    copies: u32,
}

/// What one engine holds.
#[derive(Debug)]
pub struct Mirror {
    models: Vec<Arc<str>>,
    blocks: AHashMap<Name, Held>,
    /// Fields to be in Redis, with the number of blocks behind each.
    claims: AHashMap<Field, u32>,
    unwritten: AHashSet<Field>,
    /// Of `unwritten`, those not in `claims`.
    removals: usize,
    lost_removals: bool,
}

impl Mirror {
    /// Nothing, of an engine that serves `model`.
    pub fn new(model: &str) -> Self {
        Self {
            models: vec![model.into()],
            blocks: AHashMap::new(),
            claims: AHashMap::new(),
            unwritten: AHashSet::new(),
            removals: 0,
            lost_removals: false,
        }
    }

    /// The name of a model.
    pub fn model(&self, field: Field) -> &Arc<str> {
        &self.models[usize::from(field.model)]
    }

    /// The number of a model that is written already.
    pub fn known_model(&self, name: &str) -> Option<u16> {
        self.models.iter().position(|known| **known == *name).map(|at| at as u16)
    }

    /// The number of the model `adapter`, the base without one; none if there are too many.
    pub fn model_number(&mut self, adapter: Option<&str>) -> Option<u16> {
        let Some(adapter) = adapter else { return Some(0) };
        self.known_model(adapter).or_else(|| {
            (self.models.len() < MOST_MODELS).then(|| {
                self.models.push(adapter.into());
                self.models.len() as u16 - 1
            })
        })
    }

    /// Whether the engine holds a block.
    pub fn holds(&self, name: Name) -> bool {
        self.blocks.contains_key(&name)
    }

    /// Whether it holds a block that the index cannot name.
    pub fn holds_unnamed(&self, name: Name) -> bool {
        self.blocks.get(&name).is_some_and(|held| held.field.is_none())
    }

    /// Whether the field is to be in Redis.
    pub fn claims(&self, field: Field) -> bool {
        self.claims.contains_key(&field)
    }

    /// Fields that are to be in Redis.
    pub fn fields(&self) -> usize {
        self.claims.len()
    }

    /// Fields of which Redis may say something else.
    pub fn unwritten(&self) -> usize {
        self.unwritten.len()
    }

    /// The engine has one copy more of a block. False if there are too many blocks: it is not kept.
    pub fn store(&mut self, name: Name, field: Option<Field>) -> bool {
        if let Some(held) = self.blocks.get_mut(&name) {
            held.copies += 1;
            return true;
        }
        if self.blocks.len() >= MOST_BLOCKS {
            return false;
        }
        self.blocks.insert(name, Held { field, copies: 1 });
        if let Some(field) = field {
            let blocks = self.claims.entry(field).or_default();
            *blocks += 1;
            if *blocks == 1 && !self.unwritten.insert(field) {
                self.removals -= 1;
            }
        }
        true
    }

    /// One copy of a block is gone. False if the engine never announced it.
    pub fn remove(&mut self, name: Name) -> bool {
        let Some(held) = self.blocks.get_mut(&name) else { return false };
        held.copies -= 1;
        if held.copies == 0 {
            let field = held.field;
            self.blocks.remove(&name);
            if let Some(field) = field {
                self.unclaim(field);
            }
        }
        true
    }

    /// A rank holds nothing any more.
    pub fn clear(&mut self, rank: usize) {
        let mut gone = Vec::new();
        self.blocks.retain(|name, held| {
            if name.rank == rank {
                gone.extend(held.field);
            }
            name.rank != rank
        });
        for field in gone {
            self.unclaim(field);
        }
    }

    fn unclaim(&mut self, field: Field) {
        let Some(blocks) = self.claims.get_mut(&field) else { return };
        *blocks -= 1;
        if *blocks > 0 {
            return;
        }
        self.claims.remove(&field);
        self.unwritten.insert(field);
        self.removals += 1;
        if self.removals > MOST_REMOVALS {
            let claims = &self.claims;
            self.unwritten.retain(|field| claims.contains_key(field));
            self.removals = 0;
            self.lost_removals = true;
        }
    }

    /// Whether removals were given up since this was last asked: Redis must be searched for them.
    pub fn take_lost_removals(&mut self) -> bool {
        std::mem::take(&mut self.lost_removals)
    }

    /// Redis may have lost anything: all is to be written anew.
    pub fn write_all(&mut self) {
        self.unwritten.extend(self.claims.keys().copied());
    }

    /// Up to `most` fields that are to be written, with whether Redis shall have them.
    pub fn take_unwritten(&mut self, most: usize) -> Vec<(Field, bool)> {
        let taken: Vec<Field> = self.unwritten.iter().take(most).copied().collect();
        let with_claim = taken.into_iter().map(|field| {
            self.unwritten.remove(&field);
            (field, self.claims.contains_key(&field))
        });
        let taken: Vec<(Field, bool)> = with_claim.collect();
        self.removals -= taken.iter().filter(|(_, claimed)| !claimed).count();
        taken
    }

    /// Those could not be written.
    pub fn put_back(&mut self, fields: &[(Field, bool)]) {
        for (field, _) in fields {
            if self.unwritten.insert(*field) && !self.claims.contains_key(field) {
                self.removals += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn name(rank: usize, hash: u64) -> Name {
        Name { rank, tier: Tier::Gpu, hash }
    }

    fn field(hash: u64) -> Field {
        Field { model: 0, hash }
    }

    fn written(mirror: &mut Mirror) -> BTreeSet<(u64, bool)> {
        mirror.take_unwritten(usize::MAX).into_iter().map(|(field, claimed)| (field.hash, claimed)).collect()
    }

    #[test]
    fn a_field_goes_with_the_last_block_behind_it() {
        let mut mirror = Mirror::new("m");
        mirror.store(name(0, 1), Some(field(9)));
        mirror.store(name(0, 2), Some(field(9)));
        mirror.store(name(0, 2), Some(field(9)));
        assert_eq!(written(&mut mirror), [(9, true)].into());
        assert!(mirror.remove(name(0, 1)) && mirror.remove(name(0, 2)) && mirror.claims(field(9)));
        assert!(written(&mut mirror).is_empty());
        assert!(mirror.remove(name(0, 2)) && !mirror.remove(name(0, 2)));
        assert_eq!(written(&mut mirror), [(9, false)].into());
    }

    #[test]
    fn what_came_and_went_while_redis_was_away_is_written_as_it_is_now() {
        let mut mirror = Mirror::new("m");
        mirror.store(name(0, 1), Some(field(1)));
        mirror.remove(name(0, 1));
        mirror.store(name(0, 2), Some(field(2)));
        let taken = mirror.take_unwritten(10);
        mirror.put_back(&taken);
        mirror.store(name(0, 1), Some(field(1)));
        assert_eq!(written(&mut mirror), [(1, true), (2, true)].into());
        mirror.write_all();
        assert_eq!(mirror.unwritten(), 2);
    }

    #[test]
    fn a_rank_that_is_cleared_leaves_the_others_claims() {
        let mut mirror = Mirror::new("m");
        mirror.store(name(0, 1), Some(field(1)));
        mirror.store(name(1, 1), Some(field(1)));
        mirror.store(name(1, 2), Some(field(2)));
        mirror.store(name(1, 3), None);
        assert!(mirror.holds_unnamed(name(1, 3)));
        written(&mut mirror);
        mirror.clear(1);
        assert_eq!(written(&mut mirror), [(2, false)].into());
        assert_eq!((mirror.fields(), mirror.holds(name(1, 3))), (1, false));
    }

    proptest! {
        /// Whatever comes and fails, what was written last is what the engine holds.
        #[test]
        fn redis_ends_up_with_what_the_engine_holds(
            steps in prop::collection::vec((0u8..6, 0usize..2, 0u64..5, any::<bool>()), 0..120),
        ) {
            let mut mirror = Mirror::new("m");
            let mut redis = BTreeSet::new();
            let mut held: Vec<(usize, u64)> = Vec::new();
            let mut write = |mirror: &mut Mirror, fails: bool| {
                let taken = mirror.take_unwritten(2);
                if fails {
                    return mirror.put_back(&taken);
                }
                for (field, claimed) in taken {
                    if claimed { redis.insert(field.hash); } else { redis.remove(&field.hash); }
                }
            };
            for (step, rank, block, fails) in steps {
                // Two blocks share each field.
                let place = name(rank, block);
                match step {
                    0 | 1 => {
                        mirror.store(place, Some(field(block / 2)));
                        held.push((rank, block));
                    }
                    2 | 3 => {
                        let at = held.iter().position(|other| *other == (rank, block));
                        prop_assert_eq!(mirror.remove(place), at.is_some());
                        if let Some(at) = at {
                            held.remove(at);
                        }
                    }
                    4 => {
                        mirror.clear(rank);
                        held.retain(|(other, _)| *other != rank);
                    }
                    _ => write(&mut mirror, fails),
                }
                let claims: BTreeSet<u64> = held.iter().map(|(_, block)| block / 2).collect();
                prop_assert_eq!(mirror.fields(), claims.len());
                let removals = mirror.unwritten.iter().filter(|field| !mirror.claims(**field)).count();
                prop_assert_eq!(mirror.removals, removals);
            }
            while mirror.unwritten() > 0 {
                write(&mut mirror, false);
            }
            let claims: BTreeSet<u64> = held.iter().map(|(_, block)| block / 2).collect();
            prop_assert_eq!(redis, claims);
        }
    }
}
