//! What engines say of themselves, and what they fail to say.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::kit::case::{input, list, text};
use crate::kit::engine::{Answer, MetricsPage};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, chat, response};
use crate::kit::logs;
use crate::kit::picker::{Picker, Setup};
use crate::kit::resources::{endpoint, pool};

/// Servers of these pages by name, and resources that make them one pool.
async fn serving(pages: &[(&str, Answer)]) -> (BTreeMap<String, MetricsPage>, String) {
    let mut servers = BTreeMap::new();
    let mut resources = pool();
    for (name, answer) in pages {
        let server = MetricsPage::start(answer.clone()).await;
        resources += &endpoint(name, &server.address.to_string());
        servers.insert((*name).to_owned(), server);
    }
    (servers, resources)
}

/// The value of a signal once it is `expected`.
async fn until_signal(picker: &Picker, server: &MetricsPage, signal: &str, expected: f64) {
    let address = server.address.to_string();
    let mut last = Value::Null;
    let what = format!("{signal} of {address} is {expected}");
    eventually(&what, async || {
        last = picker.endpoint(&address).await["signals"][signal]["value"].clone();
        last.as_f64().is_some_and(|value| (value - expected).abs() < 1e-9).then_some(())
    })
    .await;
}

/// Waits until every server was asked so many times more.
async fn more_scrapes(servers: &BTreeMap<String, MetricsPage>, n: u64) {
    for (name, server) in servers {
        let before = server.asked();
        eventually(format!("{n} more scrapes of {name}"), async || {
            (server.asked() >= before + n).then_some(())
        })
        .await;
    }
}

