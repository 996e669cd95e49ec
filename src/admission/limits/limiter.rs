//! All limits behind one call: the buckets of this process, and those of stores with what counts while one is away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use arc_swap::ArcSwap;
use tokio::time::Instant;

use super::charge::{Home, Shared, spent};
use super::local::{Buckets, Key, Rates, Shown};
use super::store::{Answer, Demand, Name, Store, Stores};
use super::{Both, Charge, Denied, Kind, Limit, Limited, Per, Tokens};
use crate::admission::Identity;

/// What becomes of requests while a store is away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Outage {
    /// Each replica counts its part of the limit.
    #[default]
    Local,
    /// All go.
    Open,
    /// None goes: 503.
    Closed,
}

/// What is reserved of output tokens before they are there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Reserve {
    /// Nothing: one token must be left, and what is used beyond becomes debt.
    #[default]
    None,
    /// What the request bounds itself to, as far as it is left.
    MaxTokens,
}

/// How a limiter is configured.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What is reserved of output.
    pub reserve: Reserve,
    /// Output tokens expected of an answer that has no bound.
    pub default_output: u64,
    /// What becomes of requests while a store is away.
    pub outage: Outage,
}

impl Default for Settings {
    fn default() -> Self {
        Self { reserve: Reserve::None, default_output: 200, outage: Outage::Local }
    }
}

/// A limit in effect.
#[derive(Debug)]
struct Watched {
    limit: Arc<Limit>,
    store: Option<Arc<dyn Store>>,
    /// Its buckets there, where all requests of the route share them.
    names: Both<Name>,
    rejected: Arc<Both<AtomicU64>>,
}

/// Charges requests by the limits of their routes.
#[derive(Debug)]
pub struct Limiter {
    settings: Settings,
    buckets: Buckets,
    stores: Option<Arc<dyn Stores>>,
    watched: ArcSwap<AHashMap<Arc<str>, Watched>>,
    began: Instant,
    told_of_overflow: AtomicBool,
}

/// Rejections by one limit.
#[derive(Clone, Debug)]
pub struct Rejections {
    /// The model its route is configured for.
    pub model: Arc<str>,
    /// Requests refused by kind.
    pub rejected: Both<u64>,
}

