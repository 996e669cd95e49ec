//! Who computes prompts elsewhere and when: llm-d's profile handlers and deciders, or a decider alone.

use std::sync::Arc;

use super::listed::Ready;
use super::{Planned, Reader, did_you_mean};
use crate::document::Node;
use crate::plugins;
use crate::schedule::plugin::PdDecider;

const DISAGG: &str = "disagg-profile-handler";
const PD: &str = "pd-profile-handler";
/// The decider of [`PD`] unless it names another.
const PD_DECIDER: &str = "prefix-based-pd-decider";

/// Parameters of [`PD`]; those of the prefix and of ports have no effect, since neither is told by it here.
const PD_MEMBERS: [&str; 8] = [
    "decodeProfile",
    "prefillProfile",
    "deciderPluginName",
    "threshold",
    "prefixPluginType",
    "prefixPluginName",
    "primaryPort",
    "hashBlockSize",
];

/// What a handler says; without one, llm-d's names.
pub struct Stages<'n> {
    /// The profile of who generates the output.
    pub decode: &'n str,
    /// The profile of who computes the prompt.
    pub prefill: &'n str,
}

impl<'n> Stages<'n> {
    /// The profiles of the handler among the plugins.
    pub fn of(ready: &[Ready<'n>]) -> Self {
        let named = |ready: &Ready<'n>, stage: &str| {
            let path: &[&str] = match (ready.listed.type_name, stage) {
                (DISAGG, _) => &["profiles", stage],
                (PD, "decode") => &["decodeProfile"],
                (PD, _) => &["prefillProfile"],
                ("header-profile-handler", "decode") => &["defaultProfile"],
                _ => return None,
            };
            path.iter().try_fold(ready.listed.parameters?, |node, name| node.get(name)).and_then(Node::as_str)
        };
        let of = |stage| ready.iter().find_map(|ready| named(ready, stage));
        Self { decode: of("decode").unwrap_or("decode"), prefill: of("prefill").unwrap_or("prefill") }
    }
}

/// Takes the profile of that name out of the others. Sessions are kept with who generates their output: what would keep them
/// with who computes their prompt goes.
pub fn take(reader: &mut Reader<'_>, planned: &mut Vec<Planned>, name: &str) -> Option<Planned> {
    let at = planned.iter().position(|profile| profile.name == name).filter(|_| planned.len() > 1)?;
    let mut profile = planned.remove(at);
    profile.parts.retain(|(part, place)| {
        let binds = part.instance.needs.session.is_some();
        if binds {
            let message = format!(
                "`{}` has no effect in profile `{name}`: sessions stay with who generates",
                part.name
            );
            reader.problems.warning(*place, message, None);
        }
        !binds
    });
    Some(profile)
}

/// What decides: the handler's decider, nothing where it names none, or the only one that is listed. `None`: the default.
pub fn decider(reader: &mut Reader<'_>, ready: &[Ready<'_>]) -> Option<Arc<dyn PdDecider>> {
    let handler = ready.iter().find(|ready| [DISAGG, PD].contains(&ready.listed.type_name));
    let Some(handler) = handler else {
        let mut deciders = ready.iter().filter_map(|ready| Some((ready, decider_of(ready)?)));
        let (_, first) = deciders.next()?;
        for (other, _) in deciders {
            let message =
                format!("`{}` has no effect: another decider is listed before it", other.listed.name);
            reader.problems.warning(other.listed.place, message, None);
        }
        return Some(first);
    };
    let parameters = handler.listed.parameters;
    let named = match handler.listed.type_name {
        PD => {
            if let Some(node) = parameters.filter(|node| !node.is_blank()) {
                reader.members(node, "the parameters of a profile handler", &PD_MEMBERS);
            }
            let named = parameters.and_then(|node| node.get("deciderPluginName"));
            if named.is_none() {
                // The oldest form: a threshold in place of a decider.
                let threshold = parameters.and_then(|node| node.get("threshold")).map(Node::to_json);
                let by_threshold = threshold.and_then(|threshold| {
                    let given = serde_json::json!({"nonCachedTokens": threshold});
                    (plugins::decide_prefix_based::KIND.build)(given).ok()?.decider
                });
                let listed = by_threshold.or_else(|| find(ready, PD_DECIDER));
                return Some(listed.unwrap_or_else(plugins::never_split));
            }
            named
        }
        _ => {
            if let Some(node) = parameters.filter(|node| !node.is_blank()) {
                reader.members(
                    node,
                    "the parameters of a profile handler",
                    &["stageOrder", "profiles", "deciders"],
                );
                encode(reader, node);
            }
            parameters.and_then(|node| node.get("deciders")).and_then(|deciders| deciders.get("prefill"))
        }
    };
    // A stage without a decider is none.
    let Some(node) = named else { return Some(plugins::never_split()) };
    let Some(name) = node.as_str() else {
        reader.problems.error(node.place, "a decider is named by text", None);
        return None;
    };
    let found = find(ready, name);
    if found.is_none() {
        let deciders =
            ready.iter().filter(|ready| decider_of(ready).is_some()).map(|ready| ready.listed.name);
        let advice = did_you_mean(name, deciders);
        reader.problems.error(node.place, format!("no decider is named `{name}`"), advice);
    }
    found
}

/// Encode stages of multimodal prompts.
fn encode(reader: &mut Reader<'_>, parameters: &Node) {
    for section in ["profiles", "deciders"] {
        if let Some(node) = parameters.get(section).and_then(|section| section.get("encode")) {
            let message = "encode endpoints are not available in this version".to_owned();
            reader.unsupported(node.place, message, "whoever computes the prompt encodes it");
        }
    }
}

fn find(ready: &[Ready<'_>], name: &str) -> Option<Arc<dyn PdDecider>> {
    ready.iter().find(|ready| ready.listed.name == name).and_then(decider_of)
}

fn decider_of(ready: &Ready<'_>) -> Option<Arc<dyn PdDecider>> {
    ready.built.as_ref()?.1.decider.clone()
}
