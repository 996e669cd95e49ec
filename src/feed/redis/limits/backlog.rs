//! What was spent and is not told yet: added up by bucket, and told in numbered batches, so that a batch whose answer was
//! lost can be sent again without being counted again.

use std::sync::Arc;

use ahash::AHashMap;

use crate::admission::limits::Rate;
use crate::admission::limits::store::{Name, Spent};

/// Buckets at most.
const MOST: usize = 65_536;
/// Buckets in a batch: Redis does nothing else while it runs one.
const BATCH: usize = 100;

/// A batch on its way.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Larger than that of the batch before.
    pub number: u64,
    /// By bucket.
    pub spent: Arc<[Spent]>,
}

/// All that is not told.
#[derive(Debug, Default)]
pub struct Backlog {
    waiting: AHashMap<Name, (Rate, i64)>,
    on_its_way: Option<Batch>,
    number: u64,
}

impl Backlog {
    /// Adds to what is told next; false if there is no room for one bucket more.
    pub fn add(&mut self, spent: Spent) -> bool {
        if let Some((rate, tokens)) = self.waiting.get_mut(&spent.name) {
            *rate = spent.rate;
            *tokens = tokens.saturating_add(spent.tokens);
            return true;
        }
        let room = self.waiting.len() < MOST;
        if room {
            self.waiting.insert(spent.name, (spent.rate, spent.tokens));
        }
        room
    }

    /// The batch to tell: the last one until it is known to be told.
    pub fn next(&mut self) -> Option<Batch> {
        if self.on_its_way.is_none() {
            let names: Vec<Name> = self.waiting.keys().take(BATCH).cloned().collect();
            let taken = names.into_iter().filter_map(|name| {
                let (rate, tokens) = self.waiting.remove(&name)?;
                (tokens != 0).then_some(Spent { name, rate, tokens })
            });
            let spent: Arc<[Spent]> = taken.collect();
            if spent.is_empty() {
                return None;
            }
            self.number += 1;
            self.on_its_way = Some(Batch { number: self.number, spent });
        }
        self.on_its_way.clone()
    }

    /// The batch of that number has been told.
    pub fn told(&mut self, number: u64) {
        self.on_its_way.take_if(|batch| batch.number == number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::limits::Unit;

    fn spent(name: &str, tokens: i64) -> Spent {
        Spent { name: Name(name.into()), rate: Rate { tokens: 1, unit: Unit::Second }, tokens }
    }

    #[test]
    fn a_batch_stays_the_same_until_it_is_told() {
        let mut backlog = Backlog::default();
        backlog.add(spent("a", 5));
        backlog.add(spent("a", -2));
        let first = backlog.next().unwrap();
        assert_eq!((first.number, first.spent.len(), first.spent[0].tokens), (1, 1, 3));
        backlog.add(spent("a", 7));
        assert_eq!(backlog.next().unwrap().spent[0].tokens, 3, "sent again as it was");
        backlog.told(1);
        let second = backlog.next().unwrap();
        assert_eq!((second.number, second.spent[0].tokens), (2, 7));
        backlog.told(2);
        backlog.add(spent("a", 4));
        backlog.add(spent("a", -4));
        assert!(backlog.next().is_none(), "nothing is left to tell");
    }

    #[test]
    fn it_is_bounded_and_goes_out_in_pieces() {
        let mut backlog = Backlog::default();
        let added = (0..MOST + 10).filter(|n| backlog.add(spent(&n.to_string(), 1))).count();
        assert_eq!(added, MOST);
        assert!(backlog.add(spent("7", 1)), "what is there already grows");
        let mut batches = 0;
        while let Some(batch) = backlog.next() {
            assert!(batch.spent.len() <= BATCH);
            backlog.told(batch.number);
            batches += 1;
        }
        assert_eq!(batches, MOST.div_ceil(BATCH));
    }
}
