//! llm-d's flow control: bands, times, detectors and policies, as far as they say how queues here work.
//!
//! One queue a pool serves all bands, so that policies are the same for all; and what is not known of an engine is not full.

use serde::Deserialize;

use super::Reader;
use super::listed::Listed;
use crate::admission::fairness::Bound;
use crate::admission::settings::{Ceilings, Order, ShareBy};
use crate::document::{Node, Place, Yaml, typed};
use crate::resources::{duration, quantity};

/// What the types of this section are called.
pub const POLICIES: [&str; 10] = [
    "global-strict-fairness-policy",
    "round-robin-fairness-policy",
    "program-aware-fairness",
    "fcfs-ordering-policy",
    "edf-ordering-policy",
    "slo-deadline-ordering-policy",
    "static-usage-limit-policy",
    "priority-holdback-policy",
    UTILIZATION,
    CONCURRENCY,
];
const UTILIZATION: &str = "utilization-detector";
const CONCURRENCY: &str = "concurrency-detector";

/// No reading of an engine is as high.
const NEVER: f32 = 1e9;

/// Whether a plugin type is a policy or a detector of queues, whose parameters are read here.
pub fn is_policy(type_name: &str) -> bool {
    POLICIES.contains(&type_name)
}

/// Reads the section, the detector, and what the feature gate says of both; without the gate no section counts.
pub fn lower(reader: &mut Reader<'_>, node: &Node, gate: Option<bool>, listed: &[Listed<'_>]) {
    let section = node.get("flowControl").filter(|section| !section.is_blank());
    let detector = section.and_then(|section| section.get("saturationDetector"));
    if let Some(named) = detector.or(node.get("saturationDetector")).and_then(|named| named.get("pluginRef"))
    {
        detect(reader, named, listed);
    }
    match (gate, section) {
        (Some(true), section) => {
            reader.queue.waits = true;
            // There, bands below 0 wait behind the others, and so do requests of a pool without endpoints.
            reader.queue.sheddable = Some(reader.queue.band);
            reader.queue.hold = reader.queue.timeout.unwrap_or_default();
            if let Some(section) = section {
                flow_control(reader, section, listed);
            }
        }
        (gate, Some(section)) if others(section) => {
            let place = node.key_place("flowControl").unwrap_or(section.place);
            let why = "`flowControl` has no effect but for its saturationDetector: its feature gate is off";
            let advice = Some("write `featureGates: [flowControl]`".to_owned());
            reader.problems.warning(place, why, advice);
            reader.queue.waits &= gate != Some(false);
        }
        (Some(false), _) => reader.queue.waits = false,
        (None, _) => {}
    }
}

/// Whether a section says more than which detector is used.
fn others(section: &Node) -> bool {
    matches!(&section.value, Yaml::Map(members) if members.iter().any(|member| member.0 != "saturationDetector"))
}

fn flow_control(reader: &mut Reader<'_>, section: &Node, listed: &[Listed<'_>]) {
    let all = bound(reader, section, Bound::NONE);
    reader.queue.all = all;
    if let Some(ttl) = time(reader, section, "defaultRequestTTL") {
        reader.queue.timeout = Some(ttl).filter(|ttl| !ttl.is_zero());
        reader.queue.hold = ttl;
    }
    if let Some(ttl) = time(reader, section, "noEndpointRequestTTL") {
        reader.queue.hold = ttl;
    }
    let mut policies = Policies::default();
    if let Some(band) = section.get("defaultPriorityBand") {
        reader.queue.band = bound(reader, band, reader.queue.band);
        reader.queue.sheddable = Some(reader.queue.band);
        policies.of(reader, band, listed);
    }
    if let Some(band) = section.get("defaultNegativePriorityBand") {
        let sheddable = bound(reader, band, reader.queue.band);
        reader.queue.sheddable = Some(sheddable);
        policies.of(reader, band, listed);
    }
    for band in section.get("priorityBands").into_iter().flat_map(Node::items) {
        let bound = bound(reader, band, reader.queue.band);
        match band.get("priority").map(Node::to_json).and_then(|value| i32::try_from(value.as_i64()?).ok()) {
            Some(priority) => {
                reader.queue.bands.insert(priority, bound);
            }
            None => reader.problems.error(band.place, "a band has a `priority`, a whole number", None),
        }
        policies.of(reader, band, listed);
    }
    if let Some(named) = section.get("usageLimitPolicyPluginRef") {
        ceilings(reader, named, listed);
    }
    if section.get("enableEviction").is_some_and(|value| value.to_json() == serde_json::Value::Bool(true)) {
        let place = section.key_place("enableEviction").unwrap_or(section.place);
        let why = "`enableEviction` has no effect in this version: what runs is not cut off";
        reader.problems.warning(place, why, None);
    }
}

