//! Token buckets that replicas share in Redis, under the names that Kthena's routers use.
//!
//! One script call checks and charges a request; what it really used is added up and told by one worker. A call has 20 ms:
//! after one that failed or was late nobody waits any more, until a write of the worker has come back in time.

mod allowed;
mod backlog;
mod scripts;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use redis::RedisResult;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use allowed::{Allowed, BadFlag, NotAllowable};

use super::connection::{Connection, Health};
use super::{Address, link::Link};
use crate::admission::limits::Both;
use crate::admission::limits::store::{Answer, Demand, Spent, Store, Stores};
use backlog::Backlog;

/// Time for a check.
const BUDGET: Duration = Duration::from_millis(20);
/// Pause between two signs of life, by which replicas know how many they are.
const BEAT: Duration = Duration::from_secs(1);
/// Pause between two attempts while it does not answer.
const PROBE: Duration = Duration::from_millis(100);
/// Signs of life in a row, each in time, after which it is well: one may be luck.
const GOOD: u32 = 2;
/// Answers in a row that are late, after which it is not well: one may be a hiccup of either side.
const LATE: u32 = 3;
/// Time for the first connection before its absence is a failure.
const FIRST: Duration = Duration::from_secs(1);
/// Time for what is left to be told at the end of the process.
const FAREWELL: Duration = Duration::from_millis(200);

/// Told where Redis is and how it does, at first and at every change.
pub type OnHealth = Arc<dyn Fn(&Address, &Health) + Send + Sync>;

/// The stores that flags allow.
pub struct RedisStores {
    allowed: Allowed,
    replica: Box<str>,
    on_health: OnHealth,
    stop: CancellationToken,
    tasks: TaskTracker,
    /// By the address that was allowed; a route may name it in several ways.
    open: Mutex<AHashMap<String, Arc<RedisStore>>>,
}

impl fmt::Debug for RedisStores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStores").field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

impl RedisStores {
    /// None is open yet. `replica` tells this process from the others that count there.
    pub fn new(
        allowed: Allowed,
        replica: &str,
        on_health: OnHealth,
        stop: CancellationToken,
        tasks: TaskTracker,
    ) -> Self {
        Self { allowed, replica: replica.into(), on_health, stop, tasks, open: Mutex::default() }
    }
}

impl Stores for RedisStores {
    fn allows(&self, address: &str) -> bool {
        self.allowed.find(address).is_some()
    }

    fn open(&self, address: &str) -> Option<Arc<dyn Store>> {
        let address = self.allowed.find(address)?;
        let mut open = self.open.lock();
        if let Some(store) = open.get(&address.to_string()) {
            return Some(Arc::clone(store) as Arc<dyn Store>);
        }
        let store = Arc::new(RedisStore::new(address.clone(), &self.replica, Arc::clone(&self.on_health)));
        let connection = store.inner.connection.clone();
        let stopped = self.stop.clone();
        self.tasks.spawn(async move { stopped.run_until_cancelled(connection.keep(|_| {})).await });
        let (inner, stopped) = (Arc::clone(&store.inner), self.stop.clone());
        self.tasks.spawn(async move {
            stopped.run_until_cancelled(inner.work()).await;
            inner.farewell().await;
        });
        open.insert(address.to_string(), Arc::clone(&store));
        Some(store)
    }

    fn lost(&self) -> u64 {
        self.open.lock().values().map(|store| store.inner.lost.load(Ordering::Relaxed)).sum()
    }
}

fn due(beaten: Option<Instant>) -> bool {
    beaten.is_none_or(|beaten| beaten.elapsed() >= BEAT)
}

/// The buckets of one Redis.
#[derive(Debug)]
pub struct RedisStore {
    inner: Arc<Inner>,
}

