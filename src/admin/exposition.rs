//! Turns the counters into series at the moment of a scrape.

mod caches;
mod cluster;
mod disaggregation;
mod limits;
mod queues;
mod tokenizing;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::RwLock;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::Documents;
use crate::admission::Admission;
use crate::admission::limits::Limiter;
use crate::decide::Tokenizing;
use crate::feed::kube::Watches;
use crate::feed::kv_events::{EventFeed, GAP_OUTCOMES, Skip};
use crate::feed::render::Renderer;
use crate::feed::scrape::Scraper;
use crate::metrics::{Degraded, Metrics, Stage};
use crate::schedule::Scheduler;
use crate::session::Outcome;
use crate::settle::Ledger;
use crate::snapshot::{Snapshot, Store};
use crate::state::health::State;
use crate::state::pool::{BrokenCause, Pool};
use crate::state::signals::{Millis, SignalKind};
use crate::usage::UsageSource;

/// The pool label of requests that reached none.
const NO_POOL: &str = "";

/// What series are read from.
#[derive(Debug)]
pub struct Sources {
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Pools and endpoints.
    pub store: Arc<Store>,
    /// Queues.
    pub admission: Arc<Admission>,
    /// Settled requests.
    pub ledger: Arc<Ledger>,
    /// What scrapes found out.
    pub scraper: Scraper,
    /// What is known of caches.
    pub scheduler: Arc<Scheduler>,
    /// Token limits.
    pub limiter: Arc<Limiter>,
    /// Tokenizing here.
    pub tokenizing: Arc<Tokenizing>,
    /// Tokenizing elsewhere.
    pub renderer: Renderer,
    /// KV events of engines.
    pub events: EventFeed,
    /// How current the cluster's objects are.
    pub watches: Arc<Watches>,
    /// What is wrong with resources and pods.
    pub documents: Arc<RwLock<Documents>>,
    /// Age from which a signal is unknown.
    pub staleness: Duration,
}

/// The registry that `/metrics` encodes.
pub fn registry(sources: Sources) -> Registry {
    let mut registry = Registry::with_prefix("pilotfish");
    registry.register_collector(Box::new(sources));
    registry
}

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let snapshot = self.store.load_full();
        requests(&mut encoder, &self.metrics, get(&self.ledger.aborted), &snapshot)?;
        timings(&mut encoder, &self.metrics, &snapshot)?;
        endpoints(&mut encoder, &snapshot, self.staleness)?;
        missing(&mut encoder, &snapshot, &self.scraper)?;
        events(&mut encoder, &snapshot, &self.events)?;
        self.metrics.set_degraded(Degraded::KvEvents, self.events.is_degraded());
        bookings(&mut encoder, &snapshot)?;
        disaggregation::disaggregation(&mut encoder, &snapshot)?;
        queues::queues(&mut encoder, &self.metrics, &snapshot, &self.admission)?;
        reports(&mut encoder, &self.scheduler)?;
        tokens(&mut encoder, &self.metrics, &snapshot)?;
        caches::caches(&mut encoder, &self.metrics, &snapshot, &self.scheduler)?;
        tokenizing::tokenizing(&mut encoder, &self.metrics, &self.tokenizing, &self.renderer)?;
        limits::limits(&mut encoder, &self.metrics, &self.limiter)?;
        cluster::cluster(&mut encoder, &self.watches, &self.documents.read())?;
        process(&mut encoder, &self.metrics)
    }
}

/// One family: its descriptor, then its series.
struct Family<'a>(MetricEncoder<'a>);

impl<'a> Family<'a> {
    fn new(
        encoder: &'a mut DescriptorEncoder<'_>,
        name: &'a str,
        help: &'a str,
        kind: MetricType,
    ) -> Result<Self, fmt::Error> {
        encoder.encode_descriptor(name, help, None, kind).map(Self)
    }

    fn counter<const N: usize>(&mut self, labels: [(&str, &str); N], value: u64) -> fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_family(&labels)?)
    }

    fn gauge<const N: usize>(&mut self, labels: [(&str, &str); N], value: f64) -> fmt::Result {
        ConstGauge::new(value).encode(self.0.encode_family(&labels)?)
    }
}

fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

