//! Token limits enforced through Envoy, by the picker and by Envoy's filter, alone and by replicas together.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use futures::future::join_all;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines, with_keys};
use crate::kit::eventually::eventually;
use crate::kit::extproc::CHAT;
use crate::kit::http::Answer;
use crate::kit::picker::Picker;
use crate::kit::redis::RedisServer;
use crate::kit::resources::{APP, route, server};

const ALICE: &str = "sk-alice";
const BOB: &str = "sk-bob";
const OUTPUT: u64 = 5;

/// Who refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    Picker,
    Envoy,
}

impl Door {
    fn flag(self) -> &'static str {
        match self {
            Door::Picker => "picker",
            Door::Envoy => "envoy",
        }
    }

    fn pieces(self) -> &'static [&'static str] {
        match self {
            Door::Picker => &["auth/api-key.yaml"],
            Door::Envoy => &["auth/api-key.yaml", "limits.yaml"],
        }
    }
}

/// Replicas before one engine, and a ModelRoute with a limit.
struct Site {
    door: Door,
    gateway: Gateway,
    pickers: Vec<Picker>,
    _engines: Vec<SimulatedEngine>,
}

fn request(user: Option<&str>) -> Value {
    let mut request = json!({
        "model": "tiny", "max_tokens": OUTPUT, "messages": [{"role": "user", "content": "hello"}],
    });
    if let Some(user) = user {
        request["user"] = json!(user);
    }
    request
}

impl Site {
    /// One replica, or two that count in Redis. `limit` is the ModelRoute's without its unit, which is a month: nothing comes
    /// back while a test runs.
    async fn open(setup: Setup, door: Door, limit: &str, per: &str, redis: Option<&RedisServer>) -> Self {
        let engines = start_engines(1).await;
        let address = redis.map(RedisServer::address);
        let global = address.iter().map(|address| format!(", global: {{redis: {{address: '{address}'}}}}"));
        let global: String = global.collect();
        let spec = format!(
            "  modelName: tiny\n  rules: [{{name: all, targetModels: [{{modelServerName: s}}]}}]\n  \
             rateLimit: {{unit: month, {limit}{global}}}\n"
        );
        let limited = format!("metadata: {{name: r, annotations: {{pilotfish.dev/limit-per: {per}}}}}");
        let route = route("r", &spec).replace("metadata: {name: r}", &limited);
        let resources = endpoints(&engines) + &server("s", APP, "") + &route;
        let mut pickers = Vec::new();
        for _ in 0..if redis.is_some() { 2 } else { 1 } {
            let mut picker = Picker::with(&resources)
                .flag("--identity", "header:x-pilotfish-identity")
                .flag("--limit-enforcement", door.flag())
                .flag("--usage-injection", "always");
            if let Some(address) = &address {
                picker = picker.flag("--redis-allow", address);
            }
            let picker = picker.start().await;
            picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
            pickers.push(picker);
        }
        let grpc: Vec<SocketAddr> = pickers.iter().map(|picker| picker.app.bound.grpc).collect();
        let engine = [engines[0].state.address()];
        let keys = |text: String| with_keys(&text);
        let gateway = Gateway::assembled(setup, door.pieces(), &grpc, &engine, keys).await;
        Self { door, gateway, pickers, _engines: engines }
    }

    async fn ask(&self, key: &str) -> Answer {
        self.gateway.client.chat_with(&[("x-api-key", key)], &request(None)).await
    }

    /// Answers to one after the other, until one is refused.
    async fn until_refused(&self, key: &str) -> (Vec<Answer>, Answer) {
        let mut served = Vec::new();
        for _ in 0..10_000 {
            let answer = self.ask(key).await;
            if answer.status == 429 {
                return (served, answer);
            }
            answer.served();
            served.push(answer);
        }
        panic!("nobody is refused");
    }

    /// Tokens of a kind that some clients were served, side by side, until all were refused. Envoy counts prompts as the
    /// picker does before there is an answer.
    async fn served_to(&self, clients: usize, kind: &str) -> u64 {
        let prompt = self.prompt().await;
        let all = join_all((0..clients).map(|_| self.until_refused(ALICE))).await;
        let served = all.iter().flat_map(|(served, _)| served);
        let tokens = |answer: &Answer| answer.json()["usage"][kind].as_u64().unwrap();
        let before = self.door == Door::Envoy && kind == "prompt_tokens";
        served.map(|answer| if before { prompt } else { tokens(answer) }).sum()
    }

    /// Tokens of a request's prompt, as the picker counts them.
    async fn prompt(&self) -> u64 {
        let decision = self.pickers[0].explain(CHAT, &request(None).to_string()).await;
        decision["prompt_tokens"].as_u64().unwrap()
    }
}

