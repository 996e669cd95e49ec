//! Flags of llm-d's picker that have nothing to act on here: charts may set them, and the log says that they do nothing.

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args};

/// Flags without effect.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Accepted from llm-d's charts, without effect")]
pub struct AcceptedArgs {
    /// Health is always served on the gRPC port.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_HEALTH_CHECKING")]
    pub health_checking: Option<bool>,
    /// There are no traces.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_TRACING")]
    pub tracing: Option<bool>,
    /// There are no Go profiles.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ENABLE_PPROF")]
    pub enable_pprof: Option<bool>,
    /// Every replica serves, there is no leader.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_HA_ENABLE_LEADER_ELECTION")]
    pub ha_enable_leader_election: Option<bool>,
    /// /metrics answers without a token: let only Prometheus in by network policy.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_METRICS_ENDPOINT_AUTH")]
    pub metrics_endpoint_auth: Option<bool>,
    /// Every plugin type may be used.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ALLOW_EXPERIMENTAL_PLUGINS")]
    pub allow_experimental_plugins: Option<bool>,
    /// `pilotfish_streams` is always there.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ENABLE_GRPC_STREAM_METRICS")]
    pub enable_grpc_stream_metrics: Option<bool>,
    /// The log has one form in development and production.
    #[arg(long, hide_short_help = true, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ZAP_DEVEL")]
    pub zap_devel: Option<bool>,
    /// The log has no stack traces.
    #[arg(long, hide_short_help = true, value_name = "LEVEL", env = "PILOTFISH_ZAP_STACKTRACE_LEVEL")]
    pub zap_stacktrace_level: Option<String>,
    /// Times in the log are RFC 3339.
    #[arg(long, hide_short_help = true, value_name = "ENCODING", env = "PILOTFISH_ZAP_TIME_ENCODING")]
    pub zap_time_encoding: Option<String>,
    /// Metrics are computed when they are asked for.
    #[arg(
        long,
        hide_short_help = true,
        value_name = "TIME",
        env = "PILOTFISH_REFRESH_PROMETHEUS_METRICS_INTERVAL"
    )]
    pub refresh_prometheus_metrics_interval: Option<String>,
    /// /metrics is served without TLS.
    #[arg(long, hide_short_help = true, value_name = "DIR", env = "PILOTFISH_METRICS_CERT_DIR")]
    pub metrics_cert_dir: Option<String>,
    /// /metrics is served without TLS.
    #[arg(long, hide_short_help = true, value_name = "FILE", env = "PILOTFISH_METRICS_CLIENT_CA_FILE")]
    pub metrics_client_ca_file: Option<String>,
    /// Replicas do not know of each other yet.
    #[arg(long, hide_short_help = true, value_name = "ADDRESS,...", env = "PILOTFISH_PEERS")]
    pub peers: Option<String>,
}

impl AcceptedArgs {
    /// Flags given that ask for something else than what is so anyway.
    pub fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        [
            ("--health-checking", self.health_checking == Some(false)),
            ("--tracing", self.tracing == Some(true)),
            ("--enable-pprof", self.enable_pprof == Some(true)),
            ("--ha-enable-leader-election", self.ha_enable_leader_election == Some(true)),
            ("--metrics-endpoint-auth", self.metrics_endpoint_auth == Some(true)),
            ("--allow-experimental-plugins", self.allow_experimental_plugins == Some(false)),
            ("--enable-grpc-stream-metrics", self.enable_grpc_stream_metrics == Some(false)),
            ("--zap-devel", self.zap_devel == Some(true)),
            ("--zap-stacktrace-level", self.zap_stacktrace_level.is_some()),
            ("--zap-time-encoding", self.zap_time_encoding.as_deref().is_some_and(|e| e != "rfc3339")),
            ("--refresh-prometheus-metrics-interval", self.refresh_prometheus_metrics_interval.is_some()),
            ("--metrics-cert-dir", self.metrics_cert_dir.is_some()),
            ("--metrics-client-ca-file", self.metrics_client_ca_file.is_some()),
            ("--peers", self.peers.is_some()),
        ]
        .into_iter()
        .filter(|(_, given)| *given)
        .map(|(flag, _)| flag)
    }
}
