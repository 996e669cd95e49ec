//! Every problem of a configuration, with its place.

use super::{picker_config, shown, strict};
use crate::config::Read;
use crate::document::Severity;
use rstest::rstest;

#[rstest]
#[case("plugins: []\nfoo: 1\n", "4:1 error unknown member `foo` of the configuration")]
#[case("plugin: []\n", "3:1 error unknown member `plugin` of the configuration = did you mean `plugins`?")]
#[case("plugins: 3\n", "3:10 error `plugins` must be a list")]
#[case("plugins:\n- queue-scorer\n", "4:3 error a plugin must be a map")]
#[case("plugins:\n- {name: q}\n", "4:3 error a plugin needs a `type`")]
#[case("plugins:\n- {typ: q}\n", "4:4 error unknown member `typ` of a plugin = did you mean `type`?")]
#[case("plugins:\n- {type: queue-scorer, name: 7}\n", "4:30 error a plugin needs a `name`")]
#[case(
    "plugins:\n- type: queue-scorr\n",
    "4:9 error unknown plugin type `queue-scorr` = did you mean `queue-scorer`?"
)]
#[case(
    "plugins:\n- type: decode-filtr\n",
    "4:9 error unknown plugin type `decode-filtr` = did you mean `decode-filter`?"
)]
#[case(
    "plugins:\n- type: encode-filter\n",
    "4:9 error plugin type `encode-filter` is known from llm-d and not available in this version = remove it, or start with --allow-unsupported: it is skipped"
)]
#[case(
    "plugins: [{type: random}, {type: random}]\n",
    "3:34 error plugin instance `random` is described twice = give each instance a `name` of its own"
)]
#[case(
    "plugins:\n- type: least-request\n  parameters:\n    maxWaitingRequest: 3\n",
    "6:5 error `least-request`: unknown field `maxWaitingRequest`, expected `maxWaitingRequests` or `formula` = did you mean `maxWaitingRequests`?"
)]
#[case(
    "plugins:\n- type: least-request\n  parameters:\n    formula: published\n    MAXwaitingrequests: many\n",
    "7:25 error `least-request`: invalid type: string \"many\", expected i64"
)]
#[case(
    "plugins:\n- {type: least-latency, parameters: {TTFTTPOTWeightFactor: 1.5}}\n",
    "4:60 error `least-latency`: TTFTTPOTWeightFactor must be in 0..1, not 1.5"
)]
#[case(
    "plugins:\n- {type: random, parameters: 3}\n",
    "4:30 error `random`: invalid type: integer `3`, expected struct Config"
)]
#[case(
    "plugins:\n- {type: prefix-cache-scorer, parameters: {lruCapacity: 3}}\n",
    "4:44 error unknown field `lruCapacity`"
)]
#[case(
    "plugins:\n- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: cpu-cach}}\n- {type: approx-prefix-cache-producer, name: cpu-cache}\n",
    "4:73 error no plugin instance is named `cpu-cach` = did you mean `cpu-cache`?"
)]
#[case(
    "plugins:\n- {type: session-affinity-filter, parameters: {cookie: a}}\n- {type: session-affinity-scorer, parameters: {cookie: b}}\n",
    "5:10 error a profile puts session tokens into one cookie, and that of \"session-affinity-scorer\" is the second"
)]
#[case(
    "plugins:\n- {type: approx-prefix-cache-producer, name: lonely}\n",
    "4:10 warning no prefix-cache-scorer uses `lonely`"
)]
#[case(
    "plugins:\n- type: vertexai-parser\n",
    "4:9 warning plugin type `vertexai-parser` has no effect in this version"
)]
#[case(
    "plugins: [{type: max-score-picker}, {type: random-picker}]\n",
    "3:44 error a profile takes one picker, and \"random-picker\" is the second"
)]
#[case(
    "plugins: [{type: random-picker}]\nschedulingProfiles: [{plugins: []}]\n",
    "4:22 error a profile needs a `name`"
)]
#[case(
    "schedulingProfiles: [{name: a, plugin: []}]\n",
    "3:32 error unknown member `plugin` of a profile = did you mean `plugins`?"
)]
#[case(
    "schedulingProfiles: [{name: a}]\n",
    "3:29 warning profile `a` has no scorer: every endpoint counts the same"
)]
#[case(
    "flowControl: {maxRequests: 3}\n",
    "3:1 warning `flowControl` has no effect but for its saturationDetector: its feature gate is off = write \
     `featureGates: [flowControl]`"
)]
#[case("queue: {weights: {a: 0}}\n", "3:9 error `weights` must be numbers from 0.001 to 1000000")]
#[case("queue: {shareby: tokens}\n", "3:9 error unknown field `shareby`")]
#[case("queue: {maxPerSecond: -1}\n", "3:9 error `maxPerSecond` must be a number from 0.001 to 1000000")]
#[case("queue: {endpointKvUsage: 98}\n", "3:9 error `endpointKvUsage` must be a share, up to 1")]
#[case("queue: {session: {header: x}}\n", "3:9 warning `session` has no effect without its order")]
#[case(
    "queue: {order: session, session: {headStart: soon}}\n",
    "3:25 error `session` has a `headStart` that is no duration, such as 10s"
)]
#[case(
    "featureGates: [flowControl]\nflowControl: {maxBytes: many}\n",
    "4:25 error `maxBytes` is not a quantity, such as 500 or 1Gi"
)]
#[case(
    "featureGates: [flowControl]\nflowControl: {defaultRequestTTL: 5}\n",
    "4:34 error `defaultRequestTTL` is not a duration, such as 30s"
)]
#[case(
    "featureGates: [flowControl]\nflowControl: {priorityBands: [{maxRequests: 1}]}\n",
    "4:31 error a band has a `priority`, a whole number"
)]
#[case(
    "featureGates: [flowControl]\nflowControl: {enableEviction: true}\n",
    "4:15 warning `enableEviction` has no effect in this version: what runs is not cut off"
)]
#[case(
    "plugins: [{type: utilization-detector, parameters: {metricsStalenessThreshold: 1s}}]\nsaturationDetector: {pluginRef: utilization-detector}\n",
    "4:33 warning metricsStalenessThreshold has no effect"
)]
#[case(
    "featureGates: [flowControl]\nflowControl: {priorityBands: [{priority: 1, fairnessPolicyRef: round-robin-fairness-policy}, {priority: 2, fairnessPolicyRef: program-aware-fairness}]}\n",
    "4:127 warning this band has another policy than the one before, and one policy serves all bands"
)]
#[case(
    "featureGates: [flowControll=true]\n",
    "3:16 error unknown feature gate \"flowControll=true\" = did you mean `flowControl`?"
)]
#[case(
    "dataLayer: {injectDefaults: false}\n",
    "3:1 warning `dataLayer` has no effect in this version: the metrics of every endpoint are scraped"
)]
#[case(
    "flowControl:\n  maxByte: 3\n",
    "4:3 error unknown member `maxByte` of `flowControl` = did you mean `maxBytes`?"
)]
#[case("plugins: [{type: weighted-random-picker}]\n", "1:1 warning profile `default` has no scorer")]
#[case("requestHandler: {parsers: []}\n", "3:1 warning `requestHandler` has no effect")]
#[case("saturationDetector: {pluginRef: x}\n", "3:33 error no plugin instance is named `x`")]
#[case("parser: {pluginRef: openai-parser}\n", "3:1 warning `parser` has no effect")]
#[case(
    "featureGates: [flowControl=on]\n",
    "3:16 error feature gate `flowControl` is true or false, not `on`"
)]
#[case(
    "plugins: [{type: random}, {type: random-picker}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: random}]}]\n",
    "3:34 warning `random-picker` has no effect: no profile lists it"
)]
fn each_problem_of_an_endpoint_picker_config_has_its_place(#[case] rest: &str, #[case] expected: &str) {
    check(&strict(&picker_config(rest)), expected);
}

