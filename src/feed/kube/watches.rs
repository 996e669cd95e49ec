//! How current each watch is: what readiness, gauges and logs are told.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use super::Source;
use super::trouble::Trouble;

/// One watch, for its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WatchId(u64);

/// How current a watch is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not listed anything yet.
    Starting,
    /// What it told is what stands.
    Current,
    /// What it told stood a while ago.
    Behind(Trouble),
}

/// All watches.
#[derive(Debug)]
pub struct Watches {
    inner: Mutex<Inner>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Inner {
    next: u64,
    watches: BTreeMap<WatchId, Watched>,
    /// Whether every watch has once said all it could.
    settled: bool,
}

#[derive(Debug)]
struct Watched {
    source: Source,
    state: State,
    /// When the state began.
    since: Instant,
    /// Whether it was ever current.
    was_current: bool,
}

/// How current the objects of one kind are.
#[derive(Clone, Debug, PartialEq)]
pub struct KindState {
    /// The kind as metrics call it.
    pub label: String,
    /// Whether it is not installed or may not be read.
    pub unavailable: bool,
    /// How old its last state is; zero while it is current.
    pub age: Duration,
}

impl Default for Watches {
    fn default() -> Self {
        Self { inner: Mutex::default(), changed: watch::Sender::new(()) }
    }
}

impl Watches {
    pub(super) fn add(&self, source: &Source) -> WatchId {
        let mut inner = self.inner.lock();
        let id = WatchId(inner.next);
        inner.next += 1;
        let watched = Watched {
            source: source.clone(),
            state: State::Starting,
            since: Instant::now(),
            was_current: false,
        };
        inner.watches.insert(id, watched);
        id
    }

    pub(super) fn remove(&self, id: WatchId) {
        self.inner.lock().watches.remove(&id);
        self.changed.send_replace(());
    }

    pub(super) fn current(&self, id: WatchId) {
        self.set(id, State::Current);
    }

    pub(super) fn behind(&self, id: WatchId, trouble: &Trouble) {
        self.set(id, State::Behind(trouble.clone()));
    }

    /// Forgets all watches, which are no more. An index that begins anew says nothing until it has settled again.
    pub fn clear(&self) {
        let mut inner = self.inner.lock();
        inner.watches.clear();
        inner.settled = false;
        drop(inner);
        self.changed.send_replace(());
    }

    pub(super) fn was_current(&self, id: WatchId) -> bool {
        self.inner.lock().watches.get(&id).is_some_and(|watched| watched.was_current)
    }

    fn set(&self, id: WatchId, state: State) {
        let mut inner = self.inner.lock();
        let Some(watched) = inner.watches.get_mut(&id) else { return };
        let same = match (&watched.state, &state) {
            (State::Behind(before), State::Behind(now)) => {
                std::mem::discriminant(before) == std::mem::discriminant(now)
            }
            (before, now) => before == now,
        };
        if !same {
            watched.tell(&state);
            if watched.state == State::Current || state == State::Current {
                watched.since = Instant::now();
            }
        }
        watched.was_current |= state == State::Current;
        watched.state = state;
        drop(inner);
        self.changed.send_replace(());
    }

    /// Whether every watch has once said all it could. From then on it stays so, until they are [cleared](Self::clear).
    pub fn have_settled(&self) -> bool {
        let mut inner = self.inner.lock();
        inner.settled |= inner.watches.values().all(Watched::has_settled);
        inner.settled
    }

    /// What nothing can be served without, and is missing.
    pub fn missing(&self) -> Option<String> {
        let inner = self.inner.lock();
        if inner.settled {
            return None;
        }
        inner.watches.values().find(|watched| !watched.has_settled()).map(Watched::missing)
    }

    /// Whether something that stands may be unknown here, since the API server does not answer. Kinds that are not
    /// installed, or that may never be read, are no such thing.
    pub fn is_behind(&self) -> bool {
        self.inner.lock().watches.values().any(|watched| match &watched.state {
            State::Behind(Trouble::Absent | Trouble::Forbidden) => {
                watched.was_current || watched.source.is_required()
            }
            State::Behind(_) => true,
            State::Starting | State::Current => false,
        })
    }

    /// Every kind that is watched; of several watches of one the oldest state counts.
    pub fn kinds(&self) -> Vec<KindState> {
        let inner = self.inner.lock();
        let mut kinds: BTreeMap<String, KindState> = BTreeMap::new();
        for watched in inner.watches.values() {
            let label = watched.source.label();
            let kind = kinds.entry(label.clone()).or_insert(KindState {
                label,
                unavailable: false,
                age: Duration::ZERO,
            });
            kind.unavailable |= watched.is_unavailable();
            if watched.state != State::Current {
                kind.age = kind.age.max(watched.since.elapsed());
            }
        }
        kinds.into_values().collect()
    }

    /// Told whenever a watch changes.
    pub fn changed(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }
}

impl Watched {
    fn is_unavailable(&self) -> bool {
        matches!(self.state, State::Behind(Trouble::Absent | Trouble::Forbidden))
    }

    fn has_settled(&self) -> bool {
        self.was_current || (!self.source.is_required() && self.is_unavailable())
    }

    fn what(&self) -> String {
        let label = self.source.label();
        self.source
            .namespace
            .as_ref()
            .map_or_else(|| label.clone(), |ns| format!("{label} of namespace {ns}"))
    }

    fn missing(&self) -> String {
        let what = self.what();
        match &self.state {
            State::Starting | State::Current => format!("{what} have not been listed yet"),
            State::Behind(Trouble::Absent) => format!("{what} cannot be listed: the kind is not installed"),
            State::Behind(Trouble::Forbidden) => {
                format!(
                    "{what} cannot be listed: grant this service account the verbs list and watch on them"
                )
            }
            State::Behind(Trouble::Overloaded(why) | Trouble::Unreachable(why)) => {
                format!("{what} cannot be listed: {why}")
            }
        }
    }

    /// Says once what changed.
    fn tell(&self, next: &State) {
        let what = self.what();
        match next {
            State::Starting => {}
            State::Current if self.state == State::Starting => tracing::debug!("{what} are watched"),
            State::Current => {
                let after = self.since.elapsed();
                tracing::info!("{what} are current again after {:.1} s", after.as_secs_f64());
            }
            State::Behind(Trouble::Absent) if self.was_current => {
                tracing::warn!("the kind of {what} is no longer installed: the last ones stay until it is");
            }
            State::Behind(Trouble::Absent) => {
                tracing::info!("{what} are not read: the kind is not installed");
            }
            State::Behind(Trouble::Forbidden) => {
                tracing::warn!(
                    "{what} are not read: grant this service account the verbs list and watch on them"
                );
            }
            State::Behind(Trouble::Overloaded(why) | Trouble::Unreachable(why)) => {
                tracing::warn!("{what} cannot be watched, the last ones stay: {why}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_index_that_begins_anew_waits_until_everything_is_listed_again() {
        let watches = Watches::default();
        let first = watches.add(&Source::pods("n"));
        assert!(!watches.have_settled());
        watches.current(first);
        assert!(watches.have_settled());
        watches.behind(first, &Trouble::Unreachable(String::new()));
        assert!(watches.have_settled() && watches.is_behind(), "what stood still stands");
        watches.clear();
        let second = watches.add(&Source::pods("n"));
        assert!(!watches.have_settled() && watches.missing().is_some());
        watches.current(second);
        assert!(watches.have_settled() && watches.missing().is_none());
    }
}
