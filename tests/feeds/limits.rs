//! Token buckets in a real Redis, beyond what the cases ask.

use serde_json::json;

use crate::kit::eventually::eventually;
use crate::kit::extproc::{Stream, request_of, response};
use crate::kit::picker::{Picker, Setup};
use crate::kit::redis::RedisServer;
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, route, server};

const INPUT: &str = "kthena:ratelimit:m:input";

fn limited(name: &str, redis: &RedisServer, annotations: &str) -> String {
    let limit = format!(
        "{{inputTokensPerUnit: 100, unit: month, global: {{redis: {{address: '{}'}}}}}}",
        redis.address()
    );
    let rule = format!(
        "{{modelMatch: {{headers: {{route: {{exact: {name}}}}}}}, targetModels: [{{modelServerName: ms}}]}}"
    );
    let spec = format!("  modelName: m\n  rules: [{rule}]\n  rateLimit: {limit}\n");
    route(name, &spec).replace(&format!("{{name: {name}}}"), &format!("{{name: {name}{annotations}}}"))
}

fn resources(routes: &str) -> String {
    server("ms", "m", "") + &endpoint("p0", "10.0.0.10:8000") + routes
}

async fn counting(setup: Setup) -> Picker {
    let picker = setup.start().await;
    eventually("limits are counted in Redis", async || {
        let limits = picker.json("/debug/limits").await;
        limits["limits"].as_array().unwrap().iter().all(|limit| limit["redis_well"] == true).then_some(())
    })
    .await;
    picker
}

/// A request by a route with so many tokens of prompt.
async fn ask(picker: &Picker, route: &str, user: &str, tokens: u64) -> Replies {
    let prompt: Vec<u64> = (0..tokens).collect();
    let body = json!({"model": "m", "prompt": prompt, "user": user}).to_string();
    let mut stream = Stream::of(picker, &request_of("/v1/completions", &[("route", route)], &body)).await;
    stream.until_decided().await;
    stream.respond(&response(tokens, 1)).await
}

