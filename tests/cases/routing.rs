//! From a request's model and headers to a pool.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::kit::case::{input, list, number, text};
use crate::kit::extproc::{CHAT, chat, request_of, run, run_many, serve, shares};
use crate::kit::kube::Cluster;
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint_of, endpoints, route, server};
use kube::CustomResourceExt;
use pilotfish::check::{Options, check};
use pilotfish::document::{Node, Problem, Severity};
use pilotfish::resources::lower::lower;
use pilotfish::resources::model_route::ModelRoute;

const CHAT_BODY: &str = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";

/// One ModelServer with one endpoint of its own; `more` are further lines of its spec.
fn served(name: &str, address: &str, more: &str) -> String {
    server(name, name, more) + &endpoint_of("default", name, &format!("{name}-pod"), address)
}

fn two_servers() -> String {
    served("ms", "10.0.0.10:8000", "") + &served("ms2", "10.0.0.20:8000", "")
}

fn problems(resources: &str) -> Vec<Problem> {
    lower(&[("r.yaml", Arc::from(resources))]).problems
}

fn with_headers(headers: &Value) -> Vec<Value> {
    let given = headers.as_object().unwrap().iter();
    let pairs: Vec<(&str, &str)> =
        given.map(|(name, value)| (name.as_str(), value.as_str().unwrap())).collect();
    request_of(CHAT, &pairs, CHAT_BODY).to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn rou_02_bad_rules_are_named_and_good_ones_work() {
    let case = input("ROU-02");
    let route = list(case, "apply")[0].as_str().unwrap();
    let resources = two_servers() + "---\n" + route;
    let picker = Picker::serve(&resources).await;
    let requests = list(case, "requests");
    for request in &requests[..2] {
        let replies = run(&picker, &with_headers(&request["headers"])).await;
        assert_eq!(replies.choices(), ["10.0.0.10:8000"], "{request}: the good rule works");
    }
    for (request, rule) in requests[2..].iter().zip(["zero", "noname", "ghost"]) {
        let replies = run(&picker, &with_headers(&request["headers"])).await;
        assert_eq!(replies.refused().status(), 503, "{request}");
        let message = replies.refused().message();
        assert!(message.contains(&format!("rule {rule} of ModelRoute default/r")), "{request}: {message}");
    }

    // Each is an error at its line when the file is read.
    let lines: Vec<&str> = resources.lines().collect();
    let found: Vec<(&str, String)> = problems(&resources)
        .into_iter()
        .filter(|problem| problem.severity == Severity::Error)
        .map(|problem| (lines[problem.line as usize - 1].trim(), problem.message))
        .collect();
    let at = |line: &str, words: &str| {
        let hits = found.iter().filter(|(at, message)| at.contains(line) && message.contains(words));
        assert_eq!(hits.count(), 1, "{words} at {line}: {found:?}");
    };
    at("regex: '('", "is not a regular expression");
    at("weight: 0", "weight 0");
    at("modelServerName: ''", "without `modelServerName`");
    at("does-not-exist", "does not exist");
    assert_eq!(found.len(), 4, "{found:?}");
    let config = picker.json("/debug/config").await;
    let told = list(&config, "resource_problems");
    for (_, message) in &found {
        let hits = told.iter().filter(|problem| problem.to_string().contains(&json!(message).to_string()));
        assert_eq!(hits.count(), 1, "{message}: {told:?}");
    }
    assert_eq!(picker.metric("pilotfish_config_errors", &[("kind", "file")]).await, 4.0);
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("r.yaml"), &resources).unwrap();
    let report = check(Some(dir.path()), None, &Options::default());
    assert_eq!(report.exit_code(), 1);
    let regex = lines.iter().position(|line| line.contains("regex: '('")).unwrap();
    let column = lines[regex].find("'('").unwrap() + 1;
    let expected = format!("r.yaml:{}:{column}: error: `(` is not a regular expression", regex + 1);
    assert!(report.to_string().contains(&expected), "{report}");
    assert_eq!(picker.metric("pilotfish_degraded", &[("source", "resources")]).await, 1.0);

    let first_rule = "modelMatch: {headers: {x-tier: {regex: '('}}}";
    assert!(route.contains(first_rule));
    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        let (changed, served, reported) = match variant {
            "headers: {x-tier: null}" => {
                (route.replace(first_rule, "modelMatch: {headers: {x-tier: null}}"), true, "has no test")
            }
            "rules: []" => {
                let (head, _) = route.split_once("  rules:").unwrap();
                (format!("{head}  rules: []\n"), false, "without rules")
            }
            "targetModels with null entry" => {
                let good = "- name: ok\n    targetModels: [";
                (route.replace(good, &format!("{good}null, ")), true, "target that is null")
            }
            other => panic!("unknown variant {other}"),
        };
        assert_ne!(changed, route, "{variant}");
        let resources = two_servers() + "---\n" + &changed;
        let picker = Picker::serve(&resources).await;
        let replies = run(&picker, &with_headers(&json!({}))).await;
        if served {
            assert_eq!(replies.choices(), ["10.0.0.10:8000"], "{variant}");
        } else {
            assert_eq!(replies.refused().status(), 404, "{variant}");
        }
        // The null test matches any value, the null target is left out.
        let replies = run(&picker, &with_headers(&json!({"x-tier": "any"}))).await;
        assert_eq!(replies.immediate().is_none(), served, "{variant}");
        let found = problems(&resources);
        assert_eq!(found.iter().filter(|p| p.message.contains(reported)).count(), 1, "{variant}: {found:?}");
    }
}