/// Policies of bands, of which the first counts.
#[derive(Default)]
struct Policies {
    fairness: Option<ShareBy>,
    order: Option<Order>,
}

impl Policies {
    fn of(&mut self, reader: &mut Reader<'_>, band: &Node, listed: &[Listed<'_>]) {
        if let Some(node) = band.get("fairnessPolicyRef") {
            let share_by = match type_of(node, listed) {
                "global-strict-fairness-policy" => Some(ShareBy::Nothing),
                "round-robin-fairness-policy" => Some(ShareBy::Requests),
                // It favours who was given least, by tokens with the same weights as here.
                "program-aware-fairness" => Some(ShareBy::Tokens),
                _ => None,
            };
            one(reader, node, &mut self.fairness, share_by);
            reader.queue.share_by = self.fairness.unwrap_or(reader.queue.share_by);
        }
        if let Some(node) = band.get("orderingPolicyRef") {
            let order = match type_of(node, listed) {
                // All deadlines there are the same time after arrival.
                "fcfs-ordering-policy" | "edf-ordering-policy" => Some(Order::Arrival),
                "slo-deadline-ordering-policy" => Some(Order::Deadline),
                _ => None,
            };
            one(reader, node, &mut self.order, order);
            if let Some(order) = &self.order {
                reader.queue.order = order.clone();
            }
        }
    }
}

fn one<P: PartialEq>(reader: &mut Reader<'_>, node: &Node, first: &mut Option<P>, found: Option<P>) {
    match (&first, found) {
        (_, None) => {
            let why = format!("`{}` is no policy of queues here", node.as_str().unwrap_or_default());
            reader.problems.warning(node.place, why, None);
        }
        (None, found) => *first = found,
        (Some(known), Some(found)) if *known != found => {
            let why = "this band has another policy than the one before, and one policy serves all bands";
            reader.problems.warning(node.place, why, None);
        }
        _ => {}
    }
}

