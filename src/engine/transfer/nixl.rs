//! vLLM's NixlConnector in pull mode: the prefill answer names the blocks, and the decode request repeats it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Map, Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::channel::{Pull, Question, address};
use super::pins::{Content, Pin};
use super::{Decode, Ended, Key, Part, Shape, Wish, broken, pin, wish};
use crate::engine::EngineState;
use crate::engine::error::ApiError;
use crate::engine::scheduler::{Finish, Kept};

/// What a decode request must say of the prefill.
struct Remote {
    engine_id: String,
    request_id: String,
    blocks: Vec<Vec<u64>>,
    host: String,
    port: u16,
    tokens: u64,
}

impl Remote {
    fn read(params: &Map<String, Value>) -> Result<Self, ApiError> {
        let missing = |name: &str| broken(format_args!("{name} is missing or of another type"));
        let text = |name: &str| {
            let text = params.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
            text.map(str::to_owned).ok_or_else(|| missing(name))
        };
        let number = |name: &str| params.get(name).and_then(Value::as_u64).ok_or_else(|| missing(name));
        let blocks = params.get("remote_block_ids").cloned().unwrap_or_default();
        Ok(Self {
            engine_id: text("remote_engine_id")?,
            request_id: text("remote_request_id")?,
            blocks: serde_json::from_value(blocks).map_err(|_| missing("remote_block_ids"))?,
            host: text("remote_host")?,
            port: number("remote_port")?.try_into().map_err(|_| missing("remote_port"))?,
            tokens: number("remote_num_tokens")?,
        })
    }
}

pub(super) fn plan(
    state: &EngineState,
    params: Option<&Map<String, Value>>,
    shape: &Shape<'_>,
) -> Result<Part, ApiError> {
    let Some(params) = params else { return Ok(Part::Alone) };
    match wish(params, state.config.role)? {
        Wish::Nothing => Ok(Part::Alone),
        Wish::RemoteDecode => Ok(Part::prefill(Key::Nixl(shape.id.to_owned()))),
        Wish::RemotePrefill => {
            let remote = Remote::read(params)?;
            for prompt in shape.prompts {
                let tokens = prompt.tokens.len();
                if remote.tokens != tokens as u64 {
                    let (told, name) = (remote.tokens, "remote_num_tokens");
                    return Err(broken(format_args!("{name} is {told}, but the prompt has {tokens} tokens")));
                }
            }
            let content = shape.prompts.first().map(|prompt| Content::of(&prompt.tokens));
            let pulls = content.map(|content| Pull {
                address: address(&remote.host, remote.port),
                question: Question {
                    engine_id: Some(remote.engine_id),
                    key: remote.request_id,
                    content,
                    blocks: Some(remote.blocks),
                },
            });
            Ok(Part::Decode(Decode::new(&state.config, pulls.into_iter().collect(), None)))
        }
    }
}

/// Pins every sequence that ended by its length. The answer tells of the first only, as vLLM's does.
pub(super) fn finish(
    state: &Arc<EngineState>,
    id: &str,
    ended: &Ended<'_>,
    kept: Vec<Arc<Kept>>,
) -> Option<String> {
    let mut answer = None;
    for (sequence, (kept, finish)) in kept.into_iter().zip(ended.finishes).enumerate() {
        if *finish != Finish::Length {
            continue;
        }
        let prompt = ended.prompt(sequence);
        let count = prompt.len().div_ceil(state.config.block_size as usize) as u64;
        let first = state.transfers.blocks.fetch_add(count, Relaxed);
        let blocks: Vec<Vec<u64>> = vec![(first..first + count).collect()];
        let suffix = xxh3_64_with_seed(&first.to_le_bytes(), state.id_seed) as u32;
        let request_id = format!("{id}-{sequence}-{suffix:08x}");
        if sequence == 0 {
            answer = Some(params(state, &request_id, &blocks, prompt.len(), ended.cached));
        }
        pin(state, request_id, Pin::new(prompt, kept).with_blocks(blocks));
    }
    answer
}

/// In the order of the captured answers.
fn params(state: &EngineState, request_id: &str, blocks: &[Vec<u64>], tokens: usize, cached: u32) -> String {
    let ip = state.address.ip();
    let host = if ip.is_unspecified() { "127.0.0.1".to_owned() } else { ip.to_string() };
    format!(
        r#"{{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":{},"remote_engine_id":"{}","remote_request_id":{},"remote_host":"{host}","remote_port":{},"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":{tokens},"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":{cached}}}"#,
        json!(blocks),
        state.transfers.identity(),
        json!(request_id),
        state.address.port(),
    )
}
