//! A pool whose engines have roles, behind a real Envoy.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use pilotfish::engine::{EngineConfig, EngineRole, KvConnector, RecordedRequest};
use pilotfish::state::disaggregation::{DataParallel, TransferSpec};
use pilotfish::state::endpoint::{EndpointSpec, EngineKind, EventPorts};
use pilotfish::state::rates::Speed;
use pilotfish::state::{Endpoint, ObjectName};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::engine::SimulatedEngine;
use super::envoy::{Gateway, Setup};
use super::eventually::eventually;
use super::http::{Answer, Client, whole};
use super::picker::{self, Picker};

/// The decider under which every prompt that can be is computed elsewhere.
pub const ALWAYS: &str = "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\n\
                          plugins: [{type: marginal-cost}, {type: always-disagg-pd-decider}]\n";

/// The path of these requests.
pub const COMPLETIONS: &str = "/v1/completions";

/// Engines with roles, a picker in this process, and an Envoy before them.
pub struct Pairs {
    /// Sends to Envoy.
    pub client: Client,
    /// Envoy.
    pub gateway: Gateway,
    /// The picker.
    pub picker: Picker,
    /// The engines that prefill.
    pub prefill: Vec<SimulatedEngine>,
    /// The engines that decode.
    pub decode: Vec<SimulatedEngine>,
}

/// What a stand of pairs is made of.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How Envoy is set up.
    pub setup: Setup,
    /// The connector's name in documents.
    pub connector: &'static str,
    /// How many engines prefill, and how many decode.
    pub engines: (usize, usize),
    /// What all engines have in common.
    pub engine: EngineConfig,
    /// Rank and number of ranks that the documents of prefill engines say.
    pub ranks: Option<(u32, u32)>,
    /// Endpoints that prefill beside the engines.
    pub scripted: Vec<SocketAddr>,
}

impl Plan {
    /// One engine of each role, quick ones.
    pub fn new(setup: Setup, connector: &'static str) -> Self {
        let engine = EngineConfig { speed: 100.0, blocks: 4096, recorded: 512, ..EngineConfig::default() };
        Self { setup, connector, engines: (1, 1), engine, ranks: None, scripted: Vec::new() }
    }

    /// So many engines of each role.
    pub fn engines(self, prefill: usize, decode: usize) -> Self {
        Self { engines: (prefill, decode), ..self }
    }

    /// With engines that wait for each other for seconds, where they do: whoever answers sooner does not wait for that.
    pub fn patient(mut self) -> Self {
        if self.connector == "sglang" {
            self.engine.speed = 1.0;
        }
        self
    }

    /// With this endpoint beside the engines that prefill.
    pub fn scripted(mut self, prefill: SocketAddr) -> Self {
        self.scripted.push(prefill);
        self
    }

    /// Starts everything, with a picker adjusted by `adjust`.
    pub async fn start(self, adjust: impl FnOnce(picker::Setup) -> picker::Setup) -> Pairs {
        self.start_with(adjust, |text| text).await
    }

    /// The same with Envoy's configuration changed by `change`.
    pub async fn start_with(
        self,
        adjust: impl FnOnce(picker::Setup) -> picker::Setup,
        change: impl FnOnce(String) -> String,
    ) -> Pairs {
        let (prefill, decode) = self.start_engines().await;
        let resources = self.resources(&prefill, &decode);
        let picker = adjust(Picker::with(&resources)).start().await;
        let all = prefill.len() + decode.len() + self.scripted.len();
        picker.until("every engine is up", "pilotfish_endpoints", &[("state", "up")], all as f64).await;
        let addresses: Vec<_> = prefill.iter().chain(&decode).map(|engine| engine.state.address()).collect();
        let grpc = [picker.app.bound.grpc];
        let gateway = Gateway::assembled(self.setup, &[], &grpc, &addresses, change).await;
        Pairs { client: gateway.client.clone(), gateway, picker, prefill, decode }
    }

    /// The pool of these engines.
    pub fn resources(&self, prefill: &[SimulatedEngine], decode: &[SimulatedEngine]) -> String {
        let scripted = self.scripted.iter().enumerate().map(|(at, address)| {
            format!(
                "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: scripted{at}, labels: \
                 {{app: pairs, role: prefill, group: a}}}}\nspec: {{address: '{address}'}}\n"
            )
        });
        server(self.connector)
            + &endpoints(prefill, "prefill", self.ranks)
            + &endpoints(decode, "decode", None)
            + &scripted.collect::<String>()
    }