/// What the definition cannot refuse is told of the object: as metric, and by the rules that serve.
#[tokio::test(flavor = "multi_thread")]
async fn rou_02_in_a_cluster_bad_rules_are_refused_or_counted() {
    let cluster = Cluster::namespace().await;
    let mut route = Node::parse(list(input("ROU-02"), "apply")[0].as_str().unwrap()).unwrap()[0].to_json();
    route["metadata"]["namespace"] = json!(cluster.namespace);
    let refused = cluster.try_apply(&route, false).await.unwrap_err().to_string();
    for why in ["give one target a weight above 0", "give exactly one of modelServerName"] {
        assert!(refused.contains(why), "{refused}");
    }
    let rules = route["spec"]["rules"].as_array_mut().unwrap();
    rules.retain(|rule| rule["name"] != "zero" && rule["name"] != "noname");
    cluster.try_apply(&route, false).await.unwrap();
    cluster.apply(&server("ms", "ms", "")).await;
    let picker = Picker::of_cluster(&cluster).start().await;
    picker.until_ready().await;
    let name = format!("{}/r", cluster.namespace);
    let labels = [("kind", "modelroutes"), ("name", name.as_str())];
    picker.until("the bad regex and the missing server", "pilotfish_config_errors", &labels, 2.0).await;
    cluster
        .patch(&ModelRoute::api_resource(), "r", &json!({"spec": {"rules": [route["spec"]["rules"][2]]}}))
        .await;
    picker.until("the object is mended", "pilotfish_config_errors", &labels, 0.0).await;
}

/// ModelServers `t0` and on, one endpoint `10.0.<i>.1:8000` each, and a route that splits between them.
fn split(weights: &[Value], empty: &[usize]) -> String {
    let mut resources = String::new();
    let mut targets = Vec::new();
    for (at, weight) in weights.iter().enumerate() {
        let name = format!("t{at}");
        resources += &if empty.contains(&at) {
            server(&name, &name, "")
        } else {
            served(&name, &format!("10.0.{at}.1:8000"), "")
        };
        let weight = weight.as_u64().map_or(String::new(), |weight| format!(", weight: {weight}"));
        targets.push(format!("{{modelServerName: {name}{weight}}}"));
    }
    let rules =
        format!("  modelName: m\n  rules: [{{name: split, targetModels: [{}]}}]\n", targets.join(", "));
    resources + &route("r", &rules)
}

