//! Kthena's router configuration: a `scheduler:` map with plugin arguments and lists of filters and scorers.

use std::collections::HashMap;

use super::{Planned, Reader};
use crate::document::{Node, Place, Yaml};
use crate::plugins;
use crate::schedule::pipeline::Part;
use crate::schedule::plugin::{Instance, Kind};

/// The part a plugin plays in one of the two lists.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Filter,
    Scorer,
}

/// Reads the document.
pub fn lower(reader: &mut Reader<'_>, node: &Node) -> Option<Planned> {
    reader.members(node, "the configuration", &["scheduler", "auth"]);
    if let Some(place) = node.key_place("auth") {
        let advice = "let Envoy's jwt_authn or api_key_auth filter admit clients".to_owned();
        reader.problems.warning(place, "`auth` has no effect: authentication is Envoy's", Some(advice));
    }
    let scheduler = node.get("scheduler")?;
    let place = node.key_place("scheduler").unwrap_or(scheduler.place);
    let empty = Node { place, value: Yaml::Map(Vec::new()) };
    let scheduler = if scheduler.is_blank() { &empty } else { scheduler };
    if !reader.members(scheduler, "`scheduler`", &["pluginConfig", "plugins"]) {
        return None;
    }
    let arguments = arguments(reader, scheduler);
    let lists = scheduler.get("plugins").unwrap_or(&empty);
    if !reader.members(lists, "`plugins`", &["Filter", "Score"]) {
        return None;
    }
    let mut parts = filters(reader, lists.get("Filter").unwrap_or(&empty), &arguments);
    parts.extend(scorers(reader, lists.get("Score").unwrap_or(&empty), &arguments));
    Some(Planned { name: "default".to_owned(), place, parts })
}

/// The arguments by plugin; the last entry of a name wins.
fn arguments<'n>(reader: &mut Reader<'_>, scheduler: &'n Node) -> HashMap<&'n str, Option<&'n Node>> {
    let mut entries: Vec<(&'n str, Place, Option<&'n Node>)> = Vec::new();
    for node in reader.list(scheduler, "pluginConfig") {
        if reader.members(node, "an entry of `pluginConfig`", &["name", "args"])
            && let Some((name, place)) = reader.text(node, "name", "an entry of `pluginConfig`")
        {
            entries.push((name, place, node.get("args")));
        }
    }
    for (at, &(name, place, args)) in entries.iter().enumerate() {
        if entries[at + 1..].iter().any(|(other, ..)| *other == name) {
            let message = format!("these arguments of `{name}` have no effect: a later entry replaces them");
            reader.problems.warning(place, message, None);
        } else if let Some(kind) = plugins::find(name, reader.options.extra_plugins) {
            reader.build(kind, args);
        } else {
            reader.unknown_plugin(place, name, &[]);
        }
    }
    entries.into_iter().map(|(name, _, args)| (name, args)).collect()
}

fn filters(
    reader: &mut Reader<'_>,
    node: &Node,
    arguments: &HashMap<&str, Option<&Node>>,
) -> Vec<(Part, Place)> {
    let mut parts: Vec<(Part, Place)> = Vec::new();
    for item in enabled(reader, node, "Filter") {
        let Some(name) = item.as_str() else {
            reader.problems.error(item.place, "an entry of `Filter` is the name of a plugin", None);
            continue;
        };
        if parts.iter().any(|(part, _)| &*part.name == name) {
            reader.problems.warning(item.place, format!("filter `{name}` is listed twice"), None);
        } else if let Some(part) = part(reader, name, item.place, Role::Filter, arguments) {
            parts.push((part, item.place));
        }
    }
    parts
}

fn scorers(
    reader: &mut Reader<'_>,
    node: &Node,
    arguments: &HashMap<&str, Option<&Node>>,
) -> Vec<(Part, Place)> {
    let mut entries: Vec<(&str, Place, f32)> = Vec::new();
    for item in enabled(reader, node, "Score") {
        if !reader.members(item, "an entry of `Score`", &["name", "weight"]) {
            continue;
        }
        let Some((name, place)) = reader.text(item, "name", "an entry of `Score`") else { continue };
        let weight = if let Some(weight) = item.get("weight") {
            reader.weight(weight)
        } else {
            let advice = Some("write `weight: 1`".to_owned());
            reader.problems.warning(place, format!("`{name}` has no weight and counts 0"), advice);
            0.0
        };
        match entries.iter_mut().find(|(other, ..)| *other == name) {
            Some(entry) => {
                entry.2 = weight;
                let message = format!("scorer `{name}` is listed twice: the last weight counts");
                reader.problems.warning(place, message, None);
            }
            None => entries.push((name, place, weight)),
        }
    }
    let others = entries.iter().any(|(name, ..)| *name != "random");
    let mut parts = Vec::new();
    for (name, place, weight) in entries {
        if others && name == "random" {
            let message = "`random` is dropped: it scores alone or not at all";
            reader.problems.warning(place, message, None);
        } else if let Some(part) = part(reader, name, place, Role::Scorer, arguments) {
            parts.push((Part { weight, ..part }, place));
        }
    }
    parts
}

/// The `enabled` items of a list; `disabled` changes nothing, in Kthena either.
fn enabled<'n>(reader: &mut Reader<'_>, node: &'n Node, list: &str) -> &'n [Node] {
    if !reader.members(node, &format!("`{list}`"), &["enabled", "disabled"]) {
        return &[];
    }
    if !reader.list(node, "disabled").is_empty() {
        let place = node.key_place("disabled").unwrap_or(node.place);
        let message = "`disabled` has no effect: what `enabled` does not list is off";
        reader.problems.warning(place, message, None);
    }
    reader.list(node, "enabled")
}

/// A plugin in one role, although it may have both.
fn part(
    reader: &mut Reader<'_>,
    name: &str,
    place: Place,
    role: Role,
    arguments: &HashMap<&str, Option<&Node>>,
) -> Option<Part> {
    let Some(kind) = plugins::find(name, reader.options.extra_plugins) else {
        reader.unknown_plugin(place, name, &[]);
        return None;
    };
    let instance = instance(kind, arguments.get(name).copied().flatten())?;
    let (plays, what) = match role {
        Role::Filter => (instance.filter.is_some(), "filter"),
        Role::Scorer => (instance.scorer.is_some(), "scorer"),
    };
    if !plays {
        reader.problems.error(place, format!("`{name}` is no {what}"), None);
        return None;
    }
    let (filters, scores) = (role == Role::Filter, role == Role::Scorer);
    Some(Part { name: name.into(), kind: kind.name, weight: 1.0, instance, filters, scores })
}

/// Wrong arguments were reported where `pluginConfig` was read.
fn instance(kind: &Kind, arguments: Option<&Node>) -> Option<Instance> {
    (kind.build)(arguments.map(Node::to_json).unwrap_or_default()).ok()
}
