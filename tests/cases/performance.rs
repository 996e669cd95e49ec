//! What must stay bounded whatever comes: the wait for a tokenizer elsewhere, and the memory of indexes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use pilotfish::engine::{EngineConfig, Fault};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

use crate::kit::case::{input, list, number};
use crate::kit::engine::{Answer, MetricsPage, SimulatedEngine};
use crate::kit::eventually::{eventually, within};
use crate::kit::extproc::{CHAT, Served, serve};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool};

/// Ids that the renderer gives for every prompt: no estimate hits this number.
const RENDERED: u64 = 5_021;

/// A rendering service that does one thing at a time.
struct Renderer {
    url: String,
    shared: Arc<Rendering>,
    _task: AbortOnDropHandle<()>,
}

struct Rendering {
    /// Calls that are worked on at once; none while it is closed.
    parallel: Semaphore,
    takes: Duration,
    status: AtomicU16,
    /// What it says instead of ids.
    says: parking_lot::Mutex<Option<&'static str>>,
    calls: AtomicUsize,
    most_calls: AtomicUsize,
}

impl Renderer {
    async fn start(parallel: usize, takes: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Rendering {
            parallel: Semaphore::new(parallel),
            takes,
            status: AtomicU16::new(200),
            says: parking_lot::Mutex::default(),
            calls: AtomicUsize::default(),
            most_calls: AtomicUsize::default(),
        });
        let router = Router::new().fallback(render).with_state(Arc::clone(&shared));
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, shared, _task: AbortOnDropHandle::new(task) }
    }

    fn answers(&self, status: u16, says: Option<&'static str>) {
        self.shared.status.store(status, Ordering::SeqCst);
        *self.shared.says.lock() = says;
    }
}

async fn render(State(rendering): State<Arc<Rendering>>, _body: bytes::Bytes) -> (StatusCode, String) {
    let calls = rendering.calls.fetch_add(1, Ordering::SeqCst) + 1;
    rendering.most_calls.fetch_max(calls, Ordering::SeqCst);
    let permit = rendering.parallel.acquire().await.unwrap();
    tokio::time::sleep(rendering.takes).await;
    drop(permit);
    rendering.calls.fetch_sub(1, Ordering::SeqCst);
    let status = StatusCode::from_u16(rendering.status.load(Ordering::SeqCst)).unwrap();
    let ids: Vec<u64> = (0..RENDERED).collect();
    let says = *rendering.says.lock();
    (status, says.map_or_else(|| json!([{"token_ids": ids, "model": "m"}]).to_string(), str::to_owned))
}

/// A picker whose prompts are tokenized at `url` and wait for it as long as `budget`.
async fn picker(url: &str, budget: &str) -> Picker {
    let resources = endpoint("a", "10.0.0.1:8000") + &endpoint("b", "10.0.0.2:8000") + &pool();
    let config = format!(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\ntokenizers:\n- {{model: m, source: '{url}'}}\n"
    );
    let setup = Picker::with(&resources).config(&config);
    setup.flag("--tokenize-least-wait", budget).flag("--tokenize-most-wait", budget).start().await
}

/// A prompt of about 50,000 tokens that shares no block with those of other numbers.
fn long_prompt(number: usize) -> String {
    let text = format!("{number:08} {}", "all work and no play ".repeat(200_000 / 21));
    json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 1}).to_string()
}

fn has_ids(served: &Served) -> bool {
    served.prompt_tokens() == RENDERED
}

async fn skipped(picker: &Picker, reason: &str) -> usize {
    picker.metric("pilotfish_tokenize_skipped_total", &[("reason", reason)]).await as usize
}