    /// Starts the engines that prefill, and those that decode.
    pub async fn start_engines(&self) -> (Vec<SimulatedEngine>, Vec<SimulatedEngine>) {
        let kv = match self.connector {
            "nixl" => Some(KvConnector::Nixl),
            "mooncake" => Some(KvConnector::Mooncake),
            "sglang" => Some(KvConnector::Sglang),
            _ => None,
        };
        let boots = matches!(kv, Some(KvConnector::Mooncake | KvConnector::Sglang));
        let (mut prefill, mut decode) = (Vec::new(), Vec::new());
        for at in 0..self.engines.0 {
            let config = EngineConfig {
                name: Some(format!("p{at}")),
                role: EngineRole::Prefill,
                connector: kv,
                bootstrap: boots.then_some(0),
                ..self.engine.clone()
            };
            prefill.push(SimulatedEngine::start(config).await);
        }
        for at in 0..self.engines.1 {
            let config = EngineConfig {
                name: Some(format!("d{at}")),
                role: EngineRole::Decode,
                connector: kv,
                ..self.engine.clone()
            };
            decode.push(SimulatedEngine::start(config).await);
        }
        (prefill, decode)
    }
}

impl Pairs {
    /// The only body that an engine of a role was sent, and that it was the only one.
    pub fn only_bodies(&self) -> (String, String) {
        let only = |engine: &SimulatedEngine| {
            let requests = bodies(engine);
            let [body] = &requests[..] else { panic!("{}: {requests:?}", engine.state.name()) };
            body.clone()
        };
        (only(&self.prefill[0]), only(&self.decode[0]))
    }

    /// Forgets what engines were sent.
    pub fn clear(&self) {
        self.prefill.iter().chain(&self.decode).for_each(|engine| engine.state.clear_requests());
    }

    /// Waits until nothing is booked anywhere.
    pub async fn until_idle(&self) {
        self.picker.until_idle("both legs are given back").await;
    }

    /// Waits until nothing is booked, no engine is at work, and Envoy has neither a stream nor a request open.
    pub async fn released(&self) {
        self.until_idle().await;
        for engine in self.prefill.iter().chain(&self.decode) {
            let what = format!("{} has nothing to do", engine.state.name());
            eventually(what, async || (engine.state.in_flight() == 0).then_some(())).await;
        }
        let open = &self.picker.app.admin.shared.metrics.streams;
        eventually("no open stream", async || (open.load(Ordering::SeqCst) == 0).then_some(())).await;
        let requests = async || self.gateway.statistic("http.llm.downstream_rq_active").await;
        eventually("no open request", async || (requests().await? == 0).then_some(())).await;
        assert_eq!(self.picker.metric("pilotfish_buffered_bytes", &[]).await, 0.0);
    }

    /// Sends the completion of that name, which is its request id too, and waits for the answer.
    pub async fn ask(&self, name: &str) -> Answer {
        let id = [("x-request-id", name)];
        self.client.post(COMPLETIONS, &id, whole(completion(name, false))).await.rest().await
    }

    /// The same in the background.
    pub fn begin(&self, name: &str) -> JoinHandle<Answer> {
        let (client, name) = (self.client.clone(), name.to_owned());
        tokio::spawn(async move {
            let id = [("x-request-id", &*name)];
            client.post(COMPLETIONS, &id, whole(completion(&name, false))).await.rest().await
        })
    }

    /// Checks that this is what one engine answers, that one decode engine was asked once, and that all is given back; the
    /// decision. Forgets what engines were sent.
    pub async fn check_whole(&self, name: &str, answer: &Answer) -> Value {
        let body = String::from_utf8_lossy(&answer.body);
        assert_eq!(answer.status, 200, "{name}: {body}");
        assert_eq!(text(&answer.json()), by_one_engine(name).await, "{name}: {body}");
        let asked: usize = self.decode.iter().map(|engine| bodies(engine).len()).sum();
        assert_eq!(asked, 1, "{name}: a decode engine is asked once");
        self.released().await;
        self.clear();
        self.picker.decision(name).await
    }

    /// Checks that the client was refused for this reason, and that all is given back; the message.
    pub async fn check_refused(&self, answer: &Answer, status: u16, reason: &str) -> String {
        let got = (answer.status, answer.header("x-pilotfish-reason"));
        assert_eq!(got, (status, Some(reason)), "{}", String::from_utf8_lossy(&answer.body));
        self.released().await;
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    }

    /// Waits until an engine computes something.
    pub async fn at_work(&self, engine: &SimulatedEngine) {
        let what = format!("{} is at work", engine.state.name());
        eventually(what, async || (engine.state.in_flight() > 0).then_some(())).await;
    }

    /// Waits until an engine has been sent a request.
    pub async fn sent(&self, engine: &SimulatedEngine) {
        let what = format!("{} is asked", engine.state.name());
        eventually(what, async || (!bodies(engine).is_empty()).then_some(())).await;
    }

    /// How many requests were served with this status.
    pub async fn served(&self, status: u16) -> f64 {
        self.picker.metric("pilotfish_requests_total", &[("code", &status.to_string())]).await
    }

    /// How many picks ended with this decision.
    pub async fn decided(&self, decision: &str) -> f64 {
        self.picker.metric("pilotfish_pd_decisions_total", &[("decision", decision)]).await
    }

