//! The tree of one YAML document, every node with its line and column.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::Spanned;

/// Line and column, both from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Line.
    pub line: u32,
    /// Column in characters.
    pub column: u32,
}

impl Place {
    /// The beginning of a file.
    pub const START: Place = Place { line: 1, column: 1 };

    fn of(location: serde_saphyr::Location) -> Self {
        Self { line: location.line() as u32, column: location.column() as u32 }
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where.
    pub place: Place,
    /// What.
    pub value: Yaml,
}

/// A YAML value.
#[derive(Clone, Debug)]
pub enum Yaml {
    /// Anything without members.
    Scalar(Value),
    /// A list.
    List(Vec<Node>),
    /// A map in its own order, with the place of every key.
    Map(Vec<(String, Place, Node)>),
}

/// Text that is not YAML.
#[derive(Debug)]
pub struct SyntaxError {
    /// Where.
    pub place: Place,
    /// Why.
    pub message: String,
}

impl Node {
    /// Whether it says nothing: null or an empty map.
    pub fn is_blank(&self) -> bool {
        match &self.value {
            Yaml::Map(members) => members.is_empty(),
            Yaml::Scalar(value) => value.is_null(),
            Yaml::List(_) => false,
        }
    }

    /// Reads every document of a text; empty documents are left out.
    pub fn parse(text: &str) -> Result<Vec<Node>, SyntaxError> {
        let documents = serde_saphyr::from_multiple::<Spanned<Yaml>>(text).map_err(|error| {
            let place = error.location().map_or(Place::START, Place::of);
            let whole = error.to_string();
            // The text shows the source as well; the caller shows it in its own way.
            let message = whole.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
            SyntaxError { place, message }
        })?;
        let nodes = documents.into_iter().map(Node::from);
        Ok(nodes.filter(|node| !matches!(node.value, Yaml::Scalar(Value::Null))).collect())
    }

    /// The member of a map.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Yaml::Map(members) => members.iter().rev().find(|(name, ..)| name == key).map(|(.., node)| node),
            _ => None,
        }
    }

    /// The text of a scalar.
    pub fn as_str(&self) -> Option<&str> {
        match &self.value {
            Yaml::Scalar(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// Whether it is a list.
    pub fn is_list(&self) -> bool {
        matches!(self.value, Yaml::List(_))
    }

    /// The items of a list.
    pub fn items(&self) -> &[Node] {
        match &self.value {
            Yaml::List(items) => items,
            _ => &[],
        }
    }

    /// Where a key of this map stands.
    pub fn key_place(&self, key: &str) -> Option<Place> {
        match &self.value {
            Yaml::Map(members) => members.iter().find(|(name, ..)| name == key).map(|(_, place, _)| *place),
            _ => None,
        }
    }

    /// The node at a path of keys and list indices, or the deepest one on the way there.
    pub fn at<S: AsRef<str>>(&self, path: &[S]) -> &Node {
        let mut node = self;
        for step in path {
            let step = step.as_ref().trim_matches(['[', ']']);
            let next = match &node.value {
                Yaml::List(items) => step.parse::<usize>().ok().and_then(|at| items.get(at)),
                _ => node.get(step),
            };
            match next {
                Some(next) => node = next,
                None => break,
            }
        }
        node
    }

    /// Takes a member out of the map at a path; whether it was there.
    pub fn remove<S: AsRef<str>>(&mut self, path: &[S], name: &str) -> bool {
        let Some((step, rest)) = path.split_first() else {
            let Yaml::Map(members) = &mut self.value else { return false };
            let before = members.len();
            members.retain(|(key, ..)| key != name);
            return members.len() < before;
        };
        let step = step.as_ref().trim_matches(['[', ']']);
        let next = match &mut self.value {
            Yaml::List(items) => step.parse::<usize>().ok().and_then(|at| items.get_mut(at)),
            Yaml::Map(members) => {
                members.iter_mut().rev().find(|(key, ..)| key == step).map(|(.., node)| node)
            }
            Yaml::Scalar(_) => None,
        };
        next.is_some_and(|next| next.remove(rest, name))
    }

    /// The same without places.
    pub fn to_json(&self) -> Value {
        match &self.value {
            Yaml::Scalar(value) => value.clone(),
            Yaml::List(items) => Value::Array(items.iter().map(Node::to_json).collect()),
            Yaml::Map(members) => Value::Object(
                members.iter().map(|(name, _, node)| (name.clone(), node.to_json())).collect::<Map<_, _>>(),
            ),
        }
    }
}

impl From<Spanned<Yaml>> for Node {
    fn from(spanned: Spanned<Yaml>) -> Self {
        Self { place: Place::of(spanned.referenced), value: spanned.value }
    }
}

impl<'de> Deserialize<'de> for Yaml {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlVisitor)
    }
}

struct YamlVisitor;

impl<'de> Visitor<'de> for YamlVisitor {
    type Value = Yaml;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(Value::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Yaml, E> {
        // Infinity and NaN have no JSON number; as text they fail where a number is wanted, with their place.
        Ok(Yaml::Scalar(
            Number::from_f64(value).map_or_else(|| Value::String(value.to_string()), Value::Number),
        ))
    }

    fn visit_str<E>(self, value: &str) -> Result<Yaml, E> {
        Ok(Yaml::Scalar(Value::String(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Yaml, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element::<Spanned<Yaml>>()? {
            list.push(item.into());
        }
        Ok(Yaml::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Yaml, A::Error> {
        let mut members = Vec::new();
        while let Some((key, value)) = entries.next_entry::<Spanned<String>, Spanned<Yaml>>()? {
            members.push((key.value, Place::of(key.referenced), value.into()));
        }
        Ok(Yaml::Map(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_of_every_document_has_its_place() {
        let documents = Node::parse("a: 1\nb:\n- x\n- {c: 0.5}\n---\n---\nd: [~, true]\n").unwrap();
        assert_eq!(documents.len(), 2, "an empty document is none");
        let c = documents[0].at(&["b", "1", "c"]);
        assert_eq!((c.place.line, c.place.column), (4, 7));
        assert_eq!(documents[0].key_place("b"), Some(Place { line: 2, column: 1 }));
        assert_eq!(documents[0].to_json(), serde_json::json!({"a": 1, "b": ["x", {"c": 0.5}]}));
        assert_eq!(documents[1].place.line, 7);
    }

    #[test]
    fn text_that_is_not_yaml_is_named_by_place() {
        let error = Node::parse("a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(error.place.line >= 2, "{error:?}");
        assert!(!error.message.is_empty() && !error.message.contains('\n'));
    }
}
