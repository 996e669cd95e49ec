//! Where an engine's events come from: what its document says, else what it answers itself. Only ports are believed.

use serde_json::Value;

use crate::state::Endpoint;
use crate::state::endpoint::{EngineKind, EventPort};

/// Ranks of one engine at most: more is a mistake of whoever answered.
const MOST_RANKS: usize = 64;

/// The sockets of one data-parallel rank. The host is the endpoint's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPorts {
    /// Where batches come from.
    pub events: EventPort,
    /// Where missed batches are asked for.
    pub replay: Option<u16>,
}

/// What an engine says of its events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It publishes on these sockets, by rank.
    Ranks(Vec<RankPorts>),
    /// It publishes nothing.
    Nothing,
    /// It sends to somebody it was told to dial.
    Dials,
}

/// The page to ask; none for engines without events.
pub fn page_of(engine: EngineKind) -> Option<&'static str> {
    match engine {
        EngineKind::Vllm => Some("/kv_event_sources"),
        EngineKind::Sglang => Some("/server_info"),
        EngineKind::Tgi => None,
    }
}

/// The sockets that a document and an answer name together. The document's ports win; the answer says how many ranks there
/// are. Rank r is found r ports further, at both sockets.
pub fn combine(endpoint: &Endpoint, answer: Option<&Answer>) -> Option<Vec<RankPorts>> {
    let answered = match answer {
        Some(Answer::Ranks(ranks)) => Some(ranks),
        _ => None,
    };
    let written = endpoint.event_ports;
    let Some(events) = written.events else {
        let mut ranks = answered.cloned()?;
        if let Some(replay) = written.replay {
            for (rank, ports) in ranks.iter_mut().enumerate() {
                ports.replay = replay.checked_add(rank as u16);
            }
        }
        return Some(ranks);
    };
    let ranks = answered.map_or(1, Vec::len);
    let found = answered.and_then(|ranks| ranks.first()).and_then(|first| first.replay);
    let replay = written.replay.or(found);
    (0..ranks as u16)
        .map(|rank| {
            let events = match events {
                EventPort::Dial(port) => EventPort::Dial(port.checked_add(rank)?),
                EventPort::Listen(port) => EventPort::Listen(port.checked_add(rank)?),
            };
            Some(RankPorts { events, replay: replay.and_then(|port| port.checked_add(rank)) })
        })
        .collect()
}

/// Reads an answer; none if it is not what that engine answers.
pub fn read(engine: EngineKind, body: &[u8]) -> Option<Answer> {
    let value: Value = serde_json::from_slice(body).ok()?;
    match engine {
        EngineKind::Vllm => of_vllm(&value),
        EngineKind::Sglang => of_sglang(&value),
        EngineKind::Tgi => None,
    }
}

/// `{"RANK": {"publisher", "endpoint", "replay_endpoint", ...}}`
fn of_vllm(value: &Value) -> Option<Answer> {
    let sources = value.as_object()?;
    let mut ranks: Vec<(u64, &Value)> = Vec::new();
    for (rank, source) in sources {
        let on = source["enable_kv_cache_events"].as_bool() != Some(false);
        if on && source["publisher"].as_str() == Some("zmq") {
            ranks.push((rank.parse().ok()?, source));
        }
    }
    ranks.sort_unstable_by_key(|(rank, _)| *rank);
    if ranks.is_empty() || ranks.len() > MOST_RANKS {
        return Some(Answer::Nothing);
    }
    // vLLM binds wildcards and dials everything else.
    let binds = |source: &Value| {
        source["endpoint"].as_str().is_some_and(|endpoint| endpoint.contains('*') || endpoint.contains("::"))
    };
    if !ranks.iter().all(|(_, source)| binds(source)) {
        return Some(Answer::Dials);
    }
    let port = |source: &Value, member: &str| source[member].as_str().and_then(port_of);
    let same = |member| {
        let first = ranks.first().and_then(|(_, source)| port(source, member));
        ranks.len() > 1 && ranks.iter().all(|(_, source)| port(source, member) == first)
    };
    // The configured port may be shown for every rank; each then is that much further.
    let shift = |same: bool, rank: usize| if same { rank as u16 } else { 0 };
    let (same_events, same_replay) = (same("endpoint"), same("replay_endpoint"));
    let ports = ranks.iter().enumerate().map(|(rank, (_, source))| {
        let events = port(source, "endpoint")?.checked_add(shift(same_events, rank))?;
        let replay =
            port(source, "replay_endpoint").and_then(|port| port.checked_add(shift(same_replay, rank)));
        Some(RankPorts { events: EventPort::Dial(events), replay })
    });
    ports.collect::<Option<Vec<_>>>().map(Answer::Ranks)
}

