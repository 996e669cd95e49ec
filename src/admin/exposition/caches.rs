//! What is believed of caches, how large that knowledge is and how true it was.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::Family;
use crate::metrics::{Degraded, Metrics};
use crate::schedule::Scheduler;
use crate::snapshot::Snapshot;
use crate::state::cache::Rung;

/// Sources that predict what is cached.
const PREDICTING: [Rung; 3] = [Rung::Precise, Rung::Shared, Rung::Approximate];

/// Everything about caches.
pub fn caches(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &Metrics,
    snapshot: &Snapshot,
    scheduler: &Scheduler,
) -> fmt::Result {
    let help = "1 for the source of cache knowledge that picks of the endpoint go by";
    let mut family = Family::new(encoder, "cache_rung", help, MetricType::Gauge)?;
    for endpoint in &snapshot.endpoints {
        let labels = [("endpoint", &*endpoint.destination), ("rung", scheduler.best_rung(endpoint).name())];
        family.gauge(labels, 1.0)?;
    }
    let help = "Mean difference between predicted and reported cached tokens, in parts of the prompt";
    let mut family = Family::new(encoder, "cache_prediction_error", help, MetricType::Gauge)?;
    let mut doubted = false;
    for endpoint in &snapshot.endpoints {
        for rung in PREDICTING {
            let Some(truth) = endpoint.cache.truth(rung) else { continue };
            doubted |= truth.is_doubted();
            if let Some(error) = truth.error() {
                family.gauge([("endpoint", &*endpoint.destination), ("rung", rung.name())], error)?;
            }
        }
    }
    metrics.set_degraded(Degraded::CacheTruth, doubted);

    let text = scheduler.pipeline().text.as_ref().map(|text| text.routed.size()).unwrap_or_default();
    let sizes = [
        ("text", text),
        ("routed", scheduler.tokens.routed.size()),
        ("events", scheduler.tokens.events.size()),
    ];
    let help = "Blocks in an index of caches, each counted once an endpoint";
    let mut family = Family::new(encoder, "index_blocks", help, MetricType::Gauge)?;
    for (index, size) in sizes {
        family.gauge([("index", index)], size.held as f64)?;
    }
    let help = "Memory of an index of caches, estimated";
    let mut family = Family::new(encoder, "index_bytes", help, MetricType::Gauge)?;
    for (index, size) in sizes {
        family.gauge([("index", index)], size.bytes as f64)?;
    }
    Ok(())
}
