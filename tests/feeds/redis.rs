//! The shared block index through a real Redis: read by a picker, written by relays.

use std::process::{Child, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use pilotfish::engine::{EngineConfig, EventConfig, Fault};
use pilotfish::feed::relay::{Relay, RelayConfig};
use pilotfish::index::shared::{key, standard_hash};
use pilotfish::state::endpoint::EngineKind;
use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::kit::engine::SimulatedEngine;
use crate::kit::eventually::{eventually, within};
use crate::kit::extproc::{Served, serve};
use crate::kit::picker::{Picker, Setup};
use crate::kit::redis::RedisServer;
use crate::kit::resources::{APP, endpoint, pool, server};

const BLOCK: usize = 16;

/// One whose events nobody follows.
async fn silent_engine() -> SimulatedEngine {
    SimulatedEngine::start(EngineConfig { speed: 1_000.0, ..EngineConfig::default() }).await
}

async fn engine() -> SimulatedEngine {
    let config = EngineConfig {
        speed: 1_000.0,
        blocks: 64,
        block_size: BLOCK as u32,
        loras: vec!["lora1".to_owned()],
        events: Some(EventConfig::default()),
        ..EngineConfig::default()
    };
    SimulatedEngine::start(config).await
}

fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Waits for the next second: claims of the second in which a process started are taken for those of the one before.
async fn next_second() {
    let now = unix_time();
    eventually("a second passes", async || (unix_time() > now).then_some(())).await;
}

fn setup(resources: &str, redis: &RedisServer, plugin: &str) -> Setup {
    Picker::with(resources).plugins(&[plugin]).flag("--redis-url", &redis.url())
}

/// A picker over engines `a` and `b` once it reads the index.
async fn picker(redis: &RedisServer, engines: [&SimulatedEngine; 2]) -> Picker {
    let resources = pool() + &endpoint("a", &engines[0].address()) + &endpoint("b", &engines[1].address());
    let picker = setup(&resources, redis, "kvcache-aware").start().await;
    picker.until("engines are up", "pilotfish_endpoints", &[("state", "up")], 2.0).await;
    until_read(&picker).await;
    picker
}

/// Waits until the picker asks the index and is answered.
async fn until_read(picker: &Picker) {
    let asked = [1_u32; 3];
    eventually("the index is read", async || {
        (!scores(&ask(picker, "probe", &asked).await)[0].is_null()).then_some(())
    })
    .await;
}

async fn ask(picker: &Picker, model: &str, tokens: &[u32]) -> Served {
    let body = json!({"model": model, "prompt": tokens, "max_tokens": 1}).to_string();
    within("a pick", serve(picker, "/v1/completions", &body)).await
}

/// The raw scores of all endpoints, in the order of their names; null where it abstained.
fn scores(served: &Served) -> Vec<Value> {
    let candidates = served.decision["legs"][0]["candidates"].as_array().unwrap();
    let mut by_endpoint: Vec<(String, Value)> = candidates
        .iter()
        .map(|row| (row["endpoint"].to_string(), row["scores"]["kvcache-aware"]["raw"].clone()))
        .collect();
    by_endpoint.sort_by(|a, b| a.0.cmp(&b.0));
    by_endpoint.into_iter().map(|(_, raw)| raw).collect()
}

fn score_of(served: &Served, engine: &SimulatedEngine) -> f64 {
    let candidates = served.decision["legs"][0]["candidates"].as_array().unwrap();
    let row = candidates.iter().find(|row| row["endpoint"] == engine.address()).unwrap();
    (row["scores"]["kvcache-aware"]["raw"].as_f64().unwrap() * 100.0).round() / 100.0
}

#[tokio::test(flavor = "multi_thread")]
async fn what_kthenas_engines_wrote_is_found_and_scored_as_kthena_does() {
    let redis = RedisServer::start().await;
    let (a, b) = (silent_engine().await, silent_engine().await);
    let picker = picker(&redis, [&a, &b]).await;
    next_second().await;
    let now = unix_time().to_string();
    let prompt: Vec<u32> = (1..=40).collect();
    for hash in ["6615856733697512468", "1408734799202240436"] {
        redis.claim(&format!("matrix:kv:block:m@{hash}"), "b.default", &now).await;
    }
    redis.claim("matrix:kv:block:m@6615856733697512468", "a.default", &now).await;
    let served = ask(&picker, "m", &prompt).await;
    assert_eq!((score_of(&served, &a), score_of(&served, &b)), (0.33, 0.66), "{}", served.decision);
    assert_eq!(served.endpoint(), b.address());
    assert_eq!(served.decision["predicted_cached_tokens"], 32);
    assert_eq!(served.decision["rung"], "shared");
    // An unreadable time never expires, one from before the process is void.
    let prompt: Vec<u32> = (101..=140).collect();
    let hashes: Vec<u64> = prompt.chunks(BLOCK).map(standard_hash).collect();
    redis.claim(&key("m", hashes[0]), "a.default", "soon").await;
    redis.claim(&key("m", hashes[0]), "b.default", "1700000000").await;
    let served = ask(&picker, "m", &prompt).await;
    assert_eq!((score_of(&served, &a), score_of(&served, &b)), (0.33, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_name_is_tried_where_the_targets_finds_nothing() {
    let redis = RedisServer::start().await;
    let a = engine().await;
    let resources = server("s", APP, "  model: target\n") + &endpoint("a", &a.address());
    let picker = setup(&resources, &redis, "kvcache-aware").start().await;
    until_read(&picker).await;
    next_second().await;
    let now = unix_time().to_string();
    for (base, owner_model) in [(0, "target"), (1_000, "alias")] {
        let prompt: Vec<u32> = (base..base + 17).collect();
        redis.claim(&key(owner_model, standard_hash(&prompt[..BLOCK])), "a.default", &now).await;
        let served = ask(&picker, "alias", &prompt).await;
        assert_eq!((score_of(&served, &a), &served.decision["target_model"]), (0.5, &json!("target")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn picks_go_on_without_redis_and_with_it_again() {
    let mut redis = RedisServer::start().await;
    let (a, b) = (engine().await, engine().await);
    let picker = picker(&redis, [&a, &b]).await;
    let degraded = [("source", "redis")];
    assert_eq!(picker.metric("pilotfish_degraded", &degraded).await as u64, 0);

    // Connections stay and nothing is answered: a pick that waited for Redis would never end.
    redis.hang();
    let served = ask(&picker, "m", &(0..40).collect::<Vec<_>>()).await;
    assert_eq!(scores(&served), [Value::Null, Value::Null]);
    picker.until("Redis is missed", "pilotfish_degraded", &degraded, 1.0).await;
    redis.go_on();
    picker.until("Redis is back", "pilotfish_degraded", &degraded, 0.0).await;
    until_read(&picker).await;

    redis.kill();
    let served = ask(&picker, "m", &(100..140).collect::<Vec<_>>()).await;
    assert_eq!(scores(&served), [Value::Null, Value::Null]);
    picker.until("Redis is missed", "pilotfish_degraded", &degraded, 1.0).await;
    redis.restart().await;
    picker.until("Redis is back", "pilotfish_degraded", &degraded, 0.0).await;
    until_read(&picker).await;
}

/// A relay in this process.
fn relay(redis: &RedisServer, engine: &SimulatedEngine, identity: &str) -> AbortOnDropHandle<()> {
    let config = RelayConfig {
        engine: engine.state.address(),
        kind: EngineKind::Vllm,
        identity: identity.to_owned(),
        model: "tiny".to_owned(),
        events: None,
        replay: None,
        redis: redis.url().parse().unwrap(),
    };
    AbortOnDropHandle::new(tokio::spawn(async move { Relay::new(config).run().await }))
}

async fn compute(engine: &SimulatedEngine, model: &str, salt: Option<&str>, tokens: &[u32]) {
    let mut body = json!({"model": model, "prompt": tokens, "max_tokens": 1});
    if let Some(salt) = salt {
        body["cache_salt"] = json!(salt);
    }
    post(engine, "/v1/completions", &body).await;
}

async fn post(engine: &SimulatedEngine, path: &str, body: &Value) {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = http::Request::post(format!("http://{}{path}", engine.address()))
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .unwrap();
    within(path, async {
        client.request(request).await.unwrap().into_body().collect().await.unwrap();
    })
    .await;
}

/// Blocks of tokens nobody else has, and one token more.
fn prompt(n: u32, blocks: usize) -> Vec<u32> {
    (0..=(blocks * BLOCK) as u32).map(|at| 1_000 * n + at).collect()
}

fn keys(model: &str, prompts: &[Vec<u32>]) -> Vec<String> {
    let blocks = prompts.iter().flat_map(|prompt| prompt.chunks_exact(BLOCK));
    let mut keys: Vec<String> = blocks.map(|block| key(model, standard_hash(block))).collect();
    keys.sort();
    keys.dedup();
    keys
}

async fn until_claimed(redis: &RedisServer, owner: &str, expected: &[String]) {
    let mut last = Vec::new();
    eventually(format!("{owner} claims {} blocks", expected.len()), async || {
        last = redis.claims(owner).await;
        (last == expected).then_some(())
    })
    .await;
}

struct RelayProcess(Child);

impl Drop for RelayProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_relay_writes_leads_picks_to_the_engine_that_holds_the_prompt() {
    let redis = RedisServer::start().await;
    let (a, b) = (engine().await, engine().await);
    next_second().await;
    let picker = picker(&redis, [&a, &b]).await;
    let _a = relay(&redis, &a, "a.default");
    // The other as an operator starts it.
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilotfish"));
    command.args(["kv-relay", "--identity", "b.default", "--model", "tiny", "--engine", &b.address()]);
    command.args(["--events", &b.state.events_address().unwrap().to_string()]);
    command.args(["--replay", &format!("tcp://{}", b.state.replay_address().unwrap())]);
    command.env("PILOTFISH_REDIS_URL", redis.url());
    let _b = RelayProcess(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    let (of_a, of_b) = (prompt(1, 3), prompt(2, 3));
    compute(&a, "tiny", None, &of_a).await;
    compute(&b, "tiny", None, &of_b).await;
    until_claimed(&redis, "a.default", &keys("tiny", std::slice::from_ref(&of_a))).await;
    until_claimed(&redis, "b.default", &keys("tiny", std::slice::from_ref(&of_b))).await;
    for (prompt, holder) in [(&of_a, &a), (&of_b, &b)] {
        for _ in 0..3 {
            let served = ask(&picker, "tiny", prompt).await;
            assert_eq!((served.endpoint(), score_of(&served, holder)), (&*holder.address(), 0.75));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_keeps_redis_true_through_evictions_restarts_and_losses() {
    let mut redis = RedisServer::start().await;
    let a = engine().await;
    // What a former run left, and what is somebody else's.
    let left = keys("tiny", &[prompt(90, 2)]);
    for key in &left {
        redis.claim(key, "a.default", "1700000000").await;
    }
    redis.claim(&left[0], "other.default", "1700000000").await;
    redis.claim(&key("else", 7), "a.default", "1700000000").await;
    let _relay = relay(&redis, &a, "a.default");
    let elsewhere = key("else", 7);
    let with_else = |mut keys: Vec<String>| {
        keys.push(elsewhere.clone());
        keys.sort();
        keys
    };
    until_claimed(&redis, "a.default", &with_else(Vec::new())).await;
    assert_eq!(redis.claims("other.default").await, [left[0].clone()]);

    // Adapters are models of their own, a salt has no name in the index.
    compute(&a, "lora1", None, &prompt(1, 2)).await;
    compute(&a, "tiny", Some("tenant"), &prompt(2, 2)).await;
    let of_lora = keys("lora1", &[prompt(1, 2)]);
    until_claimed(&redis, "a.default", &with_else(of_lora)).await;
    let mut client = redis.client().await;
    let life: i64 =
        redis::cmd("TTL").arg(&keys("lora1", &[prompt(1, 2)])[0]).query_async(&mut client).await.unwrap();
    assert!((86_000..=86_400).contains(&life), "{life}");

    // 64 blocks fit: what is evicted goes.
    let prompts: Vec<Vec<u32>> = (10..40).map(|n| prompt(n, 4)).collect();
    for prompt in &prompts {
        compute(&a, "tiny", None, prompt).await;
    }
    let held = || {
        let held = prompts.iter().map(|prompt| {
            let tokens = a.state.cached_tokens(prompt, "", "");
            prompt[..tokens].to_vec()
        });
        keys("tiny", &held.collect::<Vec<_>>())
    };
    assert!((4..=64).contains(&held().len()), "{}", held().len());
    until_claimed(&redis, "a.default", &with_else(held())).await;

    // Redis comes back empty.
    redis.kill();
    compute(&a, "tiny", None, &prompts[0]).await;
    redis.restart().await;
    until_claimed(&redis, "a.default", &held()).await;

    // Batches that were missed are replayed.
    a.state.set_fault(Fault::DropEvents(1));
    for prompt in &prompts[1..4] {
        compute(&a, "tiny", None, prompt).await;
    }
    until_claimed(&redis, "a.default", &held()).await;

    // A new process holds nothing.
    a.state.set_fault(Fault::Restart);
    compute(&a, "tiny", None, &prompts[5]).await;
    until_claimed(&redis, "a.default", &keys("tiny", &prompts[5..6])).await;

    // What is lost for good takes all claims with it, and what comes later is claimed.
    a.state.set_fault(Fault::LoseEvents(1));
    compute(&a, "tiny", None, &prompts[6]).await;
    compute(&a, "tiny", None, &prompts[7]).await;
    until_claimed(&redis, "a.default", &keys("tiny", &prompts[7..8])).await;
}
