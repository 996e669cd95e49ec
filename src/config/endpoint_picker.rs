//! `kind: EndpointPickerConfig`, ours and llm-d's: named plugin instances, and profiles that list them with weights.

use super::disaggregation::{self, Stages};
use super::listed::{Listed, Ready};
use super::llm_d::{self, APPROXIMATE_PREFIX, Known, PRECISE_PREFIX, PREFIX_CACHE_SCORER};
use super::{Plan, Planned, Reader, did_you_mean, flow_control, queue, sessions, tokenizers, unserved};
use crate::document::{Node, Place, typed};
use crate::plugins;
use crate::plugins::score_prefix_match::{self, Config as Match, Source};
use crate::prompt::BlockNeeds;
use crate::schedule::pipeline::Part;
use crate::schedule::plugin::Instance;

/// The kind.
pub const KIND: &str = "EndpointPickerConfig";

const VERSIONS: [&str; 3] =
    ["pilotfish.dev/v1alpha1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"];

/// Members that something here serves.
const MEMBERS: [&str; 7] =
    ["apiVersion", "kind", "plugins", "schedulingProfiles", "featureGates", "tokenizers", "queue"];

const GATES: [&str; 2] = [QUEUES, "haPopulateNonLeaderDatastore"];
const QUEUES: &str = "flowControl";

impl Ready<'_> {
    /// Whether it does nothing unless a profile lists it.
    fn takes_part(&self) -> bool {
        let by_profile = |instance: &Instance| instance.reports.is_none() && instance.decider.is_none();
        self.built.as_ref().is_some_and(|(_, instance)| by_profile(instance))
    }

    /// Its part, if it acts on responses: on all, as in llm-d.
    fn reporter(&self) -> Option<(Part, Place)> {
        let (kind, instance) = self.built.as_ref().filter(|(_, instance)| instance.reports.is_some())?;
        Some((part(self.listed.name, kind, instance.clone(), 1.0), self.listed.place))
    }
}

/// Reads the document.
pub fn lower(reader: &mut Reader<'_>, node: &Node) -> Option<Plan> {
    let members: Vec<&str> = MEMBERS.into_iter().chain(unserved::names()).collect();
    reader.members(node, "the configuration", &members);
    version(reader, node);
    let queues = feature_gates(reader, node);
    tokenizers::section(reader, node);
    let listed = Listed::all(reader, node);
    unserved::report(reader, node, &listed);
    unserved::check(reader, node, &listed);
    flow_control::lower(reader, node, queues, &listed);
    queue::section(reader, node);
    let ready = ready(reader, listed);
    let stages = Stages::of(&ready);
    let decider = disaggregation::decider(reader, &ready);
    let profiles = reader.list(node, "schedulingProfiles");
    if profiles.is_empty() {
        return Some(Plan { serving: implied_profile(node, ready), prefill: None, decider });
    }
    let mut planned: Vec<Planned> = Vec::new();
    for profile in profiles {
        if let Some(profile) = self::profile(reader, profile, &ready) {
            if planned.iter().any(|other| other.name == profile.name) {
                let message = format!("profile `{}` is described twice", profile.name);
                reader.problems.error(profile.place, message, None);
            }
            planned.push(profile);
        }
    }
    unlisted(reader, &ready, profiles);
    let prefill = disaggregation::take(reader, &mut planned, stages.prefill);
    let mut serving = one_of(reader, planned, stages.decode)?;
    serving.parts.retain(|(part, _)| part.instance.reports.is_none());
    serving.parts.extend(ready.iter().filter_map(Ready::reporter));
    Some(Plan { serving, prefill, decider })
}

fn version(reader: &mut Reader<'_>, node: &Node) {
    let version = node.get("apiVersion");
    if !version.and_then(Node::as_str).is_some_and(|version| VERSIONS.contains(&version)) {
        let place = version.map_or(node.place, |version| version.place);
        let message = format!("{KIND} is read as {} only", VERSIONS.join(", "));
        reader.problems.error(place, message, Some(format!("write `apiVersion: {}`", VERSIONS[0])));
    }
}

/// What is said of `flowControl`.
fn feature_gates(reader: &mut Reader<'_>, node: &Node) -> Option<bool> {
    let mut queues = None;
    for gate in reader.list(node, "featureGates") {
        let text = gate.as_str().unwrap_or_default();
        let (name, on) = text.split_once('=').unwrap_or((text, "true"));
        if !GATES.contains(&name) {
            let message = format!("unknown feature gate {}", gate.to_json());
            reader.problems.error(gate.place, message, did_you_mean(name, GATES));
        } else if !["true", "false"].contains(&on) {
            let message = format!("feature gate `{name}` is true or false, not `{on}`");
            reader.problems.error(gate.place, message, None);
        } else if name == QUEUES {
            queues = Some(on == "true");
        } else if on == "true" {
            let message = format!("feature gate `{name}` has no effect in this version");
            reader.problems.warning(gate.place, message, None);
        }
    }
    queues
}

