//! What token limits refuse and hold.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;

use super::{Family, get};
use crate::admission::limits::{Both, Kind, Limiter};
use crate::metrics::Metrics;

/// Everything about limits.
pub fn limits(encoder: &mut DescriptorEncoder<'_>, metrics: &Metrics, limiter: &Limiter) -> fmt::Result {
    let help = "Requests refused by token limits";
    let mut family = Family::new(encoder, "limit_rejections", help, MetricType::Counter)?;
    // Several routes may be configured for one model.
    let mut by_model: BTreeMap<Arc<str>, Both<u64>> = BTreeMap::new();
    for of_route in limiter.rejections() {
        let sum = by_model.entry(of_route.model).or_default();
        for kind in Kind::ALL {
            *sum.get_mut(kind) += of_route.rejected.get(kind);
        }
    }
    for (model, rejected) in &by_model {
        for kind in Kind::ALL {
            family.counter([("model", &**model), ("kind", kind.name())], *rejected.get(kind))?;
        }
    }
    let help = "Buckets of token limits that are less than full, in this process";
    let mut family = Family::new(encoder, "limit_buckets", help, MetricType::Gauge)?;
    family.gauge([], limiter.held() as f64)?;
    let help = "Requests whose identity shared a bucket, since too many spend tokens at a time";
    let mut family = Family::new(encoder, "limit_overflows", help, MetricType::Counter)?;
    family.counter([], limiter.overflowed())?;
    let help = "Settlements of buckets that Redis will not hear of";
    let mut family = Family::new(encoder, "limit_settlements_lost", help, MetricType::Counter)?;
    family.counter([], limiter.lost())?;
    let help = "Descriptors of Envoy's rate limit filter that name a limit that is not there";
    let mut family = Family::new(encoder, "limit_descriptors_unknown", help, MetricType::Counter)?;
    family.counter([], get(&metrics.unknown_limits))
}
