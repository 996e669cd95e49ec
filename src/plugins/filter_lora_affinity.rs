//! Keeps endpoints that serve the requested model or adapter.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Filter, Instance, Kind, Needs, parameters};
use crate::schedule::{Candidate, Cycle};

/// Keeps endpoints whose `/v1/models` lists the model name that the engine will see, be it a base model or a LoRA
/// adapter. An endpoint that has not listed its models yet is kept only while no endpoint is known to serve the name.
/// Nobody left: 503 `filtered`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "lora-affinity",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::filter(LoraAffinity).needs(Needs { lora: true, ..Needs::default() }))
    },
};

/// The filter.
#[derive(Debug)]
pub struct LoraAffinity;

impl Filter for LoraAffinity {
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        let serves = |candidate: &Candidate| {
            let adapters = cx.endpoint(candidate).adapters.load();
            adapters.as_ref().map(|adapters| adapters.served.iter().any(|name| **name == *cx.ask.model))
        };
        let somebody_does = candidates.iter().any(|candidate| serves(candidate) == Some(true));
        for (candidate, dropped) in candidates.iter().zip(dropped) {
            *dropped = match serves(candidate) {
                Some(true) => None,
                None if !somebody_does => None,
                None => Some("has not listed its models"),
                Some(false) => Some("does not serve the model"),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, pool, verdicts};
    use crate::prompt::Prepared;
    use crate::state::endpoint::Adapters;
    use std::sync::Arc;

    #[test]
    fn an_unknown_list_counts_only_while_nobody_is_known_to_serve_the_name() {
        let (pool, prompt) = (pool(3), Prepared::default());
        let list = |at: usize, names: &[&str]| {
            let served = names.iter().map(|name| (*name).into()).collect();
            pool.members[at]
                .endpoint
                .adapters
                .store(Some(Arc::new(Adapters { served, adapters: Vec::new() })));
        };
        let kept = || -> Vec<bool> {
            verdicts(&LoraAffinity, &pool, &ask(&prompt, "lora-a")).iter().map(Option::is_none).collect()
        };
        assert_eq!(kept(), [true, true, true]);
        list(0, &["base"]);
        assert_eq!(kept(), [false, true, true]);
        list(1, &["base", "lora-a"]);
        assert_eq!(kept(), [false, true, false]);
    }
}
