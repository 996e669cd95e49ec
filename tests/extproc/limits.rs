//! Token limits through Envoy's rate limit filter, as far as the filter is a gRPC client.

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use serde_json::{Value, json};

use crate::kit::eventually::{eventually, within};
use crate::kit::extproc::{CHAT, Stream, chat, headers, request_of, response, run};
use crate::kit::picker::{Picker, Setup};
use crate::kit::resources::{endpoint, route, server};

const LIMIT: &str = "{inputTokensPerUnit: 100, outputTokensPerUnit: 50, unit: month}";

fn resources(annotations: &str) -> String {
    let limited = route(
        "r",
        &format!(
            "  modelName: m\n  rules: [{{targetModels: [{{modelServerName: ms}}]}}]\n  rateLimit: {LIMIT}\n"
        ),
    );
    let free = route("free", "  modelName: free\n  rules: [{targetModels: [{modelServerName: ms}]}]\n");
    let limited = limited.replace("{name: r}", &format!("{{name: r{annotations}}}"));
    server("ms", "m", "") + &endpoint("p0", "10.0.0.10:8000") + &limited + &free
}

fn by_envoy(annotations: &str) -> Setup {
    Picker::with(&resources(annotations)).flag("--limit-enforcement", "envoy")
}

fn descriptor(limit: &str, user: &str, tokens: &str, hits: u64) -> RateLimitDescriptor {
    let entry = |(key, value): (&str, &str)| Entry { key: key.to_owned(), value: value.to_owned() };
    RateLimitDescriptor {
        entries: [("limit", limit), ("user", user), ("tokens", tokens)].map(entry).into(),
        hits_addend: Some(UInt64Value { value: hits }),
        ..RateLimitDescriptor::default()
    }
}

async fn ask(
    picker: &Picker,
    descriptors: Vec<RateLimitDescriptor>,
) -> Result<RateLimitResponse, tonic::Status> {
    let mut client = RateLimitServiceClient::new(picker.channel());
    let request = RateLimitRequest { domain: "pilotfish".to_owned(), descriptors, hits_addend: 0 };
    let answer = within("an answer", client.should_rate_limit(request)).await;
    answer.map(tonic::Response::into_inner)
}

/// What the filter asks before a request.
fn before(user: &str, input: u64) -> Vec<RateLimitDescriptor> {
    vec![descriptor("default/r", user, "input", input), descriptor("default/r", user, "output", 0)]
}

fn told<'a>(answer: &'a RateLimitResponse, name: &str) -> Option<&'a str> {
    answer
        .response_headers_to_add
        .iter()
        .find(|header| header.key == name)
        .map(|header| header.value.as_str())
}

fn codes(answer: &RateLimitResponse) -> (Code, Vec<Code>) {
    (answer.overall_code(), answer.statuses.iter().map(DescriptorStatus::code).collect())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filter_charges_the_prompt_and_reports_the_output() {
    let picker = by_envoy("").start().await;
    let answer = ask(&picker, before("", 40)).await.unwrap();
    assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok, Code::Ok]));
    let left: Vec<u32> = answer.statuses.iter().map(|status| status.limit_remaining).collect();
    assert_eq!(left, [60, 50]);
    assert_eq!(told(&answer, "x-ratelimit-remaining"), Some("60"));

    // After the response nothing is refused, however much it was.
    let report = vec![descriptor("default/r", "", "output", 80)];
    assert_eq!(codes(&ask(&picker, report).await.unwrap()), (Code::Ok, vec![Code::Ok]));

    let refused = ask(&picker, before("", 1)).await.unwrap();
    assert_eq!(codes(&refused), (Code::OverLimit, vec![Code::Ok, Code::OverLimit]));
    assert_eq!(told(&refused, "x-pilotfish-reason"), Some("limited"));
    assert_eq!(told(&refused, "x-ratelimit-limit"), Some("50"));
    // 31 tokens at 50 in 30 days, but for the milliseconds since.
    let retry: u64 = told(&refused, "retry-after").unwrap().parse().unwrap();
    assert!((1_607_000..=1_607_040).contains(&retry), "{retry}");
    let body: Value = serde_json::from_slice(&refused.raw_body).unwrap();
    assert_eq!(body["error"]["code"], "limited");
    assert!(
        body["error"]["message"].as_str().unwrap().contains("output token limit of ModelRoute default/r")
    );
    let limits = picker.json("/debug/limits").await;
    assert_eq!(
        (&limits["enforcement"], &limits["buckets"][0]["input"]),
        (&json!("envoy"), &json!(60)),
        "nothing was taken"
    );
    assert_eq!(
        picker.metric("pilotfish_limit_rejections_total", &[("model", "m"), ("kind", "output")]).await,
        1.0
    );

    // What was charged too much comes back.
    let mut back = descriptor("default/r", "", "input", 15);
    back.is_negative_hits = true;
    ask(&picker, vec![back]).await.unwrap();
    assert_eq!(picker.json("/debug/limits").await["buckets"][0]["input"], 75);
}

