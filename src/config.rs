//! The scheduler configuration: an `EndpointPickerConfig` or Kthena's `scheduler:` file, read into one pipeline.
//!
//! Reading is strict, and every problem has its place: an unknown member or plugin is an error with the nearest known
//! name, and what is accepted without an effect in this version is a warning.

mod config_map;
mod disaggregation;
mod endpoint_picker;
mod flow_control;
mod kthena;
pub mod kthena_env;
mod listed;
mod llm_d;
mod queue;
mod sessions;
#[cfg(test)]
mod tests;
mod tokenizers;
mod unserved;

use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::admission::QueueSettings;
use crate::document::{Node, Place, Problem, Problems, Severity, Yaml, nearest};
use crate::plugins::{PLUGINS, pick_max_score, pick_weighted_random};
use crate::schedule::pipeline::{Draft, Part, Pipeline, PipelineError, Profile};
use crate::schedule::plugin::{Instance, Kind, PdDecider};

pub use tokenizers::TokenizerSettings;

/// What the command line says about reading.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Skip plugins that upstream has and this version lacks, with a warning, instead of refusing the file.
    pub allow_unsupported: bool,
    /// Whether there is a shared block index to ask.
    pub shared_index: bool,
    /// Plugin types of a binary of one's own, found before the built-in ones.
    pub extra_plugins: &'a [&'a Kind],
    /// What queues go by where the file says nothing else.
    pub queue: Option<&'a QueueSettings>,
}

impl<'a> Options<'a> {
    /// The same, with what queues go by where a file says nothing else.
    pub fn with(self, queue: &'a QueueSettings) -> Self {
        Self { queue: Some(queue), ..self }
    }
}

/// What a configuration means, and what is wrong with it.
#[derive(Debug)]
pub struct Read {
    /// The pipeline; `None` if anything is an error.
    pub pipeline: Option<Pipeline>,
    /// Where models' tokenizers are, without those that are in error.
    pub tokenizers: TokenizerSettings,
    /// What queues go by.
    pub queue: QueueSettings,
    /// Problems in the order of lines.
    pub problems: Vec<Problem>,
}

/// Reads a configuration. `file` is the name that problems show. The block index of `previous` is kept where prompts are
/// still cut in the same way.
pub fn read(file: &Path, text: Arc<str>, options: &Options<'_>, previous: Option<&Pipeline>) -> Read {
    let documents = Node::parse(&text);
    let mut reader = Reader {
        problems: Problems::new(file, text),
        options,
        tokenizers: TokenizerSettings::default(),
        queue: options.queue.cloned().unwrap_or_default(),
    };
    let plan = match documents {
        Err(error) => {
            reader.problems.error(error.place, error.message, None);
            None
        }
        Ok(documents) => reader.only(&documents).and_then(|document| reader.document(document)),
    };
    let pipeline = plan.and_then(|plan| reader.assemble(plan, previous));
    let pipeline = pipeline.filter(|_| !reader.is_wrong());
    let Reader { problems, tokenizers, queue, .. } = reader;
    let mut problems = problems.found;
    problems.sort_by_key(|problem| (problem.line, problem.column));
    Read { pipeline, tokenizers, queue, problems }
}

/// What a pipeline does, as JSON for people: profile, filters in order, scorers with weights, picker, the profile of prompts
/// that are computed elsewhere if that is another, and how prompts are cut into blocks (`null` if no plugin asks).
pub fn effective(pipeline: &Pipeline) -> Value {
    let mut effective = profile(&pipeline.profile);
    if !Arc::ptr_eq(&pipeline.profile, &pipeline.prefill) {
        effective["prefill"] = profile(&pipeline.prefill);
    }
    let blocks = pipeline.text.as_ref().map(|text| {
        let needs = text.needs;
        json!({"blockBytes": needs.block_bytes, "maxBlocks": needs.max_blocks, "capacity": needs.capacity})
    });
    effective["blocks"] = json!(blocks);
    effective
}

fn profile(profile: &Profile) -> Value {
    let scorers: Vec<Value> = profile
        .scorers
        .iter()
        .map(|scored| json!({"name": &*scored.name, "type": scored.kind, "weight": scored.weight}))
        .collect();
    json!({
        "profile": &*profile.name,
        "filters": profile.filters.iter().map(|filter| &*filter.name).collect::<Vec<_>>(),
        "scorers": scorers,
        "picker": &*profile.picker.name,
    })
}

/// Pickers that follow the scores and nothing else.
const BY_SCORE: [&str; 2] = [pick_max_score::KIND.name, pick_weighted_random::KIND.name];

/// A profile that is not put together yet.
struct Planned {
    name: String,
    place: Place,
    parts: Vec<(Part, Place)>,
}

