//! Token limits.

use std::time::Duration;

use pilotfish::admission::limits::Kind;
use pilotfish::decision::Record;
use serde_json::{Value, json};
use tokio::time::{Instant, advance};

use crate::kit::case::{input, list, number, text};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, chat, request_of, response, run_inside};
use crate::kit::logs;
use crate::kit::picker::{Picker, Setup};
use crate::kit::redis::RedisServer;
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

/// A request that costs so many output tokens. Its decision may take a while.
async fn ask_for(picker: &Picker, used: u64) -> Replies {
    let mut stream = Stream::of(picker, &chat(ANY)).await;
    stream.until_decided().await;
    stream.respond(&response(1, used)).await
}

/// The limit of a case, counted in this Redis.
fn counted_in(redis: &RedisServer, spec: &str) -> String {
    let spec = spec.strip_suffix('}').unwrap();
    limited(&format!("{spec}, global: {{redis: {{address: '{}'}}}}}}", redis.address()))
}

/// A picker that counts in this Redis, once it does.
async fn counting(redis: &RedisServer, spec: &str, outage: &str) -> Picker {
    let setup = Picker::with(&counted_in(redis, spec)).flag("--redis-allow", &redis.address());
    let picker = setup.flag("--limit-outage", outage).start().await;
    until_counted(&picker).await;
    picker
}

async fn until_counted(picker: &Picker) {
    eventually("limits are counted in Redis", async || {
        (picker.json("/debug/limits").await["limits"][0]["redis_well"] == true).then_some(())
    })
    .await;
}

const OUTPUT: &str = "kthena:ratelimit:m:output";

/// What Redis holds for the output of the route, once it is this.
async fn until_kept(redis: &RedisServer, expected: f64) {
    let mut last = None;
    eventually(format!("Redis holds {expected} tokens"), async || {
        last = redis.call::<Option<f64>>(&["HGET", OUTPUT, "tokens"]).await;
        (last == Some(expected)).then_some(())
    })
    .await;
}

