//! Field by field: the definitions that the cluster has, `tests/data/fields.yaml`, and what is made of each field.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pilotfish::document::{Node, Problem};
use pilotfish::resources::crd;
use pilotfish::resources::lower::{Lowered, lower};
use rstest::rstest;
use serde_json::{Map, Value, json};

use crate::kit::kube;

/// What a definition says of a field, beside its description.
const FACTS: [&str; 12] = [
    "type",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "pattern",
];

/// The smallest good object of a kind, and what it names.
const OBJECTS: [(&str, &str, &str); 6] = [
    (
        "ModelRoute",
        "networking.serving.volcano.sh/v1alpha1",
        "{modelName: m, rules: [{targetModels: [{modelServerName: s}]}]}",
    ),
    (
        "ModelServer",
        "networking.serving.volcano.sh/v1alpha1",
        "{inferenceEngine: vLLM, workloadSelector: {matchLabels: {app: x}}, workloadPort: {port: 8000}}",
    ),
    ("ExternalModelProvider", "networking.serving.volcano.sh/v1alpha1", "{baseURL: 'https://api'}"),
    (
        "InferencePool",
        "inference.networking.k8s.io/v1",
        "{selector: {matchLabels: {app: x}}, targetPorts: [{number: 8000}]}",
    ),
    ("InferenceObjective", "llm-d.ai/v1alpha2", "{poolRef: {name: p}}"),
    (
        "InferenceModelRewrite",
        "llm-d.ai/v1alpha2",
        "{poolRef: {name: p}, rules: [{targets: [{modelRewrite: a}]}]}",
    ),
];
const OTHERS: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: s}
spec: {inferenceEngine: vLLM, workloadSelector: {matchLabels: {app: x}}, workloadPort: {port: 8000}}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: p}
spec: {selector: {matchLabels: {app: x}}, targetPorts: [{number: 8000}]}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: q}
spec: {selector: {matchLabels: {app: x}}, targetPorts: [{number: 8000}]}
---
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: e, labels: {app: x}}
spec: {address: '10.0.0.1:8000'}
---
";

/// The table of one kind.
fn table(kind: &str) -> Vec<Value> {
    let text = std::fs::read_to_string("tests/data/fields.yaml").unwrap();
    Node::parse(&text).unwrap()[0].to_json()[kind].as_array().unwrap().clone()
}

fn path(field: &Value) -> &str {
    field["at"].as_str().unwrap()
}

/// The facts of every field below a schema.
fn facts(schema: &Value, at: &str, into: &mut BTreeMap<String, Map<String, Value>>) {
    let said = FACTS.iter().filter_map(|fact| Some(((*fact).to_owned(), schema.get(*fact)?.clone())));
    into.insert(at.to_owned(), said.collect());
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let dot = if at.is_empty() { "" } else { "." };
        facts(schema, &format!("{at}{dot}{name}"), into);
    }
    for (member, mark) in [("items", "[]"), ("additionalProperties", ".*")] {
        if schema[member].is_object() {
            facts(&schema[member], &format!("{at}{mark}"), into);
        }
    }
}

/// The definition of a kind as its owner ships it.
fn definition(kind: &str) -> Value {
    let shipped = crd::definitions().into_iter().chain(kube::inference_extension());
    shipped.into_iter().find(|definition| definition["spec"]["names"]["kind"] == kind).unwrap()
}

#[rstest]
#[case("ModelRoute", true)]
#[case("ModelServer", true)]
#[case("InferencePool", false)]
#[case("InferenceObjective", false)]
#[case("InferenceModelRewrite", false)]
fn the_definitions_have_the_fields_of_the_table(#[case] kind: &str, #[case] ours: bool) {
    let schema = &definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    let mut defined = BTreeMap::new();
    facts(&schema["properties"]["spec"], "", &mut defined);
    defined.remove("");
    let listed: BTreeMap<String, Map<String, Value>> = table(kind)
        .iter()
        .map(|field| {
            let mut said = field.as_object().unwrap().clone();
            let more = said.remove("ours").filter(|_| ours);
            assert!(more.is_none() || said.contains_key("because"), "{field}");
            said.extend(more.into_iter().flat_map(|more| more.as_object().unwrap().clone()));
            said.retain(|name, _| FACTS.contains(&name.as_str()));
            (path(field).to_owned(), said)
        })
        .collect();
    let paths: BTreeSet<&String> = defined.keys().chain(listed.keys()).collect();
    for at in paths {
        assert_eq!(defined.get(at), listed.get(at), "{kind} {at}: of the definition, and of the table");
    }
}

