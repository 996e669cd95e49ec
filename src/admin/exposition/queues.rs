//! Who waits for a turn, and how full the pools are.

use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;

use super::{Family, get};
use crate::admission::{Admission, GateStatus};
use crate::metrics::Metrics;
use crate::snapshot::Snapshot;

/// Everything about queues.
pub fn queues(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &Metrics,
    snapshot: &Snapshot,
    admission: &Admission,
) -> fmt::Result {
    let gates = admission.gates();
    let gates: Vec<(Arc<str>, GateStatus)> =
        gates.into_iter().map(|(label, gate)| (label, gate.status())).collect();
    let help = "Requests that wait for their turn";
    let mut family = Family::new(encoder, "queue_requests", help, MetricType::Gauge)?;
    for (pool, gate) in &gates {
        // The usual band is there with nobody in it too: whoever scales by it must see 0 rather than nothing.
        let idle = gate.bands.iter().all(|(priority, _)| *priority != 0).then_some((0, 0));
        let busy = gate.bands.iter().map(|(priority, waiting)| (*priority, waiting.requests));
        for (priority, requests) in busy.chain(idle) {
            family.gauge([("pool", &**pool), ("priority", &priority.to_string())], requests as f64)?;
        }
    }
    let help = "Bytes of the bodies of requests that wait for their turn";
    let mut family = Family::new(encoder, "queue_bytes", help, MetricType::Gauge)?;
    for (pool, gate) in &gates {
        let bytes: u64 = gate.bands.iter().map(|(_, waiting)| waiting.bytes).sum();
        family.gauge([("pool", &**pool)], bytes as f64)?;
    }
    let help = "Requests that wait for the first endpoint of their pool: above 0, one is needed";
    let mut family = Family::new(encoder, "held_requests", help, MetricType::Gauge)?;
    for (pool, gate) in &gates {
        let waiting: usize = gate.bands.iter().map(|(_, waiting)| waiting.requests).sum();
        family.gauge([("pool", &**pool)], if gate.holds { waiting as f64 } else { 0.0 })?;
    }
    let help = "Flows that a queue knows something of";
    let mut family = Family::new(encoder, "queue_flows", help, MetricType::Gauge)?;
    for (pool, gate) in &gates {
        family.gauge([("pool", &**pool)], gate.flows as f64)?;
    }
    let help = "Share of a pool that is used, 0 to 1; at 1 requests wait";
    let mut family = Family::new(encoder, "pool_saturation", help, MetricType::Gauge)?;
    for (pool, gate) in &gates {
        family.gauge([("pool", &**pool)], gate.room.saturation())?;
    }
    let help = "Time that requests waited for their turn, those that did";
    let mut family = Family::new(encoder, "queue_seconds", help, MetricType::Histogram)?;
    for pool in &snapshot.pools {
        pool.memory.metrics.queued.encode(family.0.encode_family(&[("pool", &*pool.label)])?)?;
    }
    let help =
        "Requests that named an InferenceObjective which does not exist; they are served at priority 0";
    Family::new(encoder, "unknown_objectives", help, MetricType::Counter)?
        .counter([], get(&metrics.unknown_objectives))
}
