//! How many tokens a route may take in a unit of time, charged before a request goes and settled when it has ended.
//!
//! ```text
//! charge   input: what the prompt has; output: at least one token must be left, a bound may be reserved
//!          -> Charge, or refused with the time after which the same request would be admitted
//! settle   the charge is replaced by what was used: more becomes debt, less comes back. A charge that is dropped comes back whole.
//! ```
//!
//! [`bucket`] is the arithmetic, [`local`] the buckets of this process, [`store`] those that replicas share, [`limiter`] both
//! behind one call, [`doors`] who may make that call.

pub mod bucket;
pub mod charge;
pub mod doors;
pub mod limiter;
pub mod local;
pub mod store;

use std::sync::Arc;
use std::time::Duration;

pub use bucket::{Rate, Unit};
pub use charge::{Charge, Limiting};
pub use doors::Doors;
pub use limiter::{Limiter, Outage, Reserve, Settings};

use super::Identity;
use crate::refusal::{Reason, Refusal, Standing};

/// Which tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of prompts.
    Input,
    /// Of answers.
    Output,
}

impl Kind {
    /// Both.
    pub const ALL: [Kind; 2] = [Kind::Input, Kind::Output];

    /// The name in labels, keys and descriptors.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Input => "input",
            Kind::Output => "output",
        }
    }
}

/// One of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Both<T> {
    /// That of prompts.
    pub input: T,
    /// That of answers.
    pub output: T,
}

impl<T> Both<T> {
    /// The one of that kind.
    pub fn get(&self, kind: Kind) -> &T {
        match kind {
            Kind::Input => &self.input,
            Kind::Output => &self.output,
        }
    }

    /// The one of that kind.
    pub fn get_mut(&mut self, kind: Kind) -> &mut T {
        match kind {
            Kind::Input => &mut self.input,
            Kind::Output => &mut self.output,
        }
    }

    /// Makes one of each kind.
    pub fn of(mut make: impl FnMut(Kind) -> T) -> Self {
        Self { input: make(Kind::Input), output: make(Kind::Output) }
    }
}

/// Tokens of both kinds.
pub type Tokens = Both<u64>;

/// Whose tokens are counted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Per {
    /// All that come by the route.
    #[default]
    Route,
    /// Those of one identity.
    Identity,
}

/// Where replicas count together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// `host:port`.
    pub address: Arc<str>,
    /// What stands in keys for the route: the model as in Kthena's, with the route's name where an older route has that key.
    pub name: Arc<str>,
}

/// The limit of one ModelRoute: of all its models and adapters together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The route, `namespace/name`.
    pub route: Arc<str>,
    /// The model that the route is configured for, for labels.
    pub model: Arc<str>,
    /// Tokens in a unit of time; none: any number.
    pub rates: Both<Option<Rate>>,
    /// Whose tokens.
    pub per: Per,
    /// Where replicas count together; none: each counts for itself.
    pub together: Option<Together>,
}

impl Limit {
    /// Whose bucket a request takes from.
    pub fn owner(&self, identity: &Identity) -> Identity {
        match self.per {
            Per::Route => Identity::default(),
            Per::Identity => identity.clone(),
        }
    }

    /// What is left of each kind, by the levels of the buckets.
    fn standings(&self, levels: &Both<f64>) -> Both<Option<Standing>> {
        Both::of(|kind| self.rates.get(kind).map(|rate| rate.standing(*levels.get(kind))))
    }
}

/// Of both kinds, the one that is nearer to its end.
fn scarcest(standings: &Both<Option<Standing>>) -> Standing {
    let left = |standing: &Standing| f64::from(standing.remaining) / f64::from(standing.limit.max(1));
    let known = [standings.input, standings.output].into_iter().flatten();
    known.min_by(|a, b| left(a).total_cmp(&left(b))).unwrap_or_default()
}

/// Why a request may not go.
#[derive(Clone, Debug, PartialEq)]
pub enum Denied {
    /// Its tokens are used up.
    Limited(Limited),
    /// Nobody can say, and the operator wants nothing let through then.
    Unavailable,
}

/// Tokens are used up.
#[derive(Clone, Debug, PartialEq)]
pub struct Limited {
    /// Which: of both, those that take longer to come back.
    pub kind: Kind,
    /// When the same request would be admitted.
    pub retry_after: Duration,
    /// What the bucket holds.
    pub standing: Standing,
}

impl Denied {
    /// What the client is told.
    pub fn refusal(&self, limit: &Limit) -> Refusal {
        let Denied::Limited(limited) = self else {
            let why = "the token limits cannot be checked at present: try again shortly";
            return Refusal::new(Reason::LimiterUnavailable, why).retry_after(Duration::from_secs(1));
        };
        let seconds = whole_seconds(limited.retry_after);
        let unit = limit.rates.get(limited.kind).map_or("", |rate| rate.unit.name());
        let why = format!(
            "the {} token limit of ModelRoute {} is used up ({} per {unit}): try again in {seconds} s",
            limited.kind.name(),
            limit.route,
            limited.standing.limit,
        );
        let after = Duration::from_secs(seconds);
        Refusal { standing: Some(limited.standing), ..Refusal::new(Reason::Limited, why).retry_after(after) }
    }
}

/// Seconds after which a time is over for certain, at least 1.
pub fn whole_seconds(time: Duration) -> u64 {
    time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_rounded_up_and_have_no_end() {
        let of = |nanos| whole_seconds(Duration::from_nanos(nanos));
        assert_eq!([of(0), of(1), of(1_000_000_000), of(1_000_000_001)], [1, 1, 1, 2]);
        assert_eq!(whole_seconds(Duration::MAX), u64::MAX);
    }
}
