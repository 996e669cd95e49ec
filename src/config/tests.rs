//! Whole files of both dialects, and the pipelines they become.

mod problems;

use std::time::Duration;

use super::*;
use crate::admission::fairness::Bound;
use crate::admission::settings::{Order, ShareBy};
use crate::plugins;
use rstest::rstest;

fn read_with(text: &str, options: &Options<'_>) -> Read {
    read(Path::new("scheduler.yaml"), text.into(), options, None)
}

pub(super) fn strict(text: &str) -> Read {
    read_with(text, &Options::default())
}

pub(super) fn lenient(text: &str) -> Read {
    read_with(text, &Options { allow_unsupported: true, ..Options::default() })
}

pub(super) fn shown(read: &Read) -> Vec<String> {
    let line = |p: &Problem| {
        let advice = p.advice.as_ref().map(|advice| format!(" = {advice}")).unwrap_or_default();
        let severity = if p.severity == Severity::Error { "error" } else { "warning" };
        format!("{}:{} {severity} {}{advice}", p.line, p.column, p.message)
    };
    read.problems.iter().map(line).collect()
}

fn effect(read: &Read) -> Value {
    effective(read.pipeline.as_ref().unwrap_or_else(|| panic!("{:#?}", shown(read))))
}

/// An EndpointPickerConfig; the given text starts at line 3.
pub(super) fn picker_config(rest: &str) -> String {
    format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{rest}")
}

#[test]
fn kthenas_default_file_becomes_its_pipeline_with_one_warning() {
    let read = strict(
        "scheduler:
  pluginConfig:
  - name: least-request
    args: {maxWaitingRequests: 12}
  - name: least-latency
    args: {ttftTPOTWeightFactor: 0.25}
  - name: prefix-cache
    args: {blockSizeToHash: 64, maxBlocksToMatch: 128, maxHashCacheSize: 50000, topKMatches: 5}
  plugins:
    Filter:
      enabled: [least-request]
      disabled: [lora-affinity]
    Score:
      enabled:
      - {name: least-request, weight: 1}
      - {name: gpu-usage, weight: 1}
      - {name: least-latency, weight: 1}
      - {name: prefix-cache, weight: 2}
",
    );
    assert_eq!(shown(&read), ["12:7 warning `disabled` has no effect: what `enabled` does not list is off"]);
    assert_eq!(
        effect(&read),
        json!({
            "profile": "default",
            "filters": ["subset", "role", "health", "least-request"],
            "scorers": [
                {"name": "least-request", "type": "least-request", "weight": 1.0},
                {"name": "gpu-usage", "type": "gpu-usage", "weight": 1.0},
                {"name": "least-latency", "type": "least-latency", "weight": 1.0},
                {"name": "prefix-cache", "type": "prefix-cache", "weight": 2.0},
            ],
            "picker": "max-score-picker",
            "blocks": {"blockBytes": 64, "maxBlocks": 128, "capacity": 50_000},
        })
    );
}

#[test]
fn an_llm_d_file_becomes_its_pipeline() {
    let read = strict(&picker_config(
        "plugins:
- type: queue-scorer
- {type: kv-cache-utilization-scorer, name: kv}
- type: approx-prefix-cache-producer
  parameters: {autoTune: false, blockSizeTokens: 16, maxPrefixTokensToMatch: 16384, lruCapacityPerServer: 1000}
- type: prefix-cache-scorer
- type: weighted-random-picker
- type: single-profile-handler
- type: metrics-data-source
  parameters: {scheme: http}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv}
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: weighted-random-picker}
",
    ));
    assert_eq!(
        shown(&read),
        ["12:3 warning the parameters of `metrics-data-source` have no effect in this version"]
    );
    assert_eq!(
        effect(&read),
        json!({
            "profile": "default",
            "filters": ["subset", "role", "health"],
            "scorers": [
                {"name": "queue-scorer", "type": "queue-scorer", "weight": 2.0},
                {"name": "kv", "type": "kv-cache-utilization-scorer", "weight": 1.0},
                {"name": "prefix-cache-scorer", "type": "prefix-cache-scorer", "weight": 3.0},
            ],
            "picker": "weighted-random-picker",
            "blocks": {"blockBytes": 64, "maxBlocks": 1024, "capacity": 1000},
        })
    );
}

