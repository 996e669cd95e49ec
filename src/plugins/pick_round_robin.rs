//! Takes one candidate after the other.

use std::sync::atomic::{AtomicUsize, Ordering};

use rand::rngs::SmallRng;
use schemars::JsonSchema;
use serde::Deserialize;

use crate::schedule::plugin::{Instance, Kind, Picker, parameters};
use crate::schedule::{Candidate, Cycle};

/// Takes one endpoint after the other, whatever the scores, and offers those that follow as alternatives. One turn is
/// shared by all pools; with endpoints coming and going it stays even only on average. Prompts, outputs and whole requests
/// each have their own turn.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "round-robin",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        parameters::<Config>(given)?;
        Ok(Instance::picker(RoundRobin::default()))
    },
};

/// The picker.
#[derive(Debug, Default)]
pub struct RoundRobin {
    /// One for each role.
    turns: [AtomicUsize; 3],
}

impl Picker for RoundRobin {
    fn pick(
        &self,
        cx: &Cycle<'_>,
        candidates: &[Candidate],
        _: &[f32],
        wanted: usize,
        _: &mut SmallRng,
        ranked: &mut Vec<u32>,
    ) {
        let n = candidates.len();
        let turn = self.turns[cx.role as usize].fetch_add(1, Ordering::Relaxed);
        ranked.extend((0..wanted.min(n)).map(|next| (turn.wrapping_add(next) % n) as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{first_choices, pool};

    #[test]
    fn everybody_gets_the_same() {
        assert_eq!(first_choices(&RoundRobin::default(), &pool(3), &[0.0, 1.0, 0.0], 300), [100; 3]);
    }
}
