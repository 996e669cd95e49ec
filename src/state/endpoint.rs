//! One engine process at `ip:port`: who it is, what is booked on it, what it says of itself, whether it is well.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use ahash::AHashMap;
use arc_swap::ArcSwapOption;

use super::ObjectName;
use super::cache::CacheKnowledge;
use super::capacity::Capacity;
use super::disaggregation::TransferSpec;
use super::health::Health;
use super::rates::{Rates, Speed};
use super::seat::Seat;
use super::signals::{Millis, SignalKind, Signals};

/// What requests in flight have booked. Every field is back at 0 when nothing is in flight.
#[derive(Debug, Default)]
pub struct Booked {
    /// Requests.
    pub requests: AtomicI64,
    /// Uncached prompt tokens that are still to be prefilled.
    pub prefill_tokens: AtomicI64,
    /// Tokens held by requests that decode: their prompts and their expected output.
    pub decode_tokens: AtomicI64,
    /// Requests that decode.
    pub decoding: AtomicI64,
    /// Requests that are not at the engine yet: their prompts are being computed elsewhere.
    pub absent: AtomicI64,
    /// Time the prompts still to be prefilled take at [unit speed](super::rates), microseconds.
    pub prefill_micros: AtomicI64,
}

impl Booked {
    /// Requests, prefill tokens and decode tokens; never below zero.
    pub fn read(&self) -> (u64, u64, u64) {
        let get = |value: &AtomicI64| value.load(Ordering::Acquire).max(0) as u64;
        (get(&self.requests), get(&self.prefill_tokens), get(&self.decode_tokens))
    }

    /// Requests that are at the engine, or on their way to it.
    pub fn at_engine(&self) -> u64 {
        let get = |value: &AtomicI64| value.load(Ordering::Acquire).max(0) as u64;
        get(&self.requests).saturating_sub(get(&self.absent))
    }

    /// Requests that decode, and seconds at [unit speed](super::rates) that the prompts of the others take.
    pub fn phases(&self) -> (u64, f64) {
        let get = |value: &AtomicI64| value.load(Ordering::Acquire).max(0) as u64;
        (get(&self.decoding), get(&self.prefill_micros) as f64 * 1e-6)
    }
}

/// The LoRA adapters an engine can serve or is serving.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Adapters {
    /// Names the engine lists as models: base names and loaded adapters.
    pub served: Vec<Box<str>>,
    /// Those of them that are adapters: they name a parent.
    pub adapters: Vec<Box<str>>,
}

impl Adapters {
    /// Whether the engine lists that name.
    pub fn serves(&self, model: &str) -> bool {
        self.served.iter().any(|name| **name == *model)
    }
}

/// The adapters at work, from the engine's newest LoRA series.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct ActiveAdapters {
    /// Adapters with running requests.
    pub running: Vec<Box<str>>,
    /// Adapters with waiting requests only.
    pub waiting: Vec<Box<str>>,
}

/// Which engine's dialect an endpoint speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum EngineKind {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
    /// Text Generation Inference.
    Tgi,
}

impl EngineKind {
    /// The engine of that name, in any letter case.
    pub fn named(name: &str) -> Option<Self> {
        [EngineKind::Vllm, EngineKind::Sglang, EngineKind::Tgi]
            .into_iter()
            .find(|kind| kind.name().eq_ignore_ascii_case(name))
    }

    /// The name in debug output.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Vllm => "vLLM",
            EngineKind::Sglang => "SGLang",
            EngineKind::Tgi => "TGI",
        }
    }
}

/// Where an engine's KV events come from, as far as its document says. The host is the endpoint's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventPorts {
    /// Where batches come from; the engine is asked if it is not said.
    pub events: Option<EventPort>,
    /// Where missed batches are asked for.
    pub replay: Option<u16>,
}

/// Who dials whom for KV events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventPort {
    /// The engine publishes on this port.
    Dial(u16),
    /// The engine dials this port of ours.
    Listen(u16),
}

/// What is known and booked of an endpoint. It outlives changes of what its document says beside name and address.
#[derive(Debug, Default)]
pub struct Live {
    /// Bookings of this picker.
    pub booked: Booked,
    /// What the engine reports.
    pub signals: Signals,
    /// Whether it can take requests.
    pub health: Health,
    /// Served model names, `None` until the engine listed them once.
    pub adapters: ArcSwapOption<Adapters>,
    /// Adapters at work, `None` where the engine does not say.
    pub active_adapters: ArcSwapOption<ActiveAdapters>,
    /// Prompt tokens predicted as cached by picks, and reported as cached by engines.
    pub predicted_cached_tokens: AtomicU64,
    /// See `predicted_cached_tokens`.
    pub reported_cached_tokens: AtomicU64,
    /// How fast it has been.
    pub rates: Rates,
    /// How many requests it runs at once.
    pub capacity: Capacity,
    /// How far what is believed of its cache can be believed.
    pub cache: CacheKnowledge,
    seat: Seat,
}

