//! llm-d's table of requests and responses, over gRPC against a picker that scrapes pods of given load.

use std::fmt::Write as _;
use std::net::SocketAddr;

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::engine::{Answer, MetricsPage};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{Stream, run};
use crate::kit::picker::Picker;
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, pool};

/// The scorers of llm-d's tests, weight 1 each.
const CONFIG: &str = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: lora-affinity-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer}
  - {pluginRef: kv-cache-utilization-scorer}
  - {pluginRef: prefix-cache-scorer}
  - {pluginRef: lora-affinity-scorer}
";

/// An objective and a rewrite, as llm-d's tests have them beside the pool.
const MODELS: &str = "---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: sql-lora-sheddable}
spec: {poolRef: {name: pool}, priority: -1}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: of-tests}
spec:
  poolRef: {name: pool}
  rules:
  - matches: [{model: {type: Exact, value: model-to-be-rewritten}}]
    targets: [{modelRewrite: rewritten-model}]
";

/// Requests waiting, share of the KV cache used, adapters running.
type Pod = (u32, f64, &'static str);

/// Pods, each on a loopback address of its own, and the picker over them.
struct Cluster {
    picker: Picker,
    pods: Vec<MetricsPage>,
}

impl Cluster {
    async fn of(pods: &[Pod]) -> Self {
        let mut servers = Vec::new();
        let mut resources = pool() + MODELS;
        for (at, pod) in pods.iter().enumerate() {
            let server =
                MetricsPage::start_at(&format!("127.0.0.{}:0", at + 2), Answer::page(&page(pod))).await;
            resources += &endpoint(&format!("pod-{at}"), &server.address.to_string());
            servers.push(server);
        }
        let picker = Picker::with(&resources).config(CONFIG).switch("--trust-hints").start().await;
        let cluster = Self { picker, pods: servers };
        cluster.until_scraped().await;
        cluster
    }

    /// Until the picker knows what every pod says.
    async fn until_scraped(&self) {
        eventually("the signals of every pod", async || {
            let page = self.picker.json("/debug/endpoints").await;
            let known = |endpoint: &Value| {
                endpoint["state"] == "up"
                    && ["waiting", "kv_usage"]
                        .iter()
                        .all(|name| endpoint["signals"][name]["value"].is_number())
            };
            page["endpoints"].as_array().unwrap().iter().all(known).then_some(())
        })
        .await;
    }

    fn address(&self, pod: usize) -> SocketAddr {
        self.pods[pod].address
    }

    /// Restricts a request to pods, by number; one that is not there has an address of nobody.
    fn subset(&self, pods: &[usize]) -> Value {
        let list: Vec<String> = pods
            .iter()
            .map(|pod| {
                self.pods.get(*pod).map_or("127.0.0.99:8000".to_owned(), |pod| pod.address.to_string())
            })
            .collect();
        json!({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": list}})
    }
}

fn page((queue, kv, adapters): &Pod) -> String {
    let mut page = format!(
        "vllm:num_requests_waiting {queue}\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc {kv}\n"
    );
    let _ = writeln!(
        page,
        "vllm:lora_requests_info{{max_lora=\"2\",running_lora_adapters=\"{adapters}\",waiting_lora_adapters=\"\"}} 1"
    );
    page
}

/// One request: its headers and the pieces of its body.
#[derive(Default)]
struct Sent {
    path: &'static str,
    headers: &'static [(&'static str, &'static str)],
    pieces: &'static [&'static str],
    subset: Option<&'static [usize]>,
}

impl Sent {
    fn steps(&self, cluster: &Cluster) -> Vec<Value> {
        let method = if self.pieces.is_empty() { "GET" } else { "POST" };
        let fixed =
            [(":method", method), (":path", self.path), ("hi", "mom"), ("x-request-id", "test-request-id")];
        let headers: Vec<[&str; 2]> =
            fixed.iter().chain(self.headers).map(|(name, value)| [*name, *value]).collect();
        let mut steps = vec![json!({"rh": {"headers": headers, "eos": self.pieces.is_empty()}})];
        let last = self.pieces.len().saturating_sub(1);
        let pieces = self.pieces.iter().enumerate();
        steps.extend(pieces.map(|(at, piece)| json!({"rb": {"text": piece, "eos": at == last}})));
        if let Some(pods) = self.subset {
            for step in &mut steps {
                step["metadata"] = cluster.subset(pods);
            }
        }
        steps
    }
}

const COMPLETIONS: &str = "/v1/completions";
const REWRITE_TO_TARGET: (&str, &str) = ("x-llm-d-model-name-rewrite", "my-model-12345");

macro_rules! body {
    ($model:literal) => {
        concat!(r#"{"max_tokens":100,"model":""#, $model, r#"","prompt":"test","temperature":0}"#)
    };
}

#[rstest]
#[case::lower_queue_and_kv_cache(
    &[(3, 0.2, ""), (0, 0.1, ""), (10, 0.2, "")],
    Sent { path: COMPLETIONS, headers: &[REWRITE_TO_TARGET], pieces: &[body!("my-model")], subset: None },
    1, body!("my-model-12345"), "my-model-12345"
)]
#[case::active_adapter_and_low_queue(
    &[(0, 0.2, "foo,bar"), (0, 0.1, "foo,sql-lora-1fdg2"), (10, 0.2, "foo,bar")],
    Sent { path: COMPLETIONS, headers: &[("x-gateway-model-name-rewrite", "sql-lora-1fdg2")], pieces: &[body!("sql-lora")], subset: None },
    1, body!("sql-lora-1fdg2"), "sql-lora-1fdg2"
)]
#[case::adapter_despite_higher_kv_cache(
    &[(10, 0.2, "foo,bar"), (10, 0.4, "foo,sql-lora-1fdg2"), (10, 0.3, "foo")],
    Sent { path: COMPLETIONS, headers: &[("x-llm-d-model-name-rewrite", "sql-lora-1fdg2")], pieces: &[body!("sql-lora")], subset: None },
    1, body!("sql-lora-1fdg2"), "sql-lora-1fdg2"
)]
#[case::a_body_that_is_no_api_of_ours_passes_unchanged(
    &[(4, 0.2, "foo"), (0, 0.1, "foo"), (10, 0.9, "")],
    Sent { path: "/anything", headers: &[("x-llm-d-inference-objective", "sql-lora-sheddable")], pieces: &["no JSON at all"], subset: None },
    1, "no JSON at all", ""
)]
#[case::nothing_is_shed_by_default(
    &[(6, 0.2, "foo,sql-lora-1fdg3"), (0, 0.85, "foo"), (10, 0.9, "foo")],
    Sent {
        path: COMPLETIONS,
        headers: &[("x-llm-d-inference-objective", "sql-lora-sheddable"), ("x-llm-d-model-name-rewrite", "sql-lora-1fdg3")],
        pieces: &[body!("sql-lora-sheddable")], subset: None,
    },
    0, body!("sql-lora-1fdg3"), "sql-lora-1fdg3"
)]
#[case::a_body_split_across_chunks(
    &[(4, 0.2, "foo,bar,sql-lora-1fdg3"), (4, 0.85, "foo"), (10, 0.9, "foo")],
    Sent {
        path: COMPLETIONS,
        headers: &[("x-llm-d-model-name-rewrite", "sql-lora-1fdg3")],
        pieces: &[r#"{"max_tokens":100,"model":"sql-lo"#, r#"ra-sheddable","prompt":"test","temperature":0}"#], subset: None,
    },
    0, body!("sql-lora-1fdg3"), "sql-lora-1fdg3"
)]
#[case::the_best_of_a_subset(
    &[(0, 0.2, "foo"), (0, 0.1, "foo"), (10, 0.2, "foo")],
    Sent { path: COMPLETIONS, headers: &[], pieces: &[body!("foo")], subset: Some(&[0, 1, 2]) },
    1, body!("foo"), "foo"
)]
#[case::a_subset_of_which_one_is_there(
    &[(0, 0.2, "foo"), (0, 0.1, "foo"), (10, 0.2, "foo")],
    Sent { path: COMPLETIONS, headers: &[], pieces: &[body!("foo")], subset: Some(&[2, 7]) },
    2, body!("foo"), "foo"
)]
#[case::a_model_that_no_objective_and_no_rewrite_names(
    &[(6, 0.2, "foo"), (5, 0.95, "foo"), (10, 0.9, "foo")],
    Sent { path: COMPLETIONS, headers: &[], pieces: &[r#"{"max_tokens":100,"model":"direct-"#, r#"model","prompt":"test","temperature":0}"#], subset: None },
    0, body!("direct-model"), "direct-model"
)]
#[case::a_model_that_a_rewrite_names(
    &[(0, 0.1, "foo,rewritten-model"), (0, 0.1, "foo"), (0, 0.1, "foo")],
    Sent { path: COMPLETIONS, headers: &[], pieces: &[body!("model-to-be-rewritten")], subset: None },
    0, body!("rewritten-model"), "rewritten-model"
)]
#[case::a_get_without_a_body(
    &[(3, 0.2, ""), (0, 0.1, ""), (10, 0.2, "")],
    Sent { path: "/v1/models", headers: &[], pieces: &[], subset: None },
    1, "", ""
)]
#[tokio::test(flavor = "multi_thread")]
async fn a_request_goes_to_the_pod(
    #[case] pods: &[Pod],
    #[case] sent: Sent,
    #[case] pod: usize,
    #[case] body: &str,
    #[case] target: &str,
) {
    let cluster = Cluster::of(pods).await;
    let mut stream = Stream::of(&cluster.picker, &sent.steps(&cluster)).await;
    let pieces = usize::from(!sent.pieces.is_empty());
    stream.until(|replies| replies.destination().is_some() && replies.count("rb") >= pieces).await;
    let replies = stream.finish().await;
    assert_eq!(replies.first_choice(), cluster.address(pod).to_string(), "{}", table(&cluster).await);
    assert_eq!(String::from_utf8(replies.body()).unwrap(), body);
    assert_eq!(replies.metadata("pilotfish", "target_model").unwrap(), target);
    if pieces > 0 {
        assert_eq!(replies.kinds()[0], "rh", "headers are answered before the body");
        assert_eq!(replies.ends(), [replies.pieces().len() - 1]);
    }
    assert!(replies.removed().contains(&"x-llm-d-model-name-rewrite") || !body.contains("12345"));
}

