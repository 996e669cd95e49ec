//! vLLM's MooncakeConnector: the router names the transfer to both engines, which meet at the prefill's bootstrap server.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::channel::{Pull, Question};
use super::pins::{Content, Pin};
use super::{Decode, Ended, Key, Part, Shape, Wish, pin, wish};
use crate::engine::EngineState;
use crate::engine::error::ApiError;
use crate::engine::scheduler::{Finish, Kept};

fn text<'a>(params: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    params.get(name).and_then(Value::as_str).filter(|text| !text.is_empty())
}

pub(super) fn plan(
    state: &EngineState,
    params: Option<&Map<String, Value>>,
    shape: &Shape<'_>,
) -> Result<Part, ApiError> {
    let Some(params) = params else { return Ok(Part::Alone) };
    let transfer = text(params, "transfer_id");
    match wish(params, state.config.role)? {
        Wish::Nothing => Ok(Part::Alone),
        Wish::RemoteDecode => Ok(transfer.map_or_else(
            || {
                tracing::warn!("transfer_id is missing in kv_transfer_params: the router must send one");
                Part::Alone
            },
            |transfer| Part::prefill(Key::Mooncake(transfer.to_owned())),
        )),
        Wish::RemotePrefill => {
            let (engine, address) = (text(params, "remote_engine_id"), text(params, "remote_bootstrap_addr"));
            let (Some(engine), Some(address), Some(transfer), Some(prompt)) =
                (engine, address, transfer, shape.prompts.first())
            else {
                tracing::warn!(
                    "kv_transfer_params need remote_engine_id, remote_bootstrap_addr and transfer_id: the prompt is computed here"
                );
                return Ok(Part::Alone);
            };
            let question = Question {
                engine_id: Some(engine.to_owned()),
                key: transfer.to_owned(),
                content: Content::of(&prompt.tokens),
                blocks: None,
            };
            let pull = Pull { address: address.to_owned(), question };
            Ok(Part::Decode(Decode::new(&state.config, vec![pull], None)))
        }
    }
}

/// Pins the first sequence, if it ended by its length: a transfer has one name and one prompt.
pub(super) fn finish(state: &Arc<EngineState>, transfer: &str, ended: &Ended<'_>, kept: Vec<Arc<Kept>>) {
    if let (Some(kept), Some(Finish::Length)) = (kept.into_iter().next(), ended.finishes.first()) {
        pin(state, transfer.to_owned(), Pin::new(ended.prompt(0), kept));
    }
}
