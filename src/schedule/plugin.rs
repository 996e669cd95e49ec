//! What a plugin is: a name, a manual, a configuration and one pure function over slices.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::SmallRng;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::cost::CostModel;
use super::cycle::{Candidate, Cycle};
use crate::prompt::BlockNeeds;
use crate::session::Binding;
use crate::usage::Attribute;

/// Drops candidates.
pub trait Filter: Debug + Send + Sync {
    /// Writes the reason into `dropped[i]` for every candidate that must go; leaves `None` for those that stay.
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]);

    /// What happens when this filter would leave nobody.
    fn when_all_are_dropped(&self, _: &Cycle<'_>) -> WhenEmpty {
        WhenEmpty::Refuse
    }
}

/// What to do when a filter would leave no candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenEmpty {
    /// Refuse the request: 503 `filtered`, naming the plugin.
    Refuse,
    /// Refuse the request: 503 `no-endpoints`.
    RefuseNoEndpoints,
    /// Keep all and count it.
    Ignore,
}

/// Rates candidates.
pub trait Scorer: Debug + Send + Sync {
    /// Writes a score in [0, 1] for every candidate it has an opinion on, higher is better. `out` arrives filled with NaN,
    /// and what stays NaN abstains: it counts as the mean of the scores this scorer gave to the others.
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]);

    /// The model behind the scores, if they are costs in seconds and nothing else: then the costs of both halves of a request
    /// can be added up.
    fn cost_model(&self) -> Option<CostModel> {
        None
    }
}

/// Says whether a prompt is worth computing at another endpoint than the one that generates the output.
pub trait PdDecider: Debug + Send + Sync {
    /// Whether a prompt of which the best endpoint for the whole request would have to compute `uncached` tokens may be.
    /// Asked before anything is known of pairs.
    fn is_long_enough(&self, uncached: u64, prompt: u64) -> bool;

    /// Whether a pair beats the best endpoint for the whole request, by what the request costs everybody in seconds.
    fn prefers_pair(&self, uncached: u64, whole_seconds: f64, pair_seconds: f64) -> bool;
}

/// Chooses among the candidates left.
pub trait Picker: Debug + Send + Sync {
    /// Pushes the indices of up to `wanted` candidates into `ranked`, best first; at least one, none twice.
    /// `totals[i]` is the weighted sum of the scores of candidate i.
    fn pick(
        &self,
        cx: &Cycle<'_>,
        candidates: &[Candidate],
        totals: &[f32],
        wanted: usize,
        rng: &mut SmallRng,
        ranked: &mut Vec<u32>,
    );
}

/// What a plugin needs to be known before its cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Prompt text in blocks, and who was sent them.
    pub blocks: Option<BlockNeeds>,
    /// Prompt tokens in blocks, and who holds them.
    pub tokens: bool,
    /// Who owns the prompt's blocks in an index shared with others.
    pub shared: Option<SharedNeeds>,
    /// What endpoints hold by the best source there is: tokens, and text cut as another plugin wants it or by default.
    pub held: bool,
    /// A hash of so many leading bytes of the prompt's text.
    pub head_bytes: Option<usize>,
    /// Engine metrics.
    pub metrics: bool,
    /// Adapter lists.
    pub lora: bool,
    /// Which endpoint the request's session is bound to.
    pub session: Option<Arc<Binding>>,
}

/// How a plugin wants the shared index asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedNeeds {
    /// Tokens in a block, as the engines have it.
    pub block_tokens: usize,
    /// Leading blocks looked up.
    pub max_blocks: usize,
    /// Time that a pick waits for the answer.
    pub deadline: Duration,
}

/// A configured plugin. One that is both filter and scorer fills both.
#[derive(Clone, Debug, Default)]
pub struct Instance {
    /// Its filter.
    pub filter: Option<Arc<dyn Filter>>,
    /// Its scorer.
    pub scorer: Option<Arc<dyn Scorer>>,
    /// Its picker.
    pub picker: Option<Arc<dyn Picker>>,
    /// Its decision on disaggregation.
    pub decider: Option<Arc<dyn PdDecider>>,
    /// What it reports of responses, if it is there for that.
    pub reports: Option<Vec<Arc<Attribute>>>,
    /// What it needs.
    pub needs: Needs,
}

impl Instance {
    /// A filter.
    pub fn filter(filter: impl Filter + 'static) -> Self {
        Self { filter: Some(Arc::new(filter)), ..Self::default() }
    }

    /// A scorer.
    pub fn scorer(scorer: impl Scorer + 'static) -> Self {
        Self { scorer: Some(Arc::new(scorer)), ..Self::default() }
    }

    /// A picker.
    pub fn picker(picker: impl Picker + 'static) -> Self {
        Self { picker: Some(Arc::new(picker)), ..Self::default() }
    }

    /// A decider on disaggregation.
    pub fn decider(decider: impl PdDecider + 'static) -> Self {
        Self { decider: Some(Arc::new(decider)), ..Self::default() }
    }

    /// Says what the plugin needs.
    pub fn needs(mut self, needs: Needs) -> Self {
        self.needs = needs;
        self
    }
}

/// A plugin type: what the registry lists, the manual prints and the configuration names.
pub struct Kind {
    /// The type name in configurations.
    pub name: &'static str,
    /// The JSON schema of its parameters; its description is the manual.
    pub schema: fn() -> schemars::Schema,
    /// Builds an instance from its parameters.
    pub build: fn(Value) -> Result<Instance, ParameterError>,
}

impl Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Kind").field(&self.name).finish()
    }
}

/// Parameters that a plugin does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ParameterError(pub String);

/// Reads the parameters of a plugin: absent or null means all defaults; names match in any letter case, as Kthena's
/// decoder does, so long as that is unambiguous.
pub fn parameters<C: DeserializeOwned + Default + schemars::JsonSchema>(
    given: Value,
) -> Result<C, ParameterError> {
    let given = match given {
        Value::Null => return Ok(C::default()),
        Value::Object(members) => {
            let schema = schemars::schema_for!(C);
            let known: Vec<&String> = schema
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flatten()
                .map(|(name, _)| name)
                .collect();
            let renamed = members.into_iter().map(|(name, value)| {
                let exact = known.iter().find(|k| k.eq_ignore_ascii_case(&name));
                (exact.map_or(name, |k| (*k).clone()), value)
            });
            Value::Object(renamed.collect())
        }
        other => other,
    };
    serde_json::from_value(given).map_err(|error| ParameterError(error.to_string()))
}
