//! Numbers that an engine reports about itself, each with its age: unknown is not zero.
//!
//! A signal that was never seen, has gone stale or was not a number reads as `None`; nothing here invents a value.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The clock all ages refer to: milliseconds since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Millis(pub u64);

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Millis {
    /// Now. Follows tokio's clock, so tests may pause it.
    pub fn now() -> Self {
        Self::at(Instant::now())
    }

    /// The moment `instant`; moments before the process started count as its start.
    pub fn at(instant: Instant) -> Self {
        // One millisecond is added so that 0 can mean "never".
        Self(instant.saturating_duration_since(*START).as_millis() as u64 + 1)
    }

    /// This moment and `later`.
    pub fn plus(self, later: Duration) -> Self {
        Self(self.0 + later.as_millis() as u64)
    }

    /// Time since `earlier`, zero if that lies ahead.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

macro_rules! signals {
    ($($(#[doc = $doc:literal])+ $kind:ident = $name:literal,)+) => {
        /// What a number is about.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum SignalKind { $($(#[doc = $doc])+ $kind,)+ }

        impl SignalKind {
            /// Every kind, in the order of the debug output.
            pub const ALL: &'static [SignalKind] = &[$(SignalKind::$kind,)+];

            /// The name in `/debug/endpoints` and in metric labels.
            pub fn name(self) -> &'static str {
                match self { $(SignalKind::$kind => $name,)+ }
            }
        }
    };
}

signals! {
    /// Requests the engine is computing.
    Running = "running",
    /// Requests the engine has queued.
    Waiting = "waiting",
    /// Share of KV blocks held by live requests, 0 to 1.
    KvUsage = "kv_usage",
    /// Mean time to first token over the last scrapes that saw any, seconds.
    TimeToFirstToken = "time_to_first_token",
    /// Mean time per output token over the last scrapes that saw any, seconds.
    TimePerOutputToken = "time_per_output_token",
    /// Tokens in a KV block.
    BlockSize = "block_size",
    /// KV blocks the engine has.
    Blocks = "blocks",
    /// 1 if the engine sleeps, else 0.
    Asleep = "asleep",
    /// Tokens the engine has produced and prefilled since it started; flat while it is wedged.
    TokensDone = "tokens_done",
    /// Requests of others than this picker: running + waiting minus our own bookings when the scrape began.
    Foreign = "foreign",
    /// Unix time at which the engine process started, seconds.
    ProcessStart = "process_start",
    /// Adapters the engine can hold at once.
    MaxLora = "max_lora",
}

/// One number with its age.
#[derive(Debug)]
pub struct Signal {
    bits: AtomicU64,
    seen: AtomicU64,
}

impl Default for Signal {
    fn default() -> Self {
        Self { bits: AtomicU64::new(f64::NAN.to_bits()), seen: AtomicU64::new(0) }
    }
}

/// All signals of one endpoint.
#[derive(Debug)]
pub struct Signals {
    slots: [Signal; SignalKind::ALL.len()],
}

impl Default for Signals {
    fn default() -> Self {
        Self { slots: std::array::from_fn(|_| Signal::default()) }
    }
}

impl Signals {
    /// Stores what the engine said at `seen`; a value that is not finite is dropped, as if nothing had been said.
    pub fn set(&self, kind: SignalKind, value: f64, seen: Millis) {
        if value.is_finite() {
            let slot = &self.slots[kind as usize];
            slot.bits.store(value.to_bits(), Ordering::Relaxed);
            slot.seen.store(seen.0, Ordering::Release);
        }
    }

    /// Forgets the value: the engine restarted or stopped reporting it.
    pub fn forget(&self, kind: SignalKind) {
        self.slots[kind as usize].seen.store(0, Ordering::Release);
    }

    /// Forgets everything.
    pub fn forget_all(&self) {
        for &kind in SignalKind::ALL {
            self.forget(kind);
        }
    }

    /// The last value and its age at `now`, however old.
    pub fn last(&self, kind: SignalKind, now: Millis) -> Option<(f64, Duration)> {
        let slot = &self.slots[kind as usize];
        match slot.seen.load(Ordering::Acquire) {
            0 => None,
            seen => Some((f64::from_bits(slot.bits.load(Ordering::Relaxed)), now.since(Millis(seen)))),
        }
    }

    /// The value if it is at most `staleness` old at `now`.
    pub fn fresh(&self, kind: SignalKind, now: Millis, staleness: Duration) -> Option<f64> {
        self.last(kind, now).filter(|&(_, age)| age <= staleness).map(|(value, _)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_stale_and_not_finite_read_as_none() {
        let signals = Signals::default();
        let at = Millis(1_000);
        assert_eq!(signals.fresh(SignalKind::KvUsage, at, Duration::from_secs(2)), None);
        signals.set(SignalKind::KvUsage, f64::NAN, at);
        signals.set(SignalKind::KvUsage, f64::INFINITY, at);
        assert_eq!(signals.last(SignalKind::KvUsage, at), None);
        signals.set(SignalKind::KvUsage, 0.5, at);
        assert_eq!(signals.fresh(SignalKind::KvUsage, Millis(3_000), Duration::from_secs(2)), Some(0.5));
        assert_eq!(signals.fresh(SignalKind::KvUsage, Millis(3_001), Duration::from_secs(2)), None);
        assert_eq!(signals.fresh(SignalKind::Running, at, Duration::from_secs(2)), None, "kinds do not mix");
        signals.forget_all();
        assert_eq!(signals.last(SignalKind::KvUsage, at), None);
    }
}