/// Waits until a bucket holds so many tokens, give or take what comes back in a second.
async fn until_left(redis: &RedisServer, key: &str, expected: f64) {
    let mut last = None;
    eventually(format!("{key} holds {expected}"), async || {
        last = redis.call::<Option<f64>>(&["HGET", key, "tokens"]).await;
        last.is_some_and(|left| (left - expected).abs() < 0.01).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_and_identities_have_buckets_of_their_own() {
    let redis = RedisServer::start().await;
    let per_identity = ", annotations: {pilotfish.dev/limit-per: identity}";
    let routes = limited("a", &redis, "") + &limited("b", &redis, per_identity);
    let setup =
        Picker::with(&resources(&routes)).flag("--redis-allow", &redis.url()).flag("--identity", "user");
    let picker = counting(setup).await;
    for (route, user, tokens) in
        [("a", "x", 10), ("a", "y", 10), ("b", "x", 30), ("b", "y", 40), ("b", "x", 30)]
    {
        assert!(ask(&picker, route, user, tokens).await.destination().is_some());
    }
    until_left(&redis, INPUT, 80.0).await;
    until_left(&redis, "kthena:ratelimit:m@default/b#user:x:input", 40.0).await;
    until_left(&redis, "kthena:ratelimit:m@default/b#user:y:input", 60.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_charge_that_comes_too_late_is_undone() {
    let redis = RedisServer::start().await;
    let setup = Picker::with(&resources(&limited("a", &redis, "")));
    let picker = counting(setup.flag("--redis-allow", &redis.address()).flag("--limit-outage", "open")).await;
    redis.call::<()>(&["CLIENT", "PAUSE", "300", "ALL"]).await;
    for _ in 0..3 {
        assert!(ask(&picker, "a", "", 10).await.destination().is_some(), "nobody waits for it");
    }
    let degraded = [("source", "limiter")];
    picker.until("it is missed", "pilotfish_degraded", &degraded, 1.0).await;
    picker.until("it is back", "pilotfish_degraded", &degraded, 0.0).await;
    assert!(ask(&picker, "a", "", 30).await.destination().is_some());
    until_left(&redis, INPUT, 70.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_redis_would_hold_for_others_is_not_written() {
    let redis = RedisServer::start().await;
    let picker = Picker::serve(&resources(&limited("a", &redis, ""))).await;
    assert!(ask(&picker, "a", "", 100).await.destination().is_some());
    assert_eq!(ask(&picker, "a", "", 1).await.refused().status(), 429, "the limit counts here");
    assert_eq!(redis.call::<i64>(&["DBSIZE"]).await, 0);
    let problems = picker.json("/debug/config").await["resource_problems"].to_string();
    assert!(problems.contains(&format!("{} is not allowed", redis.address())), "{problems}");
}

/// Whatever Kthena's router has left in a bucket counts, and it reads what we leave.
#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_of_kthenas_goes_on() {
    let redis = RedisServer::start().await;
    let time: (f64, f64) = redis.call(&["TIME"]).await;
    let now = format!("{:.6}", time.0 + time.1 / 1e6);
    redis.call::<()>(&["HSET", INPUT, "tokens", "25.5", "last_update", &now]).await;
    let setup = Picker::with(&resources(&limited("a", &redis, "")));
    let picker = counting(setup.flag("--redis-url", &redis.url())).await;
    assert_eq!(ask(&picker, "a", "", 26).await.refused().status(), 429);
    assert!(ask(&picker, "a", "", 20).await.destination().is_some());
    until_left(&redis, INPUT, 5.5).await;
}

/// One key that holds something else is that bucket's trouble alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_another_kind_does_not_take_the_store_away() {
    let redis = RedisServer::start().await;
    redis.call::<()>(&["SET", INPUT, "mine"]).await;
    let routes = limited("a", &redis, "") + &limited("b", &redis, "");
    let picker = counting(Picker::with(&resources(&routes)).flag("--redis-allow", &redis.url())).await;
    assert!(ask(&picker, "a", "", 60).await.destination().is_some());
    picker.until("it is counted", "pilotfish_limit_settlements_lost_total", &[], 1.0).await;
    assert_eq!(ask(&picker, "a", "", 60).await.refused().status(), 429, "counted here");
    assert!(ask(&picker, "b", "", 30).await.destination().is_some());
    until_left(&redis, "kthena:ratelimit:m@default/b:input", 70.0).await;
    assert_eq!(picker.metric("pilotfish_degraded", &[("source", "limiter")]).await, 0.0);
}

/// The name of a service leads to another server, while the old one lives on and only reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_master_that_was_demoted_is_left_for_the_one_behind_its_name() {
    let (old, new) = (RedisServer::start().await, RedisServer::start().await);
    let name = Name::of(&old).await;
    let routes = limited("a", &old, "").replace(&old.address(), &name.address);
    let setup = Picker::with(&resources(&routes)).flag("--redis-allow", &name.address);
    let picker = counting(setup).await;
    assert!(ask(&picker, "a", "", 10).await.destination().is_some());
    until_left(&old, INPUT, 90.0).await;
    name.leads_to(&new);
    let (host, port) = new.address().rsplit_once(':').map(|(h, p)| (h.to_owned(), p.to_owned())).unwrap();
    old.call::<()>(&["REPLICAOF", &host, &port]).await;
    eventually("it counts at the new one", async || {
        new.call::<bool>(&["EXISTS", "pilotfish:limits:replicas"]).await.then_some(())
    })
    .await;
    picker.until("it is well", "pilotfish_degraded", &[("source", "limiter")], 0.0).await;
    eventually("a request is charged there", async || {
        ask(&picker, "a", "", 1).await;
        new.call::<bool>(&["EXISTS", INPUT]).await.then_some(())
    })
    .await;
}

/// A listener that leads new connections to one server or another.
struct Name {
    address: String,
    target: tokio::sync::watch::Sender<String>,
    listens: tokio::task::JoinHandle<()>,
}

impl Name {
    async fn of(server: &RedisServer) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (target, targets) = tokio::sync::watch::channel(server.address());
        let listens = tokio::spawn(async move {
            while let Ok((mut inward, _)) = listener.accept().await {
                let target = targets.borrow().clone();
                tokio::spawn(async move {
                    if let Ok(mut onward) = tokio::net::TcpStream::connect(target).await {
                        let _ = tokio::io::copy_bidirectional(&mut inward, &mut onward).await;
                    }
                });
            }
        });
        Self { address, target, listens }
    }

    fn leads_to(&self, server: &RedisServer) {
        self.target.send_replace(server.address());
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        self.listens.abort();
    }
}
