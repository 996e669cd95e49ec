//! Token limits.

mod redis;

use std::time::Duration;

use pilotfish::admission::limits::Kind;
use pilotfish::decision::Record;
use serde_json::{Value, json};
use tokio::time::{Instant, advance};

use crate::kit::case::{input, list, number, text};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, chat, request_of, response, run_inside};
use crate::kit::held::Answer;
use crate::kit::picker::{Picker, Setup};
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, endpoints, route, server};

const ANY: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;

/// ModelRoute `r` of model `m` with this limit, over endpoints of the cases.
fn limited(limit: &str) -> String {
    server("ms", "m", "")
        + &endpoint("p0", "10.0.0.10:8000")
        + &route(
            "r",
            &format!(
                "  modelName: m\n  rules: [{{targetModels: [{{modelServerName: ms}}]}}]\n  rateLimit: {limit}\n"
            ),
        )
}

/// What the bucket of the route holds.
fn level(picker: &Picker, kind: Kind) -> Option<f64> {
    let shown = picker.app.admin.doors.watched().shown(10);
    assert!(shown.len() <= 1, "{shown:?}");
    shown.first().map(|bucket| *bucket.levels.get(kind))
}

async fn ask(picker: &Picker, body: &str, answer: &[Value]) -> Replies {
    run_inside(picker, &[&chat(body)[..], answer].concat()).await
}

/// The newest decision that was settled.
async fn settled(picker: &Picker) -> Record {
    eventually("the request is settled", async || {
        picker.app.admin.ring.find(1, |_| true).first().map(|record| Record::clone(record))
    })
    .await
}

/// A stream of so many chunks with a word each, and more events.
fn stream_of(chunks: usize, more: &[&str], eos: bool) -> Vec<Value> {
    let mut steps = vec![
        json!({"sh": {"headers": [[":status", "200"], ["content-type", "text/event-stream"]], "eos": false}}),
    ];
    for n in 0..chunks {
        let event = json!({"choices": [{"index": 0, "delta": {"content": format!("w{n}")}}]});
        steps.push(json!({"sb": {"text": format!("data: {event}\n\n"), "eos": false}}));
    }
    for event in more {
        steps.push(json!({"sb": {"text": format!("data: {event}\n\n"), "eos": false}}));
    }
    if eos {
        steps.push(json!({"sb": {"text": "data: [DONE]\n\n", "eos": true}}));
    }
    steps
}

/// The limit that a case applies, as a spec.
fn spec(apply: &str) -> &str {
    apply.strip_prefix("ModelRoute rateLimit: ").unwrap()
}

/// The seconds of `t=241s request`.
fn at(step: &Value) -> u64 {
    let step = step.as_str().unwrap().strip_prefix("t=").unwrap();
    step.split([' ', 's']).next().unwrap().parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn rli_01_output_beyond_the_balance_is_paid_for() {
    let case = input("RLI-01");
    let picker = Picker::serve(&limited(spec(text(case, "apply")))).await;
    let steps = list(case, "steps");
    let used: u64 = steps[0].as_str().unwrap().rsplit_once('=').unwrap().1.parse().unwrap();
    let began = Instant::now();

    let first = ask(&picker, ANY, &response(1, used)).await;
    assert_eq!(first.destination().as_deref(), Some("10.0.0.10:8000"));
    let told = |name| first.response_header(name).unwrap();
    assert_eq!(
        (told("x-ratelimit-limit"), told("x-ratelimit-remaining")),
        ("100".to_owned(), "100".to_owned())
    );
    assert_eq!(told("x-ratelimit-reset"), "0");
    assert_eq!(level(&picker, Kind::Output), Some(100.0 - used as f64));

    advance(Duration::from_secs(at(&steps[1])).saturating_sub(began.elapsed())).await;
    let second = ask(&picker, ANY, &[]).await;
    let refused = second.refused();
    assert_eq!((refused.status(), refused.reason()), (429, "limited".to_owned()));
    assert_eq!(refused.header("retry-after").as_deref(), Some("240"));
    assert_eq!(refused.header("x-ratelimit-limit").as_deref(), Some("100"));
    assert_eq!(refused.header("x-ratelimit-remaining").as_deref(), Some("0"));
    assert_eq!(refused.header("x-ratelimit-reset").as_deref(), Some("299"));
    assert!(
        refused.message().contains("output token limit of ModelRoute default/r"),
        "{}",
        refused.message()
    );

    advance(Duration::from_secs(at(&steps[2])).saturating_sub(began.elapsed())).await;
    assert!(ask(&picker, ANY, &response(1, 1)).await.destination().is_some());
    let rejected = picker.metrics().await;
    assert_eq!(rejected.sum("pilotfish_limit_rejections_total", &[("model", "m"), ("kind", "output")]), 1.0);
    assert_eq!(rejected.sum("pilotfish_limit_rejections_total", &[]), 1.0);
}

#[tokio::test(start_paused = true)]
async fn rli_01_streams_without_usage_are_charged_by_what_was_seen() {
    let case = input("RLI-01");
    let variants = list(case, "variants");
    let aborted = "stream aborted by client after 30 chunks, no usage event";
    assert!(variants.contains(&json!(aborted)) && variants.contains(&json!("stream without usage support")));
    for (chunks, eos) in [(30, false), (40, true)] {
        let picker = Picker::serve(&limited(spec(text(case, "apply")))).await;
        let body =
            r#"{"model":"m","stream":true,"max_tokens":60,"messages":[{"role":"user","content":"hi"}]}"#;
        ask(&picker, body, &stream_of(chunks, &[], eos)).await;
        let record = settled(&picker).await;
        let (usage, source) = record.usage.unwrap();
        assert_eq!((usage.completion, source.name()), (chunks as u64, "estimate"));
        let refilled = 5.0 * 100.0 / 60.0;
        let level = level(&picker, Kind::Output).unwrap();
        assert!((100.0 - chunks as f64..100.0 - chunks as f64 + refilled).contains(&level), "{level}");
    }
    // Never more than was asked for, and never nothing.
    let picker = Picker::serve(&limited(spec(text(case, "apply")))).await;
    let body = r#"{"model":"m","stream":true,"max_tokens":3,"messages":[{"role":"user","content":"hi"}]}"#;
    ask(&picker, body, &stream_of(9, &[], true)).await;
    assert_eq!(settled(&picker).await.usage.unwrap().0.completion, 3);
}

#[tokio::test(start_paused = true)]
async fn rli_01_usage_reported_twice_is_charged_once() {
    let case = input("RLI-01");
    assert!(list(case, "variants").contains(&json!("usage reported twice")));
    let picker = Picker::serve(&limited(spec(text(case, "apply")))).await;
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":500}}"#;
    let body = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[]}"#;
    ask(&picker, body, &stream_of(2, &[usage, usage], true)).await;
    assert_eq!(level(&picker, Kind::Output), Some(-400.0));
}

