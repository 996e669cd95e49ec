//! The buckets of this process: many, behind small locks, and only those that are not full.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use parking_lot::Mutex;
use xxhash_rust::xxh3::Xxh3;

use super::bucket::{self, Bucket, SLACK};
use super::store::Answer;
use super::{Both, Kind, Rate, Tokens};
use crate::admission::Identity;

/// Locks. A request holds one for less than a microsecond.
const SHARDS: usize = 64;
/// Buckets that may be less than full at a time, by identity. Beyond it identities of a limit share one bucket.
pub const MOST_KEYS: usize = 131_072;

/// Which bucket.
#[derive(Clone, Debug)]
pub struct Key {
    hash: u128,
    route: Arc<str>,
    owner: Identity,
    share: bool,
}

impl Key {
    /// That of a route and of whoever its tokens are counted for; `share` is a replica's part of what is counted elsewhere.
    pub fn new(route: &Arc<str>, owner: Identity, share: bool) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(route.as_bytes());
        hasher.update(&[0, u8::from(share), u8::from(owner.name().is_some())]);
        hasher.update(owner.name().unwrap_or_default().as_bytes());
        Self { hash: hasher.digest128(), route: Arc::clone(route), owner, share }
    }

    /// The route, `namespace/name`.
    pub fn route(&self) -> &str {
        &self.route
    }

    /// The one that takes whoever finds no room.
    fn overflow(&self) -> Self {
        Self::new(&self.route, Identity::named("(all that found no room)"), self.share)
    }
}

/// The rates of both buckets of a key.
pub type Rates = Both<Option<Rate>>;

#[derive(Debug)]
struct Entry {
    route: Arc<str>,
    owner: Identity,
    /// Whether it is a part of a limit, whose size others decide.
    share: bool,
    rates: Rates,
    buckets: Both<Bucket>,
}

impl Entry {
    fn new(key: &Key, rates: Rates, now: Duration) -> Self {
        let full = |kind| match rates.get(kind) {
            Some(rate) => Bucket::full(*rate, now),
            None => Bucket::full(UNLIMITED, now),
        };
        Self {
            route: Arc::clone(&key.route),
            owner: key.owner.clone(),
            share: key.share,
            rates,
            buckets: Both::of(full),
        }
    }

    /// Goes on at these rates: the levels stay, a rate that comes anew begins full.
    fn follow(&mut self, rates: Rates, now: Duration) {
        if self.rates == rates {
            return;
        }
        for kind in Kind::ALL {
            match (*self.rates.get(kind), *rates.get(kind)) {
                (Some(from), Some(to)) if from != to => self.buckets.get_mut(kind).change(from, to, now),
                (None, Some(to)) => *self.buckets.get_mut(kind) = Bucket::full(to, now),
                _ => {}
            }
        }
        self.rates = rates;
    }

    fn levels(&self, now: Duration) -> Both<f64> {
        Both::of(|kind| self.rates.get(kind).map_or(0.0, |rate| self.buckets.get(kind).level(rate, now)))
    }

    fn is_full(&self, now: Duration) -> bool {
        Kind::ALL
            .iter()
            .all(|&kind| self.rates.get(kind).is_none_or(|rate| self.buckets.get(kind).is_full(rate, now)))
    }

    fn take(&mut self, asks: &Both<Option<u64>>, now: Duration) -> Answer {
        let levels = self.levels(now);
        let asked = |kind: Kind| Some(((*self.rates.get(kind))?, (*asks.get(kind))?));
        let short = Kind::ALL.iter().any(|&kind| {
            asked(kind).is_some_and(|(rate, amount)| levels.get(kind) + SLACK < rate.needed(kind, amount))
        });
        if short {
            return Answer { taken: None, levels };
        }
        let taken = Both::of(|kind| {
            asked(kind).map_or(0, |(rate, amount)| rate.taken(kind, amount, *levels.get(kind)))
        });
        self.spend(&Both::of(|kind| bucket::exact(*taken.get(kind))), now);
        Answer { taken: Some(taken), levels }
    }

    fn spend(&mut self, tokens: &Both<f64>, now: Duration) {
        for kind in Kind::ALL {
            if let Some(rate) = *self.rates.get(kind) {
                self.buckets.get_mut(kind).spend(rate, *tokens.get(kind), now);
            }
        }
    }
}

/// At which rates a bucket goes on.
#[derive(Clone, Copy)]
enum At {
    /// At these.
    These(Rates),
    /// At its own, or at these if it begins.
    Own(Rates),
}

impl At {
    fn rates(self) -> Rates {
        match self {
            At::These(rates) | At::Own(rates) => rates,
        }
    }

    fn apply(self, entry: &mut Entry, now: Duration) {
        if let At::These(rates) = self {
            entry.follow(rates, now);
        }
    }
}

/// Stands where no rate does; never looked at.
const UNLIMITED: Rate = Rate { tokens: 1, unit: super::Unit::Second };

/// A bucket as shown.
#[derive(Clone, Debug)]
pub struct Shown {
    /// The route.
    pub route: Arc<str>,
    /// Whose.
    pub owner: Identity,
    /// Its rates.
    pub rates: Rates,
    /// What it holds.
    pub levels: Both<f64>,
}

/// All buckets that are less than full.
#[derive(Debug)]
pub struct Buckets {
    shards: Box<[Mutex<AHashMap<u128, Entry>>]>,
    most: usize,
    held: AtomicUsize,
    /// Requests whose identity found no room.
    overflowed: AtomicU64,
    sweeps: AtomicUsize,
}

impl Default for Buckets {
    fn default() -> Self {
        Self::new(MOST_KEYS)
    }
}

