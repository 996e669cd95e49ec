//! vLLM's `MooncakeConnector`: both engines are told one transfer id, and the decode engine where the prefill engine's
//! bootstrap server is.
//!
//! Versions that answer with transfer parameters of their own get these handed on as they are.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Deserialize;
use serde_json::json;

use super::connector::{Connector, Fields, Meeting, Prefilled, Useless, bootstrap_port};
use super::nixl;

/// The transfer id is ours.
#[derive(Debug)]
pub struct Mooncake;

impl Connector for Mooncake {
    /// One id names the blocks of one prompt.
    fn takes_batches(&self) -> bool {
        false
    }

    /// The first to have fetched ends the transfer: the others wait for one that never begins.
    fn takes_several_answers(&self) -> bool {
        false
    }

    fn prefill(&self, meeting: &Meeting<'_>) -> Fields {
        let id = json!(meeting.transfer_id);
        nixl::field(&format!(r#"{{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":{id}}}"#))
    }

    fn bootstrap_path(&self) -> Option<&'static str> {
        Some("/query")
    }

    fn decode(&self, meeting: &Meeting<'_>, prefilled: Prefilled<'_>) -> Result<Fields, Useless> {
        if let Some(parameters) = nixl::parameters(prefilled.answer)? {
            return Ok(nixl::field(parameters));
        }
        // An answer that ended by itself pins nothing: the decode engine would wait for blocks that are not there.
        if !ended_by_length(prefilled.answer) {
            return Err(Useless::NoFields);
        }
        let rank = meeting.prefill.transfer.data_parallel.and_then(|ranks| ranks.rank).unwrap_or(0);
        let bootstrap = prefilled.bootstrap.ok_or(Useless::Bootstrap)?;
        let engine_id = engine_id(bootstrap, rank).ok_or(Useless::Bootstrap)?;
        let address = SocketAddr::new(meeting.prefill.address.ip(), bootstrap_port(meeting.prefill));
        let parameters = json!({
            "do_remote_decode": false,
            "do_remote_prefill": true,
            "remote_bootstrap_addr": format!("http://{address}"),
            "remote_engine_id": engine_id,
            "transfer_id": meeting.transfer_id,
        });
        Ok(nixl::field(&parameters.to_string()))
    }
}

/// The id of the engine of a data-parallel rank: `{"RANK": {"engine_id": ...}}`.
fn engine_id(bootstrap: &[u8], rank: u16) -> Option<String> {
    #[derive(Deserialize)]
    struct Engine {
        engine_id: String,
    }
    let mut engines: BTreeMap<u16, Engine> = serde_json::from_slice(bootstrap).ok()?;
    engines.remove(&rank).map(|engine| engine.engine_id)
}

/// Whether the answer stopped at its limit of one token, in any API's words.
fn ended_by_length(answer: &[u8]) -> bool {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Answer<'a> {
        #[serde(borrow)]
        choices: Vec<Choice<'a>>,
        stop_reason: Option<&'a str>,
        status: Option<&'a str>,
    }
    #[derive(Deserialize)]
    struct Choice<'a> {
        #[serde(borrow, default)]
        finish_reason: Option<&'a str>,
    }
    let answer: Answer<'_> = serde_json::from_slice(answer).unwrap_or_default();
    answer.choices.first().is_some_and(|choice| choice.finish_reason == Some("length"))
        || answer.stop_reason == Some("max_tokens")
        || answer.status == Some("incomplete")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(r#"{"choices":[{"finish_reason":"length"}]}"#, true)]
    #[case(r#"{"choices":[{"finish_reason":"stop"}]}"#, false)]
    #[case(r#"{"stop_reason":"max_tokens"}"#, true)]
    #[case(r#"{"stop_reason":"end_turn"}"#, false)]
    #[case(r#"{"status":"incomplete"}"#, true)]
    #[case(r#"{"status":"completed"}"#, false)]
    #[case("", false)]
    fn every_api_says_why_it_ended(#[case] answer: &str, #[case] expected: bool) {
        assert_eq!(ended_by_length(answer.as_bytes()), expected);
    }

    #[test]
    fn the_engine_of_the_rank_is_named() {
        let answer = br#"{"0":{"engine_id":"a","worker_addr":{}},"3":{"engine_id":"b","worker_addr":{}}}"#;
        assert_eq!((engine_id(answer, 3).as_deref(), engine_id(answer, 1)), (Some("b"), None));
    }
}
