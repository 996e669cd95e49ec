//! The plugins that a configuration lists, before any is built.

use super::Reader;
use crate::document::{Node, Place};
use crate::schedule::plugin::Instance;

/// An entry of `plugins`.
pub struct Listed<'n> {
    pub name: &'n str,
    pub type_name: &'n str,
    pub place: Place,
    pub node: &'n Node,
    pub parameters: Option<&'n Node>,
}

/// A listed plugin that can take part.
pub struct Ready<'n> {
    pub listed: Listed<'n>,
    /// Type and instance; `None` for what is accepted and does nothing, and for what is in error.
    pub built: Option<(&'static str, Instance)>,
}

impl<'n> Listed<'n> {
    /// All entries that have a type and a name of their own.
    pub fn all(reader: &mut Reader<'_>, node: &'n Node) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        for node in reader.list(node, "plugins") {
            if !reader.members(node, "a plugin", &["name", "type", "parameters"]) {
                continue;
            }
            let Some((type_name, place)) = reader.text(node, "type", "a plugin") else { continue };
            let name = match node.get("name") {
                Some(name) if !name.is_blank() => match reader.text(node, "name", "a plugin") {
                    Some((name, _)) => name,
                    None => continue,
                },
                _ => type_name,
            };
            if all.iter().any(|other| other.name == name) {
                let place = node.get("name").map_or(place, |name| name.place);
                let advice = Some("give each instance a `name` of its own".to_owned());
                reader.problems.error(place, format!("plugin instance `{name}` is described twice"), advice);
            }
            all.push(Self { name, type_name, place, node, parameters: node.get("parameters") });
        }
        all
    }
}