/// What nothing serves yet is read to the last name: members of llm-d's schema one by one, and the instances they name.
#[rstest]
#[case(
    "dataLayer",
    "{injectDefault: false}",
    "3:13 error unknown member `injectDefault` of `dataLayer` = did you mean `injectDefaults`?"
)]
#[case("dataLayer", "{sources: [{pluginref: a}]}", "3:24 error unknown member `pluginref` of `sources`")]
#[case("dataLayer", "{sources: [{pluginRef: a}]}", "3:35 error no plugin instance is named `a`")]
#[case(
    "dataLayer",
    "{sources: [{extractors: [{pluginRef: queu}]}]}",
    "3:49 error no plugin instance is named `queu` = did you mean `queue`?"
)]
#[case("dataLayer", "{sources: {}}", "")]
#[case("dataLayer", "{sources: 3}", "3:22 error `sources` must be a list")]
#[case("dataLayer", "{discovery: {pluginRef: b}}", "3:36 error no plugin instance is named `b`")]
#[case("dataLayer", "{peerDiscovery: {name: b}}", "3:29 error unknown member `name` of `peerDiscovery`")]
#[case("dataLayer", "{crossReplicaSyncerPluginRef: b}", "3:42 error no plugin instance is named `b`")]
#[case(
    "dataLayer",
    "{crossReplicaSyncInterval: 1s, injectDefaults: true, discovery: {pluginRef: queue}}",
    ""
)]
#[case(
    "requestHandler",
    "{parsers: [{pluginRef: openai-parsr}]}",
    "3:40 error no plugin instance is named `openai-parsr`"
)]
#[case("parser", "{type: x}", "3:10 error unknown member `type` of `parser`")]
fn members_without_effect_are_read_to_the_last_name(
    #[case] member: &str,
    #[case] value: &str,
    #[case] expected: &str,
) {
    let read = strict(&picker_config(&format!(
        "{member}: {value}\nplugins: [{{type: queue-scorer, name: queue}}]\n"
    )));
    let shown = shown(&read);
    assert!(
        shown[0].starts_with(&format!("3:1 warning `{member}` has no effect in this version: ")),
        "{shown:#?}"
    );
    assert!(shown.get(1).map_or("", String::as_str).starts_with(expected), "{shown:#?}");
    assert_eq!(shown.len(), 1 + usize::from(!expected.is_empty()), "{shown:#?}");
    assert_eq!(read.pipeline.is_none(), !expected.is_empty());
}

