//! How much is held, and how long anything may take.

use std::time::Duration;

use clap::Args;

use crate::args::units;

/// Flags of sizes and times.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Largest request body, as sent and decoded; larger ones are answered 413.
    #[arg(long, value_name = "BYTES", default_value = "64Mi", value_parser = units::bytes, env = "PILOTFISH_MAX_BODY_BYTES")]
    pub max_body_bytes: usize,
    /// Request bytes held by all streams together; beyond it new bodies are answered 503.
    #[arg(long, value_name = "BYTES", default_value = "1Gi", value_parser = units::bytes, env = "PILOTFISH_MAX_BUFFERED_BYTES")]
    pub max_buffered_bytes: usize,
    /// Largest gRPC message from Envoy; without it --max-body-bytes and 1 MiB for what is not the body.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, env = "PILOTFISH_GRPC_MAX_RECV_MSG_SIZE")]
    pub grpc_max_recv_msg_size: Option<usize>,
    /// Largest gRPC message to Envoy; same default.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, env = "PILOTFISH_GRPC_MAX_SEND_MSG_SIZE")]
    pub grpc_max_send_msg_size: Option<usize>,
    /// Longest pause between body pieces, where Envoy streams them to us; then 408.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::interval, env = "PILOTFISH_BODY_IDLE_TIMEOUT")]
    pub body_idle_timeout: Duration,
    /// Longest decision, without time queued or in a prefill leg; then 503.
    #[arg(long, value_name = "TIME", default_value = "4s", value_parser = units::interval, env = "PILOTFISH_DECISION_TIMEOUT")]
    pub decision_timeout: Duration,
    /// After SIGTERM: how long new streams are still served while health says NOT_SERVING.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = units::duration, env = "PILOTFISH_DRAIN_GRACE")]
    pub drain_grace: Duration,
    /// After SIGTERM: how long running streams may take to end.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration, env = "PILOTFISH_DRAIN_TIMEOUT")]
    pub drain_timeout: Duration,
}
