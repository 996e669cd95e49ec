//! The manuals of plugins and flags, written from what plugins and the command line say of themselves.

mod flags;

use std::fmt::Write;

use serde_json::{Map, Value, json};

use crate::plugins::PLUGINS;
use crate::schedule::plugin::{Instance, Kind};

/// Writes the files again that [`documents`] describes.
pub const COMMAND: &str = "cargo run --example generate";

const INTRODUCTION: &str = "\
# Plugins

A profile is an ordered set of plugins. Filters drop endpoints, scorers rate those that are left from 0 to 1 (higher is
better), and one picker chooses by the weighted sums. A scorer that knows nothing of an endpoint abstains on it: it then
counts as the mean of what this scorer gave to the others.

```yaml
apiVersion: pilotfish.dev/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: prefix-cache
  name: long-prefixes            # the type, where no name is given
  parameters: {fullCreditBytes: 4096}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: long-prefixes}   # weight 1
```

A plugin that is filter and scorer acts as both in an `EndpointPickerConfig`; in Kthena's `scheduler:` file it acts only in
the list that names it, `Filter` or `Score`. Parameter names match in any letter case. Of llm-d's producers,
`approx-prefix-cache-producer` holds the parameters of the `prefix-cache-scorer` that names it, and
`precise-prefix-cache-producer` makes such a scorer go by engines' events; `precise-prefix-cache-scorer` is read as
`precise-prefix`. A `session-id-producer` or `agent-identity` is what the session affinities that name it read sessions
from. Other types of llm-d and Kthena that are not below are errors, or skipped with a warning under
`--allow-unsupported`. Of several profiles one is run: `default`, else the one that serves in llm-d (`decode`, or what the
listed profile handler calls it), else the first; the others are named. A `ConfigMap` with either kind of text is read too.
";

/// The generated files: path from the root of the repository, and text.
pub fn documents() -> [(&'static str, String); 3] {
    let mut schema = format!("{:#}", schema(PLUGINS));
    schema.push('\n');
    [
        ("docs/plugins.md", markdown(PLUGINS)),
        ("docs/schema/plugins.json", schema),
        ("docs/flags.md", flags::markdown()),
    ]
}

/// The manual of these plugins.
pub fn markdown(kinds: &[&Kind]) -> String {
    let mut text =
        format!("<!-- Written by `{COMMAND}`; edit the doc comments in src/plugins instead. -->\n\n");
    text.push_str(INTRODUCTION);
    text.push_str("\n| type | role |\n|---|---|\n");
    for kind in kinds {
        _ = writeln!(text, "| [`{0}`](#{0}) | {1} |", kind.name, roles(kind));
    }
    for kind in kinds {
        let schema = (kind.schema)().to_value();
        _ = writeln!(text, "\n## {}\n\n*{}*\n\n{}", kind.name, roles(kind), description(&schema));
        let parameters = schema["properties"].as_object().filter(|parameters| !parameters.is_empty());
        if let Some(parameters) = parameters {
            text.push_str("\n| parameter | type | default | meaning |\n|---|---|---|---|\n");
            for (name, parameter) in parameters {
                rows(&schema, name, parameter, &mut text);
            }
        }
    }
    text
}

/// The row of a parameter, and of each member of what it is made of.
fn rows(root: &Value, name: &str, parameter: &Value, text: &mut String) {
    let (kind, meaning) = (type_of(root, parameter), meaning(root, parameter));
    _ = writeln!(text, "| `{name}` | {kind} | {} | {} |", default_of(parameter), cell(&meaning));
    let schema = resolved(root, parameter);
    let items = resolved(root, &schema["items"]);
    for (of, dot) in [(schema, "."), (items, "[].")] {
        for (member, parameter) in of["properties"].as_object().into_iter().flatten() {
            rows(root, &format!("{name}{dot}{member}"), parameter, text);
        }
    }
}

/// The JSON schema of an entry of `plugins`.
pub fn schema(kinds: &[&Kind]) -> Value {
    let names: Vec<&str> = kinds.iter().map(|kind| kind.name).collect();
    let rules: Vec<Value> = kinds
        .iter()
        .map(|kind| {
            let mut parameters = (kind.schema)().to_value();
            if let Some(members) = parameters.as_object_mut() {
                members.remove("$schema");
                members.remove("title");
                // With an identity of its own, its `#/$defs` references stay its own.
                members.insert("$id".to_owned(), json!(format!("parameters/{}", kind.name)));
            }
            json!({
                "if": {"properties": {"type": {"const": kind.name}}},
                "then": {"properties": {"parameters": parameters}},
            })
        })
        .collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://pilotfish.dev/schema/plugins.json",
        "title": "Plugin",
        "description": "An entry of `plugins` in an EndpointPickerConfig.",
        "type": "object",
        "properties": {
            "name": {"description": "Instance name; the type if absent.", "type": "string"},
            "type": {"description": "Plugin type.", "enum": names},
            "parameters": {"type": "object"},
        },
        "required": ["type"],
        "additionalProperties": false,
        "allOf": rules,
    })
}