impl Limiter {
    /// A limiter without limits; `stores` finds where replicas count together.
    pub fn new(settings: Settings, stores: Option<Arc<dyn Stores>>) -> Self {
        Self {
            settings,
            buckets: Buckets::default(),
            stores,
            watched: ArcSwap::default(),
            began: Instant::now(),
            told_of_overflow: AtomicBool::new(false),
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Makes these the limits: levels of those that were there stay, those that are not among them are forgotten.
    pub fn follow<'a>(&self, limits: impl Iterator<Item = &'a Arc<Limit>>) {
        let before = self.watched.load_full();
        let watched: AHashMap<Arc<str>, Watched> = limits
            .map(|limit| {
                let rejected = before.get(&limit.route).map(|known| Arc::clone(&known.rejected));
                let store = limit.together.as_ref().and_then(|at| self.stores.as_ref()?.open(&at.address));
                let rejected = rejected.unwrap_or_default();
                let names = names(limit, &Identity::default());
                (Arc::clone(&limit.route), Watched { limit: Arc::clone(limit), store, names, rejected })
            })
            .collect();
        let watched = Arc::new(watched);
        self.watched.store(Arc::clone(&watched));
        self.buckets.follow(|route| watched.get(route).map(|found| found.limit.rates), self.now());
    }

    /// Whether a store may be spoken to.
    pub fn allows(&self, address: &str) -> bool {
        self.stores.as_ref().is_some_and(|stores| stores.allows(address))
    }

    /// The limit of a route, by `namespace/name`.
    pub fn find(&self, route: &str) -> Option<Arc<Limit>> {
        self.watched.load().get(route).map(|found| Arc::clone(&found.limit))
    }

    /// Output tokens to ask for: `max_tokens` of each of `answers`.
    pub fn output(&self, max_tokens: Option<u64>, answers: u32) -> u64 {
        match self.settings.reserve {
            Reserve::None => 0,
            Reserve::MaxTokens => {
                max_tokens.unwrap_or(self.settings.default_output).saturating_mul(u64::from(answers.max(1)))
            }
        }
    }

    /// Charges a request, or says why it may not go. Kinds that are not asked for are not looked at.
    pub async fn charge(
        self: &Arc<Self>,
        limit: &Arc<Limit>,
        identity: &Identity,
        asks: Both<Option<u64>>,
    ) -> Result<Charge, Denied> {
        let owner = limit.owner(identity);
        match self.shared(limit, &owner) {
            None => self.charge_here(limit, owner, &asks),
            Some(shared) => self.charge_together(limit, owner, &asks, shared).await,
        }
    }

    /// The buckets of a store, where a limit is counted in one.
    fn shared(&self, limit: &Limit, owner: &Identity) -> Option<Shared> {
        limit.together.as_ref()?;
        let watched = self.watched.load();
        let found = watched.get(&limit.route)?;
        let store = found.store.clone()?;
        let names = match limit.per {
            Per::Route => found.names.clone(),
            Per::Identity => names(limit, owner),
        };
        Some(Shared { store, names, rates: limit.rates })
    }

    fn charge_here(
        self: &Arc<Self>,
        limit: &Arc<Limit>,
        owner: Identity,
        asks: &Both<Option<u64>>,
    ) -> Result<Charge, Denied> {
        let rates = limit.rates;
        let (key, answer) = self.buckets.take(Key::new(&limit.route, owner, false), rates, asks, self.now());
        self.tell_of_overflow();
        self.answer(limit, asks, answer, limit, || Home::Local { key, rates })
    }

    async fn charge_together(
        self: &Arc<Self>,
        limit: &Arc<Limit>,
        owner: Identity,
        asks: &Both<Option<u64>>,
        shared: Shared,
    ) -> Result<Charge, Denied> {
        let share = Key::new(&limit.route, owner, true);
        if shared.store.is_well() {
            let demand = |kind| {
                let (rate, amount) = ((*limit.rates.get(kind))?, (*asks.get(kind))?);
                Some(Demand { name: shared.names.get(kind).clone(), rate, kind, amount })
            };
            if let Some(answer) = shared.store.check(Both::of(demand)).await {
                return self.answer(limit, asks, answer, limit, || Home::Store { shared, share });
            }
        }
        match self.settings.outage {
            Outage::Closed => Err(Denied::Unavailable),
            Outage::Open => {
                let (nothing, unknown) = (Tokens::default(), Both::default());
                Ok(Charge::new(Arc::clone(self), Home::Nowhere, nothing, unknown, asks.output.is_some()))
            }
            Outage::Local => {
                let part = Limit { rates: shared.share(&shared.rates), ..Limit::clone(limit) };
                let (share, answer) = self.buckets.take(share, part.rates, asks, self.now());
                self.tell_of_overflow();
                if let Some(taken) = &answer.taken {
                    shared.add(&shared.rates, &spent(taken));
                }
                self.answer(limit, asks, answer, &part, || Home::Share { shared, share })
            }
        }
    }

    /// What buckets that fill by `by` say of a request.
    fn answer(
        self: &Arc<Self>,
        limit: &Limit,
        asks: &Both<Option<u64>>,
        answer: Answer,
        by: &Limit,
        home: impl FnOnce() -> Home,
    ) -> Result<Charge, Denied> {
        let Some(taken) = answer.taken else {
            let limited = refuse(by, asks, &answer.levels);
            if let Some(found) = self.watched.load().get(&limit.route) {
                found.rejected.get(limited.kind).fetch_add(1, Ordering::Relaxed);
            }
            return Err(Denied::Limited(limited));
        };
        let left = Both::of(|kind| answer.levels.get(kind) - super::bucket::exact(*taken.get(kind)));
        Ok(Charge::new(Arc::clone(self), home(), taken, by.standings(&left), asks.output.is_some()))
    }

    /// Spends tokens where a request was charged; fewer than 0 come back.
    pub(super) fn spend(&self, home: &Home, tokens: &Both<f64>) {
        if *tokens == Both::default() {
            return;
        }
        match home {
            Home::Local { key, rates } => {
                self.buckets.spend(key, self.rates(key).unwrap_or(*rates), tokens, self.now());
                self.tell_of_overflow();
            }
            Home::Store { shared, share } => {
                let rates = self.tell(shared, share, tokens);
                if !shared.store.is_well() && self.settings.outage == Outage::Local {
                    self.buckets.spend(share, shared.share(&rates), tokens, self.now());
                }
            }
            Home::Share { shared, share } => {
                let rates = self.tell(shared, share, tokens);
                self.buckets.spend(share, shared.share(&rates), tokens, self.now());
            }
            Home::Nowhere => {}
        }
    }

    /// Tells a store what was spent; at which rates.
    fn tell(&self, shared: &Shared, share: &Key, tokens: &Both<f64>) -> Rates {
        let rates = self.rates(share).unwrap_or(shared.rates);
        shared.add(&rates, tokens);
        rates
    }

    /// The rates of a key's limit, which may have changed since a request was charged.
    fn rates(&self, key: &Key) -> Option<Rates> {
        self.watched.load().get(key.route()).map(|found| found.limit.rates)
    }

    /// Spends tokens of a request whose charge was [kept](Charge::keep); fewer than 0 come back.
    pub fn settle(self: &Arc<Self>, limit: &Arc<Limit>, identity: &Identity, tokens: &Both<i64>) {
        let owner = limit.owner(identity);
        let home = match self.shared(limit, &owner) {
            None => Home::Local { key: Key::new(&limit.route, owner, false), rates: limit.rates },
            Some(shared) => Home::Store { shared, share: Key::new(&limit.route, owner, true) },
        };
        self.spend(&home, &Both::of(|kind| *tokens.get(kind) as f64));
    }

    fn tell_of_overflow(&self) {
        if self.buckets.overflowed() > 0 && !self.told_of_overflow.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                most = super::local::MOST_KEYS,
                "more identities spend tokens at a time than are told apart: the others of a limit share one bucket"
            );
        }
    }

    /// Forgets what is as good as not there; called a few times a second.
    pub fn sweep(&self) {
        self.buckets.sweep(self.now());
    }

    /// Refused requests by limit.
    pub fn rejections(&self) -> Vec<Rejections> {
        let of = |found: &Watched| Rejections {
            model: Arc::clone(&found.limit.model),
            rejected: Both::of(|kind| found.rejected.get(kind).load(Ordering::Relaxed)),
        };
        self.watched.load().values().map(of).collect()
    }

    /// All limits, each with whether its store answers, if it has one; at most so many.
    pub fn limits(&self, most: usize) -> Vec<(Arc<Limit>, Option<bool>)> {
        let watched = self.watched.load();
        let of =
            |found: &Watched| (Arc::clone(&found.limit), found.store.as_ref().map(|store| store.is_well()));
        watched.values().take(most).map(of).collect()
    }

    /// Buckets of this process that are less than full, at most so many.
    pub fn shown(&self, most: usize) -> Vec<Shown> {
        self.buckets.shown(most, self.now())
    }

    /// How many there are.
    pub fn held(&self) -> usize {
        self.buckets.len()
    }

    /// Settlements that no store will hear of.
    pub fn lost(&self) -> u64 {
        self.stores.as_ref().map_or(0, |stores| stores.lost())
    }

    /// Requests whose identity found no bucket of its own.
    pub fn overflowed(&self) -> u64 {
        self.buckets.overflowed()
    }
}

