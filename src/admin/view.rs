//! Records as JSON.

use serde_json::{Map, Value, json};

use crate::clock::rfc3339;
use crate::decision::Record;
use crate::disagg::Fallback;
use crate::feed::kv_events::sequence::Note;
use crate::feed::kv_events::wire::Shape;
use crate::feed::kv_events::{GAP_OUTCOMES, Skip, Status};
use crate::feed::scrape::ScrapeStatus;
use crate::schedule::{CandidateRow, LegRecord, Split};
use crate::session::Outcome;
use crate::state::Endpoint;
use crate::state::Pool;
use crate::state::cache::Rung;
use crate::state::endpoint::Booked;
use crate::state::rates::Factors;
use crate::state::signals::{Millis, SignalKind};

/// A score as JSON; NaN is null.
fn score(value: f32) -> Value {
    if value.is_finite() { json!(value) } else { Value::Null }
}

/// A decision, as `/debug/decisions` and `explain` show it.
pub fn decision(record: &Record) -> Value {
    let stages = &record.stages;
    let micros = |d: std::time::Duration| d.as_micros() as u64;
    json!({
        "decision": record.id,
        "request_id": record.request_id,
        "time": rfc3339(record.time),
        "user": record.identity.name(),
        "priority": record.priority,
        "model": record.model,
        "target_model": record.target_model,
        "pool": record.pool,
        "route": record.route,
        "rung": record.rung.name(),
        "prompt_tokens": record.prompt_tokens,
        "session": record.session.map(Outcome::name),
        "legs": record.legs.iter().map(|leg_record| leg(leg_record, record)).collect::<Vec<_>>(),
        "predicted_cached_tokens": record.predicted_cached_tokens,
        "reported_cached_tokens": record.reported_cached_tokens,
        "usage": record.usage.map(|(usage, source)| {
            json!({"prompt": usage.prompt, "completion": usage.completion, "source": source.name()})
        }),
        "status": record.status,
        "outcome": record.outcome.name(),
        "split": record.split.map(Split::name),
        "prefill": record.prefill.as_ref().map(|report| json!({
            "endpoint": report.endpoint,
            "attempts": report.attempts,
            "took_us": micros(report.took),
            "usage": report.usage.map(|usage| json!({"prompt": usage.prompt, "cached": usage.cached})),
            "failure": report.failure.map(Fallback::name),
        })),
        "stages_us": {
            "receive": micros(stages.receive),
            "parse": micros(stages.parse),
            "route": micros(stages.route),
            "prompt": micros(stages.prompt),
            "queue": micros(stages.queue),
            "schedule": micros(stages.schedule),
            "prefill": micros(stages.prefill),
            "decision": micros(stages.decision),
            "first_token": stages.first_token.map(micros),
            "total": micros(stages.total),
        },
    })
}

fn leg(leg: &LegRecord, record: &Record) -> Value {
    json!({
        "role": leg.role.name(),
        "profile": leg.profile.name,
        "candidates_total": leg.candidates_total,
        "complete": leg.complete,
        "candidates": leg.rows.iter().map(|row| candidate(leg, row)).collect::<Vec<_>>(),
        "picked": &leg.picked[..],
        "reserved": {
            "requests": leg.reserved_requests,
            "prefill_tokens": leg.reserved_prefill,
            "decode_tokens": leg.reserved_decode,
        },
        "served": record.served,
        "attempts": record.attempts,
    })
}

fn candidate(leg: &LegRecord, row: &CandidateRow) -> Value {
    let filtered_by = row.filtered_by.map(|by| {
        let name = leg.profile.filters.get(usize::from(by.filter)).map_or("filter", |filter| &*filter.name);
        format!("{name}: {}", by.why)
    });
    let scores: Map<String, Value> = leg
        .profile
        .scorers
        .iter()
        .zip(row.raw.iter().zip(&row.used))
        .map(|(scorer, (raw, used))| {
            let shown =
                json!({"type": scorer.kind, "raw": score(*raw), "used": score(*used), "weight": score(scorer.weight)});
            (scorer.name.to_string(), shown)
        })
        .collect();
    json!({
        "endpoint": row.endpoint,
        "filtered_by": filtered_by,
        "scores": scores,
        "total": score(row.total),
        "cached_tokens": row.cached_tokens,
        "rung": row.rung.name(),
    })
}

