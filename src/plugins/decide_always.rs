//! Computes every prompt at a prefill endpoint.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, PdDecider, parameters};

/// Every request whose prompt can be computed elsewhere than its output is split in two, however short it is. llm-d's
/// decider of that name, and what Kthena's router does: for pools whose decode endpoints must never prefill.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "always-disagg-pd-decider",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::decider(Always))
    },
};

/// The decider.
#[derive(Debug)]
pub struct Always;

impl PdDecider for Always {
    fn is_long_enough(&self, _uncached: u64, _prompt: u64) -> bool {
        true
    }

    fn prefers_pair(&self, _uncached: u64, _whole_seconds: f64, _pair_seconds: f64) -> bool {
        true
    }
}