fn roles(kind: &Kind) -> String {
    let Instance { filter, scorer, picker, reports, .. } = (kind.build)(Value::Null).unwrap_or_default();
    let roles = [
        ("filter", filter.is_some()),
        ("scorer", scorer.is_some()),
        ("picker", picker.is_some()),
        ("reporter", reports.is_some()),
    ];
    let played: Vec<&str> = roles.iter().filter(|(_, plays)| *plays).map(|(role, _)| *role).collect();
    played.join(" and ")
}

fn description(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_default()
}

/// What a `$ref` leads to, or the schema itself.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    let target = schema["$ref"].as_str().and_then(|path| root.pointer(path.trim_start_matches('#')));
    target.unwrap_or(schema)
}

/// The values of a parameter that is one of a few words.
fn choices(schema: &Value) -> Vec<&Map<String, Value>> {
    let choices = schema["oneOf"].as_array().into_iter().flatten();
    choices.filter_map(Value::as_object).filter(|choice| choice.contains_key("const")).collect()
}

fn type_of(root: &Value, parameter: &Value) -> String {
    let schema = resolved(root, parameter);
    let choices = choices(schema);
    if !choices.is_empty() {
        return choices.iter().map(|choice| code(&choice["const"])).collect::<Vec<_>>().join(" or ");
    }
    let name = match &schema["type"] {
        Value::Array(names) => names.iter().filter_map(Value::as_str).find(|name| *name != "null"),
        name => name.as_str(),
    };
    let name = name.unwrap_or("any");
    if schema["minimum"] == 0 { format!("{name} from 0") } else { name.to_owned() }
}

fn meaning(root: &Value, parameter: &Value) -> String {
    let mut meaning = description(parameter).to_owned();
    for choice in choices(resolved(root, parameter)) {
        let words = choice.get("description").and_then(Value::as_str).unwrap_or_default();
        _ = write!(meaning, " {}: {words}", code(&choice["const"]));
    }
    meaning
}

fn default_of(parameter: &Value) -> String {
    match &parameter["default"] {
        Value::Null => "none".to_owned(),
        value => code(value),
    }
}

fn code(value: &Value) -> String {
    value.as_str().map_or_else(|| format!("`{value}`"), |text| format!("`{text}`"))
}

/// One line without the character that ends a cell.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_files_are_up_to_date() {
        for (path, text) in documents() {
            let committed = std::fs::read_to_string(path).unwrap_or_default();
            assert!(committed == text, "{path} is out of date: run `{COMMAND}` and commit it");
        }
    }

    #[test]
    fn every_parameter_of_every_plugin_has_a_type_a_default_and_a_meaning() {
        for kind in PLUGINS {
            let schema = (kind.schema)().to_value();
            for (name, parameter) in schema["properties"].as_object().into_iter().flatten() {
                let known = parameter.get("default").is_some() && type_of(&schema, parameter) != "any";
                assert!(known && description(parameter).len() > 10, "{} of {}", name, kind.name);
            }
        }
    }

    #[test]
    fn the_manual_shows_roles_choices_and_defaults() {
        let text = markdown(PLUGINS);
        for line in [
            "| [`least-request`](#least-request) | filter and scorer |",
            "| `formula` | `onFlight` or `published` | `onFlight` | Which of the two published formulas scores. \
             `onFlight`: requests + 100 x max(requests - running, 0). `published`: running + 100 x waiting. |",
            "| `TTFTTPOTWeightFactor` | number | `0.5` | Share of the time to first token in the score, 0 to 1. |",
            "| `fullCreditBytes` | integer from 0 | `1024` | Matched bytes from which a match counts whole. |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    /// The sample of the introduction is a configuration that works as it stands.
    #[test]
    fn the_sample_is_read_without_a_problem() {
        let sample =
            INTRODUCTION.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
        let options = crate::config::Options::default();
        let read = crate::config::read(std::path::Path::new("sample"), sample.into(), &options, None);
        assert!(read.problems.is_empty(), "{:?}", read.problems);
    }

    #[test]
    fn the_schema_lists_every_type_and_its_parameters() {
        let schema = schema(PLUGINS);
        assert_eq!(schema["properties"]["type"]["enum"].as_array().unwrap().len(), PLUGINS.len());
        let rules = schema["allOf"].as_array().unwrap();
        let rule =
            rules.iter().find(|rule| rule["if"]["properties"]["type"]["const"] == "prefix-cache").unwrap();
        let parameters = &rule["then"]["properties"]["parameters"];
        assert_eq!(parameters["properties"]["blockSizeToHash"]["default"], 64);
        assert_eq!(parameters["additionalProperties"], false);
    }
}