/// The type of the instance that is named; llm-d makes one of the type that is named where none is listed.
fn type_of<'n>(node: &'n Node, listed: &[Listed<'n>]) -> &'n str {
    let name = node.as_str().unwrap_or_default();
    listed.iter().find(|one| one.name == name).map_or(name, |one| one.type_name)
}

fn parameters<P: Default + for<'de> Deserialize<'de>>(
    reader: &mut Reader<'_>,
    node: &Node,
    listed: &[Listed<'_>],
) -> P {
    let name = node.as_str().unwrap_or_default();
    let given = listed.iter().find(|one| one.name == name).and_then(|one| one.parameters);
    let Some(given) = given.filter(|given| !given.is_blank()) else { return P::default() };
    typed(given).unwrap_or_else(|(place, message, advice)| {
        reader.problems.error(place, message, advice);
        P::default()
    })
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Utilization {
    queue_depth_threshold: f32,
    kv_cache_util_threshold: f32,
    metrics_staleness_threshold: Option<String>,
    headroom: f32,
}

impl Default for Utilization {
    fn default() -> Self {
        Self {
            queue_depth_threshold: 5.0,
            kv_cache_util_threshold: 0.8,
            metrics_staleness_threshold: None,
            headroom: 0.0,
        }
    }
}

#[derive(Deserialize, Default, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Concurrency {
    #[default]
    Requests,
    Tokens,
    Hybrid,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct ConcurrencyDetector {
    max_concurrency: f32,
    concurrency_mode: Concurrency,
    max_token_concurrency: f32,
    headroom: f32,
}

impl Default for ConcurrencyDetector {
    fn default() -> Self {
        Self {
            max_concurrency: 100.0,
            concurrency_mode: Concurrency::Requests,
            max_token_concurrency: 1e6,
            headroom: 0.0,
        }
    }
}

fn detect(reader: &mut Reader<'_>, named: &Node, listed: &[Listed<'_>]) {
    match type_of(named, listed) {
        UTILIZATION => {
            let given: Utilization = parameters(reader, named, listed);
            let depth = positive(reader, named, "queueDepthThreshold", given.queue_depth_threshold);
            reader.queue.saturation.queue_depth = depth.min(NEVER);
            let usage = share(reader, named, "kvCacheUtilThreshold", given.kv_cache_util_threshold);
            reader.queue.saturation.kv_usage = usage;
            if given.metrics_staleness_threshold.is_some() {
                let why = "metricsStalenessThreshold has no effect: --staleness says when a reading is unknown, and \
                           what is unknown is not full";
                reader.problems.warning(named.place, why, None);
            }
            headroom(reader, named, given.headroom);
        }
        CONCURRENCY => {
            let given: ConcurrencyDetector = parameters(reader, named, listed);
            let requests = positive(reader, named, "maxConcurrency", given.max_concurrency);
            let tokens = positive(reader, named, "maxTokenConcurrency", given.max_token_concurrency);
            let saturation = &mut reader.queue.saturation;
            if given.concurrency_mode != Concurrency::Tokens {
                saturation.most_requests = Some(requests);
            }
            if given.concurrency_mode != Concurrency::Requests {
                saturation.most_tokens = Some(tokens);
            }
            // It looks at what is in flight alone.
            (saturation.queue_depth, saturation.kv_usage) = (NEVER, NEVER);
            headroom(reader, named, given.headroom);
        }
        _ => no_policy(reader, named),
    }
}

fn no_policy(reader: &mut Reader<'_>, named: &Node) {
    let name = named.as_str().unwrap_or_default();
    let why = format!("`{name}` has no effect here: it is no policy or detector of queues");
    reader.problems.warning(named.place, why, None);
}

/// A share is above 0 and at most 1.
fn share(reader: &mut Reader<'_>, named: &Node, key: &str, value: f32) -> f32 {
    if value > 0.0 && value <= 1.0 {
        return value;
    }
    reader.problems.error(named.place, format!("`{key}` is a share, above 0 and at most 1"), None);
    1.0
}

/// A number above 0.
fn positive(reader: &mut Reader<'_>, named: &Node, key: &str, value: f32) -> f32 {
    if value > 0.0 && value.is_finite() {
        return value;
    }
    reader.problems.error(named.place, format!("`{key}` is a number above 0"), None);
    1.0
}

fn headroom(reader: &mut Reader<'_>, named: &Node, headroom: f32) {
    if headroom > 0.0 {
        let why = "`headroom` has no effect: endpoints beyond their threshold are rated, not left out";
        reader.problems.warning(named.place, why, None);
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct StaticLimit {
    threshold: f32,
}

impl Default for StaticLimit {
    fn default() -> Self {
        Self { threshold: 1.0 }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
struct Holdback {
    shape: String,
    domain: String,
    min_ceiling: f32,
    max_ceiling: f32,
}

impl Default for Holdback {
    fn default() -> Self {
        Self { shape: "linear".to_owned(), domain: "rank".to_owned(), min_ceiling: 1.0, max_ceiling: 1.0 }
    }
}

fn ceilings(reader: &mut Reader<'_>, named: &Node, listed: &[Listed<'_>]) {
    match type_of(named, listed) {
        "static-usage-limit-policy" => {
            let given: StaticLimit = parameters(reader, named, listed);
            let threshold = share(reader, named, "threshold", given.threshold);
            reader.queue.ceilings = Ceilings::Same(threshold);
        }
        "priority-holdback-policy" => {
            let given: Holdback = parameters(reader, named, listed);
            if given.shape != "linear" || given.domain != "rank" {
                let why = "shares fall evenly from band to band here, whatever `shape` and `domain` say";
                reader.problems.warning(named.place, why, None);
            }
            let most = share(reader, named, "maxCeiling", given.max_ceiling);
            let least = share(reader, named, "minCeiling", given.min_ceiling);
            reader.queue.ceilings = Ceilings::Falling { most, least };
        }
        _ => no_policy(reader, named),
    }
}

fn bound(reader: &mut Reader<'_>, node: &Node, usual: Bound) -> Bound {
    let requests = number(reader, node, "maxRequests");
    let bytes = number(reader, node, "maxBytes");
    Bound {
        requests: requests.map_or(usual.requests, |n| usize::try_from(n).unwrap_or(usize::MAX)),
        bytes: bytes.unwrap_or(usual.bytes),
    }
}

fn number(reader: &mut Reader<'_>, node: &Node, key: &str) -> Option<u64> {
    let member = node.get(key).filter(|member| !member.is_blank())?;
    let text = match member.to_json() {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    let found = quantity::parse(&text);
    if found.is_none() {
        unreadable(reader, key, member.place, "a quantity, such as 500 or 1Gi");
    }
    found
}

fn time(reader: &mut Reader<'_>, node: &Node, key: &str) -> Option<std::time::Duration> {
    let member = node.get(key).filter(|member| !member.is_blank())?;
    let found = member.as_str().and_then(duration::parse);
    if found.is_none() {
        unreadable(reader, key, member.place, "a duration, such as 30s");
    }
    found
}

fn unreadable(reader: &mut Reader<'_>, key: &str, place: Place, wanted: &str) {
    reader.problems.error(place, format!("`{key}` is not {wanted}"), None);
}