#[tokio::test(flavor = "multi_thread")]
async fn identities_are_told_apart_where_the_route_says_so() {
    let picker = by_envoy(", annotations: {pilotfish.dev/limit-per: identity}").start().await;
    ask(&picker, before("alice", 100)).await.unwrap();
    let of = async |user| codes(&ask(&picker, before(user, 1)).await.unwrap()).0;
    assert_eq!((of("alice").await, of("bob").await, of("").await), (Code::OverLimit, Code::Ok, Code::Ok));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_not_there_limits_nothing_and_is_counted() {
    let picker = by_envoy("").start().await;
    let answer = ask(&picker, vec![descriptor("default/gone", "", "input", 1_000_000)]).await.unwrap();
    assert_eq!(codes(&answer), (Code::Ok, vec![Code::Ok]));
    assert_eq!(picker.metric("pilotfish_limit_descriptors_unknown_total", &[]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_picker_says_what_to_ask_about_and_charges_nothing_itself() {
    let picker = by_envoy("").flag("--identity", "header:x-client").start().await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;
    let request =
        [headers("POST", CHAT, &[("x-client", "alice")], false), json!({"rb": {"text": body, "eos": true}})];
    for _ in 0..3 {
        let replies = run(&picker, &[&request[..], &response(40, 500)].concat()).await;
        let told = |name| replies.metadata("pilotfish", name);
        assert_eq!((told("limit").as_deref(), told("user").as_deref()), (Some("default/r"), Some("alice")));
        assert_eq!((told("output_tokens").as_deref(), told("ratelimit_limit")), (Some("500"), None));
        assert!(told("prompt_tokens").is_some());
        assert_eq!(replies.response_header("x-ratelimit-limit"), None);
    }
    let free = run(&picker, &chat(&body.replace("\"m\"", "\"free\""))).await;
    assert_eq!(free.metadata("pilotfish", "limit"), None);
    assert_eq!(picker.json("/debug/limits").await["buckets"], json!([]));

    // What generates nothing is asked for no output.
    for (path, output) in [(CHAT, Some("default/r")), ("/v1/embeddings", None), ("/tokenize", None)] {
        let request = request_of(path, &[], r#"{"model":"m","input":"hi","messages":[]}"#);
        let replies = run(&picker, &request).await;
        let told = |name| replies.metadata("pilotfish", name);
        assert_eq!((told("limit").as_deref(), told("limit_output").as_deref()), (Some("default/r"), output));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_never_asks_is_missed() {
    let picker = by_envoy("").start().await;
    let degraded = [("source", "limiter")];
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
    for _ in 0..20 {
        assert_eq!(picker.metric("pilotfish_degraded", &degraded).await, 0.0);
        run(&picker, &chat(body)).await;
    }
    assert_eq!(picker.metric("pilotfish_degraded", &degraded).await, 1.0);
    ask(&picker, before("", 1)).await.unwrap();
    assert_eq!(picker.metric("pilotfish_degraded", &degraded).await, 0.0);
}

/// By a path that the engine's server reads otherwise than it is written, or without a model: neither leads past a limit.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_gets_past_a_limit_without_naming_a_model() {
    let picker = Picker::serve(&resources("")).await;
    let refused = async |path: &str, body: &str| {
        let replies = run(&picker, &request_of(path, &[], body)).await;
        replies.immediate().map(|refused| (refused.status(), refused.message().contains("name the model")))
    };
    let prompt = r#"{"prompt":"hi","messages":[]}"#;
    for path in ["/v1/chat/c%6fmpletions", "/generate", "/tokenize", "/v1/audio/transcriptions"] {
        assert_eq!(refused(path, prompt).await, Some((400, true)), "{path}");
    }
    assert_eq!(refused("/generate", r#"{"model":"m","prompt":"hi"}"#).await, None);
    let bodiless = run(&picker, &[headers("GET", "/version", &[], true)]).await;
    assert!(bodiless.destination().is_some(), "what asks for nothing is let through");
    picker.apply(&resources("").replace(&format!("  rateLimit: {LIMIT}\n"), "")).await;
    assert_eq!(refused("/generate", prompt).await, None, "no route has a limit");
}

/// Where response bodies are not shown to us: a stream that says nothing of its usage would cost a guess.
#[tokio::test(flavor = "multi_thread")]
async fn streams_of_routes_that_limit_output_are_asked_for_usage() {
    let picker = Picker::serve(&resources("")).await;
    let asked = async |model: &str| {
        let body = format!(r#"{{"model":"{model}","stream":true,"messages":[]}}"#);
        let replies = run(&picker, &request_of(CHAT, &[], &body)).await;
        String::from_utf8_lossy(&replies.body()).contains("include_usage")
    };
    assert_eq!((asked("m").await, asked("free").await), (true, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn where_the_picker_enforces_the_filter_is_told_to_go() {
    let picker = Picker::serve(&resources("")).await;
    let status = ask(&picker, before("", 40)).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::FailedPrecondition);
    assert!(status.message().contains("--limit-enforcement envoy"), "{}", status.message());
    assert_eq!(picker.json("/debug/limits").await["buckets"], json!([]));
    let body = r#"{"model":"m","messages":[{"role":"user","content":"hi there"}]}"#;
    let replies = run(&picker, &chat(body)).await;
    assert_eq!(replies.metadata("pilotfish", "limit"), None);
    assert_eq!(replies.metadata("pilotfish", "ratelimit_limit").as_deref(), Some("100"));
}

/// The picker's own door, while the resources change under it.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_edited_keeps_its_level_and_one_that_is_removed_is_gone() {
    let picker = Picker::serve(&resources("")).await;
    let ask = async |used| {
        let body = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;
        let replies = run(&picker, &[&chat(body)[..], &response(1, used)].concat()).await;
        replies.immediate().map_or(200, |refused| refused.status())
    };
    assert_eq!((ask(80).await, ask(1).await), (200, 429));
    let edited = |to: &str| resources("").replace(LIMIT, to);
    picker.apply(&edited("{inputTokensPerUnit: 100, outputTokensPerUnit: 5000, unit: month}")).await;
    assert_eq!(ask(1).await, 429, "the debt stays");
    picker.apply(&edited("{inputTokensPerUnit: 100, unit: month}")).await;
    assert_eq!(ask(1).await, 200, "output is not limited any more");
    picker.apply(&resources("").replace(&format!("  rateLimit: {LIMIT}\n"), "")).await;
    assert_eq!(picker.json("/debug/limits").await["limits"], json!([]));
    assert_eq!(ask(1_000_000).await, 200);
    picker.apply(&resources("")).await;
    assert_eq!((ask(1).await, ask(50).await, ask(1).await), (200, 200, 429), "it begins full");
}

/// The profile asks for no token ids; the limit does.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_counted_by_the_tokenizer_of_the_pool() {
    let annotated = "{name: ms, annotations: {pilotfish.dev/tokenizer: small}}";
    let resources = resources("").replace("{name: ms}", annotated);
    let resources = resources.replace("inputTokensPerUnit: 100,", "inputTokensPerUnit: 100000,");
    let setup = Picker::with(&resources).plugins(&["least-request"]);
    let picker = setup.flag("--tokenizer-dir", "tests/data/tokenizers").flag("--tokenize-least-wait", "5s");
    let picker = picker.flag("--tokenize-most-wait", "5s").start().await;
    let expected: Value =
        serde_json::from_str(include_str!("../data/tokenizers/small/expected.json")).unwrap();
    let known =
        expected.as_array().unwrap().iter().find(|known| known["text"] == "Hello world, this is a test");
    let known = known.unwrap();
    let body = json!({"model": "m", "prompt": known["text"], "max_tokens": 1}).to_string();
    let counted = known["with"].as_array().unwrap().len();
    let told = eventually("the tokenizer is loaded", async || {
        let mut stream = Stream::of(&picker, &request_of("/v1/completions", &[], &body)).await;
        stream.until_decided().await;
        let told = stream.replies.metadata("pilotfish", "prompt_tokens").unwrap();
        let free = json!({"model": "free", "prompt": known["text"], "max_tokens": 1}).to_string();
        let estimated = run(&picker, &request_of("/v1/completions", &[], &free)).await;
        (Some(&told) != estimated.metadata("pilotfish", "prompt_tokens").as_ref()).then_some(told)
    })
    .await;
    assert_eq!(told, counted.to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_never_was_answered_costs_its_prompt_and_what_failed_nothing() {
    let body = r#"{"model":"m","messages":[{"role":"user","content":"some words to be read"}]}"#;
    let settled = async |answer: &[Value]| {
        let picker = Picker::serve(&resources("")).await;
        let replies = run(&picker, &[&chat(body)[..], answer].concat()).await;
        let prompt: f64 = replies.metadata("pilotfish", "prompt_tokens").unwrap().parse().unwrap();
        eventually("it is settled", async || {
            let decisions = picker.json("/debug/decisions").await;
            (!decisions["decisions"].as_array().unwrap().is_empty()).then_some(())
        })
        .await;
        let bucket = picker.json("/debug/limits").await["buckets"][0].clone();
        (prompt, bucket["input"].as_f64(), bucket["output"].as_f64())
    };
    let (prompt, input, output) = settled(&[]).await;
    assert_eq!((input, output), (Some(100.0 - prompt), Some(50.0)), "the client left");
    let failed = json!({"sh": {"headers": [[":status", "500"]], "eos": true}});
    let (_, input, output) = settled(&[failed]).await;
    // A full bucket is not shown for long.
    assert!(input.is_none_or(|left| left == 100.0) && output.is_none_or(|left| left == 50.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_finds_no_endpoint_is_not_charged() {
    let picker =
        Picker::serve(&resources("").replace("app: m}}\nspec: {address", "app: other}}\nspec: {address"))
            .await;
    let body = r#"{"model":"m","messages":[{"role":"user","content":"some words to be read"}]}"#;
    for _ in 0..100 {
        let refused = run(&picker, &chat(body)).await;
        assert_eq!(refused.refused().reason(), "no-endpoints");
    }
}