/// llm-d's defaults are 64 tokens, 131,072 tokens and 31,250 blocks; older files had them on the scorer.
#[rstest]
#[case("{}", (256, 2_048, 31_250))]
#[case("{lruCapacityPerServer: 7, maxPrefixBlocksToMatch: 5, blockSizeTokens: 32}", (128, 5, 7))]
#[case("{blockSizeTokens: 0, maxPrefixTokensToMatch: -1}", (256, 2_048, 31_250))]
fn the_cut_of_a_prefix_cache_scorer_is_translated(
    #[case] parameters: &str,
    #[case] expected: (usize, usize, usize),
) {
    let read = strict(&picker_config(&format!(
        "plugins:\n- type: prefix-cache-scorer\n  parameters: {parameters}\n"
    )));
    let needs = read.pipeline.unwrap().text.unwrap().needs;
    assert_eq!((needs.block_bytes, needs.max_blocks, needs.capacity), expected);
}

#[test]
fn without_profiles_every_instance_takes_part_in_both_its_roles() {
    let read = strict(&picker_config("plugins: [{type: least-request}, {type: random-picker}]\n"));
    let effect = effect(&read);
    assert_eq!(effect["filters"], json!(["subset", "role", "health", "least-request"]));
    assert_eq!(effect["scorers"][0]["weight"], json!(1.0));
    assert_eq!(effect["picker"], json!("random-picker"));
    let built_in = self::effect(&strict(&picker_config("")));
    assert_eq!(built_in["scorers"].as_array().unwrap().len(), plugins::default_parts().len());
}

#[test]
fn one_profile_is_run_and_the_others_are_named() {
    let text = |first: &str| {
        picker_config(&format!(
            "plugins: [{{type: queue-scorer}}]
schedulingProfiles:
- {{name: {first}, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: other, plugins: [{{pluginRef: queue-scorer}}]}}
- {{name: default, plugins: [{{pluginRef: queue-scorer, weight: 5}}]}}
"
        ))
    };
    let read = strict(&text("prefill"));
    assert_eq!(effect(&read)["scorers"][0]["weight"], json!(5.0));
    let expected = "6:10 warning one profile is run for outputs in this version, `default`, and not `other`";
    assert_eq!(shown(&read), [expected]);
    let read = strict(&text("prefill").replace("name: default", "name: last"));
    assert_eq!(effect(&read)["profile"], json!("other"));
    assert_eq!(effect(&read)["prefill"]["profile"], json!("prefill"));
    assert!(
        shown(&strict(&text("other"))).contains(&"6:10 error profile `other` is described twice".to_owned())
    );
}

/// A file for split prefill and decode serves from its decode profile, whatever that is called.
#[rstest]
#[case("{type: disagg-profile-handler}", "decode")]
#[case("{type: disagg-profile-handler, parameters: {profiles: {decode: late, prefill: early}}}", "late")]
#[case("{type: pd-profile-handler, parameters: {decodeProfile: late}}", "late")]
#[case("{type: header-profile-handler, parameters: {defaultProfile: late}}", "late")]
#[case("{type: header-profile-handler, parameters: {defaultProfile: none-such}}", "early")]
#[case("{type: queue-scorer, name: other}", "decode")]
fn of_several_profiles_the_one_that_serves_is_run(#[case] handler: &str, #[case] expected: &str) {
    let profile = |name| format!("- {{name: {name}, plugins: [{{pluginRef: queue-scorer}}]}}\n");
    let profiles: String = ["early", "late", "decode"].map(profile).concat();
    let text = picker_config(&format!(
        "plugins: [{{type: queue-scorer}}, {handler}]\nschedulingProfiles:\n{profiles}"
    ));
    assert_eq!(effect(&lenient(&text))["profile"], json!(expected));
}

/// Whether requests of a long prompt and of a short one are split, by what a configuration says.
#[rstest]
#[case::default("", (true, false))]
#[case::ours(", {type: always-disagg-pd-decider}", (true, true))]
#[case::a_threshold(", {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 16}}", (true, true))]
#[case::a_stage_without_decider(", {type: disagg-profile-handler}, {type: always-disagg-pd-decider}", (false, false))]
#[case::a_handler(
    ", {type: disagg-profile-handler, parameters: {deciders: {prefill: d}}}, {type: always-disagg-pd-decider, name: d}",
    (true, true)
)]
#[case::the_older_handler(", {type: pd-profile-handler}, {type: prefix-based-pd-decider}", (false, false))]
#[case::the_oldest_form(", {type: pd-profile-handler, parameters: {threshold: 100}}", (true, false))]
#[case::the_older_handler_with_a_name(
    ", {type: pd-profile-handler, parameters: {deciderPluginName: d}}, {type: always-disagg-pd-decider, name: d}",
    (true, true)
)]
fn deciders_are_found_as_llm_d_finds_them(#[case] more: &str, #[case] expected: (bool, bool)) {
    let read = strict(&picker_config(&format!("plugins: [{{type: queue-scorer}}{more}]\n")));
    let decider = read.pipeline.unwrap_or_else(|| panic!("{:#?}", read.problems)).decider;
    assert_eq!((decider.is_long_enough(5_000, 5_000), decider.is_long_enough(20, 20)), expected);
}

