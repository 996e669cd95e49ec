//! Prompts computed at one endpoint and outputs generated at another.

use std::collections::{BTreeMap, BTreeSet};

use pilotfish::disagg::{self, Meeting};
use pilotfish::engine::{EngineConfig, Fault};
use pilotfish::state::disaggregation::KvConnector;
use serde_json::{Value, json};

use crate::kit::case::{input, list, number, text};
use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::Setup;
use crate::kit::eventually::eventually;
use crate::kit::extproc::{chat, run};
use crate::kit::http::whole;
use crate::kit::kube::Cluster;
use crate::kit::pairs::{ALWAYS, Pairs, Plan, bodies};
use crate::kit::picker::Picker;

/// Quick engines that serve the model of the cases.
fn plan(connector: &'static str) -> Plan {
    let plan = Plan::new(Setup::FullDuplex, connector);
    Plan { engine: EngineConfig { models: vec!["m".to_owned()], ..plan.engine.clone() }, ..plan }
}

async fn post(stand: &Pairs, path: &str, body: &str) -> (u16, Vec<String>, Vec<String>) {
    stand.clear();
    let answer =
        stand.client.post(path, &[("content-type", "application/json")], whole(body.to_owned())).await;
    let status = answer.rest().await.status;
    (status, bodies(&stand.prefill[0]), bodies(&stand.decode[0]))
}

/// The body with members put in the place of others, or added.
fn with(body: &str, members: &Value) -> String {
    let mut object: serde_json::Map<String, Value> = serde_json::from_str(body).unwrap();
    for (name, value) in members.as_object().unwrap() {
        if value.is_null() {
            object.remove(name)
        } else {
            object.insert(name.clone(), value.clone())
        };
    }
    Value::Object(object).to_string()
}

/// The five variants of the case, each with its path.
fn variants(body: &str, named: &[Value]) -> Vec<(&'static str, String)> {
    let chat = "/v1/chat/completions";
    let variant = |name: &Value| match name.as_str().unwrap() {
        "neither max field" => (chat, with(body, &json!({"max_completion_tokens": null}))),
        "max_tokens and max_completion_tokens both" => (chat, with(body, &json!({"max_tokens": 300}))),
        "/v1/responses max_output_tokens" => (
            "/v1/responses",
            with(
                body,
                &json!({"max_completion_tokens": null, "messages": null, "n": null, "logprobs": null, "stop": null,
                "stream_options": null, "min_tokens": null, "input": "hi", "max_output_tokens": 256}),
            ),
        ),
        "/v1/messages max_tokens" => (
            "/v1/messages",
            with(
                body,
                &json!({"max_completion_tokens": null, "n": null, "logprobs": null, "stop": null,
                "stream_options": null, "min_tokens": null, "max_tokens": 256}),
            ),
        ),
        "response_format json_schema" => {
            let schema =
                json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}});
            (chat, with(body, &json!({"response_format": schema})))
        }
        other => panic!("an unknown variant: {other}"),
    };
    named.iter().map(variant).collect()
}