fn ready<'n>(reader: &mut Reader<'_>, listed: Vec<Listed<'n>>) -> Vec<Ready<'n>> {
    let built: Vec<_> = listed.iter().map(|one| build(reader, one, &listed)).collect();
    listed.into_iter().zip(built).map(|(listed, built)| Ready { listed, built }).collect()
}

fn build(reader: &mut Reader<'_>, one: &Listed<'_>, all: &[Listed<'_>]) -> Option<(&'static str, Instance)> {
    match one.type_name {
        PREFIX_CACHE_SCORER => return prefix_match(reader, one, all),
        "token-producer" | "tokenizer" => {
            tokenizers::token_producer(reader, one.type_name, one.place, one.parameters);
            return None;
        }
        APPROXIMATE_PREFIX => {
            match_parameters(reader, one.parameters);
            if !all.iter().any(|other| uses(other, one.name)) {
                let message = format!("no {PREFIX_CACHE_SCORER} uses `{}`", one.name);
                reader.problems.warning(one.place, message, None);
            }
            return None;
        }
        sessions::SESSION_ID | sessions::AGENT_IDENTITY => {
            sessions::producer(reader, one, all);
            return None;
        }
        policy if flow_control::is_policy(policy) => return None,
        _ => {}
    }
    let type_name = llm_d::alias(one.type_name).unwrap_or(one.type_name);
    if let Some(kind) = plugins::find(type_name, reader.options.extra_plugins) {
        let instance = if sessions::is_affinity(kind.name) {
            sessions::affinity(reader, kind, one, all)
        } else {
            reader.build(kind, one.parameters)
        };
        return instance.map(|instance| (kind.name, instance));
    }
    match llm_d::known(one.type_name) {
        Some(Known::Read) => {}
        Some(Known::BuiltIn) => {
            if one.parameters.is_some_and(|node| !node.is_blank()) {
                let place = one.node.key_place("parameters").unwrap_or(one.place);
                let message = format!("the parameters of `{}` have no effect in this version", one.type_name);
                reader.problems.warning(place, message, None);
            }
        }
        Some(Known::Ignored) => {
            let message = format!("plugin type `{}` has no effect in this version", one.type_name);
            reader.problems.warning(one.place, message, None);
        }
        Some(Known::Lacking) => {
            let message = format!(
                "plugin type `{}` is known from llm-d and not available in this version",
                one.type_name
            );
            reader.unsupported(one.place, message, "it is skipped");
        }
        None => reader.unknown_plugin(one.place, one.type_name, &llm_d::names()),
    }
    None
}

/// Whether `one` scores by what the producer `name` holds.
fn uses(one: &Listed<'_>, name: &str) -> bool {
    one.type_name == PREFIX_CACHE_SCORER && producer(one).map_or(APPROXIMATE_PREFIX, |(name, _)| name) == name
}

/// The producer that a `prefix-cache-scorer` names.
fn producer<'n>(one: &Listed<'n>) -> Option<(&'n str, Place)> {
    let node = one.parameters?.get("prefixMatchInfoProducerName")?;
    node.as_str().filter(|name| !name.is_empty()).map(|name| (name, node.place))
}