/// Makes the bucket as old as if it had been written so many seconds ago.
async fn written_ago(redis: &RedisServer, seconds: f64) {
    let time: (f64, f64) = redis.call(&["TIME"]).await;
    let then = (time.0 + time.1 / 1e6 - seconds).to_string();
    redis.call::<()>(&["HSET", OUTPUT, "last_update", &then]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rli_01_replicas_count_together() {
    let case = input("RLI-01");
    assert!(list(case, "variants").contains(&json!("global (Redis) limiter, two replicas")));
    let redis = RedisServer::start().await;
    let spec = spec(text(case, "apply"));
    let (one, other) = (counting(&redis, spec, "closed").await, counting(&redis, spec, "closed").await);
    let steps = list(case, "steps");
    assert!(ask_for(&one, 500).await.destination().is_some());
    until_kept(&redis, -400.0).await;
    let mut fields: Vec<String> = redis.call(&["HKEYS", OUTPUT]).await;
    fields.sort();
    assert_eq!(fields, ["last_update", "tokens"], "as Kthena's routers write them");
    // Full again in 300 s, and a minute more.
    assert!((350..=360).contains(&redis.call::<i64>(&["TTL", OUTPUT]).await));

    written_ago(&redis, at(&steps[1]) as f64).await;
    for picker in [&one, &other] {
        let refused = ask_for(picker, 1).await;
        assert_eq!(refused.refused().status(), 429);
        assert_eq!(refused.refused().header("retry-after").as_deref(), Some("240"));
    }
    written_ago(&redis, at(&steps[2]) as f64).await;
    assert!(ask_for(&other, 1).await.destination().is_some());
}

/// Makes a running Redis fail, or well again.
async fn set_fault(redis: &mut RedisServer, fault: &str, on: bool) {
    match (fault, on) {
        ("connection refused", true) => redis.kill(),
        ("connection refused", false) => redis.restart().await,
        ("accepts, never answers", true) => redis.hang(),
        ("accepts, never answers", false) => redis.go_on(),
        ("answers after 3 s", true) => redis.call::<()>(&["CLIENT", "PAUSE", "3000", "ALL"]).await,
        ("READONLY error", true) => redis.call::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await,
        ("READONLY error", false) => redis.call::<()>(&["REPLICAOF", "NO", "ONE"]).await,
        ("NOSCRIPT after failover", true) => redis.call::<()>(&["SCRIPT", "FLUSH"]).await,
        ("auth error", true) => {
            redis.call::<()>(&["CONFIG", "SET", "requirepass", "secret"]).await;
            redis.call_as("secret", &["CLIENT", "KILL", "TYPE", "normal"]).await;
        }
        ("auth error", false) => redis.call_as("secret", &["CONFIG", "SET", "requirepass", ""]).await,
        ("NOSCRIPT after failover" | "answers after 3 s", false) => {}
        other => panic!("no fault {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rli_03_without_redis_the_operator_decides_and_nobody_waits() {
    logs::capture();
    let case = input("RLI-03");
    assert_eq!(text(case, "apply"), "global limit 1000/min");
    let policies: Vec<&str> = list(case, "policies").iter().map(|policy| policy.as_str().unwrap()).collect();
    assert_eq!(policies, ["open", "closed", "local-fallback"]);
    let times: usize = text(case, "steps").split(' ').next().unwrap().parse().unwrap();
    let (recovers, faults) = list(case, "faults").split_last().unwrap();
    assert_eq!(recovers, "recovers");
    for fault in faults {
        let fault = fault.as_str().unwrap();
        let mut redis = RedisServer::start().await;
        let spec = "{outputTokensPerUnit: 1000, unit: minute}";
        let open = counting(&redis, spec, "open").await;
        let closed = counting(&redis, spec, "closed").await;
        let local = counting(&redis, spec, "local").await;
        // They know that they are three, and so does each of the limit's part.
        eventually("replicas know each other", async || {
            (redis.call::<i64>(&["ZCARD", "pilotfish:limits:replicas"]).await == 3).then_some(())
        })
        .await;
        set_fault(&mut redis, fault, true).await;
        let transparent = fault == "NOSCRIPT after failover";
        let degraded = [("source", "limiter")];
        for (picker, refuses) in [(&open, false), (&closed, !transparent), (&local, false)] {
            for _ in 0..times {
                let replies = ask_for(picker, 1).await;
                if !refuses {
                    assert!(replies.destination().is_some(), "{fault}");
                    continue;
                }
                let refused = replies.refused();
                let reason = refused.reason();
                assert_eq!((refused.status(), &*reason), (503, "limiter-unavailable"), "{fault}");
            }
            assert_eq!(
                picker.metric("pilotfish_degraded", &degraded).await,
                f64::from(u8::from(!transparent)),
                "{fault}"
            );
        }
        if !transparent {
            // A part of the limit is a limit.
            ask_for(&local, 1_000).await;
            assert_eq!(ask_for(&local, 1).await.refused().status(), 429, "{fault}");
            assert!(ask_for(&open, 1_000).await.destination().is_some(), "{fault}");
        }
        set_fault(&mut redis, fault, false).await;
        for picker in [&open, &closed, &local] {
            picker.until("Redis is back", "pilotfish_degraded", &degraded, 0.0).await;
            until_counted(picker).await;
        }
        let lines = logs::lines_with(&["the Redis of token limits does not answer", &redis.address()]);
        assert_eq!(lines.len(), if transparent { 0 } else { 3 }, "{fault}: {lines:?}");
        // Counted together again: what one spends the others miss.
        ask_for(&open, 5_000).await;
        eventually(format!("{fault}: counted together again"), async || {
            let refused =
                async |picker| ask_for(picker, 0).await.immediate().map(|immediate| immediate.status());
            (refused(&closed).await == Some(429) && refused(&local).await == Some(429)).then_some(())
        })
        .await;
    }
}

mod held {
    use futures::{FutureExt, StreamExt};
    use pilotfish::extproc::stream::{Replies as Stream, replies_to};
    use serde_json::Value;
    use std::sync::Arc;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::UnboundedReceiverStream;

    use crate::kit::extproc::message;
    use crate::kit::picker::Picker;
    use crate::kit::replies::Replies;

    /// A request that is decided and waits for its response.
    pub struct Answer {
        to: mpsc::UnboundedSender<Value>,
        from: Stream,
        replies: Replies,
    }

    impl Answer {
        pub fn held(picker: &Picker, steps: &[Value]) -> Self {
            let (to, steps_to_come) = mpsc::unbounded_channel();
            for step in steps {
                to.send(step.clone()).unwrap();
            }
            let messages =
                UnboundedReceiverStream::new(steps_to_come).map(|step: Value| Ok(message(&step, None)));
            let shared = Arc::clone(&picker.app.admin.shared);
            let mut held =
                Self { to, from: replies_to(shared, None, messages.boxed()), replies: Replies::default() };
            while let Some(Some(Ok(reply))) = held.from.next().now_or_never() {
                held.replies.all.push(reply);
            }
            held
        }

        pub async fn finish(self, steps: &[Value]) -> Replies {
            let Self { to, mut from, mut replies } = self;
            for step in steps {
                to.send(step.clone()).unwrap();
            }
            drop(to);
            while let Some(Ok(reply)) = from.next().await {
                replies.all.push(reply);
            }
            replies
        }
    }
}
use held::Answer;