#[tokio::test(flavor = "multi_thread")]
async fn rou_03_weights_are_shares_and_zero_is_none() {
    let case = input("ROU-03");
    let n = number(case, "n");
    for (set, weights) in case["sets"].as_object().unwrap() {
        let weights = weights.as_array().unwrap();
        let resources = split(weights, &[]);
        let picker = Picker::serve(&resources).await;
        let invalid = match set.as_str() {
            "B" => Some("every target has weight 0"),
            "E" => Some("some targets have a weight and some have none"),
            _ => None,
        };
        let errors = problems(&resources);
        assert_eq!(
            errors.iter().any(|p| p.severity == Severity::Error),
            invalid.is_some(),
            "{set}: {errors:?}"
        );
        if let Some(message) = invalid {
            assert_eq!(errors[0].message, message, "{set}");
            for _ in 0..20 {
                let replies = run(&picker, &chat(CHAT_BODY)).await;
                assert_eq!(replies.refused().status(), 503, "{set}");
                assert!(replies.refused().message().contains("rule split"), "{set}");
            }
            continue;
        }
        let replies = run_many(&picker, 64, (0..n).map(|_| chat(CHAT_BODY).to_vec())).await;
        assert_eq!(replies.len(), n);
        let shares = shares(&replies);
        let share =
            |at: usize| shares.get(&format!("10.0.{at}.1:8000")).copied().unwrap_or(0) as f64 / n as f64;
        match set.as_str() {
            "A" | "F" => assert_eq!(share(0), 1.0, "{set}: {shares:?}"),
            // 1 in 2^32 may go to the second.
            "G" => assert!(share(0) > 0.999, "{set}: {shares:?}"),
            "C" => assert!((share(1) - 0.1).abs() <= 0.015, "{set}: {shares:?}"),
            "D" => assert!((share(1) - 0.5).abs() <= 0.03, "{set}: {shares:?}"),
            other => panic!("no check for set {other}"),
        }
    }

    // A target without endpoints does not pass its share on to one that was given none.
    let picker = Picker::serve(&split(&[json!(100), json!(0)], &[0])).await;
    for _ in 0..50 {
        let replies = run(&picker, &chat(CHAT_BODY)).await;
        assert_eq!(replies.refused().status(), 503);
        assert_eq!(replies.refused().reason(), "no-endpoints");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rou_06_adapters_are_routed_under_their_own_name() {
    let case = input("ROU-06");
    let apply: Vec<&str> = list(case, "apply").iter().map(|a| a.as_str().unwrap()).collect();
    assert!(apply[2].ends_with("spec.model: org/real-base"));
    let resources = |lora: &str| {
        format!("{}---\n{lora}---\n{}", served("ms", "10.0.0.10:8000", "  model: org/real-base\n"), apply[1])
    };
    let body = |name: &str| text(&case["bodies"], name);
    let picker = Picker::serve(&resources(apply[0])).await;
    let a = serve(&picker, CHAT, body("a")).await;
    assert_eq!(a.endpoint(), "10.0.0.10:8000");
    assert_eq!(a.replies.body(), body("a").as_bytes(), "an adapter keeps its name");
    assert_eq!((&a.decision["target_model"], &a.decision["route"]), (&json!("lora-a"), &json!("default/l")));
    let base = serve(&picker, CHAT, body("base")).await;
    assert_eq!(base.endpoint(), "10.0.0.10:8000");
    let renamed = body("base").replace("\"base\"", "\"org/real-base\"");
    assert_eq!(String::from_utf8(base.replies.body()).unwrap(), renamed);
    let unknown = run(&picker, &chat(body("c"))).await;
    assert_eq!((unknown.refused().status(), &*unknown.refused().reason()), (404, "unknown-model"));

    assert!(text(case, "then").contains("[lora-b]"));
    picker.apply(&resources(&apply[0].replace("[lora-a, lora-b]", "[lora-b]"))).await;
    let gone = run(&picker, &chat(body("a"))).await;
    assert_eq!(gone.refused().status(), 404, "after the update");
    let b = serve(&picker, CHAT, &body("a").replace("lora-a", "lora-b")).await;
    assert_eq!(b.decision["target_model"], "lora-b");

    // An adapter of the name of another route's model: the model wins, and the operator is told.
    let hidden = resources(&apply[0].replace("[lora-a, lora-b]", "[base]"));
    let picker = Picker::serve(&hidden).await;
    let base = serve(&picker, CHAT, body("base")).await;
    assert_eq!(base.decision["route"], "default/base");
    let found = problems(&hidden);
    let told = found.iter().filter(|p| p.message.contains("adapter `base` is hidden by the modelName"));
    assert_eq!(told.count(), 1, "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn rou_07_timeouts_and_retries_reach_the_proxy() {
    let case = input("ROU-07");
    let written = list(case, "apply")[0].as_str().unwrap();
    let policy = written.strip_prefix("ModelServer ms: ").unwrap();
    let resources = |policy: &str| endpoints(&case["pods"]) + &server("ms", "m", &format!("  {policy}\n"));
    let steps = list(case, "steps");
    let picker = Picker::serve(&resources(policy)).await;
    for _ in 0..20 {
        let replies = run(&picker, steps).await;
        let mut choices = replies.choices();
        assert_eq!(choices.len(), 3, "one and two retries: {choices:?}");
        for (key, choice) in ["d1", "d2", "d3"].iter().zip(&choices) {
            assert_eq!(replies.metadata("envoy.lb", key).as_deref(), Some(&**choice), "{key}");
        }
        choices.sort();
        choices.dedup();
        assert_eq!(choices.len(), 3, "three different endpoints");
        assert_eq!(replies.set_header("x-envoy-upstream-rq-timeout-ms").as_deref(), Some("1000"));
        assert_eq!(replies.set_header("x-envoy-max-retries").as_deref(), Some("2"));
    }
    let found = problems(&resources(policy));
    let told = found.iter().filter(|p| p.message.contains("retryInterval has no effect"));
    assert_eq!(told.count(), 1, "what Envoy cannot be told is reported: {found:?}");

    let none = Picker::serve(&resources(&policy.replace("attempts: 2", "attempts: 0"))).await;
    let replies = run(&none, steps).await;
    assert_eq!(replies.choices().len(), 1, "no retry, one endpoint");
    assert_eq!(replies.set_header("x-envoy-max-retries").as_deref(), Some("0"));
    assert_eq!(replies.metadata("envoy.lb", "d2"), None);
}