fn requests(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &Metrics,
    aborted: u64,
    snapshot: &Snapshot,
) -> fmt::Result {
    let help = "Requests by what they were answered; reason is `served` where an engine was reached, and code 0 unknown";
    let mut family = Family::new(encoder, "requests", help, MetricType::Counter)?;
    for (reason, n) in metrics.refused.read() {
        family.counter(
            [("pool", NO_POOL), ("code", &reason.status().to_string()), ("reason", reason.name())],
            n,
        )?;
    }
    if get(&metrics.answered) > 0 {
        family
            .counter([("pool", NO_POOL), ("code", "200"), ("reason", "answered")], get(&metrics.answered))?;
    }
    if aborted > 0 {
        family.counter([("pool", NO_POOL), ("code", "0"), ("reason", "aborted")], aborted)?;
    }
    for pool in &snapshot.pools {
        let counted = &pool.memory.metrics;
        for (status, n) in counted.served.read() {
            let code = if status == 100 { "0".to_owned() } else { status.to_string() };
            family.counter([("pool", &*pool.label), ("code", &*code), ("reason", "served")], n)?;
        }
        for (reason, n) in counted.refused.read() {
            let code = reason.status().to_string();
            family.counter([("pool", &*pool.label), ("code", &*code), ("reason", reason.name())], n)?;
        }
    }
    let help = "Times an endpoint was the choice of a decision";
    let mut family = Family::new(encoder, "picks", help, MetricType::Counter)?;
    for (pool, member) in members(snapshot) {
        family.counter(
            [("pool", &*pool.label), ("endpoint", &*member.endpoint.destination)],
            get(&member.picks),
        )?;
    }
    let help = "Responses that ended before they were complete, by cause";
    let mut family = Family::new(encoder, "broken_streams", help, MetricType::Counter)?;
    for (pool, member) in members(snapshot) {
        for cause in BrokenCause::ALL {
            let n = get(&member.broken[cause as usize]);
            if n > 0 {
                let endpoint = &*member.endpoint.destination;
                family
                    .counter([("pool", &*pool.label), ("endpoint", endpoint), ("cause", cause.name())], n)?;
            }
        }
    }
    let help = "Cycles in which a filter was ignored because it would have left no endpoint";
    let mut family = Family::new(encoder, "filters_ignored", help, MetricType::Counter)?;
    for pool in &snapshot.pools {
        family.counter([("pool", &*pool.label)], get(&pool.memory.metrics.filters_ignored))?;
    }
    let help = "Picks of profiles that keep sessions, by what became of the session";
    let mut family = Family::new(encoder, "sessions", help, MetricType::Counter)?;
    for pool in &snapshot.pools {
        for outcome in Outcome::ALL {
            let n = get(&pool.memory.metrics.sessions[outcome as usize]);
            if n > 0 {
                family.counter([("pool", &*pool.label), ("outcome", outcome.name())], n)?;
            }
        }
    }
    Ok(())
}

/// Attributes of responses that operators have reported.
fn reports(encoder: &mut DescriptorEncoder<'_>, scheduler: &Scheduler) -> fmt::Result {
    let help = "Responses on which the expression of a reported attribute failed";
    let mut family = Family::new(encoder, "report_failures", help, MetricType::Counter)?;
    for report in scheduler.pipeline().reports.iter() {
        family.counter([("namespace", &*report.namespace), ("name", &*report.name)], report.failures())?;
    }
    Ok(())
}

fn timings(encoder: &mut DescriptorEncoder<'_>, metrics: &Metrics, snapshot: &Snapshot) -> fmt::Result {
    let help = "Last body byte in to reply out, without time queued or in a prefill leg";
    metrics.decision.encode(encoder.encode_descriptor(
        "decision_seconds",
        help,
        None,
        MetricType::Histogram,
    )?)?;
    let help = "Time spent in each stage of a request";
    let mut family = Family::new(encoder, "stage_seconds", help, MetricType::Histogram)?;
    for stage in Stage::ALL {
        metrics.stages[stage as usize].encode(family.0.encode_family(&[("stage", stage.name())])?)?;
    }
    let help = "Reply to Envoy until the first response body byte, where somebody saw it";
    let mut family = Family::new(encoder, "time_to_first_token_seconds", help, MetricType::Histogram)?;
    for pool in &snapshot.pools {
        let histogram = &pool.memory.metrics.time_to_first_token;
        histogram.encode(family.0.encode_family(&[("pool", &*pool.label)])?)?;
    }
    Ok(())
}

