//! KV caches that move from prefill engines to decode engines: the part of one request in such a transfer.
//!
//! Nothing is moved. A prefill engine pins what it computed under a key, a decode engine asks for that key over HTTP, and
//! both check what the request said as far as a real engine depends on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::Instant;

use super::error::ApiError;
use super::generation::{Prompt, parse};
use super::scheduler::{Arrival, Finish, Kept, Work};
use super::{EngineConfig, EngineState};

pub(super) mod channel;
mod mooncake;
mod nixl;
pub(super) mod pins;
mod sglang;

use channel::{Channel, Pull, Pulled};
use pins::{Pin, Pins};
use sglang::{Occupied, Rooms};

/// Which phases an engine serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineRole {
    /// Prefill and decode.
    #[default]
    Both,
    /// Computes prompts for decode engines.
    Prefill,
    /// Takes prompts from prefill engines.
    Decode,
}

/// How KV moves between engines, which decides the fields of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KvConnector {
    /// vLLM's NixlConnector: the prefill answer tells where its KV is.
    Nixl,
    /// vLLM's MooncakeConnector: the router names the transfer.
    Mooncake,
    /// SGLang's rooms.
    Sglang,
}

/// How long a prefill engine keeps KV that nobody fetches, at speed 1.
const LEASE: Duration = Duration::from_secs(30);

/// How long vLLM's decode side tries, at speed 1.
const PATIENCE: Duration = Duration::from_secs(5);

/// The members of a body that the connector reads.
#[derive(Default)]
pub(super) struct Fields {
    kv_transfer_params: Value,
    bootstrap: sglang::Fields,
}

#[derive(Deserialize)]
struct VllmFields {
    #[serde(default)]
    kv_transfer_params: Value,
}

impl Fields {
    /// Reads nothing at an engine without a connector.
    pub fn read(state: &EngineState, body: &[u8]) -> Result<Self, ApiError> {
        let fields = Self::default();
        Ok(match state.config.connector {
            None => fields,
            Some(KvConnector::Sglang) => Self { bootstrap: parse(body)?, ..fields },
            Some(_) => Self { kv_transfer_params: parse::<VllmFields>(body)?.kv_transfer_params, ..fields },
        })
    }

    fn params(&self) -> Result<Option<&Map<String, Value>>, ApiError> {
        match &self.kv_transfer_params {
            Value::Null => Ok(None),
            Value::Object(params) => Ok(Some(params)),
            _ => Err(ApiError::invalid("kv_transfer_params", "kv_transfer_params must be an object.")),
        }
    }
}

/// A request as far as a transfer depends on it.
pub(super) struct Shape<'a> {
    /// The id of the response.
    pub id: &'a str,
    pub prompts: &'a [Prompt],
    /// Whether the prompts came as a list.
    pub listed: bool,
}

/// What the transfers of one engine share.
#[derive(Default)]
pub(super) struct Transfers {
    identity: Mutex<Arc<str>>,
    pins: Pins,
    rooms: Arc<Rooms>,
    channel: Channel,
    transferred: AtomicU64,
    failed: AtomicU64,
    blocks: AtomicU64,
}

impl Transfers {
    /// The engine as peers know it, another one after every start.
    pub fn identity(&self) -> Arc<str> {
        self.identity.lock().clone()
    }

    /// Another process in place of this one.
    pub fn restart(&self, identity: &str) {
        *self.identity.lock() = identity.into();
        self.pins.clear();
    }

    /// Forgets all pins: a dead engine has no memory.
    pub fn clear(&self) {
        self.pins.clear();
    }

    pub fn pinned(&self) -> usize {
        self.pins.len()
    }

    pub fn transferred(&self) -> u64 {
        self.transferred.load(Relaxed)
    }

    pub fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    /// Pinned KV that was released unread.
    pub fn expired(&self) -> u64 {
        self.pins.expired()
    }
}

/// The part of one request. Dropping it gives back what it occupies.
#[derive(Default)]
pub(super) enum Part {
    /// None: the prompt is computed and used here.
    #[default]
    Alone,
    Prefill(Prefill),
    Decode(Decode),
}

pub(super) struct Prefill {
    kept: Vec<Arc<Kept>>,
    under: Key,
}

/// What a prompt is pinned under.
enum Key {
    /// Request ids made of the id of the response.
    Nixl(String),
    /// The transfer's name.
    Mooncake(String),
    /// A room for each prompt.
    Sglang(Occupied),
}

pub(super) struct Decode {
    /// One for all prompts, or one for each.
    pulls: Vec<Pull>,
    arrival: Arc<Arrival>,
    patience: Duration,
    recompute: bool,
    settled: bool,
    /// Held for the life of the request.
    _rooms: Option<Occupied>,
}

impl Decode {
    fn new(config: &EngineConfig, pulls: Vec<Pull>, rooms: Option<Occupied>) -> Self {
        let patience = if rooms.is_some() { sglang::PATIENCE } else { PATIENCE };
        Self {
            pulls,
            arrival: Arc::default(),
            patience: patience.div_f64(config.speed),
            recompute: config.kv_load_recompute && rooms.is_none(),
            settled: false,
            _rooms: rooms,
        }
    }
}

impl Part {
    /// What `fields` ask for, checked as the engine of this connector and role checks them.
    pub fn plan(state: &EngineState, fields: &Fields, shape: &Shape<'_>) -> Result<Self, ApiError> {
        match state.config.connector {
            None => Ok(Self::Alone),
            Some(KvConnector::Nixl) => nixl::plan(state, fields.params()?, shape),
            Some(KvConnector::Mooncake) => mooncake::plan(state, fields.params()?, shape),
            Some(KvConnector::Sglang) => sglang::plan(state, &fields.bootstrap, shape),
        }
    }

