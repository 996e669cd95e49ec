//! Session affinity without an Envoy: one stream a request, its four replies looked at.

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::extproc::{CHAT, request_of, response, run};
use crate::kit::logs;
use crate::kit::picker::{Picker, Setup};
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, pool};

const TOKEN: &str = "x-session-token";

fn three_endpoints() -> String {
    pool() + &(1..=3).map(|at| endpoint(&format!("e{at}"), &format!("10.0.0.{at}:8000"))).collect::<String>()
}

fn affinity(kind: &str, parameters: &str) -> Setup {
    Picker::with(&three_endpoints()).plugins(&[&format!("{kind} {parameters}"), "random-picker"])
}

/// A picker that prefers the bound endpoint or has no other; both pin, where no other scorer is there.
async fn picker(kind: &str, parameters: &str) -> Picker {
    let picker = if kind == "session-affinity-scorer" {
        Picker::with(&three_endpoints()).plugins(&[&format!("{kind} {parameters}")])
    } else {
        affinity(kind, parameters)
    };
    picker.start().await
}

async fn chat(picker: &Picker, headers: &[(&str, &str)]) -> Replies {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let steps: Vec<Value> = request_of(CHAT, headers, &body).into_iter().chain(response(3, 1)).collect();
    run(picker, &steps).await
}

#[rstest]
#[case("session-affinity-filter")]
#[case("session-affinity-scorer")]
#[tokio::test(flavor = "multi_thread")]
async fn a_response_carries_a_token_and_the_next_request_is_pinned(#[case] kind: &str) {
    let picker = picker(kind, "{}").await;
    let first = chat(&picker, &[]).await;
    let token = first.response_header(TOKEN).expect("a token");
    for _ in 0..20 {
        let next = chat(&picker, &[(TOKEN, &token)]).await;
        assert_eq!(next.first_choice(), first.first_choice());
        assert_eq!(next.response_header(TOKEN).as_ref(), Some(&token));
        assert_eq!(next.removed(), [TOKEN], "the engine does not see it");
    }
    assert_eq!(picker.metric("pilotfish_sessions_total", &[("outcome", "absent")]).await, 1.0);
    assert_eq!(picker.metric("pilotfish_sessions_total", &[("outcome", "kept")]).await, 20.0);
}

/// Without a prefill leg nobody is told of one.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_decider_there_is_no_prefill_token() {
    let config = "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: session-affinity-filter, name: session-affinity-decode}
- type: session-affinity-filter
  name: session-affinity-prefill
  parameters: {profileName: prefill, encodedEndpointHeaderConfig: {header: x-session-token-prefill}}
- type: queue-scorer
schedulingProfiles:
- {name: default, plugins: [{pluginRef: session-affinity-decode}, {pluginRef: queue-scorer}]}
- {name: prefill, plugins: [{pluginRef: session-affinity-prefill}, {pluginRef: queue-scorer}]}
";
    let picker = Picker::with(&three_endpoints()).config(config).start().await;
    let replies = chat(&picker, &[]).await;
    assert!(replies.response_header(TOKEN).is_some());
    assert_eq!(replies.response_header("x-session-token-prefill"), None);
}

