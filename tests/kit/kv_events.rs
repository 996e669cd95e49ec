//! Engines as their KV events alone: frames go straight to the followers, lookups through the real index.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use pilotfish::feed::kv_events::Follower;
use pilotfish::index::{DepthSink, Tier, TokenIndexes};
use pilotfish::prompt::{Blocks, Namespace};
use pilotfish::state::endpoint::{EndpointSpec, EngineKind, EventPorts};
use pilotfish::state::{Endpoint, ObjectName};
use serde_json::Value;

use super::case::{list, number, text};

/// The engines of a case, by the name of their pod.
pub struct Engines {
    index: Arc<TokenIndexes>,
    engines: BTreeMap<String, (Arc<Endpoint>, Follower)>,
}

/// An endpoint that nobody scrapes.
pub fn endpoint(name: &str, address: &str, event_ports: EventPorts) -> Arc<Endpoint> {
    Arc::new(Endpoint::new(EndpointSpec {
        name: ObjectName::new("default", name),
        address: address.parse().unwrap(),
        weight: 1.0,
        gpu: pilotfish::state::rates::Speed::default(),
        labels: BTreeMap::new(),
        engine: EngineKind::Vllm,
        event_ports,
        transfer: pilotfish::state::disaggregation::TransferSpec::default(),
        drain: false,
        pod: None,
    }))
}

/// Bytes written as hexadecimal digits.
pub fn hex(text: &str) -> Bytes {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

/// Leading blocks of a prompt that an endpoint announced. The last token, which engines always compute, is added.
pub fn depth(
    index: &TokenIndexes,
    endpoint: &Endpoint,
    tokens: &[u32],
    size: usize,
    space: Namespace<'_>,
) -> u32 {
    let blocks = Blocks::of_tokens(&[tokens, &[0]].concat(), size, space);
    let mut sink = DepthSink::default();
    sink.begin();
    index.events.score_into(Tier::Gpu, blocks.contents(), &mut sink);
    sink.depth(endpoint.holder())
}

impl Engines {
    /// The pods of a case, each with two ranks if `ranks` says so, all connected.
    pub fn of(case: &Value, ranks: usize, can_replay: bool) -> Self {
        let index = Arc::new(TokenIndexes::default());
        let engines = list(case, "pods").iter().map(|pod| {
            let address = format!("{}:{}", text(pod, "ip"), number(pod, "port"));
            let endpoint = endpoint(text(pod, "name"), &address, EventPorts::default());
            let mut follower = Follower::new(Arc::clone(&endpoint), Arc::clone(&index), ranks, can_replay);
            (0..ranks).for_each(|rank| follower.connected(rank));
            (text(pod, "name").to_owned(), (endpoint, follower))
        });
        Self { engines: engines.collect(), index }
    }

    /// The follower of a pod.
    pub fn follower(&mut self, name: &str) -> &mut Follower {
        &mut self.engines.get_mut(name).unwrap().1
    }

    /// The names of all pods.
    pub fn names(&self) -> Vec<String> {
        self.engines.keys().cloned().collect()
    }

    /// A frame of a case: `{"endpoint", "topic", "seq", "payload_hex"}`; an endpoint `NAME:5558` is its second rank.
    pub fn send(&mut self, frame: &Value) {
        let (name, rank) = match text(frame, "endpoint").split_once(':') {
            Some((name, port)) => (name, port.parse::<usize>().unwrap() - 5557),
            None => (text(frame, "endpoint"), 0),
        };
        let topic = Bytes::copy_from_slice(text(frame, "topic").as_bytes());
        let (seq, payload) = (number(frame, "seq") as u64, hex(text(frame, "payload_hex")));
        self.follower(name).live(rank, &topic, seq, payload);
    }

    /// Leading blocks of 16 tokens of a query that a pod announced.
    pub fn depth(&self, name: &str, query: &Value) -> u32 {
        self.depth_in(name, query, Namespace::default())
    }

    /// The same of a prompt with an adapter or a salt.
    pub fn depth_in(&self, name: &str, query: &Value, space: Namespace<'_>) -> u32 {
        let tokens: Vec<u32> = serde_json::from_value(query["token_ids"].clone()).unwrap();
        depth(&self.index, &self.engines[name].0, &tokens, 16, space)
    }
}