#[test]
fn a_decider_that_is_not_there_is_an_error() {
    let text = "plugins: [{type: queue-scorer}, {type: break-even-pd-decider}, {type: disagg-profile-handler, \
                parameters: {deciders: {prefill: break-even-decider}}}]\n";
    let shown = shown(&strict(&picker_config(text)));
    assert!(shown[0].contains("no decider is named `break-even-decider`"), "{shown:?}");
}

/// Without `--allow-unsupported` everything that is missing is named at once.
#[test]
fn a_refused_file_names_all_that_it_lacks() {
    let text = picker_config(
        "plugins:
- type: prefill-filter
- {type: active-request-scorer, parameters: {idleThreshold: 1}}
- type: queue-scorer
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- type: always-disagg-pd-decider
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: active-request-scorer, weight: 2}, {pluginRef: queue-scorer}]}
",
    );
    let errors = |read: &Read| read.problems.iter().filter(|p| p.severity == Severity::Error).count();
    let refused = strict(&text);
    assert_eq!(errors(&refused), 1, "{:#?}", shown(&refused));
    let read = lenient(&text);
    assert_eq!(errors(&read), 0, "{:#?}", shown(&read));
    assert_eq!(effect(&read)["scorers"].as_array().unwrap().len(), 1);
    assert_eq!(
        read.problems.len(),
        1 + 1,
        "it is named still, and a profile without scorer: {:#?}",
        shown(&read)
    );
}

#[test]
fn kthenas_lists_give_one_role_each_and_its_rules_of_precedence_hold() {
    let read = strict(
        "scheduler:
  pluginConfig:
  - {name: prefix-cache, args: {blockSizeToHash: 1}}
  - {name: prefix-cache, args: {blockSizeToHash: 32}}
  plugins:
    Score:
      enabled:
      - {name: least-request, weight: 1}
      - {name: random, weight: 1}
      - {name: prefix-cache, weight: 1}
      - {name: least-request, weight: 4}
",
    );
    let shown = shown(&read);
    assert!(
        shown.contains(&"9:16 warning `random` is dropped: it scores alone or not at all".to_owned()),
        "{shown:#?}"
    );
    assert!(
        shown.iter().any(|line| line.starts_with("11:16 warning scorer `least-request` is listed twice"))
    );
    let effect = effect(&read);
    assert_eq!(effect["filters"], json!(["subset", "role", "health"]), "only `Filter` makes a filter");
    let weights: Vec<(&str, f64)> = effect["scorers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| (s["name"].as_str().unwrap(), s["weight"].as_f64().unwrap()))
        .collect();
    assert_eq!(weights, [("least-request", 4.0), ("prefix-cache", 1.0)]);
    assert_eq!(effect["blocks"]["blockBytes"], json!(32));
    let alone = strict("scheduler: {plugins: {Score: {enabled: [{name: random, weight: 1}]}}}\n");
    assert!(alone.problems.is_empty());
    assert_eq!(self::effect(&alone)["scorers"][0]["name"], json!("random"));
}

#[test]
fn what_upstream_has_and_we_lack_is_skipped_on_request_and_unknown_names_are_not() {
    let text = picker_config(
        "plugins:
- type: encode-filter
- {type: precise-prefix-cache-producer, name: precise}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise}}
- {type: approx-prefix-cache-producer, name: cpu, parameters: {lruCapacityPerServer: 1000}}
- {type: prefix-cache-scorer, name: tier, parameters: {prefixMatchInfoProducerName: cpu}}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: encode-filter}, {pluginRef: prefix-cache-scorer}, {pluginRef: tier}]}
",
    );
    assert!(strict(&text).pipeline.is_none());
    let read = lenient(&text);
    let scorers = effect(&read)["scorers"].as_array().unwrap().len();
    assert_eq!(scorers, 2, "one goes by events, one by what was sent");
    assert_eq!(effect(&read)["blocks"]["capacity"], json!(1_000));
    assert_eq!(read.problems.len(), 1, "{:#?}", shown(&read));
    assert!(lenient(&picker_config("plugins: [{type: encode-filtre}]\n")).pipeline.is_none());
}