impl Buckets {
    /// None yet, and never many more than `most`.
    pub fn new(most: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            most,
            held: AtomicUsize::new(0),
            overflowed: AtomicU64::new(0),
            sweeps: AtomicUsize::new(0),
        }
    }

    /// Takes from both buckets of a key, or from none. Gives the key that it was taken from, to be settled with.
    pub fn take(&self, key: Key, rates: Rates, asks: &Both<Option<u64>>, now: Duration) -> (Key, Answer) {
        match self.with(&key, At::These(rates), now, |entry| entry.take(asks, now)) {
            Some(answer) => (key, answer),
            None => {
                let key = key.overflow();
                self.overflowed.fetch_add(1, Ordering::Relaxed);
                let answer = self.with_any(&key, At::These(rates), now, |entry| entry.take(asks, now));
                (key, answer)
            }
        }
    }

    /// Spends tokens of a key, whatever it holds; fewer than 0 come back. A bucket goes on at its own rates: `rates` are those
    /// of one that has to begin.
    pub fn spend(&self, key: &Key, rates: Rates, tokens: &Both<f64>, now: Duration) {
        if self.with(key, At::Own(rates), now, |entry| entry.spend(tokens, now)).is_some() {
            return;
        }
        // It is full and finds no room: nothing can come back to it, and the crowd pays what it owes.
        let owed = Both::of(|kind| tokens.get(kind).max(0.0));
        self.overflowed.fetch_add(1, Ordering::Relaxed);
        self.with_any(&key.overflow(), At::Own(rates), now, |entry| entry.spend(&owed, now));
    }

    /// The levels of a key.
    pub fn levels(&self, key: &Key, rates: Rates, now: Duration) -> Both<f64> {
        let shard = self.shard(key).lock();
        match shard.get(&key.hash) {
            Some(entry) => entry.levels(now),
            None => Both::of(|kind| rates.get(kind).map_or(0.0, Rate::capacity)),
        }
    }

    fn shard(&self, key: &Key) -> &Mutex<AHashMap<u128, Entry>> {
        &self.shards[key.hash as usize % SHARDS]
    }

    fn with<T>(&self, key: &Key, at: At, now: Duration, act: impl FnOnce(&mut Entry) -> T) -> Option<T> {
        let mut shard = self.shard(key).lock();
        if let Some(entry) = shard.get_mut(&key.hash) {
            at.apply(entry, now);
            return Some(act(entry));
        }
        if self.held.load(Ordering::Relaxed) >= self.most {
            self.drop_full(&mut shard, now);
            if self.held.load(Ordering::Relaxed) >= self.most {
                return None;
            }
        }
        Some(self.begin(&mut shard, key, at.rates(), now, act))
    }

    /// The same for a key that must have its bucket: there are no more of them than of limits.
    fn with_any<T>(&self, key: &Key, at: At, now: Duration, act: impl FnOnce(&mut Entry) -> T) -> T {
        let mut shard = self.shard(key).lock();
        match shard.get_mut(&key.hash) {
            Some(entry) => {
                at.apply(entry, now);
                act(entry)
            }
            None => self.begin(&mut shard, key, at.rates(), now, act),
        }
    }

    fn begin<T>(
        &self,
        shard: &mut AHashMap<u128, Entry>,
        key: &Key,
        rates: Rates,
        now: Duration,
        act: impl FnOnce(&mut Entry) -> T,
    ) -> T {
        let mut entry = Entry::new(key, rates, now);
        let acted = act(&mut entry);
        if !entry.is_full(now) {
            shard.insert(key.hash, entry);
            self.held.fetch_add(1, Ordering::Relaxed);
        }
        acted
    }

    fn drop_full(&self, shard: &mut AHashMap<u128, Entry>, now: Duration) {
        self.retain(shard, |entry| !entry.is_full(now));
    }

    fn retain(&self, shard: &mut AHashMap<u128, Entry>, mut keep: impl FnMut(&mut Entry) -> bool) {
        let before = shard.len();
        shard.retain(|_, entry| keep(entry));
        self.held.fetch_sub(before - shard.len(), Ordering::Relaxed);
    }

    /// Drops full buckets of a few locks; called a few times a second.
    pub fn sweep(&self, now: Duration) {
        for _ in 0..4 {
            let at = self.sweeps.fetch_add(1, Ordering::Relaxed) % SHARDS;
            self.drop_full(&mut self.shards[at].lock(), now);
        }
    }

    /// Takes over changed limits: `rates` says those of a route, none if it has none any more.
    pub fn follow(&self, rates: impl Fn(&str) -> Option<Rates>, now: Duration) {
        for shard in &self.shards {
            self.retain(&mut shard.lock(), |entry| match rates(&entry.route) {
                Some(rates) if !entry.share => {
                    entry.follow(rates, now);
                    true
                }
                found => found.is_some(),
            });
        }
    }

    /// Buckets that are less than full.
    pub fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether all are full.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Requests whose identity found no room.
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Up to `limit` buckets.
    pub fn shown(&self, limit: usize, now: Duration) -> Vec<Shown> {
        let mut shown = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock();
            let of = |entry: &Entry| Shown {
                route: Arc::clone(&entry.route),
                owner: entry.owner.clone(),
                rates: entry.rates,
                levels: entry.levels(now),
            };
            shown.extend(shard.values().take(limit - shown.len()).map(of));
            if shown.len() >= limit {
                break;
            }
        }
        shown
    }
}

/// What to spend so that `taken` becomes `used`.
pub fn difference(taken: &Tokens, used: &Tokens) -> Both<f64> {
    Both::of(|kind| bucket::exact(*used.get(kind)) - bucket::exact(*taken.get(kind)))
}

#[cfg(test)]
mod tests;