#[tokio::test(start_paused = true)]
async fn rli_01_a_prompt_larger_than_the_bucket_borrows() {
    let case = input("RLI-01");
    assert!(
        list(case, "variants").contains(&json!("input limit 10/min and a 50-token prompt on a full bucket"))
    );
    let picker = Picker::serve(&limited("{inputTokensPerUnit: 10, unit: minute}")).await;
    let prompt: Vec<u32> = (0..50).collect();
    let request = request_of("/v1/completions", &[], &json!({"model": "m", "prompt": prompt}).to_string());
    let ask = async || run_inside(&picker, &[&request[..], &response(50, 1)].concat()).await;
    assert!(ask().await.destination().is_some(), "it is admitted at last");
    assert_eq!(level(&picker, Kind::Input), Some(-40.0));
    let refused = ask().await;
    assert_eq!(refused.refused().header("retry-after").as_deref(), Some("300"));
    advance(Duration::from_mins(5)).await;
    assert!(ask().await.destination().is_some(), "and again when the bucket is full");
}

#[tokio::test(start_paused = true)]
async fn rli_05_what_is_reserved_of_output() {
    let case = input("RLI-05");
    let (config, bodies) = (&case["config"], case["bodies"].as_object().unwrap());
    let per_unit = number(config, "output_tokens_per_unit") as f64;
    let limit = format!(
        "{{inputTokensPerUnit: {}, outputTokensPerUnit: {per_unit}, unit: {}}}",
        number(config, "input_tokens_per_unit"),
        text(config, "unit"),
    );
    let resources = |limit: &str| {
        let limit = if limit.is_empty() { String::new() } else { format!("  rateLimit: {limit}\n") };
        let rules = "  modelName: m\n  rules: [{targetModels: [{modelServerName: ms}]}]\n";
        server("ms", "m", "") + &endpoints(&case["pods"]) + &route("r", &(rules.to_owned() + &limit))
    };
    let default = number(config, "default_output_estimate");
    let setup = |limit: &str| -> Setup { Picker::with(&resources(limit)) };
    let reserving = |setup: Setup| {
        setup
            .flag("--limit-reserve-output", "max-tokens")
            .flag("--limit-default-output", &default.to_string())
    };
    let expected = [
        ("absent", 200.0),
        ("null", 200.0),
        ("zero", 0.0),
        ("neg", 200.0),
        ("float", 16.0),
        ("string", 200.0),
        ("huge", 1_000.0),
        ("new", 50.0),
        ("both", 50.0),
        ("n3", 150.0),
        ("best_of", 200.0),
        ("responses", 50.0),
    ];
    assert_eq!(expected.len(), bodies.len());
    for (name, reserved) in expected {
        let body = bodies[name].as_str().unwrap();
        let path = match name {
            "best_of" => "/v1/completions",
            "responses" => "/v1/responses",
            _ => CHAT,
        };
        let picker = reserving(setup(&limit)).start().await;
        let request = request_of(path, &[], body);
        // Held open: the reservation stands while the response is awaited.
        let answer = Answer::held(&picker, &request);
        assert_eq!(level(&picker, Kind::Output), Some(per_unit - reserved), "{name}");
        let replies = answer.finish(&response(1, 7)).await;
        assert!(replies.destination().is_some(), "{name} is served");
        assert_eq!(replies.body(), body.as_bytes(), "{name} is passed on as it is");
        assert_eq!(level(&picker, Kind::Output), Some(per_unit - 7.0), "{name} is settled by what was used");
        let again = run_inside(&picker, &[&request[..], &response(1, 7)].concat()).await;
        assert!(again.destination().is_some(), "{name} is served again");
    }
    // Capped by what is left.
    let picker = reserving(setup("{outputTokensPerUnit: 150, unit: minute}")).start().await;
    let answer = Answer::held(&picker, &request_of(CHAT, &[], bodies["absent"].as_str().unwrap()));
    assert_eq!(level(&picker, Kind::Output), Some(0.0));
    answer.finish(&response(1, 1)).await;
    // Without a rule for tokens no body is refused, however its bound is written.
    let picker = setup("").start().await;
    for (name, body) in bodies {
        assert!(ask(&picker, body.as_str().unwrap(), &[]).await.destination().is_some(), "{name}");
    }
}
