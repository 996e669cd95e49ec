//! How requests come by their token ids, and why some do not.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::Family;
use crate::decide::Tokenizing;
use crate::feed::render::Renderer;
use crate::metrics::{Degraded, Metrics};

/// Everything about tokenizing.
pub fn tokenizing(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &Metrics,
    tokenizing: &Tokenizing,
    renderer: &Renderer,
) -> fmt::Result {
    let Some(service) = &tokenizing.service else { return Ok(()) };
    let help =
        "Requests that went by the next source of cache knowledge because their token ids were not to be had";
    let mut family = Family::new(encoder, "tokenize_skipped", help, MetricType::Counter)?;
    for (reason, n) in service.skipped().read() {
        family.counter([("reason", reason.name())], n)?;
    }
    let load = service.load();
    let help = "Requests that wait for the threads that tokenize, or are worked on";
    Family::new(encoder, "tokenize_queue_requests", help, MetricType::Gauge)?
        .gauge([], load.requests as f64)?;
    let help = "Memory of remembered token ids";
    Family::new(encoder, "token_cache_bytes", help, MetricType::Gauge)?.gauge([], load.cache_bytes as f64)?;
    let help = "How near the busiest tokenizer elsewhere is to what it can bear, 0 to 1";
    Family::new(encoder, "tokenize_saturation", help, MetricType::Gauge)?.gauge([], renderer.saturation())?;
    metrics.set_degraded(Degraded::Tokenizer, !service.problems().is_empty());
    Ok(())
}
