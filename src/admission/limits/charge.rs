//! What a request was charged, given back or settled exactly once.

use std::sync::Arc;

use super::local::{self, Key, Rates};
use super::store::{Name, Spent, Store};
use super::{Both, Kind, Limit, Limiter, Tokens, bucket};
use crate::refusal::Standing;

/// Where a request stands with limits.
#[derive(Debug, Default)]
pub enum Limiting {
    /// Its route has none.
    #[default]
    Unlimited,
    /// It was charged here.
    Charged(Box<Charge>),
    /// Envoy's filter will charge it.
    ByEnvoy {
        /// The limit to ask for.
        limit: Arc<Limit>,
        /// Whether output is generated, so that some must be left.
        generates: bool,
    },
}

impl Limiting {
    /// What the client has left; none where nobody counts.
    pub fn standing(&self) -> Option<Standing> {
        match self {
            Limiting::Charged(charge) if charge.standings != Both::default() => Some(charge.standing()),
            Limiting::Charged(_) | Limiting::Unlimited | Limiting::ByEnvoy { .. } => None,
        }
    }

    /// The charge, to be settled.
    pub fn into_charge(self) -> Option<Box<Charge>> {
        match self {
            Limiting::Charged(charge) => Some(charge),
            Limiting::Unlimited | Limiting::ByEnvoy { .. } => None,
        }
    }
}

/// Tokens that a request was charged. Dropped, it gives all of them back: the request has reached no engine.
#[derive(Debug)]
pub struct Charge {
    pub(super) limiter: Arc<Limiter>,
    pub(super) home: Home,
    pub(super) taken: Tokens,
    standings: Both<Option<Standing>>,
    /// Whether the request generates output; what has none spends none, whatever is estimated.
    generates: bool,
    /// What it comes to; given back unless somebody says otherwise.
    used: Tokens,
}

/// Where it was charged.
#[derive(Debug)]
pub(super) enum Home {
    /// In a bucket of this process.
    Local { key: Key, rates: Rates },
    /// In a store; the share counts while the store is away.
    Store { shared: Shared, share: Key },
    /// In this replica's share, since the store was away; it is told when it is back.
    Share { shared: Shared, share: Key },
    /// Nowhere: the store was away and the operator lets everything pass.
    Nowhere,
}

/// Buckets of a store.
#[derive(Debug)]
pub(super) struct Shared {
    pub store: Arc<dyn Store>,
    pub names: Both<Name>,
    pub rates: Rates,
}

impl Shared {
    /// Tells the store what was spent of buckets that fill by `rates`.
    pub fn add(&self, rates: &Rates, tokens: &Both<f64>) {
        for kind in Kind::ALL {
            let spent = *tokens.get(kind) as i64;
            if let Some(rate) = rates.get(kind).filter(|_| spent != 0) {
                self.store.add(Spent { name: self.names.get(kind).clone(), rate, tokens: spent });
            }
        }
    }

    /// The rates of one replica's part.
    pub fn share(&self, rates: &Rates) -> Rates {
        let replicas = self.store.replicas();
        Both::of(|kind| rates.get(kind).map(|rate| rate.share(replicas)))
    }
}

impl Charge {
    pub(super) fn new(
        limiter: Arc<Limiter>,
        home: Home,
        taken: Tokens,
        standings: Both<Option<Standing>>,
        generates: bool,
    ) -> Self {
        Self { limiter, home, taken, standings, generates, used: Tokens::default() }
    }

    /// What is left of each kind.
    pub fn standings(&self) -> &Both<Option<Standing>> {
        &self.standings
    }

    /// What is left of the kind that is nearer to its end.
    pub fn standing(&self) -> Standing {
        super::scarcest(&self.standings)
    }

    /// What was taken.
    pub fn taken(&self) -> Tokens {
        self.taken
    }

    /// Replaces the charge by what was used.
    pub fn settle(mut self, used: Tokens) {
        self.used = Tokens { output: if self.generates { used.output } else { 0 }, ..used };
    }

    /// Leaves the charge as it is: somebody else settles.
    pub fn keep(mut self) {
        self.used = self.taken;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.limiter.spend(&self.home, &local::difference(&self.taken, &self.used));
    }
}

/// Tokens as the difference of two counts.
pub(super) fn spent(tokens: &Tokens) -> Both<f64> {
    Both::of(|kind| bucket::exact(*tokens.get(kind)))
}
