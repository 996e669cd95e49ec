//! What operators see.

use pilotfish::engine::EngineConfig;
use serde_json::{Value, json};

use crate::kit::case::{input, list, number, text};
use crate::kit::engine::SimulatedEngine;
use crate::kit::extproc::{CHAT, Stream, chat, request_of, run_many, serve_steps};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool, route, server};

#[tokio::test(flavor = "multi_thread")]
async fn obs_01_clients_cannot_make_series() {
    let case = input("OBS-01");
    let burst = &case["burst"];
    let n = number(burst, "n");
    assert_eq!(text(burst, "body"), "chat with model 'junk-{i}'");
    let headers = burst["headers"].as_object().unwrap();
    let request = |model: &str, i: usize| {
        let values: Vec<(&str, String)> = headers
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str().unwrap().replace("{i}", &i.to_string())))
            .collect();
        let pairs: Vec<(&str, &str)> = values.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let body = json!({"model": model, "messages": []}).to_string();
        request_of(CHAT, &pairs, &body).to_vec()
    };
    let resources = server("ms", "m", "")
        + &endpoint("p0", "10.0.0.10:8000")
        + &route("r", "  modelName: m\n  rules: [{targetModels: [{modelServerName: ms}]}]\n");
    let routed = Picker::serve(&resources).await;
    // Without routes a pool serves any name, which reaches one step further.
    let open = Picker::serve(&(pool() + &endpoint("p0", "10.0.0.10:8000"))).await;
    for (context, picker, n) in [("routed", &routed, n), ("any name is served", &open, n / 20)] {
        run_many(picker, 128, [request("m", 0), request("junk-first", 0)]).await;
        picker.until_idle(context).await;
        picker.until(context, "pilotfish_streams", &[], 0.0).await;
        let before = picker.metrics().await.len();
        for from in (0..n).step_by(10_000) {
            let to = (from + 10_000).min(n);
            run_many(picker, 128, (from..to).map(|i| request(&format!("junk-{i}"), i))).await;
        }
        picker.until_idle(context).await;
        let after = picker.metrics().await;
        // A reason or a status seen for the first time may add a few.
        assert!(after.len() <= before + 4, "{context}: {before} series became {}", after.len());
        let (_, page) = picker.get("/metrics").await;
        for word in ["junk", "f-1", "o-1"] {
            assert!(!page.contains(word), "{context}: {word} is on the page");
        }
    }
    // Where requests wait, the fairness ids of clients are flows for as long as they do.
    let queue = "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nqueue: {maxConcurrent: 4}\n";
    let resources = pool() + &endpoint("p0", "10.0.0.10:8000");
    let waiting = Picker::with(&resources).config(queue).switch("--trust-hints").start().await;
    let mut first = Vec::new();
    for i in 0..4 {
        let mut stream = Stream::of(&waiting, &request("m", i)).await;
        stream.until_decided().await;
        first.push(stream);
    }
    let mut others = Vec::new();
    for i in 4..204 {
        others.push(Stream::of(&waiting, &request("m", i)).await);
    }
    waiting.until("each has a flow", "pilotfish_queue_flows", &[], 200.0).await;
    let stay = others.split_off(100);
    drop(others);
    waiting.until("who left has none", "pilotfish_queue_flows", &[], 100.0).await;
    drop(first);
    let served = stay.into_iter().map(|mut stream| async move { stream.until_decided().await.destination() });
    assert!(futures::future::join_all(served).await.iter().all(Option::is_some));
    waiting.until("none is left", "pilotfish_queue_flows", &[], 0.0).await;
    assert_eq!(waiting.metric("pilotfish_queue_requests", &[]).await, 0.0);

    let refused = [("reason", "unknown-model"), ("code", "404")];
    assert_eq!(routed.metric("pilotfish_requests_total", &refused).await, (n + 1) as f64);

    assert_eq!(text(case, "then"), "1000 requests for configured model m");
    let picks = routed.metric("pilotfish_picks_total", &[("pool", "default/ms")]).await;
    run_many(&routed, 128, (0..1_000).map(|i| request("m", i))).await;
    routed.until_idle("the configured model").await;
    assert_eq!(routed.metric("pilotfish_picks_total", &[("pool", "default/ms")]).await, picks + 1_000.0);
}