/// What is booked.
pub fn booked(booked: &Booked) -> Value {
    let (requests, prefill, decode) = booked.read();
    let (decoding, prefill_seconds) = booked.phases();
    json!({
        "requests": requests,
        "decoding": decoding,
        "prefill_tokens": prefill,
        "prefill_seconds": prefill_seconds,
        "decode_tokens": decode,
    })
}

/// How an endpoint reports itself: the engine whose names its page has, the name each signal goes by there, and what is
/// missing.
pub fn scrape(status: &ScrapeStatus) -> Value {
    let names = status.names.iter().map(|(signal, name)| ((*signal).to_owned(), json!(name)));
    json!({
        "dialect": status.dialect,
        "filtered": status.filtered,
        "names": names.collect::<Map<String, Value>>(),
        "missing": status.missing,
    })
}

/// What is known of an endpoint's KV events. `lag_s` compares two clocks.
pub fn events(status: &Status) -> Value {
    let counts = &status.counts;
    let skipped = Skip::ALL.iter().map(|&why| (why.name().to_owned(), counts.skipped[why as usize]));
    let gaps = GAP_OUTCOMES.iter().map(|&(outcome, note)| (outcome.to_owned(), json!(counts.noted(note))));
    json!({
        "state": status.state.name(),
        "since_s": status.since.as_secs_f64(),
        "sources": status.sources,
        "shape": status.shape.map(Shape::name),
        "frames": counts.frames,
        "stored": counts.stored,
        "removed": counts.removed,
        "cleared": counts.cleared,
        "skipped": skipped.filter(|(_, n)| *n > 0).map(|(why, n)| (why, json!(n))).collect::<Map<String, Value>>(),
        "gaps": gaps.collect::<Map<String, Value>>(),
        "replays": counts.noted(Note::Replay),
        "restarts": counts.noted(Note::Restarted),
        "duplicates": counts.noted(Note::Duplicate),
        "topic_mismatches": counts.topic_mismatches,
        "pending": status.pending,
        "blocks": status.blocks,
        "lag_s": status.lag_seconds,
    })
}

/// Every signal of an endpoint, unknown ones as null.
pub fn signals(endpoint: &Endpoint, now: Millis) -> Value {
    let signals = SignalKind::ALL.iter().map(|&kind| {
        let shown = match endpoint.signals.last(kind, now) {
            Some((value, age)) => json!({"value": value, "age_s": age.as_secs_f64(), "source": "scrape"}),
            None => json!({"value": null, "age_s": null, "source": null}),
        };
        (kind.name().to_owned(), shown)
    });
    Value::Object(signals.collect())
}

/// How fast an endpoint is taken to be, and how many responses have shown it.
pub fn rates(endpoint: &Endpoint, pool: Option<&Pool>, now: Millis) -> Value {
    let usual = pool.map_or(Factors::UNIT, |pool| pool.memory.learned.rates.factors(Factors::UNIT));
    let factors = endpoint.rates.among(usual.at_speed(endpoint.speed()), now);
    let (prefill_samples, step_samples) = endpoint.rates.samples(now);
    json!({
        "prefill_tokens_per_second": 1_000.0 / factors.prefill(1_000.0, 0.0),
        "step_milliseconds": 1_000.0 * factors.step(1.0, 0.0),
        "prefill_samples": prefill_samples.round(),
        "step_samples": step_samples.round(),
    })
}

/// How often each source of cache knowledge was right.
pub fn truth(endpoint: &Endpoint) -> Value {
    let shown = [Rung::Precise, Rung::Shared, Rung::Approximate].into_iter().filter_map(|rung| {
        let truth = endpoint.cache.truth(rung)?;
        let shown = json!({
            "error": truth.error(),
            "bias": truth.error().map(|_| truth.bias()),
            "responses": truth.samples(),
            "doubted": truth.is_doubted(),
        });
        Some((rung.name().to_owned(), shown))
    });
    Value::Object(shown.collect())
}
