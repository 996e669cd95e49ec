//! Spreading load: bursts, hot prompts, and endpoints of which little is known.

use std::collections::BTreeMap;

use clap::Parser;
use pilotfish::args::{Args, Command};
use serde_json::{Value, json};

use crate::kit::case::{input, list, number};
use crate::kit::engine::{Answer, MetricsPage};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, chat, request_of, response, run, serve_steps};
use crate::kit::logs;
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pods, pool};

pub const IDLE: &str = "process_start_time_seconds 1\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n\
                    vllm:kv_cache_usage_perc 0\n";

/// Endpoints that answer scrapes with these pages, in one pool.
pub async fn scraped(pages: &[Answer]) -> (Vec<MetricsPage>, String) {
    let mut servers = Vec::new();
    let mut resources = pool();
    for (at, answer) in pages.iter().enumerate() {
        let server = MetricsPage::start(answer.clone()).await;
        resources += &endpoint(&format!("p{at}"), &server.address.to_string());
        servers.push(server);
    }
    (servers, resources)
}

pub(super) async fn all_up(picker: &Picker, n: usize) {
    picker.until("all are up", "pilotfish_endpoints", &[("state", "up")], n as f64).await;
    let unknown = [("signal", "running")];
    picker.until("all are scraped", "pilotfish_signal_unknown_endpoints", &unknown, 0.0).await;
}

pub(super) fn prompt(text: &str) -> Vec<Value> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 100});
    chat(&body.to_string()).to_vec()
}