async fn engine() -> SimulatedEngine {
    // Small blocks, so that even a short prompt fills one.
    SimulatedEngine::start(EngineConfig { block_size: 4, ..EngineConfig::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn obs_03_a_decision_tells_why() {
    let case = input("OBS-03");
    let engines = [engine().await, engine().await];
    let drained = endpoint("p2", "127.0.0.1:1").replace("1:1'}", "1:1', drain: true}");
    let resources =
        [pool(), endpoint("p0", &engines[0].address()), endpoint("p1", &engines[1].address()), drained];
    let picker = Picker::serve(&resources.concat()).await;
    picker.until("the engines are up", "pilotfish_endpoints", &[("state", "up")], 2.0).await;
    let steps = list(case, "steps");
    let (request, answer) = (&steps[..2], &steps[2..]);
    let run = async || {
        let mut stream = Stream::of(&picker, request).await;
        stream.until_decided().await;
        stream.respond(answer).await
    };
    let first = run().await;
    let chosen = first.first_choice().to_owned();
    let decision = picker.decision("r1").await;
    let id = first.metadata("envoy.lb", "x-pilotfish-decision").expect("the decision's name");
    assert_eq!(decision["decision"], id, "metadata and record are joined by it");
    let by_id = picker.json(&format!("/debug/decisions?decision={id}")).await;
    assert_eq!(by_id["decisions"][0]["request_id"], "r1");

    let leg = &decision["legs"][0];
    assert_eq!(leg["picked"][0], chosen, "the winner");
    assert_eq!((&leg["candidates_total"], &leg["complete"]), (&json!(3), &json!(true)));
    let candidates = list(leg, "candidates");
    let row = |address: &str| candidates.iter().find(|row| row["endpoint"] == address).unwrap();
    assert_eq!(row("127.0.0.1:1")["filtered_by"], "health: draining");
    let scored: Vec<&Value> = candidates.iter().filter(|row| row["filtered_by"].is_null()).collect();
    assert_eq!(scored.len(), 2);
    for row in scored {
        let scores = row["scores"].as_object().unwrap();
        assert_eq!(scores.len(), 1, "{row}");
        let mut sum = 0.0;
        for (name, score) in scores {
            assert_eq!(score["type"], *name);
            assert!(score["raw"].is_number(), "{name}: {score}");
            sum += score["used"].as_f64().unwrap() * score["weight"].as_f64().unwrap();
        }
        assert!((row["total"].as_f64().unwrap() - sum).abs() < 1e-5, "the total is the weighted sum: {row}");
    }
    assert!(decision["stages_us"]["decision"].is_u64(), "{}", decision["stages_us"]);
    assert_eq!(decision["usage"], json!({"prompt": 1000, "completion": 1, "source": "scanner"}));
    assert_eq!(
        (&decision["predicted_cached_tokens"], &decision["reported_cached_tokens"]),
        (&json!(0), &json!(0))
    );

    // The second time a hit is predicted and the engine reports none: both totals stand side by side.
    let second = run().await;
    assert_eq!(second.first_choice(), chosen);
    picker.until("both are settled", "pilotfish_usage_total", &[], 2.0).await;
    let of_chosen = [("endpoint", &*chosen)];
    let predicted = picker.metric("pilotfish_predicted_cached_tokens_total", &of_chosen).await;
    let reported = picker.metric("pilotfish_reported_cached_tokens_total", &of_chosen).await;
    assert!(predicted > 0.0 && reported == 0.0, "{predicted} predicted, {reported} reported");
    // And where it does report, it is counted.
    let warm = json!({"usage": {"prompt_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}});
    let mut stream = Stream::of(&picker, request).await;
    let endpoint = stream.until_decided().await.first_choice().to_owned();
    stream.respond(&[answer[0].clone(), json!({"sb": {"text": warm.to_string(), "eos": true}})]).await;
    let label = [("endpoint", &*endpoint)];
    picker.until("it is counted", "pilotfish_reported_cached_tokens_total", &label, 8.0).await;
    let unexplained = serve_steps(&picker, &chat("{\"model\":\"m\",\"messages\":[]}")).await;
    assert!(unexplained.decision["reported_cached_tokens"].is_null(), "unknown is not 0");
}