struct Inner {
    connection: Connection,
    replica: Box<str>,
    on_health: OnHealth,
    well: AtomicBool,
    /// Signs of life in a row.
    good: AtomicU32,
    /// Answers in a row that were late.
    late: AtomicU32,
    replicas: AtomicU32,
    /// What was told last.
    told: Mutex<Option<bool>>,
    backlog: Mutex<Backlog>,
    wake: Notify,
    lost: AtomicU64,
    told_of_misfit: AtomicBool,
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("at", self.connection.address()).finish_non_exhaustive()
    }
}

impl RedisStore {
    fn new(address: Address, replica: &str, on_health: OnHealth) -> Self {
        let inner = Inner {
            connection: Connection::new(address),
            replica: replica.into(),
            on_health,
            well: AtomicBool::new(false),
            good: AtomicU32::new(0),
            late: AtomicU32::new(0),
            replicas: AtomicU32::new(1),
            told: Mutex::default(),
            backlog: Mutex::default(),
            wake: Notify::new(),
            lost: AtomicU64::new(0),
            told_of_misfit: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }
}

impl Store for RedisStore {
    fn is_well(&self) -> bool {
        self.inner.well.load(Ordering::Relaxed)
    }

    fn replicas(&self) -> u32 {
        self.inner.replicas.load(Ordering::Relaxed).max(1)
    }

    fn check(&self, demands: Both<Option<Demand>>) -> BoxFuture<'_, Option<Answer>> {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            let Some(link) = inner.connection.link() else {
                inner.fail("there is no connection");
                return None;
            };
            let (tell, mut told) = oneshot::channel();
            let calling = Arc::clone(&inner);
            // A task of its own: a charge that comes too late, or for nobody, must be undone.
            tokio::spawn(async move {
                let answer = scripts::check(&link, &demands).await;
                let _ =
                    tell.send(answer.map(|answer| Granted { inner: calling, demands, answer: Some(answer) }));
            });
            let answer = match timeout(BUDGET, &mut told).await {
                Ok(answer) => answer.ok(),
                Err(_) => {
                    told.close();
                    told.try_recv().ok()
                }
            };
            match answer {
                Some(Ok(granted)) => {
                    inner.late.store(0, Ordering::Relaxed);
                    granted.accept()
                }
                Some(Err(error)) if scripts::is_of_one_key(&error) => {
                    inner.tell_of_misfit(&error);
                    None
                }
                Some(Err(error)) => {
                    inner.connection.failed(&error);
                    inner.fail(&error.to_string());
                    None
                }
                None => {
                    inner.late();
                    None
                }
            }
        })
    }

    fn add(&self, spent: Spent) {
        self.inner.add(spent);
    }
}

/// The answer to a check; what it took comes back unless somebody accepts it.
struct Granted {
    inner: Arc<Inner>,
    demands: Both<Option<Demand>>,
    answer: Option<Answer>,
}

impl Granted {
    fn accept(mut self) -> Option<Answer> {
        self.answer.take()
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        let Some(taken) = self.answer.take().and_then(|answer| answer.taken) else { return };
        for demand in [&self.demands.input, &self.demands.output].into_iter().flatten() {
            let tokens = -(*taken.get(demand.kind) as i64);
            self.inner.add(Spent { name: demand.name.clone(), rate: demand.rate, tokens });
        }
    }
}

impl Inner {
    fn add(&self, spent: Spent) {
        let room = self.backlog.lock().add(spent);
        self.lose(u64::from(!room), "too many buckets have changed while it was away");
        self.wake.notify_one();
    }

    /// Counts settlements that do not reach it.
    fn lose(&self, lost: u64, why: &str) {
        if lost > 0 && self.lost.fetch_add(lost, Ordering::Relaxed) == 0 {
            let redis = self.connection.address();
            tracing::warn!(%redis, why, "what was spent of some buckets is not told to Redis");
        }
    }

