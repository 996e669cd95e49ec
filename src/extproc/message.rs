//! Reads what Envoy's messages say beside headers and bodies: metadata, attributes, token usage.

use std::collections::HashMap;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, Metadata};
use envoy_types::pb::envoy::data::ai::v3::TokenUsage;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Any, Struct};
use prost::Message;

use crate::admission::identity::Attributes;
use crate::request::head::Head;
use crate::schedule::Subset;
use crate::settle::UpstreamFacts;
use crate::state::ObjectName;
use crate::usage::Usage;

/// The filter-metadata namespace of the candidate restriction.
const SUBSET_NAMESPACE: &str = "envoy.lb.subset_hint";
const SUBSET_KEY: &str = "x-gateway-destination-endpoint-subset";
/// The namespace that destinations go out and served endpoints come in by.
pub const LB_NAMESPACE: &str = "envoy.lb";
const SERVED_KEY: &str = "x-gateway-destination-endpoint-served";
/// The namespace that our own words go out and a pool comes in by.
pub const OWN_NAMESPACE: &str = "pilotfish";
const POOL_KEY: &str = "pool";
const USAGE_NAMESPACE: &str = "envoy.ai.token_usage";

/// Moves Envoy's headers into ours. Values come as bytes; what is no UTF-8 is replaced, it can match nothing.
pub fn head(headers: Option<HeaderMap>) -> Head {
    Head::new(headers.unwrap_or_default().headers.into_iter().map(|header| {
        let value = if header.raw_value.is_empty() { header.value } else { text(header.raw_value) };
        (header.key, value)
    }))
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

/// The restriction, if the gateway sent one: an empty list is one too.
pub fn subset(metadata: Option<&Metadata>) -> Option<Subset> {
    let hint = metadata?.filter_metadata.get(SUBSET_NAMESPACE)?.fields.get(SUBSET_KEY)?;
    match &hint.kind {
        Some(Kind::ListValue(list)) => {
            Some(Subset::from_entries(list.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.as_str()),
                _ => None,
            })))
        }
        Some(Kind::StringValue(text)) => Some(Subset::from_entries([text.as_str()])),
        // Anything else restricts to something we cannot read: to nothing, rather than to everything.
        _ => Some(Subset::default()),
    }
}

/// The pool that the gateway names, `NAMESPACE/NAME`. What is no such name names a pool that does not exist.
pub fn pool(metadata: &Metadata) -> Option<ObjectName> {
    match &metadata.filter_metadata.get(OWN_NAMESPACE)?.fields.get(POOL_KEY)?.kind {
        Some(Kind::StringValue(name)) => Some(named_pool(name)),
        _ => None,
    }
}

/// See [`pool`].
pub fn named_pool(name: &str) -> ObjectName {
    name.parse().unwrap_or_else(|_| ObjectName::new("", name))
}

/// The endpoint that has served, as the gateway writes it.
pub fn served(metadata: &Metadata) -> Option<&str> {
    match &metadata.filter_metadata.get(LB_NAMESPACE)?.fields.get(SERVED_KEY)?.kind {
        Some(Kind::StringValue(address)) => Some(address),
        _ => None,
    }
}

/// Reads attributes and metadata of a response-phase message.
pub fn upstream(attributes: &HashMap<String, Struct>, metadata: Option<&Metadata>) -> UpstreamFacts {
    let attribute =
        |name: &str| attributes.values().find_map(|values| values.fields.get(name)?.kind.as_ref());
    let text = |kind: &Kind| match kind {
        Kind::StringValue(text) => Some(text.clone()),
        _ => None,
    };
    let number = |kind: &Kind| match kind {
        Kind::NumberValue(number) => Some(*number),
        Kind::StringValue(text) => text.parse().ok(),
        _ => None,
    };
    let reported = metadata.and_then(served).map(str::to_owned);
    let served = reported.or_else(|| attribute("upstream.address").and_then(text));
    UpstreamFacts {
        served: served.and_then(|address| address.parse().ok()),
        attempts: attribute("upstream.request_attempt_count").and_then(number).map(|n| n as u32),
        status: attribute("response.code").and_then(number).map(|n| n as u16).filter(|code| *code > 0),
        from_upstream: attribute("response.code_details")
            .and_then(text)
            .map(|details| details == "via_upstream"),
    }
}