/// `{"kv_events": {"publisher", "endpoint_port_base", "replay_endpoint_port_base", "dp_size", ...}, ...}`
fn of_sglang(value: &Value) -> Option<Answer> {
    let info = &value.as_object()?.get("kv_events").unwrap_or(&Value::Null);
    let port = |member: &str| info[member].as_u64().and_then(|port| u16::try_from(port).ok());
    let (Some("zmq"), Some(events)) = (info["publisher"].as_str(), port("endpoint_port_base")) else {
        return Some(Answer::Nothing);
    };
    let ranks = info["dp_size"].as_u64().unwrap_or(1).clamp(1, MOST_RANKS as u64) as u16;
    let ports = (0..ranks).map(|rank| {
        let replay = port("replay_endpoint_port_base").and_then(|port| port.checked_add(rank));
        Some(RankPorts { events: EventPort::Dial(events.checked_add(rank)?), replay })
    });
    ports.collect::<Option<Vec<_>>>().map(Answer::Ranks)
}

/// The port of `tcp://HOST:PORT`.
fn port_of(endpoint: &str) -> Option<u16> {
    endpoint.strip_prefix("tcp://")?.rsplit_once(':')?.1.parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dial(events: u16, replay: impl Into<Option<u16>>) -> RankPorts {
        RankPorts { events: EventPort::Dial(events), replay: replay.into() }
    }

    #[test]
    fn vllm_says_its_sockets_rank_by_rank() {
        let captured = br#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5561",
            "replay_endpoint":"tcp://127.0.0.1:5571","buffer_steps":10000,"hwm":100000,"topic":"kv@127.0.0.1:8101@tiny"}}"#;
        let vllm = |body: &[u8]| read(EngineKind::Vllm, body);
        assert_eq!(vllm(captured), Some(Answer::Ranks(vec![dial(5561, 5571)])));
        let two = br#"{"1":{"publisher":"zmq","endpoint":"tcp://*:5561"},"0":{"publisher":"zmq","endpoint":"tcp://*:5561"}}"#;
        assert_eq!(vllm(two), Some(Answer::Ranks(vec![dial(5561, None), dial(5562, None)])));
        assert_eq!(vllm(b"{}"), Some(Answer::Nothing));
        assert_eq!(vllm(br#"{"0":{"publisher":"null","endpoint":"tcp://*:1"}}"#), Some(Answer::Nothing));
        let dials = br#"{"0":{"publisher":"zmq","endpoint":"tcp://10.0.0.9:5590"}}"#;
        assert_eq!(vllm(dials), Some(Answer::Dials));
        assert_eq!(vllm(b"[]"), None);
    }

    #[test]
    fn sglang_says_its_base_ports() {
        let info =
            br#"{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":2,
            "replay_endpoint_port_base":5600,"topic":"","block_size":64}}"#;
        assert_eq!(
            read(EngineKind::Sglang, info),
            Some(Answer::Ranks(vec![dial(5557, 5600), dial(5558, 5601)]))
        );
        assert_eq!(read(EngineKind::Sglang, br#"{"version":"x"}"#), Some(Answer::Nothing));
    }
}
