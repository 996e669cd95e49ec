//! The CustomResourceDefinitions that Pilotfish ships, written from the types that read the objects.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Number, Value};
use serde_saphyr::SerializeError;

use super::model_route::ModelRoute;
use super::model_server::ModelServer;
use crate::manual::COMMAND;

/// The generated files: path from the root of the repository, and text.
///
/// # Errors
///
/// A definition that has no YAML.
pub fn documents() -> Result<[(&'static str, String); 2], SerializeError> {
    let [routes, servers] = definitions().map(|definition| yaml(&definition));
    let written =
        |yaml| format!("# Written by `{COMMAND}`; edit the types in src/resources instead.\n{yaml}");
    Ok([("crds/modelroutes.yaml", written(routes?)), ("crds/modelservers.yaml", written(servers?))])
}

/// All definitions as one YAML stream, as `kubectl apply -f -` takes it.
///
/// # Errors
///
/// A definition that has no YAML.
pub fn stream() -> Result<String, SerializeError> {
    definitions().iter().map(|definition| Ok(format!("---\n{}", yaml(definition)?))).collect()
}

fn yaml(definition: &Value) -> Result<String, SerializeError> {
    serde_saphyr::to_string(definition)
}

/// The definitions as the API server should have them.
pub fn definitions() -> [Value; 2] {
    [published(&ModelRoute::crd()), published(&ModelServer::crd())]
}

fn published(definition: &CustomResourceDefinition) -> Value {
    let mut value = serde_json::to_value(definition).unwrap_or_default();
    tidy(&mut value);
    value
}

/// Takes away what Rust's types say and Kubernetes' do not.
///
/// A member that may be absent is not nullable: the API server puts the default in the place of a `null` and refuses one
/// where there is no default, as it does with Kthena's own definitions. Formats of unsigned integers are unknown to it; the
/// bounds beside them say the same.
fn tidy(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|name, value| !foreign(name, value));
            members.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        Value::Number(number) => {
            // Bounds are floating-point in the definition's type; those of integers are written as integers.
            if let Some(whole) = number.as_f64().filter(|bound| bound.fract() == 0.0) {
                *number = Number::from(whole as i64);
            }
        }
        _ => {}
    }
}

fn foreign(name: &str, value: &Value) -> bool {
    match name {
        "nullable" => value.is_boolean(),
        "default" => value.is_null(),
        "format" => value.as_str().is_some_and(|format| format.starts_with("uint")),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::Node;

    #[test]
    fn the_stream_holds_what_the_files_hold() {
        let stream = Node::parse(&stream().unwrap()).unwrap();
        let files = documents().unwrap().map(|(_, text)| Node::parse(&text).unwrap().remove(0).to_json());
        assert_eq!(stream.iter().map(Node::to_json).collect::<Vec<_>>(), files);
        assert_eq!(files.each_ref().map(|file| file["kind"].as_str()), [Some("CustomResourceDefinition"); 2]);
    }

    #[test]
    fn the_committed_definitions_are_up_to_date() {
        for (path, text) in documents().unwrap() {
            let committed = std::fs::read_to_string(path).unwrap_or_default();
            assert!(committed == text, "{path} differs from src/resources: run `{COMMAND}` and commit it");
        }
    }
}
