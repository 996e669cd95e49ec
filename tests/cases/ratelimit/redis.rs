//! Token limits that replicas count together in Redis.

use std::time::Duration;

use serde_json::json;

use super::{ANY, at, limited, spec};
use crate::kit::case::{input, list, text};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{Stream, chat, response};
use crate::kit::logs;
use crate::kit::picker::Picker;
use crate::kit::redis::RedisServer;
use crate::kit::replies::Replies;
use crate::kit::slow::SlowLine;

/// A request that costs so many output tokens. Its decision may take a while.
async fn ask_for(picker: &Picker, used: u64) -> Replies {
    let mut stream = Stream::of(picker, &chat(ANY)).await;
    stream.until_decided().await;
    stream.respond(&response(1, used)).await
}

/// The limit of a case, counted in this Redis.
fn counted_in(redis: &str, spec: &str) -> String {
    let spec = spec.strip_suffix('}').unwrap();
    limited(&format!("{spec}, global: {{redis: {{address: '{redis}'}}}}}}"))
}

/// A picker that counts in this Redis, once it does.
async fn counting(redis: &str, spec: &str, outage: &str) -> Picker {
    let setup = Picker::with(&counted_in(redis, spec)).flag("--redis-allow", redis);
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
    let (one, other) =
        (counting(&redis.address(), spec, "closed").await, counting(&redis.address(), spec, "closed").await);
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
async fn set_fault(redis: &mut RedisServer, line: &SlowLine, fault: &str, on: bool) {
    match (fault, on) {
        ("connection refused", true) => redis.kill(),
        ("connection refused", false) => redis.restart().await,
        ("accepts, never answers", true) => redis.hang(),
        ("accepts, never answers", false) => redis.go_on(),
        ("answers after 3 s", on) => line.set_delay(Duration::from_secs(if on { 3 } else { 0 })),
        ("READONLY error", true) => redis.call::<()>(&["REPLICAOF", "127.0.0.1", "1"]).await,
        ("READONLY error", false) => redis.call::<()>(&["REPLICAOF", "NO", "ONE"]).await,
        ("NOSCRIPT after failover", true) => redis.call::<()>(&["SCRIPT", "FLUSH"]).await,
        ("auth error", true) => {
            redis.call::<()>(&["CONFIG", "SET", "requirepass", "secret"]).await;
            redis.call_as("secret", &["CLIENT", "KILL", "TYPE", "normal"]).await;
        }
        ("auth error", false) => redis.call_as("secret", &["CONFIG", "SET", "requirepass", ""]).await,
        ("NOSCRIPT after failover", false) => {}
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
        let line = SlowLine::to(redis.address()).await;
        let address = if fault == "answers after 3 s" { line.address() } else { redis.address() };
        let open = counting(&address, spec, "open").await;
        let closed = counting(&address, spec, "closed").await;
        let local = counting(&address, spec, "local").await;
        // They know that they are three, and so does each of the limit's part.
        eventually("replicas know each other", async || {
            (redis.call::<i64>(&["ZCARD", "pilotfish:limits:replicas"]).await == 3).then_some(())
        })
        .await;
        set_fault(&mut redis, &line, fault, true).await;
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
            eventually(format!("{fault}: its part is used up"), async || {
                ask_for(&local, 0).await.immediate().map(|refused| assert_eq!(refused.status(), 429))
            })
            .await;
            assert!(ask_for(&open, 1_000).await.destination().is_some(), "{fault}");
        }
        set_fault(&mut redis, &line, fault, false).await;
        for picker in [&open, &closed, &local] {
            picker.until("Redis is back", "pilotfish_degraded", &degraded, 0.0).await;
            until_counted(picker).await;
        }
        let lines = logs::lines_with(&["the Redis of token limits does not answer", &address]);
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