/// Sends all at once and keeps them open; how many went to each endpoint.
async fn burst(picker: &Picker, requests: Vec<Vec<Value>>) -> BTreeMap<String, usize> {
    let opened = requests.iter().map(|steps| async {
        let mut stream = Stream::of(picker, steps).await;
        stream.until_decided().await;
        stream
    });
    let open = futures::future::join_all(opened).await;
    let shares = crate::kit::extproc::shares(open.iter().map(|stream| &stream.replies));
    drop(open);
    picker.until_idle("a burst").await;
    shares
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_03_a_burst_is_spread_although_metrics_stand_still() {
    let case = input("SCH-03");
    let n = number(&case["burst"], "n");
    assert_eq!(number(&case["burst"], "concurrency"), n);
    let endpoints = list(case, "pods").len();
    let mean = n / endpoints;
    let (servers, resources) = scraped(&vec![Answer::page(IDLE); endpoints]).await;
    let words = |words: usize| "word ".repeat(words);
    let distinct = |at: usize| prompt(&format!("{at:08} {}", words(800)));
    // Closer than chance would spread 800 requests, which is within 15 nearly half of the time.
    let even = |context: &str, shares: &BTreeMap<String, usize>| {
        assert_eq!(shares.len(), endpoints, "{context}: {shares:?}");
        assert!(shares.values().all(|share| share.abs_diff(mean) <= 5), "{context}: {shares:?}");
    };

    let picker = Picker::serve(&resources).await;
    all_up(&picker, endpoints).await;
    even("distinct prompts", &burst(&picker, (0..n).map(distinct).collect()).await);

    let variants: Vec<&str> = list(case, "variants").iter().map(|v| v.as_str().unwrap()).collect();
    let shared = words(1_600);
    let with_head = |at: usize| prompt(&format!("{shared} {at:08}"));
    let warm = async |picker: &Picker, server: &MetricsPage| {
        let mut steps = prompt(&shared);
        let subset = json!({"x-gateway-destination-endpoint-subset": [server.address.to_string()]});
        steps[0]["metadata"] = json!({"envoy.lb.subset_hint": subset});
        serve_steps(picker, &steps).await;
    };
    assert_eq!(variants[0], "all share one 2000-token prefix that every pod has cached");
    let picker = Picker::serve(&resources).await;
    all_up(&picker, endpoints).await;
    for server in &servers {
        warm(&picker, server).await;
    }
    even(variants[0], &burst(&picker, (0..n).map(with_head).collect()).await);

    assert_eq!(variants[1], "power-of-two policy");
    let plugins = ["outstanding-tokens", "least-request", "two-choices"];
    let picker = Picker::with(&resources).plugins(&plugins).start().await;
    all_up(&picker, endpoints).await;
    even(variants[1], &burst(&picker, (0..n).map(distinct).collect()).await);

    assert_eq!(variants[2], "prefix-cache policy with one warm pod");
    let picker = Picker::serve(&resources).await;
    all_up(&picker, endpoints).await;
    warm(&picker, &servers[0]).await;
    let shares = burst(&picker, (0..n).map(with_head).collect()).await;
    let others: Vec<usize> =
        servers[1..].iter().map(|s| shares.get(&s.address.to_string()).copied().unwrap_or(0)).collect();
    assert!(shares[&servers[0].address.to_string()] <= 2 * mean, "{}: {shares:?}", variants[2]);
    let (least, most) = (others.iter().min().unwrap(), others.iter().max().unwrap());
    assert!(*least > 0 && *most as f64 / *least as f64 <= 1.35, "{}: {shares:?}", variants[2]);
}

/// Sixty requests are open on one endpoint when the burst comes: what is open there counts, which turns taken in order
/// would not see.
#[tokio::test(flavor = "multi_thread")]
async fn sch_03_a_burst_levels_what_was_open_before() {
    let case = input("SCH-03");
    let endpoints = list(case, "pods").len();
    let (servers, resources) = scraped(&vec![Answer::page(IDLE); endpoints]).await;
    let distinct = |at: usize| prompt(&format!("{at:08} {}", "word ".repeat(800)));
    let picker = Picker::serve(&resources).await;
    all_up(&picker, endpoints).await;
    let crowded = servers[0].address.to_string();
    let mut open = Vec::new();
    for at in 0..60 {
        let mut steps = distinct(1_000_000 + at);
        steps[0]["metadata"] =
            json!({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [&crowded]}});
        let mut stream = Stream::of(&picker, &steps).await;
        stream.until_decided().await;
        open.push(stream);
    }
    let reserved = async |endpoint: &str| {
        picker.metric("pilotfish_reserved_requests", &[("endpoint", endpoint)]).await as usize
    };
    assert_eq!(reserved(&crowded).await, 60);
    for at in 0..number(&case["burst"], "n") {
        let mut stream = Stream::of(&picker, &distinct(at)).await;
        stream.until_decided().await;
        open.push(stream);
    }
    let mut totals = Vec::new();
    for server in &servers {
        totals.push(reserved(&server.address.to_string()).await);
    }
    let (least, most) = (totals.iter().min().unwrap(), totals.iter().max().unwrap());
    assert_eq!(totals.iter().sum::<usize>(), 860);
    assert!(*most as f64 / *least as f64 <= 1.35, "open and new together: {totals:?}");
    drop(open);
    picker.until_idle("the burst").await;
}