#[test]
fn kthenas_shared_index_is_configured_and_missed_where_there_is_none() {
    let text = "scheduler:\n  pluginConfig: [{name: kvcache-aware, args: {blockSizeToHash: 128}}]\n  plugins: \
        {Score: {enabled: [{name: kvcache-aware, weight: 3}]}}\n";
    let options = Options { shared_index: true, ..Options::default() };
    let there = read_with(text, &options);
    assert!(there.problems.is_empty(), "{:#?}", there.problems);
    let pipeline = there.pipeline.unwrap();
    assert_eq!((pipeline.shared.unwrap().block_tokens, pipeline.tokens), (128, true));
    assert_eq!(pipeline.profile.scorers[0].weight, 3.0);
    let missed = strict(text);
    assert!(missed.pipeline.is_some());
    let shown: Vec<String> = missed.problems.iter().map(ToString::to_string).collect();
    assert!(
        shown.len() == 1 && shown[0].contains("warning") && shown[0].contains("--redis-url"),
        "{shown:?}"
    );
}

#[test]
fn an_index_survives_a_reload_that_cuts_alike_and_only_that() {
    let text = |bytes: u32| {
        picker_config(&format!(
            "plugins: [{{type: prefix-cache, parameters: {{blockSizeToHash: {bytes}}}}}]\n"
        ))
    };
    let first = strict(&text(64)).pipeline.unwrap();
    let again = |bytes| {
        let options = Options::default();
        let read = read(Path::new("c"), text(bytes).into(), &options, Some(&first));
        Arc::ptr_eq(
            &first.text.as_ref().unwrap().routed,
            &read.pipeline.unwrap().text.as_ref().unwrap().routed,
        )
    };
    assert!(again(64));
    assert!(!again(32));
}

#[test]
fn a_plugin_of_ones_own_is_found_before_the_built_in_ones() {
    const OWN: Kind = Kind { name: "own", ..plugins::score_random::KIND };
    let extra: [&Kind; 1] = [&OWN];
    let options = Options { extra_plugins: &extra, ..Options::default() };
    let read = read_with(&picker_config("plugins: [{type: own}]\n"), &options);
    assert_eq!(effect(&read)["scorers"][0]["type"], json!("own"));
    let wrong = read_with(&picker_config("plugins: [{type: owm}]\n"), &options);
    assert_eq!(shown(&wrong), ["3:18 error unknown plugin type `owm` = did you mean `own`?"]);
}

/// Whatever is cut off, reading ends with a pipeline or with an error, and the error stands inside the text.
#[test]
fn files_cut_anywhere_are_read_or_refused() {
    let kthena = "scheduler:\n  pluginConfig:\n  - {name: prefix-cache, args: {blockSizeToHash: 1}}\n  plugins:\n    \
        Filter: {enabled: [least-request], disabled: [x]}\n    Score: {enabled: [{name: random, weight: 1.5}]}\n";
    let picker = picker_config(
        "featureGates: [flowControl=false]\nplugins:\n- {type: prefix-cache-scorer, parameters: {autoTune: true}}\n\
         - {type: max-score-picker, name: p}\nschedulingProfiles:\n- {name: a, plugins: [{pluginRef: p, weight: 2}]}\n",
    );
    for text in [kthena, &picker] {
        for (end, _) in text.char_indices() {
            let read = lenient(&text[..end]);
            let wrong = read.problems.iter().any(|problem| problem.severity == Severity::Error);
            assert_eq!(read.pipeline.is_none(), wrong, "{:#?}", shown(&read));
            let lines = text[..end].lines().count() as u32 + 1;
            assert!(read.problems.iter().all(|problem| problem.line <= lines), "{:#?}", shown(&read));
        }
    }
}

#[test]
fn sessions_are_kept_after_every_other_filter_wherever_they_are_listed() {
    let listed = "plugins:\n- {type: session-affinity-filter}\n- {type: lora-affinity}\n- {type: health}\n";
    let pipeline = strict(&picker_config(listed)).pipeline.unwrap();
    let filters: Vec<&str> = pipeline.profile.filters.iter().map(|filter| &*filter.name).collect();
    assert_eq!(filters, ["subset", "role", "lora-affinity", "health", "session-affinity-filter"]);
}

