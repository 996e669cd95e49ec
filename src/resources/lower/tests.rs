//! What documents mean together, and what is wrong with them.

use super::*;
use crate::state::PoolKind;
use rstest::rstest;

fn one(text: &str) -> Lowered {
    lower(&[("a.yaml", Arc::from(text))])
}

fn shown(lowered: &Lowered) -> Vec<String> {
    let line = |p: &Problem| format!("{}:{} {:?} {}", p.line, p.column, p.severity, p.message);
    lowered.problems.iter().map(line).collect()
}

const SERVER: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: ms}
spec:
  model: org/real
  inferenceEngine: vLLM
  workloadSelector: {matchLabels: {app: x}}
  workloadPort: {port: 8000}
---
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: e, labels: {app: x}}
spec: {address: '10.0.0.1:8000'}
";

#[test]
fn a_whole_set_is_read_without_a_problem() {
    let lowered = one(SERVER);
    assert!(lowered.problems.is_empty(), "{:?}", shown(&lowered));
    assert_eq!((lowered.world.endpoints.len(), lowered.world.pools.len()), (1, 1));
    assert_eq!(lowered.world.pools[0].model.as_deref(), Some("org/real"));
    assert_eq!(lowered.dump.len(), 2);
}

#[rstest]
#[case("kind: Endpoit\napiVersion: pilotfish.dev/v1alpha1\n", "1:7 Error unknown kind `Endpoit`")]
#[case("kind: Secret\n", "1:7 Warning kind `Secret` is not read")]
#[case("kind: ModelServing\n", "1:7 Warning kind `ModelServing` is not read")]
#[case("apiVersion: v1\nkind: Endpoint\n", "1:13 Error Endpoint is read as pilotfish.dev/v1alpha1 only")]
#[case("a: [1\n", "Error")]
#[case(
    "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelRoute\nmetadata: {name: r}\nspec: {modelName: m, loraAdapters: [a, '']}\n",
    "4:40 Error an adapter without a name"
)]
#[case(
    "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: gpu-0}\n",
    "4:17 Error `gpu-0` is not an address"
)]
#[case(
    "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: '[fe80::1%2]:80'}\n",
    "4:17 Error `[fe80::1%2]:80` is not an address"
)]
#[case(
    "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: '1.1.1.1:1', weight: 0}\n",
    "4:38 Error weight must be above 0, not 0"
)]
#[case(
    "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {}\nspec: {address: '1.1.1.1:1'}\n",
    "3:11 Error a document without `metadata.name`"
)]
fn each_problem_is_named_at_its_place(#[case] text: &str, #[case] expected: &str) {
    let lowered = one(text);
    let shown = shown(&lowered);
    assert!(shown.iter().any(|line| line.contains(expected)), "{shown:?}");
}

#[rstest]
#[case("InferenceObjective", "{priority: high, poolRef: {name: p}}", "invalid type")]
#[case("InferenceObjective", "{priority: 1}", "missing field `poolRef`")]
#[case("InferenceModelRewrite", "{poolRef: {name: p}, rules: [{targets: [{}]}]}", "missing field")]
fn objectives_and_rewrites_are_checked_in_both_groups(
    #[case] kind: &str,
    #[case] spec: &str,
    #[case] expected: &str,
) {
    for group in OBJECTIVE_GROUPS {
        let text =
            format!("apiVersion: {group}/v1alpha2\nkind: {kind}\nmetadata: {{name: x}}\nspec: {spec}\n");
        let shown = shown(&one(&text));
        assert_eq!(shown.len(), 1, "{shown:?}");
        assert!(shown[0].contains(expected), "{shown:?}");
    }
}

/// Every kind of mistake in a rule is reported at its place, and leaves the good rules at work.
#[test]
fn rules_that_cannot_work_are_reported_and_kept_apart() {
    let route = "---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: r}
spec:
  modelName: m
  rules:
  - {name: bad-regex, modelMatch: {headers: {x-tier: {regex: '('}}}, targetModels: [{modelServerName: ms}]}
  - {name: zero, targetModels: [{modelServerName: ms, weight: 0}]}
  - {name: noname, targetModels: [{modelServerName: ''}]}
  - {name: ghost, targetModels: [{modelServerName: mss}]}
  - {name: mixed, targetModels: [{modelServerName: ms, weight: 50}, {modelServerName: ms}]}
  - {name: both, modelMatch: {uri: {exact: a, prefix: b}, headers: {x: ~}}, targetModels: [{modelServerName: ms}, ~]}
  - ~
  - {name: ok, targetModels: [{modelServerName: ms}]}
";
    let lowered = one(&format!("{SERVER}{route}"));
    let shown = shown(&lowered);
    let expected = [
        "Error `(` is not a regular expression",
        "Error every target has weight 0",
        "Error a target without `modelServerName`",
        "Error ModelServer default/mss does not exist",
        "Error some targets have a weight and some have none",
        "Warning several of exact, prefix and regex are given",
        "Warning header x has no test",
        "Error a target that is null",
        "Error a rule that is null",
    ];
    for expected in expected {
        assert!(shown.iter().any(|line| line.contains(expected)), "{expected} is missing in {shown:#?}");
    }
    assert_eq!(lowered.world.routes[0].rules.len(), 7);
    let ghost = lowered.problems.iter().find(|p| p.message.contains("mss")).unwrap();
    assert_eq!(ghost.advice.as_deref(), Some("did you mean `ms`?"));
}

