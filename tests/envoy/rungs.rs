//! Which source of cache knowledge picks go by, when each of them fails: always the next one down, with a reason to see.

use pilotfish::engine::{EngineConfig, EventConfig, Fault};
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup};
use crate::kit::eventually::eventually;
use crate::kit::extproc::CHAT;
use crate::kit::http::whole;
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool};

const COMPLETIONS: &str = "/v1/completions";
const BLOCK: u32 = 16;

/// One engine with events behind a real Envoy, and the requests that went through.
struct Stand {
    engine: SimulatedEngine,
    picker: Picker,
    gateway: Gateway,
    sent: u32,
}

impl Stand {
    async fn start(config: EngineConfig, resources: &str, flags: &[(&str, &str)]) -> Self {
        let engine = SimulatedEngine::start(config).await;
        let text = resources.to_owned() + &endpoint("e", &engine.address());
        let setup = flags.iter().fold(Picker::with(&text), |setup, (flag, value)| setup.flag(flag, value));
        let picker = setup.start().await;
        picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
        let grpc = [picker.app.bound.grpc];
        let gateway = Gateway::start(Setup::GatewayShaped, &grpc, &[engine.state.address()]).await;
        Self { engine, picker, gateway, sent: 0 }
    }

    async fn following(speed: f64) -> Self {
        let config = EngineConfig {
            speed,
            blocks: 512,
            block_size: BLOCK,
            events: Some(EventConfig::default()),
            ..EngineConfig::default()
        };
        let stand = Self::start(config, &pool(), &[]).await;
        stand.until_rung("precise").await;
        stand
    }

    /// What `/debug/endpoints` says of the engine.
    async fn seen(&self) -> Value {
        self.picker.endpoint(&self.engine.address()).await
    }

    async fn until_rung(&self, rung: &str) -> Value {
        eventually(format!("picks go by {rung} knowledge"), async || {
            let seen = self.seen().await;
            (seen["rung"] == rung).then_some(seen)
        })
        .await
    }

    /// Sends a request; its decision, once settled.
    async fn send(&mut self, path: &str, body: &Value) -> Value {
        self.sent += 1;
        let id = format!("rung-{}", self.sent);
        let request = whole(body.to_string());
        let answer = self.gateway.client.post(path, &[("x-request-id", &id)], request).await.rest().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        self.picker.decision(&id).await
    }

    /// A prompt of its own number, of so many whole blocks and one token.
    async fn complete(&mut self, number: u32, blocks: u32) -> Value {
        let ids: Vec<u32> = (0..=blocks * BLOCK).map(|at| 1_000 * number + at).collect();
        self.send(COMPLETIONS, &json!({"model": "tiny", "prompt": ids, "max_tokens": 1})).await
    }