    /// A bucket whose key holds something else is counted as while Redis is away; the others are not.
    fn tell_of_misfit(&self, error: &redis::RedisError) {
        if !self.told_of_misfit.swap(true, Ordering::Relaxed) {
            let redis = self.connection.address();
            tracing::warn!(%redis, %error, "the key of a bucket holds something else: delete it");
        }
    }

    fn succeed(&self) {
        self.late.store(0, Ordering::Relaxed);
        let is_first = self.told.lock().is_none();
        if self.good.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= GOOD || is_first {
            self.well.store(true, Ordering::Relaxed);
            self.tell(true, "");
        }
    }

    /// An answer did not come in time. What it was for is counted here; a few in a row are a failure.
    fn late(&self) {
        self.connection.late();
        if self.late.fetch_add(1, Ordering::Relaxed).saturating_add(1) >= LATE || !self.is_well() {
            self.fail("no answers within 20 ms");
        }
    }

    fn is_well(&self) -> bool {
        self.well.load(Ordering::Relaxed)
    }

    fn fail(&self, why: &str) {
        self.good.store(0, Ordering::Relaxed);
        self.well.store(false, Ordering::Relaxed);
        self.tell(false, why);
    }

    fn tell(&self, well: bool, why: &str) {
        let mut told = self.told.lock();
        if told.replace(well) != Some(well) {
            let health = if well { Health::Well } else { Health::Failing(why.to_owned()) };
            (self.on_health)(self.connection.address(), &health);
        }
    }

    /// Shows this replica to the others, learns how many there are, and tells Redis what was spent.
    async fn work(&self) {
        let began = Instant::now();
        let mut beaten: Option<Instant> = None;
        loop {
            let well = self.well.load(Ordering::Relaxed);
            if !well || due(beaten) {
                beaten = Some(Instant::now());
                match self.connection.link() {
                    Some(link) => self.beat(&link).await,
                    None if began.elapsed() < FIRST => {}
                    None => self.fail("there is no connection"),
                }
            }
            if self.well.load(Ordering::Relaxed) {
                self.flush(|| self.well.load(Ordering::Relaxed) && !due(beaten)).await;
                let next = beaten.map_or(BEAT, |beaten| BEAT.saturating_sub(beaten.elapsed()));
                let _ = timeout(next, self.wake.notified()).await;
            } else {
                sleep(PROBE).await;
            }
        }
    }

    /// A write, so that a replica that only reads is not taken for well, and as fast as a check must be.
    async fn beat(&self, link: &Link) {
        match timeout(BUDGET, scripts::beat(link, &self.replica)).await {
            Ok(Ok(replicas)) => {
                self.replicas.store(replicas.max(1), Ordering::Relaxed);
                self.succeed();
            }
            Ok(Err(error)) => {
                self.connection.failed(&error);
                self.fail(&error.to_string());
            }
            Err(_) => self.late(),
        }
    }

    /// Tells what was spent while it may `go_on`: a long backlog must not keep back a sign of life.
    async fn flush(&self, go_on: impl Fn() -> bool) {
        while go_on() {
            let batch = self.backlog.lock().next();
            let (Some(batch), Some(link)) = (batch, self.connection.link()) else { return };
            match scripts::settle(&link, &self.replica, batch.number, &batch.spent).await {
                Ok(misfits) => {
                    self.backlog.lock().told(batch.number);
                    self.lose(misfits, "keys of buckets hold something else");
                }
                Err(error) => {
                    self.connection.failed(&error);
                    return self.fail(&error.to_string());
                }
            }
        }
    }

    /// What was spent by the last requests, and that this replica goes.
    async fn farewell(&self) {
        let leave = async {
            sleep(FAREWELL / 2).await;
            self.flush(|| true).await;
            let left: RedisResult<()> = match self.connection.link() {
                Some(link) => scripts::leave(&link, &self.replica).await,
                None => Ok(()),
            };
            left
        };
        let _ = timeout(FAREWELL, leave).await;
    }
}

#[cfg(test)]
mod tests;
