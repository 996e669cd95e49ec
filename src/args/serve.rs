//! Flags of `serve`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};

use super::{Secret, units};
use crate::decide::UsageInjection;
use crate::trust::Block;

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    #[default]
    Text,
}

/// Who may read the debug pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DebugAccess {
    /// Callers on this machine.
    #[default]
    Loopback,
    /// Everybody who reaches the port.
    Any,
}

/// Flags of `serve`.
#[derive(Clone, Debug, Parser)]
pub struct ServeArgs {
    /// Directory of YAML resources (Endpoint, ModelRoute, ModelServer, InferencePool), read again when it changes.
    #[arg(long, value_name = "DIR", env = "PILOTFISH_RESOURCES")]
    pub resources: Option<PathBuf>,
    /// Scheduler configuration file (EndpointPickerConfig, or Kthena's), read again when it changes.
    #[arg(
        long,
        alias = "config-file",
        value_name = "FILE",
        env = "PILOTFISH_CONFIG",
        conflicts_with = "config_text"
    )]
    pub config: Option<PathBuf>,
    /// Scheduler configuration as text.
    #[arg(long, value_name = "YAML", env = "PILOTFISH_CONFIG_TEXT")]
    pub config_text: Option<String>,

    /// Address of the gRPC and health ports; 127.0.0.1 with --resources, else all addresses.
    #[arg(long, value_name = "IP", env = "PILOTFISH_LISTEN")]
    pub listen: Option<IpAddr>,
    /// Address of the admin port; same default.
    #[arg(long, value_name = "IP", env = "PILOTFISH_ADMIN_LISTEN")]
    pub admin_listen: Option<IpAddr>,
    /// Port of ext_proc, access log and health; 0 picks a free one.
    #[arg(long, default_value_t = 9002, env = "PILOTFISH_GRPC_PORT")]
    pub grpc_port: u16,
    /// Port of gRPC health alone; 0 picks a free one.
    #[arg(long, default_value_t = 9003, env = "PILOTFISH_GRPC_HEALTH_PORT")]
    pub grpc_health_port: u16,
    /// Port of metrics, debug pages, /healthz and /readyz; 0 picks a free one.
    #[arg(long, alias = "admin-port", default_value_t = 9090, env = "PILOTFISH_METRICS_PORT")]
    pub metrics_port: u16,

    /// Largest request body, as sent and decoded; larger ones are answered 413.
    #[arg(long, value_name = "BYTES", default_value = "64Mi", value_parser = units::bytes, env = "PILOTFISH_MAX_BODY_BYTES")]
    pub max_body_bytes: usize,
    /// Request bytes held by all streams together; beyond it new bodies are answered 503.
    #[arg(long, value_name = "BYTES", default_value = "1Gi", value_parser = units::bytes, env = "PILOTFISH_MAX_BUFFERED_BYTES")]
    pub max_buffered_bytes: usize,
    /// Longest pause between body pieces, where Envoy streams them to us; then 408.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = units::interval, env = "PILOTFISH_BODY_IDLE_TIMEOUT")]
    pub body_idle_timeout: Duration,
    /// Longest decision, without time queued or in a prefill leg; then 503.
    #[arg(long, value_name = "TIME", default_value = "4s", value_parser = units::interval, env = "PILOTFISH_DECISION_TIMEOUT")]
    pub decision_timeout: Duration,

    /// Pause between scrapes of an engine.
    #[arg(long, value_name = "TIME", default_value = "200ms", value_parser = units::interval, env = "PILOTFISH_SCRAPE_INTERVAL")]
    pub scrape_interval: Duration,
    /// Age from which a signal is unknown; at least three scrape intervals make sense.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = units::interval, env = "PILOTFISH_STALENESS")]
    pub staleness: Duration,

    /// After SIGTERM: how long new streams are still served while health says NOT_SERVING.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = units::duration, env = "PILOTFISH_DRAIN_GRACE")]
    pub drain_grace: Duration,
    /// After SIGTERM: how long running streams may take to end.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = units::duration, env = "PILOTFISH_DRAIN_TIMEOUT")]
    pub drain_timeout: Duration,

    /// The pool of requests that no ModelRoute claims.
    #[arg(long, value_name = "NS/NAME", env = "PILOTFISH_DEFAULT_POOL")]
    pub default_pool: Option<String>,
    /// Obey the headers for model rewrite, objective and fairness id; only behind a gateway that strips clients' copies.
    #[arg(long, env = "PILOTFISH_TRUST_HINTS")]
    pub trust_hints: bool,
    /// Address blocks beside loopback that may call the access-log service.
    #[arg(long, value_name = "CIDR,...", value_delimiter = ',', env = "PILOTFISH_TRUSTED_CLIENTS")]
    pub trusted_clients: Vec<Block>,
    /// Who may read the debug pages; POSTs too.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_DEBUG_ACCESS")]
    pub debug_access: DebugAccess,
    /// Keep the whole candidate table of 1 decision in N of pools with more than 64 endpoints; 0 never.
    #[arg(long, value_name = "N", default_value_t = 1_000, env = "PILOTFISH_DECISION_DETAIL")]
    pub decision_detail: u32,
    /// Ask engines for token usage where clients stream without it.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_USAGE_INJECTION")]
    pub usage_injection: UsageInjection,
    /// File with the key that session tokens are signed with: 32 bytes or more, the same for all replicas; read at the
    /// start. Without it a random key: tokens are valid in this process only.
    #[arg(long, value_name = "FILE", env = "PILOTFISH_SESSION_KEY_FILE")]
    pub session_key_file: Option<PathBuf>,
    /// Folder below which the tokenizers lie that resources and configuration name by file.
    #[arg(long, value_name = "DIR", env = "PILOTFISH_TOKENIZER_DIR")]
    pub tokenizer_dir: Option<PathBuf>,
    /// Least time a pick waits for a prompt's token ids; 5 % of the prompt's own prefill, within these bounds.
    #[arg(long, value_name = "TIME", default_value = "5ms", value_parser = units::interval, env = "PILOTFISH_TOKENIZE_LEAST_WAIT")]
    pub tokenize_least_wait: Duration,
    /// Most time a pick waits for a prompt's token ids; after that the next source of cache knowledge counts.
    #[arg(long, value_name = "TIME", default_value = "50ms", value_parser = units::interval, env = "PILOTFISH_TOKENIZE_MOST_WAIT")]
    pub tokenize_most_wait: Duration,
    /// Start although the configuration names plugin types that this version lacks; they are left out.
    #[arg(long, env = "PILOTFISH_ALLOW_UNSUPPORTED")]
    pub allow_unsupported: bool,

    /// How log lines look.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or directives such as info,pilotfish::access=off.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "PILOTFISH_LOG_LEVEL")]
    pub log_level: String,

    /// Has no effect in this version.
    #[arg(long, value_name = "ADDRESS,...", env = "PILOTFISH_PEERS")]
    pub peers: Option<String>,
    /// Redis with the block index that `kvcache-aware` reads: redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// with
    /// TLS, unix:///PATH, redis+cluster://HOST:PORT,HOST:PORT or redis+sentinel://HOST:PORT,HOST:PORT/MASTER[/DATABASE], the
    /// last two with TLS as rediss+cluster and rediss+sentinel.
    #[arg(long, value_name = "URL", env = "PILOTFISH_REDIS_URL", hide_env_values = true)]
    pub redis_url: Option<Secret>,
    /// Has no effect in this version.
    #[arg(long, env = "PILOTFISH_CONFORMANCE")]
    pub conformance: bool,
}

impl ServeArgs {
    /// Where gRPC and health listen.
    pub fn host(&self) -> IpAddr {
        self.listen.unwrap_or_else(|| self.default_host())
    }

    /// Where the admin port listens.
    pub fn admin_host(&self) -> IpAddr {
        self.admin_listen.unwrap_or_else(|| self.default_host())
    }

    fn default_host(&self) -> IpAddr {
        if self.resources.is_some() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    }

    /// Flags given that do nothing yet.
    pub fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        [("--peers", self.peers.is_some()), ("--conformance", self.conformance)]
            .into_iter()
            .filter(|(_, given)| *given)
            .map(|(flag, _)| flag)
    }
}