/// Goes down a path and makes what is not there; containers with an example are made as it says.
fn make<'a>(spec: &'a mut Value, fields: &[Value], at: &str) -> &'a mut Value {
    let mut value = spec;
    let mut walked = String::new();
    for step in at.replace("[]", ".[]").split('.') {
        walked += if walked.is_empty() || step == "[]" { "" } else { "." };
        walked += step;
        let example = fields.iter().find(|field| path(field) == walked && field["type"] == "object");
        let fresh = example.map(|field| field["example"].clone()).unwrap_or_default();
        let index = match step {
            "[]" => {
                if !value.is_array() {
                    *value = json!([Value::Null]);
                }
                &mut value[0]
            }
            "*" => &mut value["x-key"],
            name => &mut value[name],
        };
        if index.is_null() {
            *index = fresh;
        }
        value = index;
    }
    value
}

/// The parent of a field, and its step from there.
fn split(at: &str) -> (&str, &str) {
    match at.strip_suffix("[]") {
        Some(parent) => (parent, "[]"),
        None => at.rsplit_once('.').unwrap_or(("", at)),
    }
}

/// An object with a field set, or with everything around it but the field itself.
fn with(kind: &str, fields: &[Value], at: &str, set: Option<&Value>) -> Lowered {
    let (_, version, spec) = OBJECTS.iter().find(|(name, ..)| *name == kind).unwrap();
    let mut spec = Node::parse(spec).unwrap()[0].to_json();
    if let Some(set) = set {
        *make(&mut spec, fields, at) = set.clone();
    } else {
        let (parent, step) = split(at);
        make(&mut spec, fields, at);
        let parent = if parent.is_empty() { &mut spec } else { make(&mut spec, fields, parent) };
        match (parent, step) {
            (Value::Array(items), _) => items.clear(),
            (Value::Object(members), "*") => drop(members.remove("x-key")),
            (Value::Object(members), name) => drop(members.remove(name)),
            _ => unreachable!("a parent is a container"),
        }
    }
    lowered(kind, version, &spec)
}

fn lowered(kind: &str, version: &str, spec: &Value) -> Lowered {
    let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": "o"}, "spec": spec});
    lower(&[("all.yaml", Arc::from(format!("{OTHERS}{object}\n")))])
}

/// No accepted field is silently ignored: each changes what is served, or is warned of, or is somebody else's by name.
#[rstest]
fn every_field_has_an_effect_or_a_warning(
    #[values(
        "ModelRoute",
        "ModelServer",
        "ExternalModelProvider",
        "InferencePool",
        "InferenceObjective",
        "InferenceModelRewrite"
    )]
    kind: &str,
) {
    let fields = table(kind);
    for field in &fields {
        let at = path(field);
        let uses = ["read", "ignored", "elsewhere"].iter().filter(|word| field.get(word).is_some()).count();
        let container = matches!(field["type"].as_str(), Some("object" | "array"));
        assert!(
            uses == 1 || (uses == 0 && container),
            "{kind} {at}: is it read, ignored, or somebody else's?"
        );
        if let Some(example) = field.get("read") {
            let (set, unset) = (with(kind, &fields, at, Some(example)), with(kind, &fields, at, None));
            let world = |lowered: &Lowered| format!("{:?}", lowered.world);
            assert_ne!(world(&set), world(&unset), "{kind} {at}: has no effect");
        } else if field.get("ignored").is_some() {
            let set = with(kind, &fields, at, Some(&field["example"]));
            assert!(warned(kind, &set.problems), "{kind} {at}: nobody is told that it is ignored");
        }
    }
}

/// Whether anything is wrong that is not wrong with the object without the field.
fn warned(kind: &str, problems: &[Problem]) -> bool {
    let (_, version, spec) = OBJECTS.iter().find(|(name, ..)| *name == kind).unwrap();
    let base = lowered(kind, version, &Node::parse(spec).unwrap()[0].to_json());
    let known = |problem: &Problem| base.problems.iter().any(|other| other.message == problem.message);
    // Nothing of a kind that is not read can have an effect, which is said of each of its objects.
    let whole = kind == "ExternalModelProvider" && base.problems.iter().any(|p| p.message.contains(kind));
    whole || problems.iter().any(|problem| !known(problem))
}
