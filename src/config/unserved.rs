//! The members of an `EndpointPickerConfig` that nothing here serves, or in part: read to the last name, so that a slip of
//! the pen is found all the same.

use super::listed::Listed;
use super::{Reader, did_you_mean, flow_control, llm_d};
use crate::document::{Node, Place};
use crate::plugins;

/// What a member may hold.
#[derive(Clone, Copy)]
enum Shape {
    Value,
    /// The name of a plugin instance.
    Reference,
    Map(&'static [(&'static str, Shape)]),
    List(&'static Shape),
}

use Shape::{List, Map, Reference, Value};

const REFERENCE: Shape = Map(&[("pluginRef", Reference)]);
const BAND: Shape = Map(&[
    ("priority", Value),
    ("maxBytes", Value),
    ("maxRequests", Value),
    ("fairnessPolicyRef", Reference),
    ("orderingPolicyRef", Reference),
]);

/// Members that are served, and what they may hold.
const SERVED: [(&str, Shape); 2] = [
    (
        "flowControl",
        Map(&[
            ("maxBytes", Value),
            ("maxRequests", Value),
            ("defaultRequestTTL", Value),
            ("noEndpointRequestTTL", Value),
            ("defaultPriorityBand", BAND),
            ("defaultNegativePriorityBand", BAND),
            ("priorityBands", List(&BAND)),
            ("usageLimitPolicyPluginRef", Reference),
            ("saturationDetector", REFERENCE),
            ("enableEviction", Value),
        ]),
    ),
    ("saturationDetector", REFERENCE),
];

/// Name, what it may hold, and what happens instead.
const UNSERVED: [(&str, Shape, &str); 3] = [
    (
        "dataLayer",
        Map(&[
            ("injectDefaults", Value),
            ("sources", List(&Map(&[("pluginRef", Reference), ("extractors", List(&REFERENCE))]))),
            ("discovery", REFERENCE),
            ("peerDiscovery", REFERENCE),
            ("crossReplicaSyncerPluginRef", Reference),
            ("crossReplicaSyncInterval", Value),
        ]),
        "the metrics of every endpoint are scraped",
    ),
    ("requestHandler", Map(&[("parsers", List(&REFERENCE))]), "bodies are parsed by the path of the request"),
    ("parser", REFERENCE, "bodies are parsed by the path of the request"),
];

/// The names of these members.
pub fn names() -> impl Iterator<Item = &'static str> {
    UNSERVED.iter().map(|(name, ..)| *name).chain(SERVED.iter().map(|(name, _)| *name))
}

/// Warns of each member that is there, and reports what is wrong in it.
pub fn report(reader: &mut Reader<'_>, node: &Node, listed: &[Listed<'_>]) {
    for (name, shape, instead) in UNSERVED {
        let Some(member) = node.get(name) else { continue };
        let place = node.key_place(name).unwrap_or(member.place);
        reader.problems.warning(place, format!("`{name}` has no effect in this version: {instead}"), None);
        hold(reader, member, name, shape, listed);
    }
}

/// Reports what is wrong in the members that are served.
pub fn check(reader: &mut Reader<'_>, node: &Node, listed: &[Listed<'_>]) {
    for (name, shape) in SERVED {
        if let Some(member) = node.get(name) {
            hold(reader, member, name, shape, listed);
        }
    }
}

fn hold(reader: &mut Reader<'_>, node: &Node, name: &str, shape: Shape, listed: &[Listed<'_>]) {
    match shape {
        Value => {}
        Reference => reference(reader, node.as_str().unwrap_or_default(), node.place, listed),
        Map(members) => {
            if node.is_blank() {
                return;
            }
            let known: Vec<&str> = members.iter().map(|(name, _)| *name).collect();
            reader.members(node, &format!("`{name}`"), &known);
            for (name, shape) in members {
                if let Some(member) = node.get(name) {
                    hold(reader, member, name, *shape, listed);
                }
            }
        }
        List(item) => {
            if !node.is_blank() && !node.is_list() {
                reader.problems.error(node.place, format!("`{name}` must be a list"), None);
            }
            for node in node.items() {
                hold(reader, node, name, *item, listed);
            }
        }
    }
}

/// llm-d makes an instance of the type that is named where none is listed.
fn reference(reader: &mut Reader<'_>, name: &str, place: Place, listed: &[Listed<'_>]) {
    let is_type = llm_d::known(name).is_some()
        || flow_control::is_policy(name)
        || plugins::find(name, reader.options.extra_plugins).is_some();
    if !is_type && !listed.iter().any(|one| one.name == name) {
        let advice = did_you_mean(name, listed.iter().map(|one| one.name));
        reader.problems.error(place, format!("no plugin instance is named `{name}`"), advice);
    }
}