/// New prompts get their ids again, after so many as it takes to see that the service is as fast as before.
async fn recovers(picker: &Picker, context: &str) {
    let mut number = 1_000;
    eventually(format!("ids after {context}"), async || {
        number += 1;
        has_ids(&serve(picker, CHAT, &long_prompt(number)).await).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn per_01_no_request_waits_for_a_renderer_that_has_too_much_to_do() {
    let case = input("PER-01");
    let budget = Duration::from_millis(number(&case["config"], "tokenize_budget_ms") as u64);
    let (parallel, takes) = (&case["renderer"]["parallel"], number(&case["renderer"], "latency_ms") as u64);
    assert!(case["load"].as_str().unwrap().starts_with("12-24 rps of 50k-token prompts"));
    let renderer = Renderer::start(parallel.as_u64().unwrap() as usize, Duration::from_millis(takes)).await;
    let picker = picker(&renderer.url, &format!("{}ms", budget.as_millis())).await;
    let bodies: Vec<String> = (0..24).map(long_prompt).collect();
    let served = futures::future::join_all(bodies.iter().map(|body| serve(&picker, CHAT, body))).await;
    assert!(served.iter().all(|served| served.replies.destination().is_some()));
    let late = skipped(&picker, "deadline").await;
    let shed = skipped(&picker, "saturated").await;
    assert_eq!(late + shed, 24, "100 ms are more than 30 ms, each is counted");
    assert!(shed > 0 && late > 0, "{late} late, {shed} shed");
    let most = renderer.shared.most_calls.load(Ordering::SeqCst);
    assert!(most <= 4, "{most} calls at once to a service that does one at a time");
    // One after the other all would have waited 2.4 s, or the 5 s of a call's own time: a whole second is slack.
    for served in &served {
        let waited = served.decision["stages_us"]["prompt"].as_u64().unwrap();
        assert!(u128::from(waited) < (budget + Duration::from_secs(1)).as_micros(), "{waited} us");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn per_01_a_renderer_that_never_answers_holds_no_request_and_shows_in_the_gauge() {
    let renderer = Renderer::start(0, Duration::ZERO).await;
    let picker = picker(&renderer.url, "200ms").await;
    let bodies: Vec<String> = (0..24).map(long_prompt).collect();
    // All are decided and settled while no call has ended.
    for body in &bodies {
        assert!(!has_ids(&serve(&picker, CHAT, body).await));
        if body == &bodies[3] {
            assert_eq!(picker.metric("pilotfish_tokenize_saturation", &[]).await, 1.0);
        }
    }
    assert_eq!(skipped(&picker, "deadline").await + skipped(&picker, "saturated").await, 24);
    renderer.shared.parallel.add_permits(1);
    picker.until("the calls end", "pilotfish_tokenize_saturation", &[], 0.0).await;
    recovers(&picker, "silence").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn per_01_every_fault_of_a_renderer_is_a_counted_reason_and_a_served_request() {
    let case = input("PER-01");
    let faults = list(case, "faults").iter().map(|fault| fault.as_str().unwrap());
    for fault in faults.chain(["400"]) {
        if fault == "connection refused" {
            refuses(fault).await;
            continue;
        }
        let renderer = Renderer::start(usize::from(fault != "timeout"), Duration::ZERO).await;
        let reason = match fault {
            "timeout" => "deadline",
            "503" | "429" => "saturated",
            "400" => "refused",
            "200 with wrong JSON" | "tokens for another model" => "bad-answer",
            other => panic!("unknown fault {other}"),
        };
        match fault {
            "200 with wrong JSON" => renderer.answers(200, Some("{\"token_ids\": \"none\"")),
            "tokens for another model" => {
                renderer.answers(200, Some(r#"[{"token_ids":[1,2,3],"model":"another"}]"#));
            }
            status => renderer.answers(status.parse().unwrap_or(200), None),
        }
        // Long enough for a failure to come before it, and short of the 5 s of a call.
        let picker = picker(&renderer.url, if fault == "timeout" { "200ms" } else { "2s" }).await;
        let served = serve(&picker, CHAT, &long_prompt(0)).await;
        assert!(served.replies.destination().is_some() && !has_ids(&served), "{fault}");
        assert_eq!(skipped(&picker, reason).await, 1, "{fault}");
        assert_eq!(picker.metric("pilotfish_tokenize_skipped_total", &[]).await, 1.0, "{fault}");
        renderer.answers(200, None);
        renderer.shared.parallel.add_permits(1);
        recovers(&picker, fault).await;
    }
}

/// The same with a port that is closed for a while: that of an engine which renders.
async fn refuses(fault: &str) {
    let models = vec!["m".to_owned()];
    let engine =
        SimulatedEngine::start(EngineConfig { scale_out: true, models, ..EngineConfig::default() }).await;
    engine.close().await;
    let picker = picker(&format!("http://{}", engine.address()), "2s").await;
    let body = |number: usize| {
        json!({"model": "m", "messages": [{"role": "user", "content": format!("{number} is it")}], "max_tokens": 1}).to_string()
    };
    assert!(serve(&picker, CHAT, &body(0)).await.replies.destination().is_some(), "{fault}");
    assert_eq!(skipped(&picker, "unreachable").await, 1, "{fault}");
    engine.state.clear_fault(Fault::Refuse(None));
    let mut number = 0;
    eventually("ids from an open port", async || {
        let all = async || picker.metric("pilotfish_tokenize_skipped_total", &[]).await;
        let before = all().await;
        number += 1;
        serve(&picker, CHAT, &body(number)).await;
        (all().await == before).then_some(())
    })
    .await;
}

const PODS: usize = 4;
/// Tokens in each engine's cache, and in each prompt.
const CACHE: usize = 8_192;
const PROMPT: usize = 2_048;
/// Fewest tokens in a block of the index.
const LEAST_BLOCK: usize = 16;

fn ids(prompt: usize) -> Vec<usize> {
    (0..PROMPT).map(|at| prompt * PROMPT + at).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn per_02_an_index_is_no_larger_than_the_caches_it_follows_and_forgets_the_oldest() {
    let case = input("PER-02");
    assert!(case["load"].as_str().unwrap().contains("unique 100k-token prompts"));
    for engine_block in list(case, "engine_block_size") {
        let engine_block = engine_block.as_u64().unwrap() as usize;
        let block = engine_block.max(LEAST_BLOCK);
        let page = format!(
            "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n\
             vllm:cache_config_info{{block_size=\"{engine_block}\",num_gpu_blocks=\"{}\"}} 1\n",
            CACHE / engine_block
        );
        let (mut pages, mut resources) = (Vec::new(), pool());
        for at in 0..PODS {
            let page = MetricsPage::start(Answer::page(&page)).await;
            resources += &endpoint(&format!("p{at}"), &page.address.to_string());
            pages.push(page);
        }
        let picker = Picker::serve(&resources).await;
        for page in &pages {
            let address = page.address.to_string();
            eventually("the size of its cache", async || {
                let signals = &picker.endpoint(&address).await["signals"];
                (signals["blocks"]["value"] == (CACHE / engine_block) as f64).then_some(())
            })
            .await;
        }
        let routed = [("index", "routed")];
        let (mut half, mut last) = (0.0, None);
        let prompts = 40 * PODS;
        for number in 0..prompts {
            let body = json!({"model": "m", "prompt": ids(number), "max_tokens": 1}).to_string();
            last = Some(within("a pick", serve(&picker, "/v1/completions", &body)).await);
            let held = picker.metric("pilotfish_index_blocks", &routed).await;
            assert!(held <= (PODS * CACHE / block) as f64, "{engine_block}: {held} blocks");
            if number + 1 == prompts / 2 {
                half = picker.metric("pilotfish_index_bytes", &routed).await;
            }
        }
        let held = picker.metric("pilotfish_index_blocks", &routed).await;
        assert_eq!(held, (PODS * CACHE / block) as f64, "{engine_block}: full, by {PROMPT} tokens a prompt");
        let bytes = picker.metric("pilotfish_index_bytes", &routed).await;
        assert!(half > 0.0 && bytes <= half * 1.01, "{engine_block}: {half} bytes grew to {bytes}");
        let found = async |number: usize| -> Value {
            picker.post("/debug/cache", &json!({"model": "m", "token_ids": ids(number)})).await
        };
        let (oldest, newest) = (found(0).await, found(prompts - 1).await);
        assert_eq!((&newest["block_size"], &newest["blocks"]), (&json!(block), &json!(PROMPT / block)));
        assert_eq!(list(&oldest, "holders").len(), 0, "{engine_block}: {oldest}");
        let holder = &list(&newest, "holders")[0];
        let expected = (json!(last.unwrap().endpoint()), json!(PROMPT / block));
        assert_eq!((&holder["endpoint"], &holder["depth"]), (&expected.0, &expected.1), "{engine_block}");
    }
}