/// Metrics could not tell them apart.
#[test]
fn of_a_model_server_and_a_pool_of_its_name_the_server_serves() {
    let pool = "---\napiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: ms}\n\
        spec: {selector: {matchLabels: {app: x}}}\n";
    let lowered = one(&format!("{SERVER}{pool}"));
    assert!(
        shown(&lowered).iter().any(|line| line.contains("Warning InferencePool default/ms has no effect")),
        "{:#?}",
        shown(&lowered)
    );
    assert!(!lowered.has_errors());
    let kinds: Vec<PoolKind> = lowered.world.pools.iter().map(|pool| pool.name.kind).collect();
    assert_eq!(kinds, [PoolKind::ModelServer]);
}

/// What is said of a ModelServer with `pdGroup`, its annotations and connector, and endpoints with these labels.
fn of_pairs(annotations: &str, more: &str, labels: &[&str]) -> (crate::topology::PoolSpec, Vec<String>) {
    let mut text = format!(
        "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: ModelServer\nmetadata: {{name: s, annotations: \
         {{{annotations}}}}}\nspec:\n  {more}\n  workloadPort: {{port: 8000}}\n  workloadSelector: {{matchLabels: {{app: s}}, pdGroup: \
         {{groupKey: g, prefillLabels: {{role: p}}, decodeLabels: {{role: d}}}}}}\n"
    );
    for (at, labels) in labels.iter().enumerate() {
        let endpoint = format!(
            "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: e{at}, labels: {{app: s, {labels}}}}}\n\
             spec: {{address: '10.0.0.{at}:8000'}}\n"
        );
        text.push_str(&endpoint);
    }
    let lowered = lower(&[("r.yaml", std::sync::Arc::from(text.as_str()))]);
    let shown = lowered.problems.iter().map(|problem| problem.message.clone()).collect();
    (lowered.world.pools.into_iter().next().unwrap(), shown)
}

const PAIR: [&str; 2] = ["g: a, role: p", "g: a, role: d"];

#[rstest::rstest]
#[case("", "inferenceEngine: vLLM", "http")]
#[case("", "inferenceEngine: SGLang", "sglang")]
#[case("", "inferenceEngine: vLLM\n  kvConnector: {type: nixl}", "nixl")]
#[case("", "inferenceEngine: SGLang\n  kvConnector: {type: http}", "sglang")]
#[case("pilotfish.dev/kv-connector: http", "inferenceEngine: SGLang", "http")]
#[case(
    "pilotfish.dev/kv-connector: sidecar",
    "inferenceEngine: vLLM\n  kvConnector: {type: nixl}",
    "sidecar"
)]
fn connectors_are_named_by_annotation_then_by_document_then_by_engine(
    #[case] annotations: &str,
    #[case] more: &str,
    #[case] expected: &str,
) {
    let (pool, problems) = of_pairs(annotations, more, &PAIR);
    assert_eq!((pool.disaggregation.unwrap().connector.name(), problems), (expected, Vec::new()));
}

#[rstest::rstest]
#[case("", &["g: a, role: p"], "no endpoint decodes")]
#[case("", &["g: a, role: d"], "no endpoint prefills")]
#[case("", &["g: a, role: p", "g: a, role: d", "role: d"], "Endpoint default/e2 has no role or no group, and takes no request")]
#[case("pilotfish.dev/kv-connector: nixle", &PAIR, "unknown connector `nixle`")]
fn what_is_wrong_with_pairs_is_said(
    #[case] annotations: &str,
    #[case] labels: &[&str],
    #[case] expected: &str,
) {
    let (_, problems) = of_pairs(annotations, "inferenceEngine: vLLM", labels);
    assert_eq!(problems, [expected]);
}
