//! An object of an API server as a document, so that files and clusters are read in one way.

use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

use kube::core::ApiResource;
use serde_json::{Value, json};

/// The document of an object, under the name that problems are reported with: `modelroutes/NAMESPACE/NAME`.
///
/// The kind is given because items of a list do not say theirs. Of the metadata only what documents have is kept:
/// `managedFields` is often longer than the rest. `status` is left out.
pub fn document(resource: &ApiResource, object: &Value) -> (PathBuf, Arc<str>) {
    let metadata = &object["metadata"];
    let word = |name: &str| metadata[name].as_str().unwrap_or_default();
    let path = [resource.plural.as_str(), word("namespace"), word("name")].iter().collect();
    let kept = ["name", "namespace", "labels", "annotations", "creationTimestamp"];
    let kept = kept.iter().filter(|name| !metadata[**name].is_null());
    let metadata: serde_json::Map<_, _> =
        kept.map(|name| ((*name).to_owned(), metadata[*name].clone())).collect();
    let document = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": metadata,
        "spec": object["spec"],
    });
    // One member a line: problems show the line they are about.
    (path, yaml(&format!("{document:#}")).into())
}

/// JSON as YAML: the same, but for characters that stand in JSON as they are and that YAML wants escaped (YAML 1.2.2, 5.1
/// and 5.4). They can only stand in strings, where both languages write `\u` and four digits.
fn yaml(json: &str) -> String {
    let mut yaml = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                _ = write!(yaml, "\\u{:04x}", u32::from(c));
            }
            _ => yaml.push(c),
        }
    }
    yaml
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::document::{Node, Severity};
    use crate::resources::lower::lower_objects;
    use crate::resources::model_route::ModelRoute;

    fn route(spec: &Value) -> Value {
        let metadata = json!({"namespace": "chat", "name": "r", "managedFields": [{"manager": "kubectl"}]});
        json!({"metadata": metadata, "spec": spec, "status": {"conditions": []}})
    }

    #[test]
    fn an_object_is_read_like_a_document_and_newer_members_do_not_stop_it() {
        let resource = ApiResource::erase::<ModelRoute>(&());
        let rules = json!([{"targetModels": [{"modelServerName": "mss", "priority": 1}]}]);
        let object = route(&json!({"modelName": "m", "retryBudget": {}, "rules": rules}));
        let lowered = lower_objects(&[document(&resource, &object)]);
        let shown: Vec<String> = lowered
            .problems
            .iter()
            .map(|p| format!("{} {:?} {}: {}", p.file.display(), p.severity, p.message, p.source.trim()))
            .collect();
        assert_eq!(lowered.world.routes[0].rules.len(), 1, "{shown:#?}");
        assert_eq!(
            shown,
            [
                "modelroutes/chat/r Warning `retryBudget` is not known to this version and has no effect: \"retryBudget\": {},",
                "modelroutes/chat/r Error ModelServer chat/mss does not exist: \"modelServerName\": \"mss\",",
                "modelroutes/chat/r Warning `priority` is not known to this version and has no effect: \"priority\": 1",
            ]
        );
    }

    #[test]
    fn a_value_of_the_wrong_type_stops_its_object_only() {
        let resource = ApiResource::erase::<ModelRoute>(&());
        let good = json!({"metadata": {"name": "good"}, "spec": {"modelName": "m", "rules": []}});
        let objects = [document(&resource, &route(&json!({"rules": 7}))), document(&resource, &good)];
        let lowered = lower_objects(&objects);
        assert_eq!(lowered.world.routes.len(), 1);
        assert!(lowered.problems.iter().any(|p| p.severity == Severity::Error));
    }

    /// Any text, control characters included.
    fn text() -> impl Strategy<Value = String> {
        prop::collection::vec(any::<char>(), 0..8).prop_map(String::from_iter)
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            text().prop_map(Value::from),
            "[ -~]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(text(), inner, 0..4)
                    .prop_map(|members| Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn every_spec_comes_out_of_the_document_as_it_went_in(spec in json_value()) {
            let (_, text) = document(&ApiResource::erase::<ModelRoute>(&()), &route(&spec));
            let read = Node::parse(&text).unwrap().remove(0).to_json();
            prop_assert_eq!(&read["spec"], &spec);
        }
    }
}