/// The texts of these attributes, as far as they came.
pub fn attributes(came: &HashMap<String, Struct>, wanted: &[Arc<str>]) -> Attributes {
    let text = |name: &str| {
        came.values().find_map(|values| match values.fields.get(name)?.kind.as_ref()? {
            Kind::StringValue(text) => Some(Box::from(text.as_str())),
            _ => None,
        })
    };
    wanted.iter().filter_map(|name| Some((Arc::clone(name), text(name)?))).collect()
}

/// The counts of Envoy's usage filter.
pub fn usage(metadata: Option<&Metadata>) -> Option<Usage> {
    typed_usage(metadata?.typed_filter_metadata.get(USAGE_NAMESPACE)?)
}

fn typed_usage(packed: &Any) -> Option<Usage> {
    let usage = TokenUsage::decode(&packed.value[..]).ok()?;
    let prompt = usage.input_tokens.as_ref().map(|n| n.value);
    let completion = usage.output_tokens.as_ref().map(|n| n.value);
    if prompt.is_none() && completion.is_none() {
        return None;
    }
    let cached = usage.input_token_details.and_then(|details| details.cached_tokens).map(|n| n.value);
    Some(Usage { prompt: prompt.unwrap_or(0), completion: completion.unwrap_or(0), cached })
}

#[cfg(test)]
mod tests {
    use super::*;
    use envoy_types::pb::google::protobuf::{ListValue, Value};
    use rstest::rstest;

    fn string(text: &str) -> Value {
        Value { kind: Some(Kind::StringValue(text.into())) }
    }

    fn list(values: Vec<Value>) -> Value {
        Value { kind: Some(Kind::ListValue(ListValue { values })) }
    }

    fn hint(value: Option<Value>) -> Metadata {
        let fields = value.map(|value| (SUBSET_KEY.to_owned(), value)).into_iter().collect();
        Metadata {
            filter_metadata: HashMap::from([(SUBSET_NAMESPACE.to_owned(), Struct { fields })]),
            ..Metadata::default()
        }
    }

    #[rstest]
    #[case(None, None)]
    #[case(Some(list(vec![])), Some(false))]
    #[case(Some(list(vec![string("10.0.0.1:80")])), Some(true))]
    #[case(Some(list(vec![Value { kind: Some(Kind::NumberValue(5.0)) }, string("10.0.0.1:80")])), Some(true))]
    #[case(Some(string("10.0.0.9:80,10.0.0.1:80")), Some(true))]
    #[case(Some(Value { kind: Some(Kind::BoolValue(true)) }), Some(false))]
    fn subsets_of_every_form(#[case] value: Option<Value>, #[case] allowed: Option<bool>) {
        let found = subset(Some(&hint(value)));
        assert_eq!(found.map(|subset| subset.allows("10.0.0.1:80".parse().unwrap())), allowed);
    }

    #[test]
    fn the_report_of_the_gateway_wins_over_the_attribute() {
        let attributes = HashMap::from([(
            "envoy.filters.http.ext_proc".to_owned(),
            Struct {
                fields: HashMap::from([
                    ("upstream.address".to_owned(), string("10.0.0.1:80")),
                    (
                        "upstream.request_attempt_count".to_owned(),
                        Value { kind: Some(Kind::NumberValue(2.0)) },
                    ),
                    ("response.code".to_owned(), Value { kind: Some(Kind::NumberValue(503.0)) }),
                    ("response.code_details".to_owned(), string("no_healthy_upstream")),
                ]),
            },
        )]);
        let facts = upstream(&attributes, None);
        assert_eq!(facts.served, Some("10.0.0.1:80".parse().unwrap()));
        assert_eq!((facts.attempts, facts.status, facts.from_upstream), (Some(2), Some(503), Some(false)));
        let fields = HashMap::from([(SERVED_KEY.to_owned(), string("10.0.0.2:80"))]);
        let filter_metadata = HashMap::from([(LB_NAMESPACE.to_owned(), Struct { fields })]);
        let metadata = Metadata { filter_metadata, ..Metadata::default() };
        assert_eq!(upstream(&attributes, Some(&metadata)).served, Some("10.0.0.2:80".parse().unwrap()));
    }
}
