//! The access log: one event a request under the target `pilotfish::access`, as JSON or text by `--log-format`.

use crate::decision::Record;
use crate::disagg::Fallback;
use crate::refusal::Refusal;
use crate::schedule::Split;
use crate::session::Outcome;

/// The target that turns the access log on and off: `--log-level info,pilotfish::access=off`.
pub const TARGET: &str = "pilotfish::access";

/// A request that reached an endpoint.
pub fn served(record: &Record) {
    if !tracing::enabled!(target: TARGET, tracing::Level::INFO) {
        return;
    }
    let millis = |d: std::time::Duration| d.as_secs_f64() * 1e3;
    let (usage, source) = record.usage.map_or((None, ""), |(usage, source)| (Some(usage), source.name()));
    let picked = record.legs.first().and_then(|leg| leg.picked.first());
    let stages = &record.stages;
    tracing::info!(
        target: TARGET,
        request_id = &*record.request_id,
        decision = &*record.id,
        user = record.identity.name(),
        model = &*record.model,
        target_model = record.target_model.as_deref(),
        route = record.route.as_deref(),
        pool = record.pool.as_deref(),
        endpoint = record.served.as_deref().or(picked.map(|p| &**p)),
        picked = picked.map(|p| &**p),
        attempts = record.attempts,
        status = record.status,
        outcome = record.outcome.name(),
        prompt_tokens = usage.map(|u| u.prompt),
        output_tokens = usage.map(|u| u.completion),
        cached_tokens = usage.and_then(|u| u.cached),
        prefill_endpoint = record.prefill.as_ref().map(|report| &*report.endpoint),
        prefill_failure = record.prefill.as_ref().and_then(|report| report.failure).map(Fallback::name),
        prefill_ms = record.prefill.as_ref().map(|report| millis(report.took)),
        split = record.split.map(Split::name),
        session = record.session.map(Outcome::name),
        predicted_cached_tokens = record.predicted_cached_tokens,
        usage_source = source,
        receive_ms = millis(stages.receive),
        parse_ms = millis(stages.parse),
        route_ms = millis(stages.route),
        prompt_ms = millis(stages.prompt),
        queue_ms = millis(stages.queue),
        schedule_ms = millis(stages.schedule),
        decision_ms = millis(stages.decision),
        first_token_ms = stages.first_token.map(millis),
        total_ms = millis(stages.total),
        "request"
    );
}

/// A request that the picker refused.
pub fn refusal(record: &Record, refusal: &Refusal) {
    tracing::info!(
        target: TARGET,
        request_id = &*record.request_id,
        decision = &*record.id,
        user = record.identity.name(),
        model = &*record.model,
        route = record.route.as_deref(),
        pool = record.pool.as_deref(),
        status = record.status,
        reason = refusal.reason.name(),
        queue_ms = record.stages.queue.as_secs_f64() * 1e3,
        why = &*refusal.message,
        "refused"
    );
}