#[rstest]
#[case("session-affinity-filter")]
#[case("session-affinity-scorer")]
#[tokio::test(flavor = "multi_thread")]
async fn of_a_header_and_an_agents_session_the_header_wins(#[case] kind: &str) {
    let config = format!(
        "apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: agent-identity
- type: {kind}
  parameters:
    strategy: session_id
    sessionIdConfig:
      sources: [{{header: x-session-id}}, {{attribute: agent-identity}}]
"
    );
    let picker = Picker::with(&three_endpoints()).config(&config).start().await;
    let agent = ("x-claude-code-session-id", "agent");
    let bound = chat(&picker, &[agent]).await.first_choice().to_owned();
    // Another session by the header, though the agent's is bound: find one that is bound elsewhere.
    let mut elsewhere = None;
    for at in 0..100 {
        let id = format!("chat-{at}");
        let replies = chat(&picker, &[("x-session-id", &id), agent]).await;
        assert_eq!(replies.response_header(TOKEN), None, "ids need no token");
        if replies.first_choice() != bound {
            elsewhere = Some((id, replies.first_choice().to_owned()));
            break;
        }
    }
    let (id, other) = elsewhere.expect("a session of another endpoint");
    for _ in 0..10 {
        assert_eq!(chat(&picker, &[("x-session-id", &id), agent]).await.first_choice(), other);
        assert_eq!(chat(&picker, &[agent]).await.first_choice(), bound);
        assert_eq!(chat(&picker, &[("x-session-id", ""), agent]).await.first_choice(), bound);
    }
    assert_eq!(chat(&picker, &[("x-session-id", &id)]).await.removed(), ["x-session-id"]);
    // The table knows digests, and the debug page does not know the id either.
    let page = picker.json("/debug/decisions").await.to_string();
    assert!(page.contains("\"session\":\"kept\"") && !page.contains(&id), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_with_one_key_obey_each_others_tokens_and_others_do_not() {
    logs::capture();
    let dir = tempfile::tempdir().unwrap();
    let key = |name: &str, text: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, text).unwrap();
        file.to_str().unwrap().to_owned()
    };
    let (ours, theirs) = (key("ours", &"k".repeat(32)), key("theirs", &"l".repeat(32)));
    let start = async |flags: &[&str]| {
        let setup = affinity("session-affinity-filter", "{}");
        flags.iter().fold(setup, |setup, file| setup.flag("--session-key-file", file)).start().await
    };
    let (first, replica, stranger) = (start(&[&ours]).await, start(&[&ours]).await, start(&[&theirs]).await);
    let served = chat(&first, &[]).await;
    let token = served.response_header(TOKEN).unwrap();
    for _ in 0..10 {
        assert_eq!(chat(&replica, &[(TOKEN, &token)]).await.first_choice(), served.first_choice());
        chat(&stranger, &[(TOKEN, &token)]).await;
    }
    assert_eq!(stranger.metric("pilotfish_sessions_total", &[("outcome", "ignored")]).await, 10.0);
    assert_eq!(replica.metric("pilotfish_sessions_total", &[("outcome", "kept")]).await, 10.0);
    let alone = start(&[]).await;
    chat(&alone, &[(TOKEN, &token)]).await;
    assert_eq!(alone.metric("pilotfish_sessions_total", &[("outcome", "ignored")]).await, 1.0);
    assert!(!logs::lines_with(&["valid in this process only", "--session-key-file"]).is_empty());
}

#[rstest]
#[case::the_choice("200", "10.0.0.2:8000", true)]
#[case::a_stranger("200", "10.9.9.9:8000", false)]
#[case::a_failing_engine("500", "10.0.0.2:8000", false)]
#[tokio::test(flavor = "multi_thread")]
async fn only_an_endpoint_of_the_pool_that_served_is_told(
    #[case] status: &str,
    #[case] served: &str,
    #[case] told: bool,
) {
    let picker = affinity("session-affinity-filter", "{}").start().await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string();
    let mut steps = request_of(CHAT, &[], &body).to_vec();
    steps.push(json!({
        "sh": {"headers": [[":status", status]], "eos": true},
        "metadata": {"envoy.lb": {"x-gateway-destination-endpoint-served": served}},
    }));
    let token = run(&picker, &steps).await.response_header(TOKEN);
    assert_eq!(token.is_some(), told);
    if let Some(token) = token {
        assert_eq!(
            chat(&picker, &[(TOKEN, &token)]).await.first_choice(),
            served,
            "not the choice, but who served"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_says_where_a_session_is_bound_and_binds_nothing() {
    let picker = picker("session-affinity-filter", "{strategy: session_id}").await;
    let question = json!({
        "path": CHAT, "headers": {"x-session-id": "a"},
        "body": json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).to_string(),
    });
    let explain = async || picker.post("/debug/explain", &question).await["session"].clone();
    assert_eq!((explain().await, explain().await), (json!("new"), json!("new")));
    chat(&picker, &[("x-session-id", "a")]).await;
    assert_eq!(explain().await, "kept");
}
