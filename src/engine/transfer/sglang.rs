//! SGLang's rooms: both engines get the same request with a number, and meet under it at the prefill's bootstrap server.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashSet;
use futures::future::join_all;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::channel::{Pull, Question, address};
use super::pins::{Content, Pin};
use super::{Decode, Ended, EngineRole, Key, Part, Shape, pin};
use crate::engine::EngineState;
use crate::engine::error::ApiError;
use crate::engine::scheduler::Kept;

/// How long either engine waits for the other, at speed 1.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// The bootstrap port of a request that names none.
const DEFAULT_PORT: u16 = 8998;

/// Members of the body.
#[derive(Default, Deserialize)]
pub(super) struct Fields {
    #[serde(default, rename = "bootstrap_host")]
    host: Value,
    #[serde(default, rename = "bootstrap_port")]
    port: Value,
    #[serde(default, rename = "bootstrap_room")]
    room: Value,
}

/// Rooms of the requests under way.
#[derive(Default)]
pub(super) struct Rooms(Mutex<AHashSet<i64>>);

/// Rooms that one request occupies until it is dropped.
pub(super) struct Occupied {
    rooms: Vec<i64>,
    all: Arc<Rooms>,
}

impl Drop for Occupied {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        self.rooms.iter().for_each(|room| {
            all.remove(room);
        });
    }
}

impl Rooms {
    /// The room that is in use already, if there is one.
    fn occupy(self: &Arc<Self>, rooms: Vec<i64>) -> Result<Occupied, i64> {
        let mut all = self.0.lock();
        for (index, room) in rooms.iter().enumerate() {
            if !all.insert(*room) {
                rooms[..index].iter().for_each(|room| {
                    all.remove(room);
                });
                return Err(*room);
            }
        }
        drop(all);
        Ok(Occupied { rooms, all: self.clone() })
    }
}

fn room(value: &Value) -> Option<i64> {
    value.as_i64().filter(|room| *room >= 0)
}

fn port(value: &Value) -> Option<u16> {
    match value {
        Value::Null => Some(DEFAULT_PORT),
        _ => value.as_u64().and_then(|port| port.try_into().ok()).filter(|port| *port > 0),
    }
}

fn host(value: &Value) -> Option<String> {
    value.as_str().filter(|host| !host.is_empty()).map(str::to_owned)
}

/// One value a prompt: a list, or one for all where that is allowed.
struct Each<'a> {
    name: &'static str,
    value: &'a Value,
    shape: &'a Shape<'a>,
}

impl Each<'_> {
    fn wrong(&self, needs: &str) -> ApiError {
        ApiError::invalid(self.name, format!("{} {needs}.", self.name))
    }

    fn read<T>(&self, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>, ApiError> {
        let prompts = self.shape.prompts.len();
        let Value::Array(values) = self.value else {
            let value = || read(self.value).ok_or_else(|| self.wrong(&format!("must be {kind}")));
            return (0..prompts).map(|_| value()).collect();
        };
        if !self.shape.listed {
            return Err(self.wrong("must not be a list for one prompt"));
        }
        if values.len() != prompts {
            return Err(self.wrong(&format!("has {} elements for {prompts} prompts", values.len())));
        }
        let value = |value| read(value).ok_or_else(|| self.wrong(&format!("must hold {kind} each")));
        values.iter().map(value).collect()
    }
}

fn rooms(fields: &Fields, shape: &Shape<'_>) -> Result<Vec<i64>, ApiError> {
    let each = Each { name: "bootstrap_room", value: &fields.room, shape };
    let several = shape.prompts.len() > 1;
    if several && !each.value.is_null() && !each.value.is_array() {
        return Err(each.wrong("must be a list for several prompts"));
    }
    each.read("a whole number from 0 to 9223372036854775807", room)
}

/// Types are wrong whatever the role; missing members only where they are needed.
fn check_types(fields: &Fields, shape: &Shape<'_>) -> Result<(), ApiError> {
    if !fields.room.is_null() {
        rooms(fields, shape)?;
    }
    if !fields.host.is_null() {
        hosts(fields, shape)?;
    }
    ports(fields, shape).map(drop)
}

