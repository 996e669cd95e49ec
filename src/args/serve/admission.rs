//! Who may go, and when.

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::admission::limits::{self, Outage, Reserve};
use crate::admission::{QueueSettings, Source};
use crate::args::units;

/// Flags of identities, limits and queues.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Admission")]
pub struct AdmissionArgs {
    /// Where the identity of a request stands; the first source that says something counts. attribute:NAME, an attribute that
    /// Envoy sends; header:NAME, a header that Envoy sets and whose copies of clients it removes; user, the member of the body,
    /// and session, the header x-session-id, both of which clients choose. Without it all requests are one identity's.
    #[arg(long, value_name = "SOURCE,...", value_delimiter = ',', env = "PILOTFISH_IDENTITY")]
    pub identity: Vec<Source>,
    /// Let requests wait while their pool has no room, in fair turns; off: they go on to engines that let them wait, and only
    /// those of negative priority are shed.
    #[arg(long, value_enum, env = "PILOTFISH_QUEUE")]
    pub queue: Option<Switch>,
    /// Longest wait for room; then 429. 0 is as long as the client waits. Without it the configuration's, else 60s.
    #[arg(long, value_name = "TIME", value_parser = units::duration, env = "PILOTFISH_QUEUE_TIMEOUT")]
    pub queue_timeout: Option<Duration>,
    /// Most requests that wait in one band of priority of a pool; then 429. Without it the configuration's, else 5000.
    #[arg(long, value_name = "N", env = "PILOTFISH_QUEUE_REQUESTS")]
    pub queue_requests: Option<usize>,
    /// How long requests wait for the first endpoint of a pool that has none, so that an autoscaler can start one from
    /// `pilotfish_held_requests`; then 503. Without it the configuration's, else 0: refused at once.
    #[arg(long, value_name = "TIME", value_parser = units::duration, env = "PILOTFISH_HOLD_TIMEOUT")]
    pub hold_timeout: Option<Duration>,
    /// Most requests that wait for the first endpoint of a pool.
    #[arg(long, value_name = "N", default_value_t = 1_000, env = "PILOTFISH_HOLD_REQUESTS")]
    pub hold_requests: usize,
    /// Who enforces token limits of ModelRoutes: the picker, which answers 429 itself, or Envoy's rate limit filter, which asks
    /// the rate limit service of the gRPC port. Never both: tokens would be charged twice.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_LIMIT_ENFORCEMENT")]
    pub limit_enforcement: Enforcement,
    /// Output tokens that a request is charged before it goes. What it really used replaces them at its end; without a
    /// reservation, what is used beyond the limit becomes debt, and the next request waits until that is paid.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_LIMIT_RESERVE_OUTPUT")]
    pub limit_reserve_output: Reserve,
    /// Output tokens reserved for each answer of a request that has no bound of its own, with --limit-reserve-output max-tokens.
    #[arg(long, value_name = "N", default_value_t = 200, env = "PILOTFISH_LIMIT_DEFAULT_OUTPUT")]
    pub limit_default_output: u64,
    /// What becomes of requests while the Redis of a global limit does not answer: local, each replica counts its part of the
    /// limit; open, all go; closed, all are answered 503.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_LIMIT_OUTAGE")]
    pub limit_outage: Outage,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

/// Who enforces token limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Enforcement {
    /// The picker.
    #[default]
    Picker,
    /// Envoy's rate limit filter.
    Envoy,
}

impl AdmissionArgs {
    /// What queues go by: what the configuration says, unless a flag says otherwise.
    pub fn over(&self, mut settings: QueueSettings) -> QueueSettings {
        if let Some(queue) = self.queue {
            settings.waits = queue == Switch::On;
        }
        if let Some(timeout) = self.queue_timeout {
            settings.timeout = Some(timeout).filter(|timeout| !timeout.is_zero());
        }
        if let Some(requests) = self.queue_requests {
            settings.band.requests = requests;
            if let Some(sheddable) = &mut settings.sheddable {
                sheddable.requests = requests;
            }
        }
        settings.hold = self.hold_timeout.unwrap_or(settings.hold);
        settings.hold_requests = self.hold_requests;
        settings
    }

    /// How limits are counted.
    pub fn limits(&self) -> limits::Settings {
        limits::Settings {
            reserve: self.limit_reserve_output,
            default_output: self.limit_default_output,
            outage: self.limit_outage,
        }
    }

    /// Attributes of Envoy that identities may stand in.
    pub fn attributes(&self) -> impl Iterator<Item = Arc<str>> {
        self.identity.iter().filter_map(|source| match source {
            Source::Attribute(name) => Some(Arc::clone(name)),
            _ => None,
        })
    }
}