/// llm-d's `prefix-cache-scorer` is our `prefix-cache` with its producer's cut of the prompt and no length factor.
fn prefix_match(
    reader: &mut Reader<'_>,
    one: &Listed<'_>,
    all: &[Listed<'_>],
) -> Option<(&'static str, Instance)> {
    let own = match_parameters(reader, one.parameters)?;
    let named = producer(one);
    let source = all.iter().find(|other| other.name == named.map_or(APPROXIMATE_PREFIX, |(name, _)| name));
    let config = match (named, source) {
        (_, Some(source)) if source.type_name == APPROXIMATE_PREFIX => {
            // The producer's own entry reports what is wrong with it.
            let cut = source.parameters.and_then(|node| typed::<Match>(node).ok()).unwrap_or_default();
            Match {
                match_length_weight: own.match_length_weight,
                match_length_scale_tokens: own.match_length_scale_tokens,
                ..cut
            }
        }
        (_, Some(source)) if source.type_name == PRECISE_PREFIX => Match { source: Source::Precise, ..own },
        (Some((name, place)), None) if name != APPROXIMATE_PREFIX => {
            let message = format!("no plugin instance is named `{name}`");
            let advice = did_you_mean(name, all.iter().map(|other| other.name));
            reader.problems.error(place, message, advice);
            return None;
        }
        (Some((name, place)), Some(_)) => {
            let message = format!("the prefix matches of `{name}` are not available in this version");
            reader.unsupported(place, message, "what each endpoint was sent is matched instead");
            own
        }
        _ => own,
    };
    let kind = &score_prefix_match::KIND;
    let instance = reader.built(kind, serde_json::to_value(config).unwrap_or_default(), one.place)?;
    Some((kind.name, instance))
}

fn match_parameters(reader: &mut Reader<'_>, parameters: Option<&Node>) -> Option<Match> {
    let Some(node) = parameters.filter(|node| !node.is_blank()) else {
        return Some(Match::default());
    };
    match typed::<Match>(node) {
        Ok(parameters) => Some(parameters),
        Err((place, message, advice)) => {
            reader.problems.error(place, message, advice);
            None
        }
    }
}

/// Without profiles, every instance takes part in one; without plugins either, the built-in profile stands.
fn implied_profile(node: &Node, ready: Vec<Ready<'_>>) -> Planned {
    let parts = if ready.is_empty() {
        plugins::default_parts().into_iter().map(|part| (part, node.place)).collect()
    } else {
        ready
            .into_iter()
            .filter_map(|one| {
                let (kind, instance) = one.built?;
                Some((part(one.listed.name, kind, instance, 1.0), one.listed.place))
            })
            .collect()
    };
    Planned { name: "default".to_owned(), place: node.place, parts }
}

/// A plugin that is filter and scorer acts as both.
fn part(name: &str, kind: &'static str, instance: Instance, weight: f32) -> Part {
    Part { name: name.into(), kind, weight, instance, filters: true, scores: true }
}

fn profile(reader: &mut Reader<'_>, node: &Node, ready: &[Ready<'_>]) -> Option<Planned> {
    if !reader.members(node, "a profile", &["name", "plugins"]) {
        return None;
    }
    let (name, place) = reader.text(node, "name", "a profile")?;
    let mut parts: Vec<(Part, Place)> = Vec::new();
    let mut cut: Option<BlockNeeds> = None;
    for item in reader.list(node, "plugins") {
        let Some((one, place)) = reference(reader, item, ready) else { continue };
        let weight = item.get("weight").map(|weight| (reader.weight(weight), weight.place));
        let Some((kind, instance)) = &one.built else { continue };
        if parts.iter().any(|(part, _)| &*part.name == one.listed.name) {
            let message = format!("`{}` is listed twice in profile `{name}`", one.listed.name);
            reader.problems.error(place, message, Some("remove one, or add up their weights".to_owned()));
            continue;
        }
        if instance.scorer.is_none()
            && let Some((_, place)) = weight
        {
            let message = format!("the weight of `{}` has no effect: it is no scorer", one.listed.name);
            reader.problems.warning(place, message, None);
        }
        let other_cut = cut.zip(instance.needs.blocks).is_some_and(|(a, b)| a != b);
        if other_cut && one.listed.type_name == PREFIX_CACHE_SCORER {
            let message = "several prefix caches of different sizes are not available in this version";
            reader.unsupported(place, message.to_owned(), "only the first of the profile scores");
            continue;
        }
        cut = cut.or(instance.needs.blocks);
        let weight = weight.map_or(1.0, |(weight, _)| weight);
        parts.push((part(one.listed.name, kind, instance.clone(), weight), place));
    }
    Some(Planned { name: name.to_owned(), place, parts })
}

/// The instance that an entry of a profile names.
fn reference<'r, 'n>(
    reader: &mut Reader<'_>,
    item: &Node,
    ready: &'r [Ready<'n>],
) -> Option<(&'r Ready<'n>, Place)> {
    if !reader.members(item, "an entry of a profile", &["pluginRef", "weight"]) {
        return None;
    }
    let (name, place) = reader.text(item, "pluginRef", "an entry of a profile")?;
    let found = ready.iter().find(|one| one.listed.name == name);
    if found.is_none() {
        let advice = if plugins::find(name, reader.options.extra_plugins).is_some() {
            Some(format!("add `- type: {name}` to `plugins`"))
        } else {
            did_you_mean(name, ready.iter().map(|one| one.listed.name))
        };
        reader.problems.error(place, format!("no plugin instance is named `{name}`"), advice);
    }
    found.map(|found| (found, place))
}

/// Warns of filters, scorers and pickers that no profile lists.
fn unlisted(reader: &mut Reader<'_>, ready: &[Ready<'_>], profiles: &[Node]) {
    let entries = || profiles.iter().filter_map(|profile| profile.get("plugins")).flat_map(Node::items);
    let listed =
        |name: &str| entries().any(|entry| entry.get("pluginRef").and_then(Node::as_str) == Some(name));
    for one in ready.iter().filter(|one| one.takes_part() && !listed(one.listed.name)) {
        let message = format!("`{}` has no effect: no profile lists it", one.listed.name);
        reader.problems.warning(one.listed.place, message, None);
    }
}

/// The one profile that is run: `default`, else the one whose endpoint serves in llm-d, else the first.
fn one_of(reader: &mut Reader<'_>, mut planned: Vec<Planned>, serving: &str) -> Option<Planned> {
    if planned.is_empty() {
        return None;
    }
    let named = |name: &str| planned.iter().position(|profile| profile.name == name);
    let at = named("default").or_else(|| named(serving)).unwrap_or(0);
    let chosen = planned.remove(at);
    if let Some(first) = planned.first() {
        let ignored: Vec<String> = planned.iter().map(|profile| format!("`{}`", profile.name)).collect();
        let message = format!(
            "one profile is run for outputs in this version, `{}`, and not {}",
            chosen.name,
            ignored.join(", ")
        );
        reader.problems.warning(first.place, message, None);
    }
    Some(chosen)
}
