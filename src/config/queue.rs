//! The section `queue`: whose share is how large, and when a pool is full.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;

use super::Reader;
use crate::admission::QueueSettings;
use crate::admission::fairness::USUAL_WEIGHT;
use crate::admission::gate::SESSIONS;
use crate::admission::settings::{Order, ShareBy};
use crate::document::{Node, typed};
use crate::resources::duration;

/// Requests wait while their pool has no room. Who goes first: the higher priority, then the flow (identity or fairness id)
/// that was given least for its share, then who came first.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
pub struct Queue {
    /// What shares turns: `tokens` (flows, by what they cost; the default), `requests` (flows, one request each), `nothing`
    /// (one line).
    share_by: Option<Share>,
    /// The order inside a flow: `arrival` (the default), `deadline` (by `x-slo-ttft-ms`), `session` (who goes on with a
    /// session first).
    order: Option<OrderBy>,
    /// For `order: session`: the header with the session's id (`x-session-id`) and the head start (`10s`).
    session: Session,
    /// Cost of a prompt token (1).
    input_token_weight: Option<f64>,
    /// Cost of an output token (2).
    output_token_weight: Option<f64>,
    /// Shares of flows by name, beside 1 for all others.
    weights: BTreeMap<String, f64>,
    /// Requests of a pool at once, whatever its endpoints could hold.
    max_concurrent: Option<u32>,
    /// Requests of a pool in a second.
    max_per_second: Option<f64>,
    /// Waiting requests of an engine that count as full (5).
    endpoint_queue_depth: Option<f32>,
    /// Use of an engine's KV cache that counts as full (0.98).
    endpoint_kv_usage: Option<f32>,
    /// Requests at once on an endpoint of weight 1; without it as many as it has shown it runs, and its queue.
    endpoint_max_requests: Option<f32>,
    /// Tokens in flight on an endpoint of weight 1; without it what its KV cache holds.
    endpoint_max_tokens: Option<f32>,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
enum Share {
    Tokens,
    Requests,
    Nothing,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
enum OrderBy {
    Arrival,
    Deadline,
    Session,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Session {
    header: Option<String>,
    head_start: Option<String>,
}

impl Session {
    fn is_given(&self) -> bool {
        self.header.is_some() || self.head_start.is_some()
    }
}

/// The head start of requests that go on with a session, where nothing says another.
pub const HEAD_START: Duration = Duration::from_secs(10);
/// Kthena's header.
pub const SESSION_HEADER: &str = "x-session-id";

/// Requests a second that can be told apart from none and from all.
pub const RATES: RangeInclusive<f64> = 0.001..=1e6;

/// Reads the section.
pub fn section(reader: &mut Reader<'_>, node: &Node) {
    let Some(node) = node.get("queue").filter(|node| !node.is_blank()) else { return };
    let queue = match typed::<Queue>(node) {
        Ok(queue) => queue,
        Err((place, message, advice)) => return reader.problems.error(place, message, advice),
    };
    if queue.session.is_given() && !matches!(queue.order, Some(OrderBy::Session)) {
        let place = node.key_place("session").unwrap_or(node.place);
        let advice = Some("write `order: session` beside it".to_owned());
        reader.problems.warning(place, "`session` has no effect without its order", advice);
    }
    if let Err((key, why)) = queue.apply(&mut reader.queue) {
        let place = node.key_place(key).unwrap_or(node.place);
        reader.problems.error(place, format!("`{key}` {why}"), None);
    }
}

impl Queue {
    fn apply(self, to: &mut QueueSettings) -> Result<(), (&'static str, &'static str)> {
        let above_zero = |key, number: Option<f64>| match number {
            Some(number) if !(number.is_finite() && number > 0.0) => Err((key, "must be a number above 0")),
            number => Ok(number),
        };
        let wide = |number: Option<f32>| number.map(f64::from);
        if self.max_per_second.is_some_and(|rate| !RATES.contains(&rate)) {
            return Err(("maxPerSecond", "must be a number from 0.001 to 1000000"));
        }
        if self.endpoint_kv_usage.is_some_and(|usage| usage > 1.0) {
            return Err(("endpointKvUsage", "must be a share, up to 1"));
        }
        above_zero("endpointQueueDepth", wide(self.endpoint_queue_depth))?;
        above_zero("endpointKvUsage", wide(self.endpoint_kv_usage))?;
        above_zero("endpointMaxRequests", wide(self.endpoint_max_requests))?;
        above_zero("endpointMaxTokens", wide(self.endpoint_max_tokens))?;
        if self.max_concurrent == Some(0) {
            return Err(("maxConcurrent", "must be a number above 0"));
        }
        for (name, weight) in self.weights {
            let scaled = weight * f64::from(USUAL_WEIGHT);
            if !(1.0..=1e9).contains(&scaled) {
                return Err(("weights", "must be numbers from 0.001 to 1000000"));
            }
            to.weights.insert(name.into(), scaled as u32);
        }
        let weight = |key, number: Option<f64>, usual| match number {
            Some(number) if !(number.is_finite() && number >= 0.0) => {
                Err((key, "must be a number, 0 or above"))
            }
            number => Ok(number.unwrap_or(usual)),
        };
        let (input, output) = to.token_weights;
        to.token_weights = (
            weight("inputTokenWeight", self.input_token_weight, input)?,
            weight("outputTokenWeight", self.output_token_weight, output)?,
        );
        let head_start = match self.session.head_start.as_deref().map(duration::parse) {
            Some(None) => return Err(("session", "has a `headStart` that is no duration, such as 10s")),
            Some(Some(head_start)) => head_start,
            None => HEAD_START,
        };
        match self.order {
            Some(OrderBy::Arrival) => to.order = Order::Arrival,
            Some(OrderBy::Deadline) => to.order = Order::Deadline,
            Some(OrderBy::Session) => {
                let header = self.session.header.as_deref().unwrap_or(SESSION_HEADER);
                let header = header.to_ascii_lowercase().into();
                to.order = Order::Session { header, boost: head_start, sessions: SESSIONS };
            }
            None => {}
        }
        match self.share_by {
            Some(Share::Tokens) => to.share_by = ShareBy::Tokens,
            Some(Share::Requests) => to.share_by = ShareBy::Requests,
            Some(Share::Nothing) => to.share_by = ShareBy::Nothing,
            None => {}
        }
        to.most_at_once = self.max_concurrent.or(to.most_at_once);
        to.most_per_second = self.max_per_second.or(to.most_per_second);
        let full = &mut to.saturation;
        full.queue_depth = self.endpoint_queue_depth.unwrap_or(full.queue_depth);
        full.kv_usage = self.endpoint_kv_usage.unwrap_or(full.kv_usage);
        full.most_requests = self.endpoint_max_requests.or(full.most_requests);
        full.most_tokens = self.endpoint_max_tokens.or(full.most_tokens);
        Ok(())
    }
}