/// Requests in a closed loop, so many at a time, each answered before the next; where they went.
async fn closed_loop(picker: &Picker, at_once: usize, requests: Vec<Vec<Value>>) -> Vec<String> {
    use futures::StreamExt;
    let served = requests.into_iter().map(|steps| async move {
        let mut stream = Stream::of(picker, &steps).await;
        stream.until_decided().await;
        let chosen = stream.replies.first_choice().to_owned();
        stream.respond(&response(25, 10)).await;
        chosen
    });
    futures::stream::iter(served).buffer_unordered(at_once).collect().await
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_06_a_short_common_head_makes_no_hot_spot() {
    let case = input("SCH-06");
    assert!(case["steps"].as_str().unwrap().starts_with("1000 closed-loop requests, concurrency 64"));
    let picker = Picker::serve(&pods(&case["pods"])).await;
    let head = "twenty tokens shared by all of the requests that are sent to the four pods here ";
    assert_eq!(head.len() / 4, 20);
    let short = (0..1_000).map(|at| prompt(&format!("{head}{at:020}"))).collect();
    let served = closed_loop(&picker, 64, short).await;
    let mut shares = BTreeMap::new();
    for chosen in served {
        *shares.entry(chosen).or_insert(0usize) += 1;
    }
    assert!(shares.values().all(|share| *share <= 350), "{shares:?}");

    let cached = picker.metric("pilotfish_predicted_cached_tokens_total", &[]).await;
    let long = "shared ".repeat(8_000 * 4 / 7);
    let long = (0..200).map(|at| prompt(&format!("{long}{at:020}"))).collect();
    closed_loop(&picker, 64, long).await;
    let hit = picker.metric("pilotfish_predicted_cached_tokens_total", &[]).await - cached;
    // The first request at each of the four may miss; of the rest nine of ten find the whole head.
    assert!(hit >= 0.9 * 196.0 * 7_900.0, "{hit} tokens of {} were found", 196 * 8_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_09_what_is_unknown_is_not_saturated() {
    logs::capture();
    let case = input("SCH-09");
    let rows = list(case, "rows");
    assert_eq!((number(&rows[0], "pods"), number(&rows[1], "pods"), number(&rows[2], "pods")), (1, 3, 0));
    let unknown = "pilotfish_signal_unknown_endpoints";
    let waiting = [("signal", "waiting")];

    // Row 1: the only endpoint says nothing any more.
    let (servers, resources) = scraped(&[Answer::page(IDLE)]).await;
    let picker = Picker::with(&resources).flag("--staleness", "600ms").start().await;
    all_up(&picker, 1).await;
    servers[0].answer(Answer::Hang);
    picker.until("row 1: its signals are stale", unknown, &waiting, 1.0).await;
    let age = picker.metric("pilotfish_signal_age_seconds", &waiting).await;
    assert!(age >= 0.6, "row 1: {age}");
    for _ in 0..20 {
        let replies = run(&picker, &prompt("hi")).await;
        assert_eq!(replies.choices(), [servers[0].address.to_string()], "row 1: dispatched at once");
    }
    let address = format!("address=\"{}\"", servers[0].address);
    let warnings = || logs::lines_with(&[&address, "signals of this endpoint are stale"]);
    eventually("row 1: a warning", async || (!warnings().is_empty()).then_some(())).await;
    let asked = servers[0].asked();
    eventually("row 1: another scrape", async || (servers[0].asked() > asked).then_some(())).await;
    assert_eq!(warnings().len(), 1, "row 1: one line, however often it fails");

    // Row 2: one of three says nothing.
    let (servers, resources) = scraped(&[Answer::page(IDLE), Answer::page(IDLE), Answer::page(IDLE)]).await;
    let picker = Picker::with(&resources).flag("--staleness", "600ms").start().await;
    all_up(&picker, 3).await;
    servers[0].answer(Answer::Hang);
    picker.until("row 2: its signals are stale", unknown, &waiting, 1.0).await;
    let shares =
        burst(&picker, (0..300).map(|at| prompt(&format!("{at:08} {}", "word ".repeat(100)))).collect())
            .await;
    let stale = shares.get(&servers[0].address.to_string()).copied().unwrap_or(0);
    assert!(stale > 0, "row 2: it still gets some: {shares:?}");
    let fresh = shares.values().copied().max().unwrap();
    assert!(stale <= fresh, "row 2: fresh ones are not passed over for it: {shares:?}");

    // Row 3: nobody is there.
    let empty = Picker::serve(&pool()).await;
    let replies = run(&empty, &request_of(CHAT, &[], "{\"model\":\"m\",\"messages\":[]}")).await;
    let refused = replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (503, "no-endpoints"));
    assert_eq!(refused.header("x-llm-d-request-dropped-reason").as_deref(), Some("rejected-no-endpoints"));
    assert!(!refused.message().is_empty());

    let Command::Serve(defaults) = Args::try_parse_from(["pilotfish", "serve"]).unwrap().command else {
        panic!("not serve")
    };
    assert!(defaults.staleness >= 3 * defaults.scrape_interval);
}