fn hosts(fields: &Fields, shape: &Shape<'_>) -> Result<Vec<String>, ApiError> {
    Each { name: "bootstrap_host", value: &fields.host, shape }.read("a host name", host)
}

fn ports(fields: &Fields, shape: &Shape<'_>) -> Result<Vec<u16>, ApiError> {
    Each { name: "bootstrap_port", value: &fields.port, shape }.read("a port number or null", port)
}

pub(super) fn plan(state: &EngineState, fields: &Fields, shape: &Shape<'_>) -> Result<Part, ApiError> {
    check_types(fields, shape)?;
    if state.config.role == EngineRole::Both {
        return Ok(Part::Alone);
    }
    let rooms = rooms(fields, shape)?;
    if let Some((rank, size)) = state.config.data_parallel {
        let other = |room: &&i64| room.unsigned_abs() % u64::from(size) != u64::from(rank);
        if let Some(room) = rooms.iter().find(other) {
            return Err(ApiError::Internal(format!(
                "bootstrap_room {room} does not belong to rank {rank} of {size}"
            )));
        }
    }
    let pulls =
        if state.config.role == EngineRole::Decode { pulls(fields, shape, &rooms)? } else { Vec::new() };
    let occupied = state.transfers.rooms.occupy(rooms);
    let occupied =
        occupied.map_err(|room| ApiError::Internal(format!("bootstrap_room {room} is in use already")))?;
    Ok(match state.config.role {
        EngineRole::Decode => Part::Decode(Decode::new(&state.config, pulls, Some(occupied))),
        _ => Part::prefill(Key::Sglang(occupied)),
    })
}

fn pulls(fields: &Fields, shape: &Shape<'_>, rooms: &[i64]) -> Result<Vec<Pull>, ApiError> {
    let (hosts, ports) = (hosts(fields, shape)?, ports(fields, shape)?);
    let pull =
        |(((room, host), port), prompt): (((&i64, String), u16), &crate::engine::generation::Prompt)| Pull {
            address: address(&host, port),
            question: Question {
                engine_id: None,
                key: room.to_string(),
                content: Content::of(&prompt.tokens),
                blocks: None,
            },
        };
    Ok(rooms.iter().zip(hosts).zip(ports).zip(shape.prompts).map(pull).collect())
}

/// Releases rooms that were not fetched when their request is given up.
struct Offered<'a> {
    state: &'a EngineState,
    rooms: &'a [i64],
}

impl Drop for Offered<'_> {
    fn drop(&mut self) {
        self.rooms.iter().for_each(|room| self.state.transfers.pins.remove(&room.to_string()));
    }
}

/// Offers each prompt in its room, and waits until all were fetched.
pub(super) async fn finish(
    state: &Arc<EngineState>,
    occupied: &Occupied,
    ended: &Ended<'_>,
    kept: Vec<Arc<Kept>>,
) -> Result<(), ApiError> {
    let deadline = Instant::now() + PATIENCE.div_f64(state.config.speed);
    let _offered = Offered { state, rooms: &occupied.rooms };
    let choices = ended.choices.max(1) as usize;
    let mut waiting = Vec::with_capacity(occupied.rooms.len());
    let first_of_each = kept.into_iter().step_by(choices).zip(ended.prompts);
    for (room, (kept, prompt)) in occupied.rooms.iter().zip(first_of_each) {
        let (sender, receiver) = oneshot::channel();
        waiting.push(receiver);
        pin(state, room.to_string(), Pin::new(prompt, kept).with_notice(sender));
    }
    let fetched = tokio::time::timeout_at(deadline, join_all(waiting)).await;
    if fetched.is_ok_and(|all| all.iter().all(Result::is_ok)) {
        return Ok(());
    }
    state.transfers.failed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    Err(ApiError::Internal(format!("bootstrap_room {:?}: the KV was not fetched in time", occupied.rooms)))
}
