//! Which endpoint a session is bound to: by a signed token that the client brings back, or by a table of session ids.
//!
//! Plugins ask for a [`Binding`]; equal ones of a profile share an [`Affinity`]. A [`Session`] is what one request says under
//! one affinity: it is read before the cycle and looked up within it, so that of two first requests at once the second
//! finds what the first was bound to.

mod bindings;
mod token;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

pub use bindings::Bindings;
pub use token::{Key, ShortKey, Token};

use crate::request::head::Head;
use crate::state::signals::Millis;
use crate::state::{Endpoint, Pool};

/// Where a value stands in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Carrier {
    /// In the header of this lower-case name.
    Header(Box<str>),
    /// In the cookie of this name.
    Cookie(Box<str>),
}

impl Carrier {
    /// The value in a request; an empty one is none.
    pub fn read<'h>(&self, head: &'h Head) -> Option<&'h str> {
        let value = match self {
            Carrier::Header(name) => head.get(name).map(str::trim),
            Carrier::Cookie(name) => head.cookie(name),
        };
        value.filter(|value| !value.is_empty())
    }
}

/// How sessions are told apart and bound to endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Binding {
    /// The client carries the binding.
    Token(Carrier),
    /// The binding is kept here, under an id of the client's.
    Id {
        /// Where the id may stand; the first that is there counts.
        sources: Vec<Carrier>,
        /// How long a binding lives without a request.
        ttl: Duration,
        /// Most bindings kept; the oldest go.
        capacity: usize,
    },
}

/// One way of binding in a profile, with what it has bound.
#[derive(Debug)]
pub struct Affinity {
    /// The way.
    pub binding: Binding,
    bindings: Bindings,
}

impl Affinity {
    /// With nothing bound yet.
    pub fn new(binding: Binding) -> Self {
        let bindings = match binding {
            Binding::Token(_) => Bindings::new(Duration::ZERO, 0),
            Binding::Id { ttl, capacity, .. } => Bindings::new(ttl, capacity),
        };
        Self { binding, bindings }
    }

    /// Where the token stands, if there is one.
    pub fn token(&self) -> Option<&Carrier> {
        match &self.binding {
            Binding::Token(carrier) => Some(carrier),
            Binding::Id { .. } => None,
        }
    }
}

/// What became of a request's session at the pick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The request names no session.
    Absent,
    /// Its token is forged, cut off, another pool's, or of an endpoint that is gone: as if it had none.
    Ignored,
    /// Its id was bound to nobody.
    New,
    /// It went where it is bound.
    Kept,
    /// Other scores weighed more; the binding of an id stays.
    Outweighed,
    /// Where it was bound is no candidate: it is bound anew.
    Moved,
}

impl Outcome {
    /// Every outcome.
    pub const ALL: [Outcome; 6] =
        [Outcome::Absent, Outcome::Ignored, Outcome::New, Outcome::Kept, Outcome::Outweighed, Outcome::Moved];

    /// The name in JSON and in metric labels.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Absent => "absent",
            Outcome::Ignored => "ignored",
            Outcome::New => "new",
            Outcome::Kept => "kept",
            Outcome::Outweighed => "outweighed",
            Outcome::Moved => "moved",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Absent,
    Ignored,
    /// The slot that a valid token names.
    Token(u64),
    /// The digest of an id: the text is not kept.
    Id(u128),
}

/// What a request says of its session under one affinity.
#[derive(Debug)]
pub struct Session {
    affinity: Arc<Affinity>,
    mark: Mark,
}

impl Session {
    /// Reads a request that `pool` will serve.
    pub fn read(affinity: &Arc<Affinity>, head: &Head, pool: &Pool, key: &Key) -> Self {
        let mark = match &affinity.binding {
            Binding::Token(carrier) => match carrier.read(head) {
                None => Mark::Absent,
                Some(text) => match key.endpoint(text, pool) {
                    Some(endpoint) => Mark::Token(endpoint.slot),
                    None => Mark::Ignored,
                },
            },
            Binding::Id { sources, .. } => match sources.iter().find_map(|source| source.read(head)) {
                None => Mark::Absent,
                Some(id) => Mark::Id(key.digest(pool, id)),
            },
        };
        Self { affinity: Arc::clone(affinity), mark }
    }

