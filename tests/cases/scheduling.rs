//! From a pool to one endpoint: who is a candidate, and what counts as knowledge.

use serde_json::{Value, json};

use crate::kit::case::{input, list, number};
use crate::kit::engine::{Answer, MetricsPage};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, chat, request_of, run, run_many, serve_steps, shares};
use crate::kit::picker::Picker;
use crate::kit::resources::{addresses, endpoint, pods, pool, route};

/// A chat request restricted to these endpoints.
fn restricted(text: &str, subset: &[&str]) -> Vec<Value> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string();
    let mut steps = chat(&body).to_vec();
    let hint = json!({"x-gateway-destination-endpoint-subset": subset});
    steps[0]["metadata"] = json!({"envoy.lb.subset_hint": hint});
    steps
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_01_a_subset_hint_is_obeyed_in_every_form() {
    let case = input("SCH-01");
    let picker = Picker::serve(&pods(&case["pods"])).await;
    let all = ["10.0.0.10:8000", "10.0.0.11:8000", "10.0.0.12:8000"];
    // The second endpoint has the most to do, and the first holds the prompt.
    let prompt = "a prompt that one endpoint has seen before ".repeat(50);
    let mut busy = Vec::new();
    for n in 0..20 {
        let mut stream = Stream::of(&picker, &restricted(&format!("{n} {prompt}"), &all[1..2])).await;
        stream.until_decided().await;
        busy.push(stream);
    }
    let warm = serve_steps(&picker, &restricted(&prompt, &all[..1])).await;
    assert_eq!(warm.endpoint(), all[0]);

    let variants = list(case, "metadata_variants");
    let allowed: [&[&str]; 7] = [&all, &all, &[], &all[1..2], &[], &all[2..], &all[..2]];
    assert_eq!(variants.len(), allowed.len());
    for (variant, allowed) in variants.iter().zip(allowed) {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": prompt}]}).to_string();
        let mut steps = chat(&body).to_vec();
        if !variant.is_null() {
            steps[0]["metadata"] = variant.clone();
        }
        for _ in 0..10 {
            let replies = run(&picker, &steps).await;
            if allowed.is_empty() {
                assert_eq!(replies.refused().status(), 503, "{variant}");
                assert_eq!(replies.refused().reason(), "no-endpoints", "{variant}");
                continue;
            }
            let choices = replies.choices();
            assert!(choices.iter().all(|choice| allowed.contains(&&**choice)), "{variant}: {choices:?}");
            assert_eq!(choices.len(), allowed.len(), "{variant}: all that are allowed are offered");
        }
    }
    drop(busy);
    picker.until_idle("subset hints").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_02_addresses_are_compared_as_addresses() {
    let case = input("SCH-02");
    let pods_of_case = list(case, "pods");
    let all: Vec<String> = pods_of_case.iter().flat_map(addresses).collect();
    let picker = Picker::serve(&pods(&case["pods"])).await;
    let body = "{\"model\":\"m\",\"messages\":[]}";
    let mut steps = chat(body).to_vec();
    steps[0]["metadata"] = case["metadata"].clone();
    for _ in 0..20 {
        assert_eq!(run(&picker, &steps).await.choices(), ["[fd00::10]:8001"]);
    }
    let seen = async |entry: &str| {
        let mut choices = run(&picker, &restricted("hi", &[entry])).await.choices();
        choices.sort();
        choices
    };
    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        if variant.starts_with("subset entry 'fd00::10'") {
            assert_eq!(seen("fd00::10").await, ["[fd00::10]:8000", "[fd00::10]:8001"], "{variant}");
        } else if variant.contains("other spelling") {
            assert_eq!(seen("[FD00:0:0:0:0:0:0:10]:8001").await, ["[fd00::10]:8001"], "{variant}");
        } else if variant.starts_with("no hint") {
            for _ in 0..20 {
                let choices = run(&picker, &chat(body)).await.choices();
                assert!(choices.iter().all(|choice| all.contains(choice)), "{variant}: {choices:?}");
            }
        } else if variant.starts_with("podIPs") {
            // Which of a pod's addresses serves is written in the Endpoint: it is taken as it stands.
            let dual = Picker::serve(&(pool() + &endpoint("e", "[fd00::5]:8000"))).await;
            assert_eq!(run(&dual, &chat(body)).await.choices(), ["[fd00::5]:8000"], "{variant}");
        } else if variant.starts_with("metrics URL") {
            let page = MetricsPage::start_at("[::1]:0", Answer::page("vllm:num_requests_running 3\n")).await;
            let address = page.address.to_string();
            assert!(address.starts_with("[::1]:"), "{address}");
            let picker = Picker::serve(&(pool() + &endpoint("e", &address))).await;
            eventually(variant, async || {
                (picker.endpoint(&address).await["signals"]["running"]["value"] == 3.0).then_some(())
            })
            .await;
        } else {
            assert!(variant.starts_with("zone id"), "unknown variant {variant}");
            for zone in ["eth0", "2"] {
                let entry = format!("[fe80::1%{zone}]:8000");
                let replies = run(&picker, &restricted("hi", &[&entry])).await;
                assert_eq!(replies.refused().status(), 503, "{variant}: {entry}");
                let zoned = Picker::serve(&(pool() + &endpoint("e", &entry))).await;
                let endpoints = zoned.json("/debug/endpoints").await;
                assert_eq!(list(&endpoints, "endpoints").len(), 0, "{variant}: {entry} is no endpoint");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_13_what_cannot_be_scored_is_spread_evenly() {
    let case = input("SCH-13");
    let burst = &case["burst"];
    let bodies = list(burst, "bodies");
    // Four times the burst, so that a fifth is far outside of chance.
    let n = 4 * number(burst, "n");
    let given = list(case, "pods").to_vec();
    let reversed: Vec<Value> = given.iter().rev().cloned().collect();
    let renamed: Vec<Value> = given
        .iter()
        .zip(["z", "a", "b", "c"])
        .map(|(pod, name)| {
            let mut pod = pod.clone();
            pod["name"] = json!(name);
            pod
        })
        .collect();
    let variants = list(case, "variants");
    assert_eq!(variants[0], "tokenizer endpoint down", "no tokenizer is asked: as given");
    for (context, pods_of_case) in [("as given", given), ("reversed", reversed), ("p0 is last", renamed)] {
        let picker = Picker::with(&pods(&json!(pods_of_case))).plugins(&["prefix-cache"]).start().await;
        let even = |what: &str, replies: &[crate::kit::replies::Replies]| {
            let shares = shares(replies);
            let mean = replies.len() / 4;
            assert_eq!(shares.len(), 4, "{context}, {what}: {shares:?}");
            let within = shares.values().all(|share| share.abs_diff(mean) <= mean / 5);
            assert!(within, "{context}, {what}: {shares:?}");
        };
        for body in bodies {
            let body = body.as_str().unwrap();
            let path = match body {
                chat if chat.contains("messages") => CHAT,
                embed if embed.contains("input") => "/v1/embeddings",
                _ => "/v1/completions",
            };
            let explained = picker.explain(path, body).await;
            let candidates = list(&explained["legs"][0], "candidates");
            assert_eq!(candidates.len(), 4);
            // A prompt is scored, and one sent again belongs to where it was sent first. Without one there is no
            // opinion, which counts as no 0.
            let has_prompt = body != "{\"model\":\"m\"}";
            for candidate in candidates {
                let score = &candidate["scores"]["prefix-cache"];
                assert_eq!(score["raw"].is_null(), !has_prompt, "{context}: {body}: {score}");
            }
            if !has_prompt {
                let many = (0..n).map(|_| request_of(path, &[], body).to_vec());
                even(body, &run_many(&picker, 1, many).await);
                continue;
            }
            let fresh = (0..n).map(|at| {
                // New in its first block, so that nobody holds any of it.
                let new = |text: &str| format!("{at:08} {text}");
                let changed = body
                    .replace("\"a\"", &format!("\"{}\"", new("a")))
                    .replace("\"content\":\"\"", &format!("\"content\":\"{}\"", new("")))
                    .replace("embed me", &new("embed me"));
                request_of(path, &[], &changed).to_vec()
            });
            even(body, &run_many(&picker, 1, fresh).await);
        }
    }
    let picker = Picker::serve(&pods(&case["pods"])).await;
    let scheduler = picker.json("/debug/config").await["scheduler"].clone();
    let scorers = list(&scheduler, "scorers");
    assert_eq!(scorers.len(), 1, "{scheduler}");
    assert!(
        scorers.iter().all(|scorer| scorer["weight"] == 1.0),
        "every weight in force is shown: {scheduler}"
    );
    assert!(scheduler["blocks"]["blockBytes"].is_u64(), "as is how prompts are cut: {scheduler}");
}

/// An Endpoint with any labels.
fn labelled(namespace: &str, name: &str, address: &str, labels: &str) -> String {
    format!(
        "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n\
         metadata: {{name: {name}, namespace: {namespace}, labels: {{{labels}}}}}\nspec: {{address: '{address}'}}\n"
    )
}

fn server_of(namespace: &str, name: &str, label: &str) -> String {
    format!(
        "---\napiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec:\n  inferenceEngine: vLLM\n  \
         workloadSelector: {{matchLabels: {{{label}}}}}\n  workloadPort: {{port: 8000}}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_14_pools_share_no_candidates_and_no_names() {
    let case = input("SCH-14");
    assert_eq!(list(case, "steps").len(), 6, "each step has its check below");
    let pods_of = |pool: &str| list(&case["pools"][pool], "pods");
    // One model in three pools, told apart by a header. C selects what A selects, but for A's second pod.
    let resources = |without: &str| {
        let mut yaml = server_of("default", "a", "app: a") + &server_of("default", "c", "also: c");
        yaml += &server_of("other", "b", "app: b");
        for (namespace, pool, label) in [("default", "A", "app: a"), ("other", "B", "app: b")] {
            for pod in pods_of(pool) {
                let (name, address) = (pod["name"].as_str().unwrap(), &addresses(pod)[0]);
                let labels = match (pool, name) {
                    ("A", "p0") => format!("{label}, also: c"),
                    _ => label.to_owned(),
                };
                if *address != without {
                    yaml += &labelled(namespace, name, address, &labels);
                }
            }
        }
        let rule = |name: &str| {
            format!(
                "  - modelMatch: {{headers: {{x-pool: {{exact: {name}}}}}}}\n    targetModels: [{{modelServerName: {name}}}]\n"
            )
        };
        yaml += &route("ac", &format!("  modelName: m\n  rules:\n{}{}", rule("a"), rule("c")));
        yaml += &route("b", &format!("  modelName: m\n  rules:\n{}", rule("b")))
            .replace("{name: b}", "{name: b, namespace: other}");
        yaml
    };
    // Alone there, A/p0 is where X lands.
    let picker = Picker::with(&resources("10.0.0.11:8000")).small_blocks().start().await;
    let text = "x".repeat(256 - "<|im_start|>user\n<|im_end|>\n".len());
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}]}).to_string();
    let send = async |pool: &str| serve_steps(&picker, &request_of(CHAT, &[("x-pool", pool)], &body)).await;
    let matched = |served: &crate::kit::extproc::Served| served.matched_blocks();

    assert_eq!(send("a").await.endpoint(), "10.0.0.10:8000");
    picker.apply(&resources("")).await;
    let here = send("a").await;
    assert_eq!((here.endpoint(), matched(&here)), ("10.0.0.10:8000", 4));

    let there = send("b").await;
    assert_eq!(matched(&there), 0, "the other pool holds nothing");
    let foreign = there.replies.choices();
    assert!(foreign.iter().all(|choice| choice.starts_with("10.0.1.")), "{foreign:?}");
    assert_eq!(there.decision["pool"], "other/b");

    picker.apply(&resources("10.0.1.10:8000")).await;
    let gone = send("b").await;
    assert_eq!(gone.replies.choices(), ["10.0.1.11:8000"], "the pod that was deleted is no candidate");
    let still = send("a").await;
    assert_eq!(
        (still.endpoint(), matched(&still)),
        ("10.0.0.10:8000", 4),
        "its namesake keeps what it holds"
    );

    let both = send("c").await;
    assert_eq!(both.replies.choices(), ["10.0.0.10:8000"], "only its own candidates");
    assert_eq!(matched(&both), 4, "what the endpoint holds is a fact about the endpoint");
    assert_eq!(both.decision["pool"], "default/c");
    let metrics = picker.metrics().await;
    assert_eq!(metrics.sum("pilotfish_picks_total", &[("pool", "default/c")]), 1.0);
    picker.until_idle("pools").await;
}
