//! Prompts computed elsewhere than their output.

use std::time::Duration;

use clap::Args;

use crate::args::units;
use crate::prefill::{Protocol, Settings};

/// Flags of prefill legs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Prefill legs")]
pub struct DisaggregationArgs {
    /// Longest call to a prefill endpoint; then the next is tried, and after the last the decode endpoint does it alone.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = units::interval, env = "PILOTFISH_PREFILL_TIMEOUT")]
    pub prefill_timeout: Duration,
    /// Calls to prefill endpoints for one request, each to the next best.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=8), env = "PILOTFISH_PREFILL_ATTEMPTS")]
    pub prefill_attempts: u32,
    /// What prefill endpoints are spoken to. vLLM and SGLang speak HTTP/1.1 only.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_PREFILL_PROTOCOL")]
    pub prefill_protocol: Protocol,
    /// Leave the members of request bodies that tell engines where KV blocks are (kv_transfer_params, bootstrap_room and their
    /// kin) as clients send them. Without it they are taken out in pools with roles: by them a client could make an engine
    /// fetch from anywhere.
    #[arg(long, env = "PILOTFISH_ALLOW_TRANSFER_FIELDS")]
    pub allow_transfer_fields: bool,
}

impl DisaggregationArgs {
    /// How prefill legs are called.
    pub fn settings(&self) -> Settings {
        Settings {
            timeout: self.prefill_timeout,
            attempts: self.prefill_attempts,
            protocol: self.prefill_protocol,
        }
    }
}