async fn table(cluster: &Cluster) -> String {
    cluster.picker.json("/debug/decisions").await["decisions"][0]["legs"].to_string()
}

const IDLE: &[Pod] = &[(0, 0.2, ""), (0, 0.1, ""), (10, 0.2, "")];

#[rstest]
#[case::no_pod(&[], Sent { path: "/", ..Sent::default() }, 503, "no-endpoints", Some("rejected-no-endpoints"))]
#[case::no_model(
    IDLE,
    Sent { path: COMPLETIONS, pieces: &[r#"{"prompt":"hello"}"#], ..Sent::default() },
    400, "malformed-body", None
)]
#[case::no_json(
    IDLE,
    Sent { path: COMPLETIONS, pieces: &["no healthy upstream"], ..Sent::default() },
    400, "malformed-body", None
)]
#[case::a_subset_that_matches_nothing(
    IDLE,
    Sent { path: COMPLETIONS, pieces: &[body!("foo")], subset: Some(&[9]), ..Sent::default() },
    503, "no-endpoints", Some("rejected-no-endpoints")
)]
#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_refused(
    #[case] pods: &[Pod],
    #[case] sent: Sent,
    #[case] status: i32,
    #[case] reason: &str,
    #[case] dropped: Option<&str>,
) {
    let cluster = Cluster::of(pods).await;
    let replies = run(&cluster.picker, &sent.steps(&cluster)).await;
    let refused = replies.refused();
    assert_eq!((refused.status(), refused.reason().as_str()), (status, reason), "{}", refused.message());
    assert_eq!(refused.header("x-llm-d-request-dropped-reason").as_deref(), dropped);
}