/// Which kind refuses, and when the request would be admitted: of both, the longer wait.
fn refuse(limit: &Limit, asks: &Both<Option<u64>>, levels: &Both<f64>) -> Limited {
    let wait = |kind| {
        let (rate, amount) = ((*limit.rates.get(kind))?, (*asks.get(kind))?);
        let level = *levels.get(kind);
        Some((rate.wait(level, rate.needed(kind, amount)), kind, rate.standing(level)))
    };
    let longest = Kind::ALL.into_iter().filter_map(wait).max_by_key(|(wait, ..)| *wait);
    let (retry_after, kind, standing) =
        longest.unwrap_or((Duration::ZERO, Kind::Output, super::scarcest(&limit.standings(levels))));
    Limited { kind, retry_after, standing }
}

/// Kthena's names, so that its routers and we count together; an identity is named in front of the kind.
fn names(limit: &Limit, owner: &Identity) -> Both<Name> {
    let model = limit.together.as_ref().map_or(&limit.model, |together| &together.name);
    Both::of(|kind| {
        let kind = kind.name();
        let name = match limit.per {
            Per::Route => format!("kthena:ratelimit:{model}:{kind}"),
            Per::Identity => format!("kthena:ratelimit:{model}#{}:{kind}", owner.name().unwrap_or_default()),
        };
        Name(name.into())
    })
}

#[cfg(test)]
mod tests;