    /// The session under `binding`, among those of a request.
    pub fn under<'s>(sessions: &'s [Session], binding: &Binding) -> Option<&'s Session> {
        sessions.iter().find(|session| session.affinity.binding == *binding)
    }

    /// The slot of the endpoint that it is bound to.
    pub fn bound(&self, now: Millis) -> Option<u64> {
        match self.mark {
            Mark::Absent | Mark::Ignored => None,
            Mark::Token(slot) => Some(slot),
            Mark::Id(id) => self.affinity.bindings.get(id, now),
        }
    }

    /// What a pick of `picked` among candidates makes of it. Nothing is bound by this.
    pub fn outcome(&self, picked: u64, is_candidate: impl Fn(u64) -> bool, now: Millis) -> Outcome {
        match (self.mark, self.bound(now)) {
            (Mark::Absent, _) => Outcome::Absent,
            (Mark::Ignored, _) => Outcome::Ignored,
            (_, None) => Outcome::New,
            (_, Some(bound)) if bound == picked => Outcome::Kept,
            (_, Some(bound)) if is_candidate(bound) => Outcome::Outweighed,
            (_, Some(_)) => Outcome::Moved,
        }
    }

    /// Binds an id to the picked endpoint, or lets it live on where it stays bound.
    pub fn bind(&self, outcome: Outcome, picked: u64, now: Millis) {
        if let Mark::Id(id) = self.mark {
            let slot = match outcome {
                Outcome::Outweighed => self.bound(now).unwrap_or(picked),
                _ => picked,
            };
            self.affinity.bindings.bind(id, slot, now);
        }
    }

    /// Binds an id to the endpoint that served in place of the `picked` one that it was bound to.
    pub fn served_by(&self, served: u64, picked: u64, now: Millis) {
        if let Mark::Id(id) = self.mark
            && served != picked
            && self.bound(now) == Some(picked)
        {
            self.affinity.bindings.bind(id, served, now);
        }
    }
}

/// Tells a client by tokens where its session is bound.
#[derive(Debug)]
pub struct Issuer {
    key: Arc<Key>,
    pool: Arc<Pool>,
    ranked: SmallVec<[Arc<Endpoint>; 3]>,
    affinities: SmallVec<[Arc<Affinity>; 1]>,
}

impl Issuer {
    /// For a request that `ranked` endpoints of `pool` may serve; `None` where no affinity uses tokens.
    pub fn of(
        affinities: &[Arc<Affinity>],
        key: &Arc<Key>,
        pool: &Arc<Pool>,
        ranked: &[Arc<Endpoint>],
    ) -> Option<Box<Self>> {
        let tokens = || affinities.iter().filter(|affinity| affinity.token().is_some());
        tokens().next()?;
        Some(Box::new(Self {
            key: Arc::clone(key),
            pool: Arc::clone(pool),
            ranked: ranked.iter().cloned().collect(),
            affinities: tokens().cloned().collect(),
        }))
    }

    /// Where clients bring tokens, and find them.
    pub fn carriers(&self) -> impl Iterator<Item = &Carrier> {
        self.affinities.iter().filter_map(|affinity| affinity.token())
    }

    /// The endpoints that may serve, best first.
    pub fn ranked(&self) -> &[Arc<Endpoint>] {
        &self.ranked
    }

    /// The token of an endpoint.
    pub fn token(&self, endpoint: &Endpoint) -> Token {
        self.key.token(&self.pool, endpoint)
    }