fn histogram(name: &str, sum: f64, count: u32) -> String {
    format!(
        "# TYPE {name} histogram\n{name}_sum{{engine=\"0\",model_name=\"m\"}} {sum}\n{name}_count{{engine=\"0\",model_name=\"m\"}} {count}\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn met_01_renamed_metrics_are_found_and_missing_ones_are_unknown() {
    logs::capture();
    let case = input("MET-01");
    let pages: Vec<(&str, Answer)> =
        ["p0", "p1", "p2", "p3"].map(|name| (name, Answer::page(text(&case["metrics"], name)))).into();
    let (servers, resources) = serving(&pages).await;
    let picker = Picker::with(&resources).plugins(&["kv-cache-utilization-scorer"]).start().await;
    for (name, value) in [("p0", 0.9), ("p1", 0.1), ("p2", 0.9)] {
        until_signal(&picker, &servers[name], "kv_usage", value).await;
    }
    until_signal(&picker, &servers["p3"], "running", 1.0).await;
    more_scrapes(&servers, 3).await;

    let names = [
        ("p0", "vllm:kv_cache_usage_perc"),
        ("p1", "vllm:gpu_cache_usage_perc"),
        ("p2", "vllm:kv_cache_usage_perc"),
    ];
    for (name, metric) in names {
        let scrape = picker.endpoint(&servers[name].address.to_string()).await["scrape"].clone();
        assert_eq!(
            (&scrape["dialect"], &scrape["names"]["kv_usage"]),
            (&json!("vLLM"), &json!(metric)),
            "{name}"
        );
    }
    let silent = servers["p3"].address.to_string();
    let shown = picker.endpoint(&silent).await;
    assert!(shown["signals"]["kv_usage"]["value"].is_null(), "unknown, not 0");
    assert!(list(&shown["scrape"], "missing").contains(&json!("kv_usage")), "{}", shown["scrape"]);
    for (name, missing) in [("p0", 0.0), ("p1", 0.0), ("p2", 0.0), ("p3", 1.0)] {
        let labels = [("endpoint", &*servers[name].address.to_string()), ("metric", "kv_usage")];
        assert_eq!(picker.metric("pilotfish_engine_metric_missing", &labels).await, missing, "{name}");
    }
    let warned = logs::lines_with(&[&format!("address=\"{silent}\""), "metric=\"kv_usage\""]);
    assert_eq!(warned.len(), 1, "one warning for the endpoint: {warned:?}");

    let explained = picker.explain(CHAT, "{\"model\":\"m\",\"messages\":[]}").await;
    let candidates = list(&explained["legs"][0], "candidates");
    let score = |name: &str, member: &str| {
        let address = servers[name].address.to_string();
        let row = candidates.iter().find(|row| row["endpoint"] == address).unwrap();
        row["scores"]["kv-cache-utilization-scorer"][member].as_f64()
    };
    assert_eq!(score("p3", "raw"), None, "it abstains");
    let others: f64 = ["p0", "p1", "p2"].iter().map(|name| score(name, "raw").unwrap()).sum();
    assert!(
        (score("p3", "used").unwrap() - others / 3.0).abs() < 1e-6,
        "and counts as the mean of the others"
    );

    let (old, new) = ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds");
    for variant in list(case, "variants") {
        let (page, expected) = match variant.as_str().unwrap() {
            "vllm:time_per_output_token_seconds only" => (histogram(old, 3.0, 10), 0.3),
            "vllm:inter_token_latency_seconds only" => (histogram(new, 2.0, 10), 0.2),
            "both with different values" => (histogram(old, 3.0, 10) + &histogram(new, 2.0, 10), 0.2),
            other => panic!("unknown variant {other}"),
        };
        let (servers, resources) = serving(&[("p", Answer::page(&page))]).await;
        let picker = Picker::serve(&resources).await;
        until_signal(&picker, &servers["p"], "time_per_output_token", expected).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn met_02_series_of_all_ranks_are_put_together() {
    let case = input("MET-02");
    let first = text(&case["metrics"], "p0");
    let (servers, resources) = serving(&[("p0", Answer::page(first))]).await;
    let server = &servers["p0"];
    let picker = Picker::serve(&resources).await;
    for (signal, value) in
        [("running", 5.0), ("waiting", 7.0), ("kv_usage", 0.95), ("time_to_first_token", 0.2)]
    {
        until_signal(&picker, server, signal, value).await;
    }
    server.answer(Answer::page(text(case, "second_scrape")));
    // The second engine restarted: its 1 s over 2 requests is all that is new.
    until_signal(&picker, server, "time_to_first_token", 0.5).await;
    more_scrapes(&servers, 3).await;
    until_signal(&picker, server, "time_to_first_token", 0.5).await;

    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        if variant.starts_with("two model_name values") {
            // A process serves its models from one queue and one cache: what is asked for is the load of the process.
            let page = "vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 2\n\
                        vllm:num_requests_running{engine=\"0\",model_name=\"other\"} 4\n\
                        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.3\n\
                        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"other\"} 0.6\n";
            let (servers, resources) = serving(&[("p", Answer::page(page))]).await;
            let picker = Picker::serve(&resources).await;
            until_signal(&picker, &servers["p"], "running", 6.0).await;
            until_signal(&picker, &servers["p"], "kv_usage", 0.6).await;
        } else {
            assert!(variant.starts_with("per-rank endpoints"), "unknown variant {variant}");
            let rank = |rank: u32, running: u32| {
                Answer::page(&format!(
                    "vllm:num_requests_running{{engine=\"{rank}\",model_name=\"m\"}} {running}\n"
                ))
            };
            let (servers, resources) = serving(&[("r0", rank(0, 2)), ("r1", rank(1, 3))]).await;
            let picker = Picker::serve(&resources).await;
            until_signal(&picker, &servers["r0"], "running", 2.0).await;
            until_signal(&picker, &servers["r1"], "running", 3.0).await;
        }
    }
}

/// How each endpoint of MET-03 answers.
fn answers(case: &Value) -> Vec<(&str, Answer)> {
    let scrapes = case["scrapes"].as_object().unwrap().iter();
    scrapes
        .map(|(name, said)| {
            let answer = match said.as_str().unwrap() {
                "HTTP 500" => Answer::Status(500),
                "HTTP 200, empty body" => Answer::page(""),
                "HTTP 200, text/html '<html>'" => Answer::Page("text/html", "<html>".to_owned()),
                "hangs 30 s" => Answer::Hang,
                "20 MB of unrelated series" => {
                    let line = "some_series_of_another_program{label=\"a value of some length\"} 1234567\n";
                    Answer::page(&line.repeat(20_000_000 / line.len()))
                }
                "good" => Answer::page(
                    "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n",
                ),
                page => Answer::page(page),
            };
            (name.as_str(), answer)
        })
        .collect()
}

/// Answers 500 requests, 16 at a time, and counts where they went.
async fn closed_loop(picker: &Picker) -> BTreeMap<String, usize> {
    use futures::StreamExt;
    let served = (0..500).map(|at| async move {
        let body =
            json!({"model": "m", "messages": [{"role": "user", "content": format!("{at:08} some words")}]});
        let mut stream = Stream::of(picker, &chat(&body.to_string())).await;
        stream.until_decided().await;
        let chosen = stream.replies.first_choice().to_owned();
        stream.respond(&response(5, 5)).await;
        chosen
    });
    let mut shares = BTreeMap::new();
    for chosen in futures::stream::iter(served).buffer_unordered(16).collect::<Vec<_>>().await {
        *shares.entry(chosen).or_insert(0) += 1;
    }
    shares
}

#[tokio::test(flavor = "multi_thread")]
async fn met_03_broken_pages_make_no_endpoint_look_idle() {
    let case = input("MET-03");
    assert_eq!(text(case, "steps"), "500 closed-loop requests");
    let (servers, resources) = serving(&answers(case)).await;
    // Scorers of what engines report beside the scorer of our own bookings.
    let plugins = ["kv-cache-utilization-scorer", "queue-scorer", "least-request"];
    let setups: [(&str, Setup); 2] = [
        ("the default profile", Picker::with(&resources)),
        ("scorers of engine metrics", Picker::with(&resources).plugins(&plugins)),
    ];
    for (context, setup) in setups {
        let picker = setup.start().await;
        until_signal(&picker, &servers["p7"], "waiting", 0.0).await;
        until_signal(&picker, &servers["p6"], "waiting", 3.0).await;
        until_signal(&picker, &servers["p6"], "running", 1.0).await;
        for name in ["p0", "p1", "p2", "p3", "p4", "p5"] {
            let shown = picker.endpoint(&servers[name].address.to_string()).await;
            for signal in ["running", "waiting", "kv_usage"] {
                assert!(shown["signals"][signal]["value"].is_null(), "{context}: {name} {signal}");
            }
        }
        let shares = closed_loop(&picker).await;
        let share = |name: &str| shares.get(&servers[name].address.to_string()).copied().unwrap_or(0);
        let good = share("p7");
        assert!(good > 0, "{context}: {shares:?}");
        for name in ["p0", "p1", "p2", "p3", "p4"] {
            assert!(share(name) as f64 <= 1.5 * good as f64, "{context}: {name} of {shares:?}");
        }
        let decisions = picker.json("/debug/decisions?limit=500").await;
        for decision in list(&decisions, "decisions") {
            for row in list(&decision["legs"][0], "candidates") {
                assert!(row["total"].is_number(), "{context}: no total is NaN: {row}");
            }
        }
    }

    // An endpoint that hangs delays nobody.
    let picker = Picker::serve(&resources).await;
    let (hanging, good) = (servers["p4"].asked(), servers["p7"].asked());
    eventually("ten scrapes of the good one", async || (servers["p7"].asked() >= good + 10).then_some(()))
        .await;
    assert!(servers["p4"].asked() - hanging < 10, "the one that hangs is asked less often");

    // The last good value stays until it is stale.
    let (address, server) = (servers["p6"].address.to_string(), &servers["p6"]);
    until_signal(&picker, server, "waiting", 3.0).await;
    let unknown =
        async || picker.metric("pilotfish_signal_unknown_endpoints", &[("signal", "waiting")]).await;
    let before = unknown().await;
    server.answer(Answer::Status(500));
    let asked = server.asked();
    eventually("two failed scrapes", async || (server.asked() >= asked + 2).then_some(())).await;
    assert_eq!(picker.endpoint(&address).await["signals"]["waiting"]["value"], 3.0, "kept");
    assert_eq!(unknown().await, before, "and believed");
    eventually("it is stale", async || (unknown().await >= before + 1.0).then_some(())).await;
}
