//! Tells Envoy what a response cost, by an expression of the operator's.

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::schedule::plugin::{Instance, Kind, ParameterError, parameters};
use crate::usage::Attribute;

/// llm-d's reporter: puts a number made of the response's usage into dynamic metadata with the last reply to the response,
/// for Envoy's rate limits and logs. `expression` is CEL over `usage.prompt_tokens`, `usage.completion_tokens`,
/// `usage.total_tokens` and, where the engine tells, `usage.prompt_tokens_details.cached_tokens`, all doubles; its result
/// loses its fraction. Nothing is reported where `condition` is false, where no usage was seen, or where Envoy shows
/// neither response bodies nor trailers. It acts on every request, whether or not a profile lists it.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// What is reported: each number with the metadata field that it goes to.
    pub attributes: Vec<Reported>,
}

/// One number.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Reported {
    /// Where it goes.
    pub key: Key,
    /// Gives the number.
    pub expression: String,
    /// Says whether there is one.
    #[serde(default)]
    pub condition: Option<String>,
}

/// A field of the dynamic metadata.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Key {
    /// Its namespace.
    #[serde(default = "envoy_lb")]
    pub namespace: String,
    /// Its name.
    pub name: String,
}

fn envoy_lb() -> String {
    "envoy.lb".to_owned()
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "request-attribute-reporter",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        let reports = config.attributes.iter().map(compiled).collect::<Result<_, _>>()?;
        Ok(Instance { reports: Some(reports), ..Instance::default() })
    },
};

fn compiled(reported: &Reported) -> Result<Arc<Attribute>, ParameterError> {
    let Reported { key, expression, condition } = reported;
    if key.name.is_empty() {
        return Err(ParameterError("`key.name` is empty: name the metadata field".to_owned()));
    }
    let namespace = Some(&*key.namespace).filter(|name| !name.is_empty()).unwrap_or("envoy.lb");
    let condition = condition.as_deref().filter(|text| !text.trim().is_empty());
    Attribute::compile(namespace, &key.name, expression, condition)
        .map(Arc::new)
        .map_err(|error| ParameterError(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::Usage;
    use rstest::rstest;
    use serde_json::json;

    #[test]
    fn an_attribute_goes_to_envoy_lb_unless_it_says_otherwise() {
        let built = (KIND.build)(json!({"attributes": [
            {"key": {"name": "cost"}, "expression": "usage.total_tokens", "condition": ""},
            {"key": {"namespace": "billing", "name": "out"}, "expression": "usage.completion_tokens"},
        ]}));
        let reports = built.unwrap().reports.unwrap();
        let usage = Usage { prompt: 3, completion: 4, cached: None };
        let shown: Vec<_> = reports.iter().map(|r| (&*r.namespace, &*r.name, r.value(&usage))).collect();
        assert_eq!(shown, [("envoy.lb", "cost", Some(7)), ("billing", "out", Some(4))]);
    }

    #[rstest]
    #[case(json!({"attributes": [{"key": {"name": ""}, "expression": "1"}]}), "`key.name` is empty")]
    #[case(json!({"attributes": [{"key": {"name": "c"}, "expression": "usage."}]}), "is not an expression")]
    #[case(json!({"attributes": [{"key": {"name": "c"}}]}), "missing field `expression`")]
    #[case(json!({"attributes": [{"key": {"nam": "c"}, "expression": "1"}]}), "unknown field `nam`")]
    fn wrong_attributes_are_refused(#[case] given: serde_json::Value, #[case] expected: &str) {
        let error = (KIND.build)(given).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