/// What the case expects of a prefill body, and that nothing else of the client's changed.
fn check_prefill(path: &str, client: &str, prefill: &str) {
    let (client, leg): (Value, Value) =
        (serde_json::from_str(client).unwrap(), serde_json::from_str(prefill).unwrap());
    let own = if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" };
    assert_eq!(leg[own], 1, "{prefill}");
    let members = leg.as_object().unwrap();
    for (name, value) in members.iter().filter(|(name, _)| name.starts_with("max_")) {
        assert_eq!(*value, 1, "{name} in {prefill}");
    }
    assert!(!members.contains_key("min_tokens") && !members.contains_key("stream_options"), "{prefill}");
    assert!(members.get("stream").is_none_or(|stream| *stream == false), "{prefill}");
    assert!(members.get("n").is_none_or(|n| *n == 1), "{prefill}");
    let changed = ["min_tokens", "stream_options", "stream", "n"];
    for (name, value) in client.as_object().unwrap() {
        if !changed.contains(&name.as_str()) && !name.starts_with("max_") {
            assert_eq!(leg[name], *value, "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pd_01_a_prefill_leg_makes_one_token_and_its_errors_are_not_hidden() {
    let case = input("PD-01");
    let body = text(case, "body");
    let mut all = vec![("/v1/chat/completions", body.to_owned())];
    all.extend(variants(body, list(case, "variants")));
    assert_eq!(all.len(), 6);

    // Where the picker makes the prefill leg. Several answers are not split with a connector that hands blocks over once.
    let stand = plan("http").start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off")).await;
    for (path, client) in &all {
        let (status, prefill, decode) = post(&stand, path, client).await;
        assert_eq!(
            (status, prefill.len(), &decode[..]),
            (200, 1, std::slice::from_ref(client)),
            "{path} {client}"
        );
        check_prefill(path, client, &prefill[0]);
    }
    let stand = plan("nixl").start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off")).await;
    let (status, prefill, decode) = post(&stand, "/v1/chat/completions", body).await;
    assert_eq!((status, prefill.len(), &decode[..]), (200, 0, &[body.to_owned()][..]), "n is 2");
    for (path, client) in &all {
        let client = with(client, &json!({"n": null}));
        let (status, prefill, decode) = post(&stand, path, &client).await;
        assert_eq!((status, prefill.len(), decode.len()), (200, 1, 1), "{path} {client}");
        check_prefill(path, &client, &prefill[0]);
        let told: Value = serde_json::from_str(&prefill[0]).unwrap();
        assert_eq!(told["kv_transfer_params"], json!({"do_remote_decode": true, "do_remote_prefill": false}));
        let told = decode[0].find(&client[1..]).unwrap_or_else(|| panic!("{} in {}", client, decode[0]));
        let fields = format!("{}}}", decode[0][..told].trim_end_matches(','));
        let fields: serde_json::Map<String, Value> = serde_json::from_str(&fields).unwrap();
        assert_eq!(fields.keys().collect::<Vec<_>>(), ["kv_transfer_params"], "nothing else is added");
    }
    let body = &with(body, &json!({"n": null}));
    // What the prefill engine refuses is told as it said it, and what it fails at is counted.
    let (status, prefill, decode) =
        post(&stand, "/v1/chat/completions", &with(body, &json!({"model": "ghost"}))).await;
    assert_eq!((status, prefill.len(), decode.len()), (404, 1, 0));
    assert_eq!(stand.fell_back("").await, 0.0);
    stand.prefill[0].state.set_fault(Fault::Status500);
    let (status, _, decode) = post(&stand, "/v1/chat/completions", body).await;
    assert_eq!((status, decode), (200, vec![body.to_owned()]));
    assert_eq!(stand.fell_back("engine-error").await, 1.0);

    // Where the decode engine's sidecar does.
    let stand = plan("sidecar").start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off")).await;
    for (path, client) in &all {
        let (status, prefill, decode) = post(&stand, path, client).await;
        assert_eq!((status, prefill.len(), decode), (200, 0, vec![client.clone()]), "{path}");
        let requests = stand.decode[0].state.requests();
        let header = requests.last().unwrap().header("x-prefiller-host-port").map(str::to_owned);
        assert_eq!(header, Some(stand.prefill[0].address()));
    }
}

/// A pod as the case's steps change it.
#[derive(Clone, Debug)]
struct Pod {
    labels: BTreeMap<String, String>,
    address: String,
    ready: bool,
}

impl Pod {
    /// Role and group, if it has both and is ready.
    fn placement(&self) -> Option<(&str, &str)> {
        let label = |name: &str| self.labels.get(name).map(String::as_str);
        label("role").zip(label("g")).filter(|_| self.ready)
    }
}

/// The ModelServer that the case abbreviates, with a connector that shows both choices without a call.
fn model_server(text: &str) -> String {
    let mut selector = text.strip_prefix("ModelServer: workloadSelector ").unwrap().to_owned();
    for name in ["matchLabels", "pdGroup", "prefillLabels", "decodeLabels"] {
        selector = selector.replace(&format!("{name} {{"), &format!("{name}: {{"));
    }
    format!(
        "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n\
         metadata: {{name: ms, annotations: {{pilotfish.dev/kv-connector: sidecar}}}}\nspec:\n  inferenceEngine: vLLM\n  \
         workloadPort: {{port: 8000}}\n  workloadSelector: {selector}\n"
    )
}

/// `P1 g=a role=prefill`.
fn pod_of(text: &str) -> (String, BTreeMap<String, String>) {
    let mut words = text.split(' ');
    let name = words.next().unwrap().to_ascii_lowercase();
    let label =
        |word: &str| word.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).unwrap();
    (name, words.map(label).chain([("app".to_owned(), "pd".to_owned())]).collect())
}

/// Does to the pods what a step says, in the cluster and in what is expected of it.
async fn take(step: &str, cluster: &Cluster, pods: &mut BTreeMap<String, Pod>) {
    if let Some(name) = step.strip_prefix("delete ") {
        let name = name.to_ascii_lowercase();
        cluster.end(&name).await;
        pods.remove(&name);
        return;
    }
    let (name, change) = step.split_once(": ").unwrap();
    let name = name.to_ascii_lowercase();
    let pod = pods.get_mut(&name).unwrap();
    if change == "Ready=False" {
        pod.ready = false;
        cluster.report(&name, pod.address.trim_end_matches(":8000"), false).await;
    } else if let Some(label) = change.strip_prefix("remove label ") {
        pod.labels.remove(label);
        cluster.describe(&name, &json!({"labels": {label: null}})).await;
    } else {
        let (label, values) = change.split_once(' ').unwrap();
        let (from, to) = values.split_once("->").unwrap();
        assert_eq!(pod.labels.insert(label.to_owned(), to.to_owned()).as_deref(), Some(from));
        cluster.describe(&name, &json!({"labels": {label: to}})).await;
    }
}

/// Endpoint, role and group of everything that the debug page shows, in order.
async fn shown(picker: &Picker) -> Vec<(String, Option<String>, Option<String>)> {
    let page = picker.json("/debug/endpoints").await;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let one = |e: &Value| (text(&e["endpoint"]).unwrap(), text(&e["role"]), text(&e["group"]));
    let mut all: Vec<_> = page["endpoints"].as_array().unwrap().iter().map(one).collect();
    all.sort();
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn pd_02_membership_is_what_the_labels_say_now() {
    let case = input("PD-02");
    let cluster = Cluster::namespace().await;
    cluster.apply(&model_server(text(case, "apply"))).await;
    let picker = Picker::of_cluster(&cluster).config(ALWAYS).start().await;
    picker.until_ready().await;
    let (mut pods, mut engines) = (BTreeMap::new(), Vec::new());
    for (host, written) in (1..).zip(list(case, "pods")) {
        let (name, labels) = pod_of(written.as_str().unwrap());
        let ip = cluster.address(host);
        let address = format!("{ip}:8000");
        let config =
            EngineConfig { listen: address.parse().unwrap(), speed: 100.0, ..EngineConfig::default() };
        engines.push(SimulatedEngine::start(config).await);
        cluster.pod(&name, &json!(labels), &ip).await;
        pods.insert(name, Pod { labels, address, ready: true });
    }
    let steps: Vec<&str> = list(case, "steps").iter().map(|step| step.as_str().unwrap()).collect();
    for step in std::iter::once("").chain(steps) {
        if !step.is_empty() {
            take(step, &cluster, &mut pods).await;
        }
        // Membership is a fresh computation, and every pod is there once.
        let mut expected: Vec<_> = pods
            .values()
            .filter(|pod| pod.ready)
            .map(|pod| {
                let (role, group) = pod.placement().unzip();
                (pod.address.clone(), role.map(str::to_owned), group.map(str::to_owned))
            })
            .collect();
        expected.sort();
        eventually(format!("after {step:?}: {expected:?}"), async || {
            (shown(&picker).await == expected).then_some(())
        })
        .await;
        let up = expected.len() as f64;
        picker.until("engines are seen", "pilotfish_endpoints", &[("state", "up")], up).await;

        let placement = |address: &str| pods.values().find(|pod| pod.address == address).unwrap().placement();
        let groups = |role: &str| -> BTreeSet<&str> {
            pods.values()
                .filter_map(Pod::placement)
                .filter(|(is, _)| *is == role)
                .map(|(_, group)| group)
                .collect()
        };
        let pairs = groups("prefill").intersection(&groups("decode")).next().is_some();
        for request in 0..200 {
            let body = format!(
                "{{\"model\":\"tiny\",\"messages\":[{{\"role\":\"user\",\"content\":\"{request}\"}}]}}"
            );
            let replies = run(&picker, &chat(&body)).await;
            let (role, group) = placement(replies.first_choice()).expect("a pod with role and group");
            assert_eq!(role, "decode", "after {step:?}");
            let prefill = replies.set_header("x-prefiller-host-port");
            assert_eq!(prefill.is_some(), pairs, "after {step:?}");
            if let Some(prefill) = prefill {
                assert_eq!(placement(&prefill), Some(("prefill", group)), "after {step:?}");
            }
        }
    }
}

#[test]
fn pd_04_rooms_agree_with_the_rank_and_are_unique() {
    let case = input("PD-04");
    let (size, rank, repeat) =
        (number(case, "dp_size"), number(case, "prefill_dp_rank"), number(case, "repeat"));
    let endpoint = crate::kit::pairs::ranked_endpoint(rank as u16, size as u16);
    let mut rooms = BTreeSet::new();
    for _ in 0..repeat {
        let meeting =
            Meeting { prefill: &endpoint, transfer_id: "t", room_seed: rand::random(), batch: None };
        let fields = disagg::of(KvConnector::Sglang).prefill(&meeting);
        let fields: Value = serde_json::from_str(&format!("{{{}}}", fields.trim_end_matches(','))).unwrap();
        let room = fields["bootstrap_room"].as_i64().expect("a number of 63 bits");
        assert_eq!(room % size as i64, rank as i64);
        assert!(rooms.insert(room), "a room is given once");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pd_04_bootstrap_fields_have_the_shape_of_the_request_in_every_api() {
    let case = input("PD-04");
    let (size, rank) = (number(case, "dp_size") as u32, number(case, "prefill_dp_rank") as u32);
    let written = &case["bodies"];
    let chat = "/v1/chat/completions";
    let messages = with(text(written, "chat"), &json!({"max_tokens": 8}));
    assert_eq!(text(written, "messages"), "/v1/messages shape");
    let generate = "{\"text\":\"hi\",\"sampling_params\":{\"max_new_tokens\":4}}";
    let responses = "{\"model\":\"m\",\"input\":\"hi\"}";
    let cases = [
        (chat, text(written, "chat"), None),
        (chat, text(written, "n"), None),
        ("/v1/completions", text(written, "batch"), Some(2)),
        (chat, text(written, "client_room"), None),
        ("/v1/messages", &messages, None),
        ("/v1/responses", responses, None),
        ("/generate", generate, None),
    ];
    let plan = plan("sglang");
    let engine = EngineConfig { data_parallel: Some((rank, size)), ..plan.engine.clone() };
    let stand = Plan { engine, ranks: Some((rank, size)), ..plan }
        .start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off"))
        .await;
    for (path, body, prompts) in cases {
        let (status, prefill, decode) = post(&stand, path, body).await;
        assert_eq!(
            (status, prefill.len(), decode.len()),
            (200, 1, 1),
            "{path} {body}: {prefill:?} {decode:?}"
        );
        let own: Value = serde_json::from_str(body).unwrap();
        for leg in [&prefill[0], &decode[0]] {
            // Equal names would leave it to the engine which counts.
            assert_eq!(leg.matches("\"bootstrap_room\"").count(), 1, "{leg}");
            let leg: Value = serde_json::from_str(leg).unwrap();
            let rooms = match prompts {
                None => vec![leg["bootstrap_room"].clone()],
                Some(prompts) => {
                    let rooms = leg["bootstrap_room"].as_array().expect("a list").clone();
                    assert_eq!(rooms.len(), prompts, "{leg}");
                    rooms
                }
            };
            for room in rooms {
                assert_eq!(room.as_i64().expect("a number") % i64::from(size), i64::from(rank), "{leg}");
            }
            assert!(!leg.to_string().contains("evil"), "{leg}");
        }
        let decode: Value = serde_json::from_str(&decode[0]).unwrap();
        for (name, value) in
            own.as_object().unwrap().iter().filter(|(name, _)| !name.starts_with("bootstrap_"))
        {
            assert_eq!(decode[name], *value, "{name} is as the client sent it");
        }
        let added: Vec<&String> =
            decode.as_object().unwrap().keys().filter(|name| own.get(*name).is_none()).collect();
        assert!(added.iter().all(|name| name.starts_with("bootstrap_")), "{added:?}");
    }
}
