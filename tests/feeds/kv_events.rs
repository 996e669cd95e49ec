//! A picker that follows the KV events of simulated engines, over sockets.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use pilotfish::engine::{EngineConfig, EventConfig, EventHashes, EventShape, Fault};
use pilotfish::prompt::Namespace;
use pilotfish::state::Endpoint;
use pilotfish::zmtp::{Kind, Socket};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::kit::engine::SimulatedEngine;
use crate::kit::eventually::{eventually, within};
use crate::kit::kv_events::{depth, hex};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool};

const BLOCK: usize = 16;

/// Quick, with a small cache.
fn config(events: EventConfig) -> EngineConfig {
    EngineConfig {
        speed: 1_000.0,
        blocks: 64,
        block_size: BLOCK as u32,
        loras: vec!["lora1".to_owned()],
        events: Some(events),
        ..EngineConfig::default()
    }
}

/// An engine and a picker that was told nothing but the engine's address.
struct Pair {
    engine: SimulatedEngine,
    picker: Picker,
}

impl Pair {
    async fn start(events: EventConfig) -> Self {
        let engine = SimulatedEngine::start(config(events)).await;
        let picker = Picker::serve(&(pool() + &endpoint("e", &engine.address()))).await;
        Self { engine, picker }
    }

    fn endpoint(&self) -> Arc<Endpoint> {
        Arc::clone(&self.picker.app.admin.shared.decider.store.load_full().endpoints[0])
    }

    /// What `/debug/endpoints` shows.
    async fn events(&self) -> Value {
        self.picker.endpoint(&self.engine.address()).await["events"].clone()
    }

    async fn until_state(&self, state: &str) -> Value {
        eventually(format!("KV events are {state}"), async || {
            let events = self.events().await;
            (events["state"] == state).then_some(events)
        })
        .await
    }

    /// Has a prompt computed, with one token of an answer.
    async fn compute(&self, tokens: &[u32], model: &str, salt: Option<&str>) -> Value {
        let mut body = json!({"model": model, "prompt": tokens, "max_tokens": 1});
        if let Some(salt) = salt {
            body["cache_salt"] = json!(salt);
        }
        post(&self.engine, "/v1/completions", &body).await
    }

    fn index_depth(&self, tokens: &[u32], space: Namespace<'_>) -> usize {
        let tokens_index = &self.picker.app.admin.shared.decider.scheduler.tokens;
        depth(tokens_index, &self.endpoint(), tokens, BLOCK, space) as usize
    }

    /// Waits until the index says of every prompt what the engine holds.
    async fn until_equal(&self, prompts: &[Vec<u32>]) {
        eventually("the index is what the engine holds", async || {
            let equal = |prompt: &Vec<u32>| {
                self.index_depth(prompt, Namespace::default()) * BLOCK
                    == self.engine.state.cached_tokens(prompt, "", "")
            };
            prompts.iter().all(equal).then_some(())
        })
        .await;
    }
}

async fn post(engine: &SimulatedEngine, path: &str, body: &Value) -> Value {
    let client = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    let request = http::Request::post(format!("http://{}{path}", engine.address()))
        .header("content-type", "application/json")
        .body(Full::from(body.to_string()))
        .unwrap();
    within(path, async {
        let body = client.request(request).await.unwrap().into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&body).unwrap_or(Value::Null)
    })
    .await
}