/// Signals that an engine should report and does not. An engine that renames a metric shows here.
fn missing(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot, scraper: &Scraper) -> fmt::Result {
    let help = "1 for a signal that the engine should report and does not";
    let mut family = Family::new(encoder, "engine_metric_missing", help, MetricType::Gauge)?;
    for endpoint in &snapshot.endpoints {
        let Some(status) = scraper.status(endpoint.slot) else { continue };
        for metric in status.missing {
            family.gauge([("endpoint", &*endpoint.destination), ("metric", metric)], 1.0)?;
        }
    }
    Ok(())
}

/// KV events of endpoints that have a source of them.
fn events(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot, feed: &EventFeed) -> fmt::Result {
    let followed: Vec<_> = snapshot
        .endpoints
        .iter()
        .filter_map(|endpoint| Some((&*endpoint.destination, feed.status(endpoint.slot)?.counts)))
        .collect();
    let help = "Blocks that engines announced as stored or removed, and times they emptied their cache";
    let mut family = Family::new(encoder, "kv_events", help, MetricType::Counter)?;
    for (endpoint, counts) in &followed {
        for (kind, n) in [("stored", counts.stored), ("removed", counts.removed), ("cleared", counts.cleared)]
        {
            family.counter([("endpoint", *endpoint), ("kind", kind)], n)?;
        }
    }
    let help = "KV events, or whole frames of them, that had no effect";
    let mut family = Family::new(encoder, "kv_events_skipped", help, MetricType::Counter)?;
    for (why, n) in Skip::ALL.iter().zip(feed.skipped()) {
        family.counter([("reason", why.name())], n)?;
    }
    let help = "Gaps in an engine's KV events by how they ended";
    let mut family = Family::new(encoder, "kv_event_gaps", help, MetricType::Counter)?;
    for (endpoint, counts) in &followed {
        for (outcome, note) in GAP_OUTCOMES {
            family.counter([("endpoint", *endpoint), ("outcome", outcome)], counts.noted(note))?;
        }
    }
    Ok(())
}

fn endpoints(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot, staleness: Duration) -> fmt::Result {
    let mut family = Family::new(encoder, "endpoints", "Endpoints of a pool by state", MetricType::Gauge)?;
    for pool in &snapshot.pools {
        for state in State::ALL {
            let n = pool.members.iter().filter(|member| member.endpoint.health.state() == state).count();
            family.gauge([("pool", &*pool.label), ("state", state.name())], n as f64)?;
        }
    }
    let now = Millis::now();
    let help = "Age of the oldest value of a signal among the pool's endpoints that ever gave it";
    let mut family = Family::new(encoder, "signal_age_seconds", help, MetricType::Gauge)?;
    for pool in &snapshot.pools {
        for &kind in SignalKind::ALL {
            let ages =
                pool.members.iter().filter_map(|m| m.endpoint.signals.last(kind, now)).map(|(_, age)| age);
            if let Some(age) = ages.max() {
                family.gauge([("pool", &*pool.label), ("signal", kind.name())], age.as_secs_f64())?;
            }
        }
    }
    let help = "Endpoints of a pool whose signal is unknown or older than --staleness";
    let mut family = Family::new(encoder, "signal_unknown_endpoints", help, MetricType::Gauge)?;
    for pool in &snapshot.pools {
        for kind in [SignalKind::Running, SignalKind::Waiting, SignalKind::KvUsage] {
            let unknown =
                |m: &&Arc<crate::state::Member>| m.endpoint.signals.fresh(kind, now, staleness).is_none();
            let n = pool.members.iter().filter(unknown).count();
            family.gauge([("pool", &*pool.label), ("signal", kind.name())], n as f64)?;
        }
    }
    Ok(())
}