    /// How many prefill legs were of no use for this reason; every reason if it is empty.
    pub async fn fell_back(&self, reason: &str) -> f64 {
        let labels: &[(&str, &str)] = if reason.is_empty() { &[] } else { &[("reason", reason)] };
        self.picker.metric("pilotfish_pd_fallback_total", labels).await
    }
}

/// Scraped when they come and not again: the picker learns of a fault from requests alone.
pub fn unscraped(picker: picker::Setup) -> picker::Setup {
    picker.config(ALWAYS).flag("--scrape-interval", "1h").flag("--staleness", "2h")
}

/// A completion whose prompt, of that name, fills blocks.
pub fn completion(name: &str, stream: bool) -> String {
    let prompt = format!("{name} and {}", "the quick brown fox jumps over the lazy dog ".repeat(12));
    json!({"model": "tiny", "prompt": prompt, "max_tokens": 8, "stream": stream}).to_string()
}

/// What one engine that does both answers to a completion that is no stream.
pub async fn by_one_engine(name: &str) -> String {
    let config = EngineConfig { speed: 100.0, blocks: 4096, ..EngineConfig::default() };
    let engine = SimulatedEngine::start(config).await;
    let client = Client::of(engine.state.address());
    let answer = client.post(COMPLETIONS, &[], whole(completion(name, false))).await.rest().await;
    text(&answer.json())
}

/// The bodies of the requests for inference that an engine was sent.
pub fn bodies(engine: &SimulatedEngine) -> Vec<String> {
    let text = |request: &RecordedRequest| String::from_utf8(request.body.to_vec()).unwrap();
    engine
        .state
        .requests()
        .iter()
        .filter(|request| request.method == "POST")
        .map(|request| text(request))
        .collect()
}

/// A ModelServer of pairs in one group.
pub fn server(connector: &str) -> String {
    let (kind, annotation) = match connector {
        "http" | "lmcache" | "nixl" | "mooncake" => {
            (format!("  kvConnector: {{type: {connector}}}\n"), String::new())
        }
        other => (String::new(), format!(", annotations: {{pilotfish.dev/kv-connector: {other}}}")),
    };
    format!(
        "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n\
         metadata: {{name: pairs{annotation}}}\nspec:\n  inferenceEngine: {}\n  workloadPort: {{port: 8000}}\n  \
         workloadSelector:\n    matchLabels: {{app: pairs}}\n    pdGroup: {{groupKey: group, prefillLabels: {{role: \
         prefill}}, decodeLabels: {{role: decode}}}}\n{kind}",
        if connector == "sglang" { "SGLang" } else { "vLLM" }
    )
}

/// Endpoints of a role in group `a`.
pub fn endpoints(engines: &[SimulatedEngine], role: &str, ranks: Option<(u32, u32)>) -> String {
    engines.iter().map(|engine| endpoint(engine, &format!("role: {role}, group: a"), ranks)).collect()
}

/// An Endpoint with these labels, its bootstrap server's port with it.
pub fn endpoint(engine: &SimulatedEngine, labels: &str, ranks: Option<(u32, u32)>) -> String {
    let mut annotations = Vec::new();
    if let Some(bootstrap) = engine.state.bootstrap_address() {
        annotations.push(format!("pilotfish.dev/bootstrap-port: '{}'", bootstrap.port()));
    }
    if let Some((rank, size)) = ranks {
        annotations.push(format!(
            "pilotfish.dev/data-parallel-rank: '{rank}', pilotfish.dev/data-parallel-size: '{size}'"
        ));
    }
    format!(
        "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: {}, labels: {{app: pairs, \
         {labels}}}, annotations: {{{}}}}}\nspec: {{address: '{}'}}\n",
        engine.state.name(),
        annotations.join(", "),
        engine.address()
    )
}

/// An endpoint that is one of so many data-parallel ranks.
pub fn ranked_endpoint(rank: u16, size: u16) -> Endpoint {
    Endpoint::new(EndpointSpec {
        name: ObjectName::new("default", "ranked"),
        address: "10.0.0.1:8000".parse().unwrap(),
        weight: 1.0,
        gpu: Speed::default(),
        labels: BTreeMap::new(),
        engine: EngineKind::Sglang,
        event_ports: EventPorts::default(),
        transfer: TransferSpec {
            bootstrap_port: None,
            data_parallel: Some(DataParallel { rank: Some(rank), told: false, size }),
        },
        drain: false,
        pod: None,
    })
}

/// The text of an answer or of a stream, whatever the API.
pub fn text(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let mut out = String::new();
            for (name, value) in members {
                match (name.as_str(), value) {
                    ("text" | "content", Value::String(text)) => out += text,
                    ("text" | "content" | "choices" | "message" | "output", value) => {
                        out += &self::text(value);
                    }
                    _ => {}
                }
            }
            out
        }
        Value::Array(items) => items.iter().map(text).collect(),
        _ => String::new(),
    }
}