#[rstest]
#[case(
    "flowControl",
    "{priorityBands: [{priorty: 1}]}",
    "3:32 error unknown member `priorty` of `priorityBands` = did you mean `priority`?"
)]
#[case(
    "flowControl",
    "{priorityBands: [{priority: 1, maxBytes: 1Gi, maxRequests: 3, fairnessPolicyRef: queue}]}",
    "3:95 warning `queue` is no policy of queues here"
)]
#[case(
    "flowControl",
    "{defaultPriorityBand: {orderingPolicyRef: fcfs}}",
    "3:56 error no plugin instance is named `fcfs`"
)]
#[case("flowControl", "{defaultNegativePriorityBand: {orderingPolicyRef: fcfs-ordering-policy}}", "")]
#[case("flowControl", "{usageLimitPolicyPluginRef: b}", "3:42 error no plugin instance is named `b`")]
#[case("flowControl", "{saturationDetector: {pluginRef: b}}", "3:47 error no plugin instance is named `b`")]
#[case(
    "flowControl",
    "{maxBytes: 1, maxRequests: 1, defaultRequestTTL: 1s, noEndpointRequestTTL: 1s, enableEviction: false}",
    ""
)]
#[case("saturationDetector", "{pluginRef: utilization-detector}", "")]
fn members_of_flow_control_are_read_to_the_last_name(
    #[case] member: &str,
    #[case] value: &str,
    #[case] expected: &str,
) {
    let read = strict(&picker_config(&format!(
        "{member}: {value}\nplugins: [{{type: queue-scorer, name: queue}}]\nfeatureGates: [flowControl]\n"
    )));
    let shown = shown(&read);
    assert_eq!(shown.is_empty(), expected.is_empty(), "{shown:#?}");
    assert!(shown.is_empty() || shown.iter().any(|line| line.starts_with(expected)), "{shown:#?}");
}

#[rstest]
#[case("{pluginRef: quue}", "7:16 error no plugin instance is named `quue` = did you mean `queue`?")]
#[case(
    "{pluginRef: random}",
    "7:16 error no plugin instance is named `random` = add `- type: random` to `plugins`"
)]
#[case("{weight: 2}", "7:4 error an entry of a profile needs a `pluginRef`")]
#[case(
    "{pluginRef: queue, weigth: 2}",
    "7:23 error unknown member `weigth` of an entry of a profile = did you mean `weight`?"
)]
#[case("{pluginRef: queue, weight: -1}", "7:31 error a weight is a number of 0 or more, not -1")]
#[case("{pluginRef: queue, weight: 1.0e39}", "7:31 error a weight is a number of 0 or more, not 1e+39")]
#[case("{pluginRef: queue, weight: heavy}", "7:31 error a weight is a number of 0 or more, not \"heavy\"")]
#[case("{pluginRef: pick, weight: 2}", "7:30 warning the weight of `pick` has no effect: it is no scorer")]
#[case(
    "{pluginRef: health, weight: 2}",
    "7:32 warning the weight of `health` has no effect: it is no scorer"
)]
#[case("{pluginRef: prefix}, {pluginRef: other}", "7:37 error \"other\" cuts prompts differently")]
#[case("{pluginRef: queue}, {pluginRef: queue}", "7:36 error `queue` is listed twice in profile `default`")]
fn each_problem_of_a_profile_has_its_place(#[case] entries: &str, #[case] expected: &str) {
    let listed = "[{type: queue-scorer, name: queue}, {type: max-score-picker, name: pick}, {type: health}, \
        {type: prefix-cache, name: prefix}, {type: prefix-cache, name: other, parameters: {blockSizeToHash: 9}}]";
    let rest =
        format!("plugins: {listed}\nschedulingProfiles:\n-\n plugins:\n  [{entries}]\n name: default\n");
    let read = strict(&picker_config(&rest));
    check(&read, expected);
}