/// Who holds blocks: an endpoint as an index knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Holder {
    /// Its seat: dense, so that numbers about endpoints lie side by side, and given to another once it is gone.
    pub seat: u32,
    /// Its slot, which tells it from those who had the seat before.
    pub slot: u64,
}

/// The pod that an endpoint runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    /// Unique for all time: a pod that is created anew under its old name is another.
    pub uid: Arc<str>,
    /// Which of the pod's engines it is: the position of its port in the pool's list.
    pub rank: u16,
}

/// One inference endpoint. Shared by every snapshot and every request that knows it.
#[derive(Debug)]
pub struct Endpoint {
    /// Name of the document or pod.
    pub name: ObjectName,
    /// Unique in the process and never used again: a document that returns is a new endpoint after its grace period.
    pub slot: u64,
    /// Where it listens.
    pub address: SocketAddr,
    /// `ip:port`, IPv6 in brackets: what Envoy is told and every label says.
    pub destination: Arc<str>,
    /// Capacity relative to its pool, above 0.
    pub weight: f32,
    /// How fast its GPU is, if its document names it.
    pub gpu: Speed,
    /// Labels that pools select by.
    pub labels: BTreeMap<String, String>,
    /// Engine dialect.
    pub engine: EngineKind,
    /// Where its KV events come from.
    pub event_ports: EventPorts,
    /// How KV blocks are transferred from it.
    pub transfer: TransferSpec,
    /// The pod it runs in; none for those that documents describe.
    pub pod: Option<PodIdentity>,
    live: Arc<Live>,
}

impl Deref for Endpoint {
    type Target = Live;

    fn deref(&self) -> &Live {
        &self.live
    }
}

/// What an [`Endpoint`] is made from.
#[derive(Clone, Debug, PartialEq)]
pub struct EndpointSpec {
    /// Name of the document or pod.
    pub name: ObjectName,
    /// Where it listens.
    pub address: SocketAddr,
    /// Capacity relative to its pool.
    pub weight: f32,
    /// How fast its GPU is, if its document names it.
    pub gpu: Speed,
    /// Labels that pools select by.
    pub labels: BTreeMap<String, String>,
    /// Engine dialect.
    pub engine: EngineKind,
    /// Where its KV events come from.
    pub event_ports: EventPorts,
    /// How KV blocks are transferred from it.
    pub transfer: TransferSpec,
    /// Whether the operator wants no new requests there.
    pub drain: bool,
    /// The pod it runs in; none for those that documents describe.
    pub pod: Option<PodIdentity>,
}

impl EndpointSpec {
    /// What nothing else that is there can share: a pod may run several engines.
    pub fn key(&self) -> (&ObjectName, u16) {
        (&self.name, self.address.port())
    }
}

impl Endpoint {
    /// A fresh endpoint: nothing booked, everything unknown.
    pub fn new(spec: EndpointSpec) -> Self {
        static NEXT_SLOT: AtomicU64 = AtomicU64::new(1);
        Self::described(spec, NEXT_SLOT.fetch_add(1, Ordering::Relaxed), Arc::default())
    }

    /// The same endpoint under a changed description.
    pub fn changed(&self, spec: EndpointSpec) -> Self {
        Self::described(spec, self.slot, Arc::clone(&self.live))
    }

    fn described(spec: EndpointSpec, slot: u64, live: Arc<Live>) -> Self {
        live.health.set_drain(spec.drain);
        Self {
            name: spec.name,
            slot,
            destination: spec.address.to_string().into(),
            address: spec.address,
            weight: spec.weight,
            gpu: spec.gpu,
            labels: spec.labels,
            engine: spec.engine,
            event_ports: spec.event_ports,
            transfer: spec.transfer,
            pod: spec.pod,
            live,
        }
    }

    /// The endpoint as indexes know it.
    pub fn holder(&self) -> Holder {
        Holder { seat: self.live.seat.number(), slot: self.slot }
    }