fn bookings(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> fmt::Result {
    let help = "Requests booked on an endpoint";
    let mut family = Family::new(encoder, "reserved_requests", help, MetricType::Gauge)?;
    for (pool, member) in members(snapshot) {
        let labels = [("pool", &*pool.label), ("endpoint", &*member.endpoint.destination)];
        family.gauge(labels, member.booked.read().0 as f64)?;
    }
    let help = "Tokens booked on an endpoint by phase";
    let mut family = Family::new(encoder, "reserved_tokens", help, MetricType::Gauge)?;
    for (pool, member) in members(snapshot) {
        let (_, prefill, decode) = member.booked.read();
        for (phase, tokens) in [("prefill", prefill), ("decode", decode)] {
            let labels =
                [("pool", &*pool.label), ("endpoint", &*member.endpoint.destination), ("phase", phase)];
            family.gauge(labels, tokens as f64)?;
        }
    }
    Ok(())
}

fn tokens(encoder: &mut DescriptorEncoder<'_>, metrics: &Metrics, snapshot: &Snapshot) -> fmt::Result {
    let help = "Settled requests by where their token counts came from";
    let mut family = Family::new(encoder, "usage", help, MetricType::Counter)?;
    for source in UsageSource::ALL {
        family.counter([("source", source.name())], get(&metrics.usage[source as usize]))?;
    }
    let help = "Tokens of settled requests";
    let mut family = Family::new(encoder, "tokens", help, MetricType::Counter)?;
    for pool in &snapshot.pools {
        let counted = &pool.memory.metrics;
        for (kind, n) in [
            ("prompt", &counted.prompt_tokens),
            ("output", &counted.output_tokens),
            ("cached", &counted.cached_tokens),
        ] {
            family.counter([("pool", &*pool.label), ("kind", kind)], get(n))?;
        }
    }
    let help = "Prompt tokens that picks believed cached";
    let mut family = Family::new(encoder, "predicted_cached_tokens", help, MetricType::Counter)?;
    for endpoint in &snapshot.endpoints {
        family.counter([("endpoint", &*endpoint.destination)], get(&endpoint.predicted_cached_tokens))?;
    }
    let help = "Prompt tokens that engines reported as cached";
    let mut family = Family::new(encoder, "reported_cached_tokens", help, MetricType::Counter)?;
    for endpoint in &snapshot.endpoints {
        family.counter([("endpoint", &*endpoint.destination)], get(&endpoint.reported_cached_tokens))?;
    }
    Ok(())
}

fn process(encoder: &mut DescriptorEncoder<'_>, metrics: &Metrics) -> fmt::Result {
    let help = "1 while something works less well than configured";
    let mut family = Family::new(encoder, "degraded", help, MetricType::Gauge)?;
    for source in Degraded::ALL {
        family.gauge([("source", source.name())], f64::from(u8::from(metrics.is_degraded(source))))?;
    }
    let help = "Request bytes held while their decision is open";
    let mut family = Family::new(encoder, "buffered_bytes", help, MetricType::Gauge)?;
    family.gauge([], metrics.buffered_bytes.load(Ordering::Relaxed).max(0) as f64)?;
    let mut family = Family::new(encoder, "streams", "Open ext_proc streams", MetricType::Gauge)?;
    family.gauge([], metrics.streams.load(Ordering::Relaxed).max(0) as f64)?;
    let help = "Access-log entries by whether they joined a decision of this replica";
    let mut family = Family::new(encoder, "access_log_entries", help, MetricType::Counter)?;
    family.counter([("joined", "yes")], get(&metrics.access_log_joined))?;
    family.counter([("joined", "foreign")], get(&metrics.access_log_foreign))?;
    let help = "Calls of the access-log and rate limit services refused because the caller is not trusted";
    let mut family = Family::new(encoder, "untrusted_calls", help, MetricType::Counter)?;
    family.counter([], get(&metrics.untrusted_calls))?;
    let help = "TLS handshakes of the gRPC port that failed";
    let mut family = Family::new(encoder, "tls_handshakes_failed", help, MetricType::Counter)?;
    family.counter([], get(&metrics.failed_handshakes))
}

fn members(snapshot: &Snapshot) -> impl Iterator<Item = (&Pool, &crate::state::Member)> {
    snapshot.pools.iter().flat_map(|pool| pool.members.iter().map(move |member| (&**pool, &**member)))
}
