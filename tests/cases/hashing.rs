//! Bounded-load hashing with many endpoints, after churn, and beside adapters.

use std::collections::VecDeque;

use pilotfish::engine::EngineConfig;
use serde_json::{Value, json};

use crate::kit::case::{input, list, number};
use crate::kit::engine::SimulatedEngine;
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, chat, run_many, serve, shares};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool};

fn prompt(model: &str, prefix: &str) -> String {
    json!({"model": model, "messages": [{"role": "user", "content": prefix}], "max_tokens": 8}).to_string()
}

fn distinct(number: usize) -> Vec<Value> {
    chat(&prompt("m", &format!("{number:08} is a prefix of its own"))).to_vec()
}

fn pods_from(first: usize, n: usize) -> String {
    let one = |at: usize| endpoint(&format!("p{at}"), &format!("10.0.{}.{}:8000", at / 250, at % 250 + 1));
    (first..first + n).map(one).collect::<String>() + &pool()
}

async fn open(picker: &Picker, steps: &[Value]) -> Stream {
    let mut stream = Stream::of(picker, steps).await;
    stream.until_decided().await;
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_07_few_requests_at_many_endpoints_are_one_each() {
    let case = &list(input("SCH-07"), "cases")[0];
    let (pods, requests) = (number(case, "pods"), number(case, "in_flight_target"));
    assert_eq!(
        (case["load_factor"].as_f64(), &case["prefixes"]),
        (Some(1.25), &json!("25% identical, rest unique"))
    );
    let picker = Picker::with(&pods_from(0, pods)).plugins(&["bounded-load-hash"]).start().await;
    let mut streams = Vec::new();
    for at in 0..requests {
        let number = if at % 4 == 0 { 1_000_000 } else { at };
        streams.push(open(&picker, &distinct(number)).await);
    }
    let shares = shares(streams.iter().map(|stream| &stream.replies));
    assert!(shares.values().all(|share| *share == 1), "{shares:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_07_after_churn_prefixes_are_spread_as_before_and_nothing_stays_booked() {
    let case = &list(input("SCH-07"), "cases")[1];
    let live = number(case, "pods");
    assert!(case["churn"].as_str().unwrap().starts_with("add and remove endpoints 2000 times"));
    let picker = Picker::with(&pods_from(0, live)).plugins(&["bounded-load-hash"]).start().await;
    // Each time all ten go and ten others come, among 1,000 addresses that return.
    let mut streams = VecDeque::new();
    for round in 1..=200 {
        for at in 0..live {
            streams.push_back(open(&picker, &distinct(round * live + at)).await);
        }
        picker.apply(&pods_from(round * live % 1_000, live)).await;
        // Half are cancelled, half end in order; some are open over the next changes.
        while streams.len() > 2 * live {
            let stream = streams.pop_front().unwrap();
            if streams.len() % 2 == 0 {
                drop(stream);
            } else {
                stream.finish().await;
            }
        }
    }
    drop(streams);
    picker.until_idle("the churn").await;

    let (addresses, n) = (live, 1_000);
    let spread = shares(&run_many(&picker, 1, (0..n).map(distinct)).await);
    assert_eq!(spread.len(), addresses, "{spread:?}");
    assert!(spread.values().all(|share| *share as f64 <= 1.6 * (n / live) as f64), "{spread:?}");

    let mut streams = Vec::new();
    for number in 0..60 {
        streams.push(open(&picker, &distinct(number)).await);
    }
    let series = picker.metrics().await;
    for (endpoint, share) in shares(streams.iter().map(|stream| &stream.replies)) {
        let booked = series.sum("pilotfish_reserved_requests", &[("endpoint", &endpoint)]);
        assert_eq!(booked, share as f64, "{endpoint}");
    }
    assert_eq!(series.sum("pilotfish_reserved_requests", &[]), 60.0);
    drop(streams);
    picker.until_idle("the last requests").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_07_an_adapter_goes_where_it_is_although_all_are_over_the_bound() {
    let case = &list(input("SCH-07"), "cases")[2];
    assert_eq!(
        (number(case, "pods"), &case["adapter"], &case["all_over_bound"]),
        (2, &json!("only p1 has it"), &json!(true))
    );
    let models = vec!["m".to_owned()];
    let base = EngineConfig { models, ..EngineConfig::default() };
    let engines = [
        SimulatedEngine::start(base.clone()).await,
        SimulatedEngine::start(EngineConfig { loras: vec!["adapter".to_owned()], ..base }).await,
    ];
    let resources = endpoint("p0", &engines[0].address()) + &endpoint("p1", &engines[1].address()) + &pool();
    let picker = Picker::with(&resources).plugins(&["lora-affinity", "bounded-load-hash"]).start().await;
    for engine in &engines {
        eventually("its models are known", async || {
            picker.endpoint(&engine.address()).await["models"].is_array().then_some(())
        })
        .await;
    }
    let mut streams = Vec::new();
    for at in 0..41 {
        let mut steps = distinct(at);
        // All but one at p1.
        let there = engines[usize::from(at > 0)].address();
        steps[0]["metadata"] =
            json!({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [there]}});
        streams.push(open(&picker, &steps).await);
    }
    for number in 0..20 {
        let served = serve(&picker, CHAT, &prompt("adapter", &format!("{number} of an adapter"))).await;
        assert_eq!(served.endpoint(), engines[1].address());
    }
    drop(streams);
    picker.until_idle("all").await;
}