/// Streams without a request phase, as llm-d's tests send them. Bodies pass byte by byte; where they are cut is ours.
#[rstest]
#[case::in_two_chunks("application/json", &[r#"{"max_tokens":100,"model":"sql-lo"#, r#"ra-sheddable","prompt":"test"}"#])]
#[case::that_is_no_json("application/json", &["no healthy upstream"])]
#[case::that_ends_with_an_empty_chunk("application/json", &[r#"{"max_tokens":100,"prompt":"test"}"#, ""])]
#[tokio::test(flavor = "multi_thread")]
async fn a_response_passes(#[case] kind: &str, #[case] pieces: &[&str]) {
    let cluster = Cluster::of(IDLE).await;
    let replies = run(&cluster.picker, &response(kind, pieces)).await;
    assert_eq!(replies.kinds()[0], "sh", "{replies:?}");
    assert_passed(&replies, pieces);
}

/// The steps of a response in pieces.
fn response(kind: &str, pieces: &[&str]) -> Vec<Value> {
    let mut steps =
        vec![json!({"sh": {"headers": [[":status", "200"], ["content-type", kind]], "eos": false}})];
    let last = pieces.len() - 1;
    steps
        .extend(pieces.iter().enumerate().map(|(at, text)| json!({"sb": {"text": text, "eos": at == last}})));
    steps
}

fn assert_passed(replies: &Replies, pieces: &[&str]) {
    assert_eq!(String::from_utf8(replies.response_body()).unwrap(), pieces.concat());
    let ends: Vec<bool> = replies.response_pieces().iter().map(|(_, end)| *end).collect();
    assert_eq!(ends.iter().filter(|end| **end).count(), 1, "{ends:?}");
    assert_eq!(ends.last(), Some(&true));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tokens_of_a_streamed_response_are_counted_and_its_events_pass() {
    let cluster = Cluster::of(IDLE).await;
    let pieces = [
        "data: {\"choices\":[{\"text\":\"a\"}],\"model\":\"foo\"}\n\n",
        "data: {\"choices\":[],\"model\":\"foo\",\"usage\":{\"prompt_tokens\":7,\"total_tokens\":17,\"completion_tokens\":10}}\n\n",
        "data: [DONE]\n\n",
    ];
    let stream = r#"{"model":"foo","prompt":"test","stream":true,"stream_options":{"include_usage":true}}"#;
    let request = [
        json!({"rh": {"headers": [[":method", "POST"], [":path", COMPLETIONS]], "eos": false}}),
        json!({"rb": {"text": stream, "eos": true}}),
    ];
    let mut streams = Stream::of(&cluster.picker, &request).await;
    streams.until_decided().await;
    let replies = streams.respond(&response("text/event-stream", &pieces)).await;
    assert_passed(&replies, &pieces);
    let (name, kind) = ("pilotfish_tokens_total", ("kind", "prompt"));
    cluster.picker.until("prompt tokens are counted", name, &[("pool", "default/pool"), kind], 7.0).await;
}