/// What a configuration plans.
struct Plan {
    /// For whole requests and outputs.
    serving: Planned,
    /// For prompts, if that is another.
    prefill: Option<Planned>,
    /// What decides which requests are split, if it says so.
    decider: Option<Arc<dyn PdDecider>>,
}

impl From<Planned> for Plan {
    fn from(serving: Planned) -> Self {
        Self { serving, prefill: None, decider: None }
    }
}

impl Planned {
    fn draft(self) -> Draft {
        Draft { name: self.name.into(), parts: self.parts.into_iter().map(|(part, _)| part).collect() }
    }
}

/// What both dialects share.
struct Reader<'a> {
    problems: Problems,
    options: &'a Options<'a>,
    tokenizers: TokenizerSettings,
    queue: QueueSettings,
}

impl Reader<'_> {
    /// The one document of a file.
    fn only<'n>(&mut self, documents: &'n [Node]) -> Option<&'n Node> {
        match documents {
            [] => {
                let advice =
                    "write an EndpointPickerConfig, or start without --config for the built-in profile";
                self.problems.error(Place::START, "the configuration is empty", Some(advice.to_owned()));
                None
            }
            [only] => Some(only),
            [_, second, ..] => {
                let message = "a configuration is one document, and this is the second";
                self.problems.error(second.place, message, None);
                None
            }
        }
    }

    /// Tells the dialect by content.
    fn document(&mut self, node: &Node) -> Option<Plan> {
        let kind = node.get("kind");
        match kind.and_then(Node::as_str) {
            Some(endpoint_picker::KIND) => return endpoint_picker::lower(self, node),
            Some(config_map::KIND) => return config_map::lower(self, node),
            None if node.get("scheduler").is_some() => return kthena::lower(self, node).map(Plan::from),
            _ => {}
        }
        let place = kind.map_or(node.place, |kind| kind.place);
        let found = kind.and_then(Node::as_str).map(|kind| format!("kind `{kind}`"));
        let message = format!("{} is not a scheduler configuration", found.as_deref().unwrap_or("this"));
        let advice = "write `kind: EndpointPickerConfig`, or Kthena's `scheduler:` at the top";
        self.problems.error(place, message, Some(advice.to_owned()));
        None
    }

    fn is_wrong(&self) -> bool {
        self.problems.found.iter().any(|problem| problem.severity == Severity::Error)
    }

    fn assemble(&mut self, plan: Plan, previous: Option<&Pipeline>) -> Option<Pipeline> {
        for planned in std::iter::once(&plan.serving).chain(&plan.prefill) {
            self.doubts(planned);
        }
        let all = plan.serving.parts.iter().chain(plan.prefill.iter().flat_map(|planned| &planned.parts));
        let places: Vec<(Arc<str>, Place)> =
            all.map(|(part, place)| (Arc::clone(&part.name), *place)).collect();
        let place = plan.serving.place;
        match Pipeline::assemble_pair(plan.serving.draft(), plan.prefill.map(Planned::draft), previous) {
            Ok(pipeline) => Some(match plan.decider {
                Some(decider) => pipeline.with_decider(decider),
                None => pipeline,
            }),
            Err(error) => {
                let (PipelineError::SecondPicker(part)
                | PipelineError::BlocksDiffer(part)
                | PipelineError::SecondCookie(part)) = &error;
                // The part that is in the way is never the first of its name.
                let place = places.iter().rev().find(|(name, _)| name == part).map_or(place, |(_, at)| *at);
                self.problems.error(place, error.to_string(), None);
                None
            }
        }
    }

    /// What is right in a profile and hardly meant.
    fn doubts(&mut self, planned: &Planned) {
        let Planned { name, place, parts } = planned;
        let rates = parts.iter().any(|(part, _)| part.scores && part.instance.scorer.is_some());
        let picker = parts.iter().find(|(part, _)| part.instance.picker.is_some());
        let by_score = picker.is_none_or(|(part, _)| BY_SCORE.contains(&part.kind));
        if by_score && !rates && !self.is_wrong() {
            let message = format!("profile `{name}` has no scorer: every endpoint counts the same");
            self.problems.warning(*place, message, None);
        }
        for (part, place) in
            parts.iter().filter(|(part, _)| part.instance.reports.as_ref().is_some_and(Vec::is_empty))
        {
            let message = format!("`{}` reports nothing: give it `attributes`", part.name);
            self.problems.warning(*place, message, None);
        }
        for (part, place) in parts.iter().filter(|(part, _)| part.instance.needs.shared.is_some()) {
            if !self.options.shared_index {
                let message =
                    format!("`{}` has no opinion: it reads a block index that is not there", part.name);
                let advice =
                    Some("give --redis-url the address of the Redis that engines write to".to_owned());
                self.problems.warning(*place, message, advice);
            }
        }
    }

    /// Reports a plugin that upstream has and we lack, or a setting of one. `skipped` says what is done about it where
    /// that is allowed.
    fn unsupported(&mut self, place: Place, message: String, skipped: &str) {
        if self.options.allow_unsupported {
            self.problems.warning(place, format!("{message}: {skipped}"), None);
        } else {
            let advice = Some(format!("remove it, or start with --allow-unsupported: {skipped}"));
            self.problems.error(place, message, advice);
        }
    }

    /// Reports a plugin type that nobody has.
    fn unknown_plugin(&mut self, place: Place, name: &str, upstream: &[&'static str]) {
        let ours = self.options.extra_plugins.iter().chain(PLUGINS).map(|kind| kind.name);
        let advice = did_you_mean(name, ours.chain(upstream.iter().copied()));
        self.problems.error(place, format!("unknown plugin type `{name}`"), advice);
    }

    /// Whether a node is a map of known members only; each other one is an error.
    fn members(&mut self, node: &Node, what: &str, known: &[&str]) -> bool {
        let Yaml::Map(members) = &node.value else {
            self.problems.error(node.place, format!("{what} must be a map"), None);
            return false;
        };
        for (name, place, _) in members {
            if !known.contains(&name.as_str()) {
                let message = format!("unknown member `{name}` of {what}");
                self.problems.error(*place, message, did_you_mean(name, known.iter().copied()));
            }
        }
        true
    }

    /// The items of a list; absent and null are the empty list.
    fn list<'n>(&mut self, node: &'n Node, key: &str) -> &'n [Node] {
        match node.get(key).map(|list| (&list.value, list.place)) {
            None | Some((Yaml::Scalar(Value::Null), _)) => &[],
            Some((Yaml::List(items), _)) => items,
            Some((_, place)) => {
                self.problems.error(place, format!("`{key}` must be a list"), None);
                &[]
            }
        }
    }

    /// A text that must be there.
    fn text<'n>(&mut self, node: &'n Node, key: &str, what: &str) -> Option<(&'n str, Place)> {
        let member = node.get(key);
        match member.and_then(Node::as_str) {
            Some(text) if !text.is_empty() => member.map(|member| (text, member.place)),
            _ => {
                let place = member.map_or(node.place, |member| member.place);
                self.problems.error(place, format!("{what} needs a `{key}`"), None);
                None
            }
        }
    }

    /// A weight: any number from 0 on.
    fn weight(&mut self, node: &Node) -> f32 {
        let weight = match &node.value {
            Yaml::Scalar(Value::Number(number)) => number.as_f64().map(|weight| weight as f32),
            _ => None,
        };
        weight.filter(|weight| weight.is_finite() && *weight >= 0.0).unwrap_or_else(|| {
            let message = format!("a weight is a number of 0 or more, not {}", node.to_json());
            self.problems.error(node.place, message, None);
            0.0
        })
    }

    /// Builds an instance; wrong parameters are reported where they stand.
    fn build(&mut self, kind: &Kind, parameters: Option<&Node>) -> Option<Instance> {
        let Some(node) = parameters else { return self.built(kind, Value::Null, Place::START) };
        let value = node.to_json();
        let error = match (kind.build)(value.clone()) {
            Ok(instance) => return Some(instance),
            Err(error) => error,
        };
        // Every parameter has a default, so the member that is wrong is wrong alone as well.
        let culprit = value.as_object().into_iter().flatten().find(|(name, value)| {
            let alone = Value::Object(std::iter::once(((*name).clone(), (*value).clone())).collect());
            (kind.build)(alone).is_err_and(|alone| alone == error)
        });
        let unknown = error.0.starts_with("unknown field");
        let place = match culprit {
            Some((name, _)) if unknown => node.key_place(name),
            Some((name, _)) => node.get(name).map(|value| value.place),
            None => None,
        };
        let schema = (kind.schema)();
        let known = schema.get("properties").and_then(Value::as_object).into_iter().flatten();
        let advice = culprit
            .filter(|_| unknown)
            .and_then(|(name, _)| did_you_mean(name, known.map(|(name, _)| name.as_str())));
        let message = format!("`{}`: {error}", kind.name);
        self.problems.error(place.unwrap_or(node.place), message, advice);
        None
    }

    /// Builds an instance from parameters that the file does not hold in this form.
    fn built(&mut self, kind: &Kind, parameters: Value, place: Place) -> Option<Instance> {
        match (kind.build)(parameters) {
            Ok(instance) => Some(instance),
            Err(error) => {
                self.problems.error(place, format!("`{}`: {error}", kind.name), None);
                None
            }
        }
    }
}

fn did_you_mean<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    nearest(given, known).map(|name| format!("did you mean `{name}`?"))
}
