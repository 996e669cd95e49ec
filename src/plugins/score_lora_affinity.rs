//! Prefers endpoints where the requested adapter is at work or finds a free place.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Needs, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::SignalKind;

/// 1.0 where requests of the adapter run, 0.8 where fewer adapters are at work than the engine can hold, 0.6 where requests
/// of the adapter wait, else 0 (llm-d's values). An endpoint that does not report adapters abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "lora-affinity-scorer",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::scorer(LoraAffinity).needs(Needs { metrics: true, lora: true, ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct LoraAffinity;

impl Scorer for LoraAffinity {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(out) {
            let active = cx.endpoint(candidate).active_adapters.load();
            let Some(active) = active.as_ref() else { continue };
            let most = cx.signal(candidate, SignalKind::MaxLora).unwrap_or(0.0);
            let has = |names: &[Box<str>]| names.iter().any(|name| **name == *cx.ask.model);
            *out = if has(&active.running) {
                1.0
            } else if ((active.running.len() + active.waiting.len()) as f32) < most {
                0.8
            } else if has(&active.waiting) {
                0.6
            } else {
                0.0
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{pool, scores, signal};
    use crate::state::endpoint::ActiveAdapters;
    use std::sync::Arc;

    #[test]
    fn llm_ds_table_comes_out() {
        let pool = pool(5);
        let set = |at: usize, running: &[&str], waiting: &[&str], most: f64| {
            let names = |list: &[&str]| list.iter().map(|name| (*name).into()).collect();
            let active = ActiveAdapters { running: names(running), waiting: names(waiting) };
            pool.members[at].endpoint.active_adapters.store(Some(Arc::new(active)));
            signal(&pool, at, SignalKind::MaxLora, most);
        };
        set(0, &["m", "b"], &[], 2.0);
        set(1, &["b"], &[], 2.0);
        set(2, &["b"], &["m"], 2.0);
        set(3, &["b", "c"], &[], 2.0);
        let found = scores(&LoraAffinity, &pool);
        assert_eq!(&found[..4], [1.0, 0.8, 0.6, 0.0]);
        assert!(found[4].is_nan());
    }
}