    /// The endpoint that served: the reported one if it is of this pool, or where nobody reports, the one that the number
    /// of attempts (0 if unknown) points to.
    pub fn served(&self, reported: Option<SocketAddr>, attempts: u32) -> Option<&Endpoint> {
        match reported {
            Some(address) => self.pool.member_at(address).map(|member| &*member.endpoint),
            None => self.ranked.get(attempts.max(1) as usize - 1).map(|endpoint| &**endpoint),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::pool;

    fn head(headers: &[(&str, &str)]) -> Head {
        Head::new(headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn an_id_follows_who_served_unless_it_was_bound_elsewhere_since() {
        let (pool, key, now) = (pool(1), Key::random(), Millis(1));
        let session = Session::read(&ids(), &head(&[("x-session-id", "a")]), &pool, &key);
        session.bind(Outcome::New, 1, now);
        session.served_by(2, 1, now);
        assert_eq!(session.bound(now), Some(2));
        session.served_by(3, 1, now);
        assert_eq!(session.bound(now), Some(2), "an older request that ends later");
    }

    fn ids() -> Arc<Affinity> {
        let sources = vec![Carrier::Header("x-session-id".into()), Carrier::Cookie("chat".into())];
        Arc::new(Affinity::new(Binding::Id { sources, ttl: Duration::from_mins(5), capacity: 10 }))
    }

    #[test]
    fn the_first_source_that_is_there_names_the_session() {
        let (affinity, key, pool) = (ids(), Key::random(), pool(2));
        let read = |headers: &[(&str, &str)]| Session::read(&affinity, &head(headers), &pool, &key).mark;
        let header = read(&[("x-session-id", "a")]);
        assert_eq!(read(&[("x-session-id", " a "), ("cookie", "chat=b")]), header);
        assert_eq!(read(&[("x-session-id", ""), ("cookie", "x=1; chat=a")]), header);
        assert_ne!(read(&[("cookie", "chat=b")]), header);
        assert_eq!(read(&[("cookie", "chat=; other=a")]), Mark::Absent);
    }

    #[test]
    fn an_id_in_another_pool_is_another_session() {
        let (affinity, key) = (ids(), Key::random());
        let (one, mut other) = (pool(1), Arc::into_inner(pool(1)).unwrap());
        other.label = "elsewhere/pool".into();
        let head = head(&[("x-session-id", "a")]);
        let mark = |pool: &Pool| Session::read(&affinity, &head, pool, &key).mark;
        assert_ne!(mark(&one), mark(&other));
    }

    #[test]
    fn a_binding_moves_only_when_its_endpoint_is_no_candidate() {
        let (affinity, key, pool) = (ids(), Key::random(), pool(2));
        let session = Session::read(&affinity, &head(&[("x-session-id", "a")]), &pool, &key);
        let now = Millis(1);
        let pick = |picked, candidates: &[u64]| {
            let outcome = session.outcome(picked, |slot| candidates.contains(&slot), now);
            session.bind(outcome, picked, now);
            (outcome, session.bound(now))
        };
        assert_eq!(pick(1, &[1, 2]), (Outcome::New, Some(1)));
        assert_eq!(pick(1, &[1, 2]), (Outcome::Kept, Some(1)));
        assert_eq!(pick(2, &[1, 2]), (Outcome::Outweighed, Some(1)));
        assert_eq!(pick(2, &[2]), (Outcome::Moved, Some(2)));
    }

    #[test]
    fn a_token_names_who_served_and_nobody_outside_the_pool() {
        let affinity = Arc::new(Affinity::new(Binding::Token(Carrier::Header("x-session-token".into()))));
        let (key, pool) = (Arc::new(Key::random()), pool(3));
        let endpoint = |at: usize| Arc::clone(&pool.members[at].endpoint);
        let issuer = Issuer::of(&[affinity], &key, &pool, &[endpoint(1), endpoint(0)]).unwrap();
        let served = |reported: Option<&str>, attempts| {
            issuer.served(reported.map(|a| a.parse().unwrap()), attempts).map(|e| e.name.name.to_string())
        };
        assert_eq!(served(Some("10.0.0.3:8000"), 2).as_deref(), Some("e3"));
        assert_eq!(served(Some("10.9.9.9:8000"), 1), None);
        assert_eq!(served(None, 0).as_deref(), Some("e2"));
        assert_eq!(served(None, 2).as_deref(), Some("e1"));
        assert_eq!(served(None, 3), None);
        assert!(Issuer::of(&[ids()], &key, &pool, &[endpoint(1)]).is_none(), "ids need no token");
    }
}