    /// Sends the prompt until its blocks are known by `rung`; the decision.
    async fn known_by(&mut self, rung: &str, number: u32) -> Value {
        self.complete(number, 3).await;
        for _ in 0..100 {
            let decision = self.complete(number, 3).await;
            if decision["predicted_cached_tokens"] == json!(3 * BLOCK) {
                assert_eq!(decision["rung"], rung);
                assert_eq!(decision["reported_cached_tokens"], json!(3 * BLOCK), "{decision}");
                return decision;
            }
        }
        panic!("the prompt was never known by {rung} knowledge: {}", self.seen().await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_followed_and_predictions_are_what_the_engine_reports() {
    let mut stand = Stand::following(1_000.0).await;
    stand.known_by("precise", 1).await;
    let seen = stand.seen().await;
    assert_eq!(seen["events"]["state"], "following");
    assert!(seen["truth"]["precise"]["responses"].as_u64() >= Some(1), "{seen}");
    assert_eq!(stand.picker.metric("pilotfish_cache_rung", &[("rung", "precise")]).await, 1.0);
    assert_eq!(stand.picker.metric("pilotfish_degraded", &[("source", "kv_events")]).await, 0.0);
}

#[rstest]
#[case::lost_for_good(Fault::LoseEvents(3), "gap")]
#[case::another_block_size(Fault::EventBlockSize(32), "block-size")]
#[case::unreadable(Fault::UnreadableEvents, "unreadable")]
#[tokio::test(flavor = "multi_thread")]
async fn events_that_fail_leave_what_was_sent(#[case] fault: Fault, #[case] state: &str) {
    let mut stand = Stand::following(1_000.0).await;
    stand.engine.state.set_fault(fault);
    for number in 10..30 {
        stand.complete(number, 2).await;
    }
    let seen = stand.until_rung("approximate").await;
    assert_eq!(seen["events"]["state"], state, "the reason shows");
    assert_eq!(stand.picker.metric("pilotfish_degraded", &[("source", "kv_events")]).await, 1.0);
    stand.known_by("approximate", 50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hash_seed_of_another_process_changes_nothing() {
    let mut stand = Stand::following(1_000.0).await;
    stand.engine.state.set_fault(Fault::EventHashSeed);
    stand.known_by("precise", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_holds_nothing_and_is_followed_anew() {
    let mut stand = Stand::following(1_000.0).await;
    stand.known_by("precise", 1).await;
    stand.engine.state.set_fault(Fault::Restart);
    eventually("the restart is noticed", async || {
        (stand.seen().await["token_blocks"]["events"] == 0).then_some(())
    })
    .await;
    let decision = stand.complete(1, 3).await;
    assert_eq!(decision["predicted_cached_tokens"], decision["reported_cached_tokens"]);
    stand.known_by("precise", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_events_what_was_sent_counts_and_without_a_tokenizer_its_text() {
    let config = EngineConfig { speed: 1_000.0, blocks: 512, block_size: BLOCK, ..EngineConfig::default() };
    let mut stand = Stand::start(config, &pool(), &[]).await;
    let seen = stand.seen().await;
    assert_eq!(
        (&seen["rung"], &seen["events"]),
        (&json!("approximate"), &Value::Null),
        "no source of events"
    );
    stand.known_by("approximate", 1).await;
    let text = "words that make a prompt of some length ".repeat(60);
    let chat = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]});
    stand.send(CHAT, &chat).await;
    let again = stand.send(CHAT, &chat).await;
    assert_eq!(again["rung"], "approximate");
    assert!(again["predicted_cached_tokens"].as_u64() > Some(500), "{again}");
    let why = [("reason", "no-tokenizer")];
    assert!(stand.picker.metric("pilotfish_tokenize_skipped_total", &why).await >= 2.0);
}

/// The file is no tokenizer: picks go by text, and the reason shows at three places.
#[tokio::test(flavor = "multi_thread")]
async fn a_broken_tokenizer_leaves_the_text() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let config = EngineConfig { speed: 1_000.0, blocks: 512, block_size: BLOCK, ..EngineConfig::default() };
    let server = "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n\
                  metadata: {name: tiny, annotations: {pilotfish.dev/tokenizer: tokenizer.json}}\n\
                  spec: {workloadSelector: {matchLabels: {app: m}}, workloadPort: {port: 8000}, inferenceEngine: vLLM}\n";
    let folder = dir.path().display().to_string();
    let mut stand = Stand::start(config, server, &[("--tokenizer-dir", &folder)]).await;
    let text = "words that make a prompt of some length ".repeat(60);
    let chat = json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]});
    stand.send(CHAT, &chat).await;
    let again = stand.send(CHAT, &chat).await;
    assert_eq!(again["rung"], "approximate");
    assert!(again["predicted_cached_tokens"].as_u64() > Some(500), "{again}");
    stand.picker.until("it shows", "pilotfish_degraded", &[("source", "tokenizer")], 1.0).await;
    assert!(stand.picker.metric("pilotfish_tokenize_skipped_total", &[]).await >= 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flap_forgets_nothing_and_another_name_at_the_address_inherits_nothing() {
    let config = EngineConfig { speed: 1_000.0, blocks: 512, block_size: BLOCK, ..EngineConfig::default() };
    let mut stand = Stand::start(config, &pool(), &[]).await;
    stand.known_by("approximate", 1).await;
    let address = stand.engine.address();
    stand.picker.apply(&pool()).await;
    stand.picker.apply(&(pool() + &endpoint("e", &address))).await;
    stand.picker.until("it is back", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
    assert_eq!(stand.complete(1, 3).await["predicted_cached_tokens"], json!(3 * BLOCK));

    stand.picker.apply(&(pool() + &endpoint("successor", &address))).await;
    eventually("the successor is up", async || {
        let seen = stand.seen().await;
        (seen["name"] == "default/successor" && seen["state"] == "up").then_some(())
    })
    .await;
    assert_eq!(stand.complete(1, 3).await["predicted_cached_tokens"], 0);
}
