//! Reads the cases and expands what their texts abbreviate.

use std::collections::HashMap;
use std::sync::LazyLock;

use serde_json::Value;

static CASES: LazyLock<HashMap<String, Value>> = LazyLock::new(|| {
    let lines = include_str!("../data/cases/cases.jsonl").lines();
    let cases = lines.map(|line| serde_json::from_str::<Value>(line).unwrap());
    cases.map(|case| (case["id"].as_str().unwrap().to_owned(), expand(&case["input"]))).collect()
});

/// The input of a case, with every `{{rep:STR:N}}` written out.
pub fn input(id: &str) -> &'static Value {
    CASES.get(id).unwrap_or_else(|| panic!("no case {id}"))
}

/// The value with every `{{rep:STR:N}}` in its strings written out.
pub fn expand(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::String(expand_text(text)),
        Value::Array(items) => items.iter().map(expand).collect(),
        Value::Object(members) => members.iter().map(|(name, value)| (name.clone(), expand(value))).collect(),
        other => other.clone(),
    }
}

fn expand_text(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{rep:") {
        let (inside, after) = after.split_once("}}").expect("an open {{rep:");
        let (unit, times) = inside.rsplit_once(':').expect("{{rep:STR:N}}");
        out.push_str(before);
        out.push_str(&unit.repeat(times.parse().expect("a number of repetitions")));
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A member that holds text.
pub fn text<'a>(value: &'a Value, member: &str) -> &'a str {
    value[member].as_str().unwrap_or_else(|| panic!("no text `{member}` in {value}"))
}

/// A member that is a list.
pub fn list<'a>(value: &'a Value, member: &str) -> &'a [Value] {
    value[member].as_array().unwrap_or_else(|| panic!("no list `{member}` in {value}"))
}

/// A member that is a whole number.
pub fn number(value: &Value, member: &str) -> usize {
    value[member].as_u64().unwrap_or_else(|| panic!("no number `{member}` in {value}")) as usize
}
