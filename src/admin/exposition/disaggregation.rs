//! Prompts computed elsewhere than their output: how many, how long, and why not.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;

use super::{Family, get};
use crate::disagg::Fallback;
use crate::schedule::Split;
use crate::snapshot::Snapshot;

/// Everything about pools with roles.
pub fn disaggregation(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> fmt::Result {
    let pools = || snapshot.pools.iter().filter(|pool| pool.disaggregation.is_some());
    let help = "Picks in pools with roles: pair, or why one endpoint served the whole request";
    let mut family = Family::new(encoder, "pd_decisions", help, MetricType::Counter)?;
    for pool in pools() {
        for split in Split::ALL {
            let count = get(&pool.memory.metrics.disaggregation.decisions[split as usize]);
            family.counter([("pool", &*pool.label), ("decision", split.name())], count)?;
        }
    }
    let help = "Prefill legs that were of no use: the decode endpoint computed the prompt, if it could";
    let mut family = Family::new(encoder, "pd_fallback", help, MetricType::Counter)?;
    for pool in pools() {
        for reason in Fallback::ALL {
            let count = get(&pool.memory.metrics.disaggregation.fallbacks[reason as usize]);
            family.counter([("pool", &*pool.label), ("reason", reason.name())], count)?;
        }
    }
    let help =
        "Time of the legs of requests that were split: the call to the prefill endpoint, and the response";
    let mut family = Family::new(encoder, "leg_seconds", help, MetricType::Histogram)?;
    for pool in pools() {
        let counted = &pool.memory.metrics.disaggregation;
        for (leg, histogram) in [("prefill", &counted.prefill), ("decode", &counted.decode)] {
            histogram.encode(family.0.encode_family(&[("pool", &*pool.label), ("leg", leg)])?)?;
        }
    }
    let help = "Prompt tokens whose KV blocks decode endpoints were to fetch";
    let mut family = Family::new(encoder, "transferred_tokens", help, MetricType::Counter)?;
    for pool in pools() {
        let tokens = get(&pool.memory.metrics.disaggregation.transferred_tokens);
        family.counter([("pool", &*pool.label)], tokens)?;
    }
    Ok(())
}
