//! Who may go, and when: identities, and what is asked of them before an endpoint is picked.
//!
//! ```text
//! routed request -> identity   who sends it
//!                -> limits     may these tokens be spent? 429, or a charge that is settled with what was used
//!                -> queue      its turn among the flows of its pool, while the pool has no room
//!                -> pick       the endpoint is chosen when the request leaves, not when it came
//! ```

pub mod fairness;
pub mod gate;
pub mod identity;
pub mod limits;
pub mod saturation;
pub mod settings;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use ahash::AHashMap;
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use gate::{Bill, Entered, Gate, GateStatus, Permit, Rules, Ticket, Want};
pub use identity::{Identity, Source};
pub use settings::QueueSettings;

use crate::state::Pool;

/// How often queues are looked at in which somebody waits, beside whenever a request ends: engines report room that no
/// end of ours has made.
pub const TICK: Duration = Duration::from_millis(25);

/// The gates of all pools.
#[derive(Debug)]
pub struct Admission {
    rules: Arc<Rules>,
    gates: ArcSwap<AHashMap<Arc<str>, Arc<Gate>>>,
    /// Held while the map is replaced; true once it was made from the pools that are there.
    changing: Mutex<bool>,
}

impl Default for Admission {
    /// Gates of the usual settings, signals of the usual age.
    fn default() -> Self {
        Self::new(QueueSettings::default(), Duration::from_secs(2), u64::MAX)
    }
}

impl Admission {
    /// Gates that go by `settings` and hold signals older than `staleness` to be unknown; at most so many bytes wait in front of
    /// all.
    pub fn new(settings: QueueSettings, staleness: Duration, most_bytes: u64) -> Self {
        tell(&settings);
        let settings = ArcSwap::from_pointee(settings);
        let rules =
            Rules { settings, staleness, most_bytes, bytes: AtomicU64::new(0), waiting: Notify::new() };
        Self { rules: Arc::new(rules), gates: ArcSwap::default(), changing: Mutex::default() }
    }

    /// What queues go by.
    pub fn settings(&self) -> Arc<QueueSettings> {
        self.rules.settings.load_full()
    }

    /// Replaces what queues go by; who waits stays where he is.
    pub fn replace(&self, settings: QueueSettings) {
        tell(&settings);
        self.rules.settings.store(Arc::new(settings));
        self.gates.load().values().for_each(Gate::look);
    }

    /// The gate of a pool; a closed one for a pool that is no more.
    pub fn gate(&self, pool: &Arc<Pool>) -> Arc<Gate> {
        if let Some(gate) = self.gates.load().get(&pool.label) {
            return Arc::clone(gate);
        }
        let known = self.changing.lock();
        if *known {
            return Arc::new(Gate::closed(Arc::clone(&self.rules), Arc::clone(pool)));
        }
        self.open(std::slice::from_ref(pool));
        Arc::clone(&self.gates.load()[&pool.label])
    }

    /// Opens gates to pools that are about to be there: whoever sees a pool finds its gate.
    pub fn prepare(&self, pools: &[Arc<Pool>]) {
        let _changing = self.changing.lock();
        self.open(pools);
    }

    /// Opens those that are not open; `changing` is held.
    fn open(&self, pools: &[Arc<Pool>]) {
        let mut gates = AHashMap::clone(&self.gates.load());
        for pool in pools {
            let new = || Arc::new(Gate::new(Arc::clone(&self.rules), Arc::clone(pool)));
            gates.entry(Arc::clone(&pool.label)).or_insert_with(new);
        }
        self.gates.store(Arc::new(gates));
    }

    /// Pools as they are described now, and which ModelRoutes are there. Who waits for what is no more is refused.
    pub fn follow(&self, pools: &[Arc<Pool>], is_there: &dyn Fn(&str) -> bool) {
        let mut known = self.changing.lock();
        *known = true;
        self.open(pools);
        let mut gone = AHashMap::clone(&self.gates.load());
        let mut gates = AHashMap::with_capacity(pools.len());
        for pool in pools {
            if let Some(gate) = gone.remove(&pool.label) {
                gate.follow(pool, is_there);
                gates.insert(Arc::clone(&pool.label), gate);
            }
        }
        self.gates.store(Arc::new(gates));
        gone.values().for_each(|gate| gate.close());
    }

    /// Every gate with its pool's `namespace/name`.
    pub fn gates(&self) -> Vec<(Arc<str>, Arc<Gate>)> {
        self.gates.load().iter().map(|(label, gate)| (Arc::clone(label), Arc::clone(gate))).collect()
    }

    /// Looks at queues for as long as anybody waits, and sleeps while nobody does.
    pub async fn tend(&self) {
        loop {
            self.rules.waiting.notified().await;
            let mut tick = tokio::time::interval(TICK);
            tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            tick.tick().await;
            while self.someone_waits() {
                tick.tick().await;
                for gate in self.gates.load_full().values().filter(|gate| gate.waiting() > 0) {
                    gate.look();
                }
            }
        }
    }

    fn someone_waits(&self) -> bool {
        self.gates.load().values().any(|gate| gate.waiting() > 0)
    }
}

fn tell(settings: &QueueSettings) {
    if let Some(why) = settings.without_effect() {
        tracing::warn!("{why}");
    }
}
