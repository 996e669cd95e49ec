//! JSON whose members stay in the order of the text, as Python's dictionaries do: chat templates print them.

use std::fmt;
use std::sync::Arc;

use indexmap::IndexMap;
use minijinja::Value;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// The members of an object. Of equal names the last value counts, at the place of the first, as in Python.
pub type Members = IndexMap<Arc<str>, Json, ahash::RandomState>;

/// One value. It holds prompts, so it cannot be printed.
#[derive(Clone, PartialEq)]
pub enum Json {
    /// `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number beyond `i64`.
    Big(u64),
    /// Any other number.
    Float(f64),
    /// A string.
    Text(Arc<str>),
    /// A list.
    List(Vec<Json>),
    /// An object.
    Object(Members),
}

impl Json {
    /// Reads one value; `None` if the text is no JSON.
    pub fn parse(text: &[u8]) -> Option<Json> {
        serde_json::from_slice(text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)).ok()
    }

    /// A string.
    pub fn text(text: impl Into<Arc<str>>) -> Json {
        Json::Text(text.into())
    }

    /// An object of these members.
    pub fn object<const N: usize>(members: [(&str, Json); N]) -> Json {
        Json::Object(members.into_iter().map(|(name, value)| (Arc::from(name), value)).collect())
    }

    /// A member of an object; `None` for `null`, as for what is not there.
    pub fn get(&self, name: &str) -> Option<&Json> {
        self.as_object()?.get(name).filter(|value| **value != Json::Null)
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        if let Json::Text(text) = self { Some(text) } else { None }
    }

    /// The value of a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        if let Json::Bool(value) = self { Some(*value) } else { None }
    }

    /// The items of a list.
    pub fn as_list(&self) -> Option<&[Json]> {
        if let Json::List(items) = self { Some(items) } else { None }
    }

    /// The members of an object.
    pub fn as_object(&self) -> Option<&Members> {
        if let Json::Object(members) = self { Some(members) } else { None }
    }

    /// Whether Python takes it for true.
    pub fn is_truthy(&self) -> bool {
        match self {
            Json::Null => false,
            Json::Bool(value) => *value,
            Json::Int(number) => *number != 0,
            Json::Big(_) => true,
            Json::Float(number) => *number != 0.0,
            Json::Text(text) => !text.is_empty(),
            Json::List(items) => !items.is_empty(),
            Json::Object(members) => !members.is_empty(),
        }
    }
}

impl From<&Json> for Value {
    fn from(json: &Json) -> Value {
        match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Int(number) => Value::from(*number),
            Json::Big(number) => Value::from(*number),
            Json::Float(number) => Value::from(*number),
            Json::Text(text) => Value::from(Arc::clone(text)),
            Json::List(items) => items.iter().map(Value::from).collect(),
            Json::Object(members) => {
                Value::from_pairs(members.iter().map(|(name, value)| (Arc::clone(name), Value::from(value))))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        deserializer.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json, E> {
        Ok(Json::Int(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(i64::try_from(number).map_or(Json::Big(number), Json::Int))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Json, E> {
        Ok(Json::Float(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::text(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = list.next_element()? {
            items.push(item);
        }
        Ok(Json::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Json, A::Error> {
        let mut members = Members::default();
        while let Some((name, value)) = object.next_entry::<Box<str>, Json>()? {
            members.insert(name.into(), value);
        }
        Ok(Json::Object(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_the_order_of_the_text_and_the_last_value() {
        let json = Json::parse(br#"{"b":1,"a":[null,true,1.5,18446744073709551615],"b":"x"}"#).unwrap();
        let names: Vec<&str> = json.as_object().unwrap().keys().map(AsRef::as_ref).collect();
        assert_eq!(names, ["b", "a"]);
        assert_eq!(json.get("b").and_then(Json::as_str), Some("x"));
        assert!(
            json.get("a").and_then(Json::as_list)
                == Some(&[Json::Null, Json::Bool(true), Json::Float(1.5), Json::Big(u64::MAX)])
        );
        assert!(Json::parse(b"{").is_none());
    }
}