    fn prefill(under: Key) -> Self {
        Self::Prefill(Prefill { kept: Vec::new(), under })
    }

    /// True when the engine ends every answer after its first token.
    pub fn ends_with_prefill(&self) -> bool {
        matches!(self, Self::Prefill(Prefill { under: Key::Sglang(_), .. }))
    }

    /// Makes a sequence wait for its KV, or keep it.
    pub fn attach(&mut self, state: &EngineState, work: &mut Work) {
        match self {
            Self::Alone => {}
            Self::Prefill(prefill) => {
                let kept = state.scheduler.keep();
                prefill.kept.push(kept.clone());
                work.kept = Some(kept);
            }
            Self::Decode(decode) => work.arrival = Some(decode.arrival.clone()),
        }
    }

    /// The request was refused: vLLM lets the prefill engine free what nobody will read.
    pub fn reject(self, state: &Arc<EngineState>) {
        let Self::Decode(decode) = self else { return };
        if state.config.connector != Some(KvConnector::Nixl) {
            return;
        }
        let state = state.clone();
        tokio::spawn(async move {
            for pull in &decode.pulls {
                let _ = tokio::time::timeout(decode.patience, state.transfers.channel.pull(pull)).await;
            }
        });
    }

    /// Waits until the KV of the prompts is here, or will never be. Does nothing from the second call on.
    pub async fn load(&mut self, state: &EngineState) -> Result<(), ApiError> {
        let Self::Decode(decode) = self else { return Ok(()) };
        if std::mem::replace(&mut decode.settled, true) {
            return Ok(());
        }
        let transfers = &state.transfers;
        let deadline = Instant::now() + decode.patience;
        let pulls = decode.pulls.iter().map(|pull| async {
            tokio::time::timeout_at(deadline, transfers.channel.pull(pull)).await.unwrap_or(Pulled::Missing)
        });
        let results = join_all(pulls).await;
        if let Some(Pulled::Refused(message)) = results.iter().find(|r| matches!(r, Pulled::Refused(_))) {
            return Err(ApiError::Internal(message.clone()));
        }
        let here = results.iter().all(|result| matches!(result, Pulled::Here));
        if here {
            transfers.transferred.fetch_add(results.len() as u64, Relaxed);
        } else {
            tokio::time::sleep_until(deadline).await;
            transfers.failed.fetch_add(1, Relaxed);
            if !decode.recompute {
                return Err(ApiError::Internal("Internal server error".to_owned()));
            }
        }
        decode.arrival.settle(here);
        state.scheduler.wake();
        Ok(())
    }

    /// Pins what was computed, and waits where the answer waits for it to be fetched. Returns the answer's
    /// `kv_transfer_params` as JSON.
    pub async fn finish(&mut self, state: &Arc<EngineState>, ended: &Ended<'_>) -> Result<String, ApiError> {
        if let Self::Prefill(prefill) = self {
            let kept = std::mem::take(&mut prefill.kept);
            match &prefill.under {
                Key::Nixl(id) => {
                    return Ok(nixl::finish(state, id, ended, kept).unwrap_or_else(|| "null".to_owned()));
                }
                Key::Mooncake(transfer) => mooncake::finish(state, transfer, ended, kept),
                Key::Sglang(rooms) => sglang::finish(state, rooms, ended, kept).await?,
            }
        }
        Ok("null".to_owned())
    }
}

/// A request whose sequences have all ended.
pub(super) struct Ended<'a> {
    pub prompts: &'a [Arc<[u32]>],
    /// Sequences of each prompt.
    pub choices: u32,
    /// The end of each sequence.
    pub finishes: &'a [Finish],
    /// Prompt tokens that were cached.
    pub cached: u32,
}

impl Ended<'_> {
    fn prompt(&self, sequence: usize) -> &Arc<[u32]> {
        &self.prompts[sequence / self.choices.max(1) as usize]
    }
}

/// Pins a prompt until it is fetched or its lease ends.
fn pin(state: &Arc<EngineState>, key: String, pin: Pin) {
    let serial = state.transfers.pins.put(key.clone(), pin);
    let (state, lease) = (Arc::downgrade(state), LEASE.div_f64(state.config.speed));
    tokio::spawn(async move {
        tokio::time::sleep(lease).await;
        if let Some(state) = state.upgrade() {
            state.transfers.pins.expire(&key, serial);
        }
    });
}

/// An error that a real engine has only when whoever sent the request is wrong about it.
fn broken(message: impl std::fmt::Display) -> ApiError {
    ApiError::Internal(format!("kv_transfer_params: {message}"))
}

/// A flag of `kv_transfer_params`, false when absent.
fn flag(params: &Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match params.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(broken(format_args!("{name} must be true or false"))),
    }
}

/// What `kv_transfer_params` ask for.
enum Wish {
    Nothing,
    RemoteDecode,
    RemotePrefill,
}

fn wish(params: &Map<String, Value>, role: EngineRole) -> Result<Wish, ApiError> {
    match (flag(params, "do_remote_decode")?, flag(params, "do_remote_prefill")?) {
        (false, false) => Ok(Wish::Nothing),
        (true, true) => Err(broken("do_remote_decode and do_remote_prefill exclude each other")),
        (true, false) if role == EngineRole::Decode => {
            Err(broken("do_remote_decode was sent to a decode engine"))
        }
        (true, false) => Ok(Wish::RemoteDecode),
        (false, true) if role == EngineRole::Prefill => {
            Err(broken("do_remote_prefill was sent to a prefill engine"))
        }
        (false, true) => Ok(Wish::RemotePrefill),
    }
}
