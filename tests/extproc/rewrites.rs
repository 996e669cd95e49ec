//! InferenceModelRewrites on requests that are served.

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::extproc::{CHAT, request_of, run, serve_steps};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool, route, server};

const REWRITES: &str = "---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: all}
spec: {poolRef: {name: pool}, rules: [{targets: [{modelRewrite: fallback}]}]}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: some}
spec:
  poolRef: {name: pool}
  rules:
  - matches: [{model: {value: alias}}, {model: {value: nickname}}]
    targets: [{modelRewrite: real}]
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {name: urgent}
spec: {poolRef: {name: pool}, priority: 7}
";
const FORCE: &str = "x-llm-d-model-name-rewrite";

fn one_pool() -> String {
    pool() + &endpoint("e", "10.0.0.1:8000") + REWRITES
}

#[rstest]
#[case::an_exact_rule(true, &[], r#"{"model":"alias","messages":[]}"#, r#"{"model":"real","messages":[]}"#, json!("rewrite default/some"))]
#[case::its_other_name(true, &[], r#"{"model":"nickname","messages":[]}"#, r#"{"model":"real","messages":[]}"#, json!("rewrite default/some"))]
#[case::the_generic_rule(true, &[], r#"{"model":"m","messages":[]}"#, r#"{"model":"fallback","messages":[]}"#, json!("rewrite default/all"))]
#[case::a_missing_model(true, &[], r#"{"messages":[]}"#, r#"{"model":"fallback","messages":[]}"#, json!("rewrite default/all"))]
#[case::a_trusted_header(true, &[(FORCE, "forced")], r#"{"model":"alias","messages":[]}"#, r#"{"model":"forced","messages":[]}"#, json!(null))]
#[case::a_trusted_header_alone(true, &[(FORCE, "forced")], r#"{"messages":[]}"#, r#"{"model":"forced","messages":[]}"#, json!(null))]
#[case::a_header_of_anybody(false, &[(FORCE, "forced")], r#"{"model":"alias","messages":[]}"#, r#"{"model":"real","messages":[]}"#, json!("rewrite default/some"))]
#[tokio::test(flavor = "multi_thread")]
async fn the_engine_sees_the_model_that_a_rule_or_a_trusted_header_names(
    #[case] trusted: bool,
    #[case] headers: &[(&str, &str)],
    #[case] body: &str,
    #[case] expected: &str,
    #[case] route: Value,
) {
    let setup = Picker::with(&one_pool());
    let picker = if trusted { setup.switch("--trust-hints") } else { setup }.start().await;
    let served = serve_steps(&picker, &request_of(CHAT, headers, body)).await;
    assert_eq!(String::from_utf8(served.replies.body()).unwrap(), expected);
    let target: Value = serde_json::from_str(expected).unwrap();
    assert_eq!(served.decision["target_model"], target["model"]);
    assert_eq!(served.decision["route"], route);
}

/// A form has no place for a model that it does not name.
#[tokio::test(flavor = "multi_thread")]
async fn a_form_without_a_model_is_refused_whatever_a_rule_or_header_names() {
    let picker = Picker::with(&one_pool()).switch("--trust-hints").start().await;
    for forced in [None, Some("forced")] {
        let mut headers =
            vec![[":method", "POST"], [":path", CHAT], ["content-type", "multipart/form-data; boundary=b"]];
        headers.extend(forced.map(|model| [FORCE, model]));
        let form = "--b\r\ncontent-disposition: form-data; name=\"language\"\r\n\r\nen\r\n--b--\r\n";
        let steps =
            [json!({"rh": {"headers": headers, "eos": false}}), json!({"rb": {"text": form, "eos": true}})];
        let replies = run(&picker, &steps).await;
        assert_eq!(
            (replies.refused().status(), replies.refused().reason().as_str()),
            (400, "malformed-body")
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_route_decides_alone() {
    let spec = "  modelName: alias\n  rules: [{targetModels: [{modelServerName: ms}]}]\n";
    let resources = one_pool() + &server("ms", "m", "  model: served\n") + &route("r", spec);
    let picker = Picker::serve(&resources).await;
    let served = serve_steps(&picker, &request_of(CHAT, &[], r#"{"model":"alias","messages":[]}"#)).await;
    assert_eq!(
        (&served.decision["target_model"], &served.decision["route"]),
        (&json!("served"), &json!("default/r"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn weights_share_out_and_a_changed_rule_takes_effect() {
    let targets = |targets: &str| {
        let rewrite =
            "---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceModelRewrite\nmetadata: {name: r}\n";
        let spec = format!("spec: {{poolRef: {{name: pool}}, rules: [{{targets: [{targets}]}}]}}\n");
        pool() + &endpoint("e", "10.0.0.1:8000") + rewrite + &spec
    };
    let picker = Picker::serve(&targets("{modelRewrite: a, weight: 1}, {modelRewrite: b, weight: 1}")).await;
    let mut drawn = [0u32; 2];
    for _ in 0..64 {
        let page = picker.explain(CHAT, r#"{"model":"m","messages":[]}"#).await;
        drawn[usize::from(page["target_model"] == "b")] += 1;
    }
    // Both shares being nothing has a chance of 2 in 2^64.
    assert!(drawn.iter().all(|n| *n > 0), "{drawn:?}");
    picker.apply(&targets("{modelRewrite: c}")).await;
    let page = picker.explain(CHAT, r#"{"model":"m","messages":[]}"#).await;
    assert_eq!(page["target_model"], "c");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_debug_pages_show_rewrites_and_objectives() {
    let picker = Picker::serve(&one_pool()).await;
    let config = picker.json("/debug/config").await;
    assert_eq!(config["rewrites"], json!({"default/pool": ["rewrite default/all", "rewrite default/some"]}));
    assert_eq!(config["objectives"], json!({"default/urgent": 7}));
    assert_eq!(config["resource_problems"], json!([]));
    let dump = picker.json("/debug/config_dump/inferencemodelrewrites").await;
    assert_eq!(dump["inferencemodelrewrites"][1]["name"], "some");
    assert_eq!(dump["inferencemodelrewrites"][1]["spec"]["rules"][0]["targets"][0]["modelRewrite"], "real");
    let dump = picker.json("/debug/config_dump/inferenceobjectives").await;
    assert_eq!(dump["inferenceobjectives"][0]["spec"]["priority"], 7);
}