#[rstest]
#[case("", "1:1 error the configuration is empty")]
#[case("a: [1\n", "error")]
#[case("- a\n", "1:1 error this is not a scheduler configuration")]
#[case("kind: Pod\n", "1:7 error kind `Pod` is not a scheduler configuration")]
#[case("kind: EndpointPickerConfig\n", "1:1 error EndpointPickerConfig is read as pilotfish.dev/v1alpha1,")]
#[case("kind: EndpointPickerConfig\napiVersion: v1\n", "2:13 error EndpointPickerConfig is read as")]
#[case("scheduler: {}\n---\nscheduler: {}\n", "3:1 error a configuration is one document")]
#[case("scheduler: {}\n", "1:1 warning profile `default` has no scorer")]
#[case(
    "scheduler: ~\nauht: {}\n",
    "2:1 error unknown member `auht` of the configuration = did you mean `auth`?"
)]
#[case(
    "scheduler: {}\nauth: {issuer: x}\n",
    "2:1 warning `auth` has no effect: authentication is Envoy's = let Envoy"
)]
#[case("scheduler: 3\n", "1:12 error `scheduler` must be a map")]
#[case(
    "scheduler:\n  plugins:\n    score: {}\n",
    "3:5 error unknown member `score` of `plugins` = did you mean `Score`?"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enable: []}\n",
    "3:13 error unknown member `enable` of `Score` = did you mean `enabled`?"
)]
#[case(
    "scheduler:\n  plugins:\n    Filter: {enabled: [{name: a}]}\n",
    "3:24 error an entry of `Filter` is the name of a plugin"
)]
#[case(
    "scheduler:\n  plugins:\n    Filter: {enabled: [prefix-cache]}\n",
    "3:24 error `prefix-cache` is no filter"
)]
#[case(
    "scheduler:\n  plugins:\n    Filter: {enabled: [lora-affinity, lora-affinity]}\n",
    "3:39 warning filter `lora-affinity` is listed twice"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [{name: lora-affinity, weight: 1}]}\n",
    "3:30 error `lora-affinity` is no scorer"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [gpu-usage]}\n",
    "3:23 error an entry of `Score` must be a map"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [{name: gpu-usag}]}\n",
    "3:30 error unknown plugin type `gpu-usag` = did you mean `gpu-usage`?"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [{name: gpu-usage}]}\n",
    "3:30 warning `gpu-usage` has no weight and counts 0 = write `weight: 1`"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [{name: gpu-usage, weight: -2}]}\n",
    "3:49 error a weight is a number of 0 or more, not -2"
)]
#[case(
    "scheduler:\n  plugins:\n    Score: {enabled: [{name: kvcache-aware, weight: 1}]}\n",
    "3:30 warning `kvcache-aware` has no opinion: it reads a block index that is not there = give --redis-url the address of \
     the Redis that engines write to"
)]
#[case(
    "scheduler:\n  pluginConfig:\n  - {name: prefix-cash}\n",
    "3:12 error unknown plugin type `prefix-cash` = did you mean `prefix-cache`?"
)]
#[case(
    "scheduler:\n  pluginConfig:\n  - {nam: random}\n",
    "3:6 error unknown member `nam` of an entry of `pluginConfig` = did you mean `name`?"
)]
#[case(
    "scheduler:\n  pluginConfig:\n  - name: prefix-cache\n    args:\n      topKMatches: 3\n      blockSize: 3\n",
    "6:7 error `prefix-cache`: unknown field `blockSize`"
)]
#[case(
    "scheduler:\n  pluginConfig:\n  - {name: random, args: {x: 1}}\n  - {name: random}\n",
    "3:12 warning these arguments of `random` have no effect: a later entry replaces them"
)]
fn each_problem_of_a_file_and_of_kthenas_dialect_has_its_place(#[case] text: &str, #[case] expected: &str) {
    check(&strict(text), expected);
}

fn check(read: &Read, expected: &str) {
    let shown = shown(read);
    assert!(
        shown.iter().any(|line| line.starts_with(expected) || expected == "error" && line.contains(expected)),
        "{shown:#?}"
    );
    let wrong = read.problems.iter().any(|problem| problem.severity == Severity::Error);
    assert_eq!(read.pipeline.is_none(), wrong, "{shown:#?}");
}