#[test]
fn llm_ds_flow_control_becomes_bands_bounds_and_thresholds() {
    let read = strict(&picker_config(
        "featureGates: [flowControl]
plugins:
- {type: queue-scorer}
- {type: round-robin-fairness-policy}
- {type: slo-deadline-ordering-policy, name: slo}
- {type: priority-holdback-policy, parameters: {minCeiling: 0.5}}
- {type: concurrency-detector, parameters: {maxConcurrency: 132, concurrencyMode: hybrid}}
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  maxBytes: 10Gi
  maxRequests: 1k
  defaultRequestTTL: 30s
  noEndpointRequestTTL: 2m
  defaultPriorityBand: {maxRequests: 40, fairnessPolicyRef: round-robin-fairness-policy, orderingPolicyRef: slo}
  defaultNegativePriorityBand: {maxRequests: 7}
  priorityBands:
  - {priority: 100, maxRequests: '500', maxBytes: 1Mi}
  - {priority: -10, maxRequests: 50}
  usageLimitPolicyPluginRef: priority-holdback-policy
",
    ));
    assert_eq!(shown(&read), [""; 0]);
    let queue = &read.queue;
    assert_eq!(queue.all, Bound { requests: 1_000, bytes: 10 << 30 });
    let bound = |priority| queue.bound(priority).map(|bound| (bound.requests, bound.bytes));
    assert_eq!(bound(0), Some((40, 1_000_000_000)));
    assert_eq!(bound(100), Some((500, 1 << 20)));
    assert_eq!(bound(-10), Some((50, 1_000_000_000)));
    assert_eq!(bound(-1), Some((7, 1_000_000_000)));
    assert_eq!((queue.timeout, queue.hold), (Some(Duration::from_secs(30)), Duration::from_mins(2)));
    assert_eq!((queue.share_by, &queue.order), (ShareBy::Requests, &Order::Deadline));
    assert_eq!((queue.ceiling(100), queue.ceiling(-10)), (1.0, 0.5));
    let full = queue.saturation;
    assert_eq!((full.most_requests, full.most_tokens), (Some(132.0), Some(1e6)));
}

#[test]
fn the_gate_of_flow_control_says_whether_requests_wait_and_no_gate_leaves_it_as_it_is() {
    let queue = |rest: &str| strict(&picker_config(rest)).queue;
    assert_eq!(queue(""), QueueSettings::default());
    assert!(!queue("featureGates: [flowControl=false]\n").waits);
    let on = queue("featureGates: [flowControl]\n");
    assert_eq!((on.waits, on.hold), (true, Duration::from_mins(1)));
    assert!(on.sheddable.is_some(), "low bands wait there");
    let detector = "plugins: [{type: utilization-detector, parameters: {queueDepthThreshold: 9, kvCacheUtilThreshold: 0.7}}]\n";
    for section in ["saturationDetector", "flowControl: {saturationDetector"] {
        let end = if section.contains('{') { "}" } else { "" };
        let read = strict(&picker_config(&format!(
            "{detector}{section}: {{pluginRef: utilization-detector}}{end}\n"
        )));
        assert!(shown(&read).iter().all(|line| !line.contains("saturation")), "{:?}", shown(&read));
        let full = read.queue.saturation;
        assert_eq!((full.queue_depth, full.kv_usage), (9.0, 0.7));
    }
}

#[test]
fn the_queue_section_changes_what_it_names() {
    let read = strict(&picker_config(
        "queue:
  shareBy: tokens
  order: session
  session: {header: X-Chat, headStart: 3s}
  outputTokenWeight: 4
  weights: {alice: 3, bob: 0.5}
  maxConcurrent: 9
  maxPerSecond: 2.5
  endpointQueueDepth: 2
  endpointMaxRequests: 8
",
    ));
    assert!(shown(&read).iter().all(|line| !line.contains("error")), "{:?}", shown(&read));
    let queue = read.queue;
    let weights = [Some("alice"), Some("bob"), Some("carol"), None].map(|name| queue.weight(name));
    assert_eq!(weights, [3_000, 500, 1_000, 1_000]);
    assert_eq!(
        (queue.token_weights, queue.most_at_once, queue.most_per_second),
        ((1.0, 4.0), Some(9), Some(2.5))
    );
    assert_eq!((queue.saturation.queue_depth, queue.saturation.most_requests), (2.0, Some(8.0)));
    let order = Order::Session { header: "x-chat".into(), boost: Duration::from_secs(3), sessions: 4_096 };
    assert_eq!(queue.order, order);
}
