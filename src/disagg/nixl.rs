//! vLLM's `NixlConnector`: the prefill engine pins the blocks and says where they are; the decode engine fetches them.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::connector::{Connector, Fields, Meeting, Prefilled, Useless};

/// What the prefill engine answers goes to the decode engine as it is.
#[derive(Debug)]
pub struct Nixl;

impl Connector for Nixl {
    /// One answer speaks of the blocks of one prompt.
    fn takes_batches(&self) -> bool {
        false
    }

    /// The first to have fetched ends the lease: the others read blocks that may be another prompt's by then.
    fn takes_several_answers(&self) -> bool {
        false
    }

    fn prefill(&self, _: &Meeting<'_>) -> Fields {
        r#""kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false},"#.to_owned()
    }

    fn decode(&self, _: &Meeting<'_>, prefilled: Prefilled<'_>) -> Result<Fields, Useless> {
        parameters(prefilled.answer)?.ok_or(Useless::NoFields).map(field)
    }
}

/// The field of a decode body.
pub(super) fn field(parameters: &str) -> Fields {
    format!("\"kv_transfer_params\":{parameters},")
}

/// The `kv_transfer_params` of an answer as written; none if it has none, or not an object.
pub(super) fn parameters(answer: &[u8]) -> Result<Option<&str>, Useless> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow, default)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let answer: Answer<'_> = serde_json::from_slice(answer).map_err(|_| Useless::NoFields)?;
    Ok(answer.kv_transfer_params.map(RawValue::get).filter(|json| json.starts_with('{')))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        r#"{"id":"x","kv_transfer_params":{ "a" : [ [1,2] ] , "b":1.50}}"#,
        Ok(Some(r#"{ "a" : [ [1,2] ] , "b":1.50}"#))
    )]
    #[case(r#"{"kv_transfer_params":null}"#, Ok(None))]
    #[case(r#"{"kv_transfer_params":"x"}"#, Ok(None))]
    #[case(r#"{"id":"x"}"#, Ok(None))]
    #[case("no json", Err(Useless::NoFields))]
    fn parameters_are_taken_as_written(
        #[case] answer: &str,
        #[case] expected: Result<Option<&str>, Useless>,
    ) {
        assert_eq!(parameters(answer.as_bytes()), expected);
    }
}
