//! Keeps a connection to Redis: connects again with growing pauses, and says when Redis fails and when it is well again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use redis::{ErrorKind, RedisError};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::address::Address;
use super::link::Link;

/// Pause before the first new attempt to connect, and the longest, give or take a fifth.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Time between two looks at a connection that seems well. One of them without a failure ends a degradation.
const LOOK: Duration = Duration::from_millis(500);
/// Time for a whole attempt to connect, names and handshakes included.
const CONNECT: Duration = Duration::from_secs(3);

/// How Redis does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// It answers.
    Well,
    /// It does not, or not in time; why, for people.
    Failing(String),
}

/// A connection that is kept. Clones share it.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    address: Address,
    link: ArcSwapOption<Link>,
    /// Calls that failed or were late.
    failures: AtomicU64,
    /// Whether the server said that it only reads.
    demoted: AtomicBool,
    look: Notify,
}

impl Connection {
    /// Not connected yet: that is the work of [`Connection::keep`].
    pub fn new(address: Address) -> Self {
        let shared = Shared {
            address,
            link: ArcSwapOption::empty(),
            failures: AtomicU64::new(0),
            demoted: AtomicBool::new(false),
            look: Notify::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Where it leads.
    pub fn address(&self) -> &Address {
        &self.shared.address
    }

    /// The link of this moment; none while there is no connection.
    pub fn link(&self) -> Option<Arc<Link>> {
        self.shared.link.load_full()
    }

    /// A call over the link failed: it is looked at at once. A server that only reads is left: its name may lead to another.
    pub fn failed(&self, error: &RedisError) {
        tracing::debug!(kind = ?error.kind(), "a call of Redis failed");
        if says(error, "READONLY") {
            self.shared.demoted.store(true, Ordering::Relaxed);
        }
        self.late();
    }

    /// An answer did not come in time.
    pub fn late(&self) {
        self.shared.failures.fetch_add(1, Ordering::Relaxed);
        self.shared.look.notify_one();
    }

    /// Keeps it connected until dropped. `report` is told what becomes of it, at first and at every change.
    pub async fn keep(self, mut report: impl FnMut(Health)) {
        let mut last = None;
        let mut tell = move |health: Health| {
            let change = last
                .as_ref()
                .is_none_or(|last: &Health| std::mem::discriminant(last) != std::mem::discriminant(&health));
            if change {
                report(health.clone());
                last = Some(health);
            }
        };
        let mut pause = PAUSE.0;
        loop {
            let why = match timeout(CONNECT, Link::connect(&self.shared.address)).await {
                Ok(Ok(link)) => {
                    let connected = Instant::now();
                    self.shared.demoted.store(false, Ordering::Relaxed);
                    self.shared.link.store(Some(Arc::new(link.clone())));
                    let error = self.watch(&link, &mut tell).await;
                    self.shared.link.store(None);
                    // One that fails at once would be connected to all the time.
                    if connected.elapsed() > PAUSE.1 {
                        pause = PAUSE.0;
                    }
                    error.to_string()
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no connection within 3 s".to_owned(),
            };
            tell(Health::Failing(why));
            sleep(pause.mul_f64(rand::random_range(0.8..1.2))).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Looks at a link until it fails.
    async fn watch(&self, link: &Link, tell: &mut impl FnMut(Health)) -> RedisError {
        let mut known = self.shared.failures.load(Ordering::Relaxed);
        loop {
            if let Err(error) = link.check().await {
                return error;
            }
            if self.shared.demoted.load(Ordering::Relaxed) {
                return RedisError::from((
                    ErrorKind::Io,
                    "the server has become a replica, which only reads",
                ));
            }
            let failures = self.shared.failures.load(Ordering::Relaxed);
            if failures == known {
                tell(Health::Well);
            } else {
                tell(Health::Failing("answers fail or come too late".to_owned()));
            }
            known = failures;
            sleep_or_look(&self.shared.look).await;
        }
    }
}

/// Whether an error is of a code. Before version 7 Redis tells those of commands in scripts in the text of another.
pub fn says(error: &RedisError, code: &str) -> bool {
    error.code() == Some(code) || error.detail().is_some_and(|detail| detail.contains(code))
}

async fn sleep_or_look(look: &Notify) {
    tokio::select! {
        () = sleep(LOOK) => {}
        () = look.notified() => {}
    }
}