    /// The load at `now`, read once per cycle.
    pub fn load(&self, now: Millis, staleness: Duration) -> Load {
        let (own, prefill_tokens, decode_tokens) = self.booked.read();
        let (decoding, prefill_seconds) = self.booked.phases();
        let fresh = |kind| self.signals.fresh(kind, now, staleness);
        Load {
            own: own as f32,
            foreign: fresh(SignalKind::Foreign).unwrap_or(0.0) as f32,
            prefill_tokens: prefill_tokens as f32,
            decode_tokens: decode_tokens as f32,
            decoding: decoding as f32,
            prefill_seconds: prefill_seconds as f32,
            running: fresh(SignalKind::Running).map(|v| v as f32),
            waiting: fresh(SignalKind::Waiting).map(|v| v as f32),
            kv_usage: fresh(SignalKind::KvUsage).map(|v| v as f32),
        }
    }

    /// How fast the operator says it is.
    pub fn speed(&self) -> Speed {
        Speed::of_weight(self.weight).times(self.gpu)
    }

    /// The rank to tell its engine, if it must be told.
    pub fn rank_header(&self) -> Option<u16> {
        self.transfer.data_parallel.filter(|ranks| ranks.told).and_then(|ranks| ranks.rank)
    }

    /// Tokens in a block of its KV cache, once it said so.
    pub fn block_tokens(&self) -> Option<usize> {
        let (tokens, _) = self.signals.last(SignalKind::BlockSize, Millis::now())?;
        (tokens >= 1.0).then_some(tokens as usize)
    }

    /// Tokens its KV cache can hold, once it said so.
    pub fn cache_tokens(&self) -> Option<u64> {
        let last = |kind| self.signals.last(kind, Millis::now()).map(|(value, _)| value);
        Some((last(SignalKind::Blocks)? * last(SignalKind::BlockSize)?) as u64)
    }

    /// Whether `spec` describes this very endpoint: labels and the rest may change while it lives.
    pub fn is(&self, spec: &EndpointSpec) -> bool {
        let same_pod = match (&self.pod, &spec.pod) {
            (Some(known), Some(described)) => known.uid == described.uid,
            (known, described) => known.is_none() && described.is_none(),
        };
        same_pod && self.name == spec.name && self.address == spec.address
    }

    /// Whether `spec` says of it what is known already.
    pub fn is_unchanged(&self, spec: &EndpointSpec) -> bool {
        self.engine == spec.engine
            && self.event_ports == spec.event_ports
            && self.transfer == spec.transfer
            && self.labels == spec.labels
            && self.weight.to_bits() == spec.weight.to_bits()
            && self.gpu == spec.gpu
            && self.pod == spec.pod
    }
}

/// An endpoint's load as one cycle sees it. `None` is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests booked by this picker.
    pub own: f32,
    /// Requests of others, from the last scrape; 0 if unknown.
    pub foreign: f32,
    /// Booked prompt tokens still to prefill.
    pub prefill_tokens: f32,
    /// Booked tokens that decode.
    pub decode_tokens: f32,
    /// Booked requests that decode.
    pub decoding: f32,
    /// Seconds that the booked prompts still take, at [unit speed](super::rates).
    pub prefill_seconds: f32,
    /// Engine gauge.
    pub running: Option<f32>,
    /// Engine gauge.
    pub waiting: Option<f32>,
    /// Engine gauge, 0 to 1.
    pub kv_usage: Option<f32>,
}

impl Load {
    /// All requests there: ours and others'.
    pub fn requests(&self) -> f32 {
        self.own + self.foreign
    }
}

/// Endpoints by `ip:port`, for subset hints and served reports.
pub type ByAddress = AHashMap<SocketAddr, usize>;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An endpoint named `name` at `address`, for tests.
    pub(crate) fn endpoint(name: &str, address: &str) -> Arc<Endpoint> {
        Arc::new(Endpoint::new(EndpointSpec {
            name: ObjectName::new("default", name),
            address: address.parse().unwrap(),
            weight: 1.0,
            gpu: crate::state::rates::Speed::default(),
            labels: BTreeMap::new(),
            engine: EngineKind::Vllm,
            event_ports: EventPorts::default(),
            transfer: TransferSpec::default(),
            drain: false,
            pod: None,
        }))
    }

    #[test]
    fn ipv6_destinations_carry_brackets() {
        assert_eq!(&*endpoint("a", "[fd00::10]:8001").destination, "[fd00::10]:8001");
    }

    #[test]
    fn unknown_signals_stay_unknown_in_the_load() {
        let endpoint = endpoint("a", "10.0.0.1:8000");
        let now = Millis(5_000);
        endpoint.signals.set(SignalKind::Running, 3.0, now);
        let load = endpoint.load(now, Duration::from_secs(2));
        assert_eq!((load.running, load.waiting, load.kv_usage), (Some(3.0), None, None));
    }
}
