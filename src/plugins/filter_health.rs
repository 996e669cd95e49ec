//! Leaves out endpoints that would refuse a request, let it hang or want none.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Filter, Instance, Kind, WhenEmpty, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::disaggregation::Disaggregation;
use crate::state::health::State;
use crate::state::reservation::Role;

/// Leaves out endpoints that are down (two refused connections), starting while another is up, asleep, draining (`drain`,
/// or three 500/502 in a row, with one probe request after each 10 s), full (a 503 within the last second), or wedged (requests open, token counters flat) while
/// a probe request is under way. If that would leave nobody it is ignored and counted: a wrong belief about health must
/// not turn a slow pool into a dead one. Prompts are not computed elsewhere if nobody who could is well,
/// where one endpoint can do it all. Runs before every profile, listed or not.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "health",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::filter(Health))
    },
};

/// The filter.
#[derive(Debug)]
pub struct Health;

impl Filter for Health {
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        for (candidate, dropped) in candidates.iter().zip(dropped) {
            let health = &cx.endpoint(candidate).health;
            *dropped = match health.state() {
                State::Starting => Some("starting"),
                State::Down => Some("down"),
                State::Asleep => Some("asleep"),
                State::Draining if !health.may_be_probed(cx.now) => Some("draining"),
                State::Up if health.is_full(cx.now) => Some("full"),
                State::Up if health.is_wedged() && !health.may_be_probed(cx.now) => Some("wedged"),
                State::Draining | State::Up => None,
            };
        }
    }

    fn when_all_are_dropped(&self, cx: &Cycle<'_>) -> WhenEmpty {
        let alone = |roles: &Disaggregation| roles.connector.decode_serves_alone();
        let served_without = cx.role == Role::Prefill && cx.pool.disaggregation.as_ref().is_some_and(alone);
        if served_without { WhenEmpty::Refuse } else { WhenEmpty::Ignore }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, pool, verdicts};
    use crate::prompt::Prepared;
    use crate::state::signals::Millis;

    #[test]
    fn each_state_is_named() {
        let (pool, prompt) = (pool(7), Prepared::default());
        let health = |at: usize| &pool.members[at].endpoint.health;
        health(1).refused();
        health(1).refused();
        health(2).set_asleep(true);
        health(3).set_drain(true);
        health(4).answered(503, Millis::now());
        health(5).set_wedged(true);
        health(6).set_wedged(true);
        assert!(health(6).begin_probe());
        let found = verdicts(&Health, &pool, &ask(&prompt, "m"));
        assert_eq!(
            found,
            [None, Some("down"), Some("asleep"), Some("draining"), Some("full"), None, Some("wedged")]
        );
    }
}