fn number(answer: &Answer, header: &str) -> u64 {
    answer.header(header).unwrap_or_else(|| panic!("{header}: {:?}", answer.headers)).parse().unwrap()
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn every_identity_has_tokens_of_its_own(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(Door::Picker, Door::Envoy)] door: Door,
) {
    let site = Site::open(setup, door, "inputTokensPerUnit: 60", "identity", None).await;
    let prompt = site.prompt().await;
    let (served, refused) = site.until_refused(ALICE).await;
    assert!(served.len() >= 2, "{}", served.len());
    let remaining = served.iter().map(|answer| number(answer, "x-ratelimit-remaining"));
    assert!(remaining.collect::<Vec<_>>().is_sorted_by(|before, after| before > after));
    assert_eq!(number(&served[0], "x-ratelimit-remaining"), 60 - prompt);
    assert!(served.iter().all(|answer| number(answer, "x-ratelimit-limit") == 60));
    assert_eq!(refused.header("x-pilotfish-reason"), Some("limited"), "{refused:?}");
    assert!(number(&refused, "retry-after") > 0 && number(&refused, "x-ratelimit-remaining") < prompt);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    let bobs = request(Some("bob"));
    let as_bob = site.gateway.client.chat_with(&[("x-api-key", ALICE)], &bobs).await;
    assert_eq!(as_bob.status, 429, "whose name stands in the body does not matter");
    site.ask(BOB).await.served();
    site.pickers[0].until_idle("all are answered").await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_was_answered_counts_for_the_next_request(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(Door::Picker, Door::Envoy)] door: Door,
) {
    let site = Site::open(setup, door, "outputTokensPerUnit: 60", "route", None).await;
    let (served, refused) = site.until_refused(ALICE).await;
    // The last may go before what the one before it used is known.
    assert!((12..=14).contains(&served.len()), "{}", served.len());
    assert_eq!(refused.header("x-pilotfish-reason"), Some("limited"));
    assert_eq!(site.ask(BOB).await.status, 429, "a route's tokens are everybody's");
}

/// Within 2 % of what was allowed.
fn check_budget(served: u64, budget: u64) {
    assert!(served.abs_diff(budget) * 50 <= budget, "{served} tokens of {budget}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn replicas_share_one_budget(
    #[values(Setup::StaticFailOpen, Setup::GatewayShaped)] setup: Setup,
    #[values(Door::Picker, Door::Envoy)] door: Door,
    #[values("input", "output")] kind: &str,
) {
    let redis = RedisServer::start().await;
    let budget = 3_000;
    let limit = format!("{kind}TokensPerUnit: {budget}");
    let site = Site::open(setup, door, &limit, "route", Some(&redis)).await;
    let usage = if kind == "input" { "prompt_tokens" } else { "completion_tokens" };
    check_budget(site.served_to(6, usage).await, budget);
    for picker in &site.pickers {
        picker.until_idle("all are answered").await;
        assert!(picker.metric("pilotfish_picks_total", &[]).await > 0.0, "both have decided");
        assert_eq!(picker.metric("pilotfish_degraded", &[("source", "limiter")]).await, 0.0);
    }
}

/// Waits until both replicas know that they are two: until each has given a sign of life after both had.
async fn acquainted(redis: &RedisServer) {
    let signs = async || -> BTreeMap<String, String> {
        let words = ["ZRANGE", "pilotfish:limits:replicas", "0", "-1", "WITHSCORES"];
        let all: Vec<String> = redis.call(&words).await;
        all.chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
    };
    let before = eventually("both live", async || Some(signs().await).filter(|all| all.len() == 2)).await;
    let newer = async || signs().await.iter().all(|(name, time)| before[name] != *time).then_some(());
    eventually("both have looked", newer).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn without_redis_each_replica_counts_its_part(#[values(Door::Picker, Door::Envoy)] door: Door) {
    let mut redis = RedisServer::start().await;
    let budget = 3_000;
    let limit = format!("inputTokensPerUnit: {budget}");
    let site = Site::open(Setup::StaticFailOpen, door, &limit, "route", Some(&redis)).await;
    site.ask(ALICE).await.served();
    acquainted(&redis).await;
    redis.kill();
    let served = site.served_to(6, "prompt_tokens").await;
    // A half each; whoever is refused by one of the two stops.
    assert!(served > budget / 3 && served <= budget + budget / 50, "{served} tokens of {budget}");
    for picker in &site.pickers {
        picker.until("it says so", "pilotfish_degraded", &[("source", "limiter")], 1.0).await;
    }
}