fn prompt(n: u32, blocks: u32) -> Vec<u32> {
    (0..=blocks * BLOCK as u32).map(|at| 1_000 * n + at).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_found_and_followed_block_by_block() {
    for (shape, hashes) in [(EventShape::Map, EventHashes::Int), (EventShape::Array, EventHashes::Bytes)] {
        let pair = Pair::start(EventConfig { shape, hashes, ..EventConfig::default() }).await;
        let events = pair.until_state("following").await;
        assert_eq!(events["stored"], 0, "an engine that has published nothing holds nothing");
        let mut rng = SmallRng::seed_from_u64(7);
        // Prompts that share beginnings, four times as many as fit.
        let prompts: Vec<Vec<u32>> = (0..40)
            .map(|n| {
                let mut prompt = prompt(n % 4, rng.random_range(1..6));
                prompt.extend((0..rng.random_range(20..60)).map(|_| rng.random_range(0..5_000u32)));
                prompt
            })
            .collect();
        for prompt in &prompts {
            let believed = self::within("a state", pair.until_equal(std::slice::from_ref(prompt)));
            believed.await;
            let expected = pair.index_depth(&prompt[..prompt.len() - 1], Namespace::default()) * BLOCK;
            let answer = pair.compute(prompt, "tiny", None).await;
            let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
            assert_eq!(cached.as_u64().unwrap() as usize, expected, "{answer}");
        }
        pair.until_equal(&prompts).await;
        let events = pair.events().await;
        assert!(events["removed"].as_u64() > Some(0), "{events}");
        assert_eq!((&events["state"], &events["skipped"]), (&json!("following"), &json!({})));
        assert_eq!(pair.picker.metric("pilotfish_degraded", &[("source", "kv_events")]).await.to_bits(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn adapters_and_salts_are_kept_apart() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    let prompt = prompt(1, 3);
    pair.compute(&prompt, "lora1", None).await;
    pair.compute(&prompt, "tiny", Some("tenant")).await;
    let spaces = [
        (Namespace { adapter: Some("lora1"), salt: None }, 3),
        (Namespace { adapter: None, salt: Some("tenant") }, 3),
        (Namespace::default(), 0),
        (Namespace { adapter: Some("tenant"), salt: None }, 0),
    ];
    eventually("both chains and no other", async || {
        spaces.iter().all(|(space, depth)| pair.index_depth(&prompt, *space) == *depth).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_dropped_on_the_way_is_replayed() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    let prompts = [prompt(1, 3), prompt(2, 3), prompt(3, 3)];
    pair.engine.state.set_fault(Fault::DropEvents(2));
    for prompt in &prompts {
        pair.compute(prompt, "tiny", None).await;
    }
    pair.until_equal(&prompts).await;
    let events = pair.until_state("following").await;
    assert_eq!(events["gaps"]["replayed"], 1);
    let labels = [("endpoint", &*pair.engine.address()), ("outcome", "replayed")];
    assert_eq!(pair.picker.metric("pilotfish_kv_event_gaps_total", &labels).await as u64, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_for_good_leaves_a_gap_that_shows() {
    for replay in [Some(0), None] {
        let pair = Pair::start(EventConfig { replay, ..EventConfig::default() }).await;
        // Without a replay socket only the first batch shows that nothing was before.
        eventually("the socket is connected", async || {
            let state = pair.events().await["state"].clone();
            (state == if replay.is_some() { "following" } else { "joining" }).then_some(())
        })
        .await;
        pair.compute(&prompt(1, 3), "tiny", None).await;
        pair.until_state("following").await;
        pair.engine.state.set_fault(Fault::LoseEvents(1));
        pair.compute(&prompt(2, 3), "tiny", None).await;
        pair.compute(&prompt(3, 3), "tiny", None).await;
        let events = pair.until_state("gap").await;
        let outcome = if replay.is_some() { "history-lost" } else { "no-replay" };
        assert_eq!(events["gaps"][outcome], 1, "{events}");
        assert_eq!(pair.picker.metric("pilotfish_degraded", &[("source", "kv_events")]).await as u64, 1);
        // Once the cache is emptied, everything is known again.
        post(&pair.engine, "/reset_prefix_cache", &json!({})).await;
        let last = [prompt(4, 3)];
        pair.compute(&last[0], "tiny", None).await;
        pair.until_state("following").await;
        pair.until_equal(&last).await;
        assert_eq!(pair.index_depth(&prompt(1, 3), Namespace::default()), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_starts_anew_on_its_ports_is_followed_anew() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    let prompts = [prompt(1, 3), prompt(2, 3)];
    for prompt in &prompts {
        pair.compute(prompt, "tiny", None).await;
    }
    pair.until_equal(&prompts).await;
    pair.engine.state.set_fault(Fault::Restart);
    pair.until_equal(&prompts).await;
    assert_eq!(pair.index_depth(&prompts[0], Namespace::default()), 0);
    pair.compute(&prompts[1], "tiny", None).await;
    pair.until_equal(&prompts).await;
    let events = pair.until_state("following").await;
    assert!(events["restarts"].as_u64() >= Some(1), "{events}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_gone_is_said_to_be_and_taken_up_again() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    let prompts = [prompt(1, 3)];
    pair.compute(&prompts[0], "tiny", None).await;
    pair.until_equal(&prompts).await;
    let state = &pair.engine.state;
    let ports = EventConfig {
        port: state.events_address().unwrap().port(),
        replay: state.replay_address().map(|address| address.port()),
        ..EventConfig::default()
    };
    let listen = state.address();
    let Pair { engine, picker } = pair;
    drop(engine);
    let address = listen.to_string();
    eventually("the stream is gone", async || {
        (picker.endpoint(&address).await["events"]["state"] == "unreachable").then_some(())
    })
    .await;
    // The ports of the old process may take a moment to be free.
    let engine = eventually("an engine on the same ports", async || {
        let config = EngineConfig { listen, ..config(ports.clone()) };
        SimulatedEngine::try_start(config).await
    })
    .await;
    let pair = Pair { engine, picker };
    pair.until_state("following").await;
    assert_eq!(pair.index_depth(&prompts[0], Namespace::default()), 0, "the new process holds nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_a_wrong_size_and_unreadable_frames_are_not_trusted() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    // Until its metrics are read, the engine's own word counts.
    eventually("the block size is known", async || pair.endpoint().block_tokens()).await;
    pair.engine.state.set_fault(Fault::EventBlockSize(32));
    pair.compute(&prompt(1, 3), "tiny", None).await;
    pair.until_state("block-size").await;
    pair.engine.state.clear_faults();
    let prompts = [prompt(2, 3)];
    pair.compute(&prompts[0], "tiny", None).await;
    pair.until_equal(&prompts).await;
    pair.engine.state.set_fault(Fault::UnreadableEvents);
    for n in 10..20 {
        pair.compute(&prompt(n, 1), "tiny", None).await;
    }
    let events = pair.until_state("unreadable").await;
    assert!(events["skipped"]["unreadable-frame"].as_u64() >= Some(8), "{events}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hashes_of_another_seed_make_no_difference() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    pair.engine.state.set_fault(Fault::EventHashSeed);
    let prompts = [prompt(1, 3)];
    pair.compute(&prompts[0], "tiny", None).await;
    pair.until_equal(&prompts).await;
    assert_eq!(pair.index_depth(&prompts[0], Namespace::default()), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sleeping_engine_holds_nothing_and_is_followed_again_after_waking() {
    let pair = Pair::start(EventConfig::default()).await;
    pair.until_state("following").await;
    let prompts = [prompt(1, 3), prompt(2, 3)];
    pair.compute(&prompts[0], "tiny", None).await;
    pair.until_equal(&prompts).await;
    pair.engine.state.set_fault(Fault::Sleep(1));
    pair.until_state("asleep").await;
    assert_eq!(pair.index_depth(&prompts[0], Namespace::default()), 0);
    pair.engine.state.clear_faults();
    pair.until_state("following").await;
    pair.compute(&prompts[1], "tiny", None).await;
    pair.until_equal(&prompts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_picker_that_comes_late_knows_everything_if_the_history_does() {
    for (history, follows) in [(1_000, true), (2, false)] {
        let events = EventConfig { history, ..EventConfig::default() };
        let engine = SimulatedEngine::start(config(events)).await;
        let prompts: Vec<Vec<u32>> = (0..6).map(|n| prompt(n, 3)).collect();
        for prompt in &prompts {
            post(&engine, "/v1/completions", &json!({"model": "tiny", "prompt": prompt, "max_tokens": 1}))
                .await;
        }
        let picker = Picker::serve(&(pool() + &endpoint("e", &engine.address()))).await;
        let pair = Pair { engine, picker };
        if follows {
            pair.until_state("following").await;
            pair.until_equal(&prompts).await;
            continue;
        }
        eventually("the part that is known is there", async || {
            (pair.index_depth(&prompts[5], Namespace::default()) == 3).then_some(())
        })
        .await;
        assert_eq!(pair.events().await["state"], "joining");
        // The cache turns over: 64 blocks, of which 18 are unknown or old.
        for n in 20..60 {
            pair.compute(&prompt(n, 5), "tiny", None).await;
        }
        pair.until_state("following").await;
        pair.until_equal(&prompts).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_may_dial_us_and_only_their_own_frames_count() {
    let port = {
        let free = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        free.local_addr().unwrap().port()
    };
    let engine = SimulatedEngine::start(EngineConfig::default()).await;
    let written = endpoint("e", &engine.address()).replace("'}", &format!("', kvEvents: 'listen:{port}'}}"));
    let picker = Picker::serve(&(pool() + &written)).await;
    let mut dialled = eventually("the port is open", async || {
        Socket::connect(([127, 0, 0, 1], port).into(), Kind::Pub).await.ok()
    })
    .await;
    assert_eq!(&within("the subscription", dialled.recv()).await.unwrap()[..], [&b"\x01"[..]]);
    let payload = hex(
        "93cb41daa8dbe02000009198ab426c6f636b53746f72656491cfa1a1a1a1a1a1a1a1c0dc00100102030405060708090a0b0c0d0e0f1010c0a3475055c000",
    );
    let own = format!("kv@{}@org/m@rev1", engine.address());
    let foreign = format!("kv@{}0@m", engine.address());
    dialled.send(&[foreign.as_bytes(), &[0; 8], &payload]).await.unwrap();
    dialled.send(&[own.as_bytes(), &[0; 8], &payload]).await.unwrap();
    let pair = Pair { engine, picker };
    let events = pair.until_state("following").await;
    assert_eq!((&events["frames"], &events["stored"]), (&json!(1), &json!(1)), "{events}");
    assert_eq!(pair.index_depth(&(1..=16).collect::<Vec<_>>(), Namespace::default()), 1);
}
