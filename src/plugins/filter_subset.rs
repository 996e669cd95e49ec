//! Honours the candidate restriction that the gateway sent with the request.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Filter, Instance, Kind, WhenEmpty, parameters};
use crate::schedule::{Candidate, Cycle};

/// Keeps the endpoints named by `envoy.lb.subset_hint` / `x-gateway-destination-endpoint-subset`. Entries are compared as
/// addresses, port-exact; an entry without a port means every port of that host. A restriction that matches nothing is
/// answered 503 `no-endpoints`, never by an endpoint outside it. Runs before every profile, listed or not.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "subset",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::filter(Subset))
    },
};

/// The filter.
#[derive(Debug)]
pub struct Subset;

impl Filter for Subset {
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        let Some(subset) = cx.ask.subset else { return };
        for (candidate, dropped) in candidates.iter().zip(dropped) {
            if !subset.allows(cx.endpoint(candidate).address) {
                *dropped = Some("not in the subset");
            }
        }
    }

    fn when_all_are_dropped(&self, _: &Cycle<'_>) -> WhenEmpty {
        WhenEmpty::RefuseNoEndpoints
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, pool, verdicts};
    use crate::prompt::Prepared;

    #[test]
    fn only_listed_endpoints_stay_and_no_hint_keeps_all() {
        let (pool, prompt) = (pool(3), Prepared::default());
        let mut ask = ask(&prompt, "m");
        assert_eq!(verdicts(&Subset, &pool, &ask), [None; 3]);
        let subset = crate::schedule::Subset::from_entries(["10.0.0.2:8000", "10.0.0.3:9999"]);
        ask.subset = Some(&subset);
        let kept: Vec<bool> = verdicts(&Subset, &pool, &ask).iter().map(Option::is_none).collect();
        assert_eq!(kept, [false, true, false]);
    }
}
