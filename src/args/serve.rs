//! Flags of `serve`.

mod accepted;
mod admission;
mod disaggregation;
mod kubernetes;
mod limits;
mod log;
mod ports;
mod tls;
mod webhook;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Parser, ValueEnum};

pub use accepted::AcceptedArgs;
pub use admission::{AdmissionArgs, Enforcement, Switch};
pub use disaggregation::DisaggregationArgs;
pub use kubernetes::{KubernetesArgs, Selector, TargetPorts};
pub use limits::LimitArgs;
pub use log::{LogArgs, LogFormat, ZapLevel};
pub use ports::{PoolPort, PortArgs};
pub use tls::{TlsArgs, TlsVersion};
pub use webhook::WebhookArgs;

use super::{Secret, units};
use crate::decide::UsageInjection;
use crate::state::ObjectName;
use crate::trust::Block;

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

    /// Pause between scrapes of an engine.
    #[arg(long, alias = "refresh-metrics-interval", value_name = "TIME", default_value = "200ms", value_parser = units::interval, env = "PILOTFISH_SCRAPE_INTERVAL")]
    pub scrape_interval: Duration,
    /// Age from which a signal is unknown; at least three scrape intervals make sense.
    #[arg(long, alias = "metrics-staleness-threshold", value_name = "TIME", default_value = "2s", value_parser = units::interval, env = "PILOTFISH_STALENESS")]
    pub staleness: Duration,

    /// The pool of requests that no ModelRoute claims.
    #[arg(long, value_name = "NS/NAME", env = "PILOTFISH_DEFAULT_POOL")]
    pub default_pool: Option<ObjectName>,
    /// Obey the headers for model rewrite, objective and fairness id; only behind a gateway that strips clients' copies.
    /// On by default with --pool-name.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_TRUST_HINTS")]
    pub trust_hints: Option<bool>,
    /// Do not keep to the candidates that the gateway names in `envoy.lb.subset_hint`.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_DISABLE_ENDPOINT_SUBSET_FILTER")]
    pub disable_endpoint_subset_filter: bool,
    /// Tell Envoy the score of every candidate, in `envoy.lb` metadata `x-gateway-destination-endpoint-scores`.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_EMIT_ENDPOINT_SCORES")]
    pub emit_endpoint_scores: bool,
    /// Address blocks beside loopback that may call the access-log service.
    #[arg(long, value_name = "CIDR,...", value_delimiter = ',', env = "PILOTFISH_TRUSTED_CLIENTS")]
    pub trusted_clients: Vec<Block>,
    /// Who may read the debug pages; POSTs too.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_DEBUG_ACCESS")]
    pub debug_access: DebugAccess,
    /// Keep the whole candidate table of 1 decision in N of pools with more than 64 endpoints; 0 never.
    #[arg(long, value_name = "N", default_value_t = 1_000, env = "PILOTFISH_DECISION_DETAIL")]
    pub decision_detail: u32,
    /// Ask engines for token usage where clients stream without it: `auto` where the picker sees response bodies, and withholds
    /// the extra event, and on routes that limit output tokens, where clients may get it.
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
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ALLOW_UNSUPPORTED")]
    pub allow_unsupported: bool,

    /// Redis with the block index that `kvcache-aware` reads: redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// with
    /// TLS, unix:///PATH, redis+cluster://HOST:PORT,HOST:PORT or redis+sentinel://HOST:PORT,HOST:PORT/MASTER[/DATABASE], the
    /// last two with TLS as rediss+cluster and rediss+sentinel.
    #[arg(long, value_name = "URL", env = "PILOTFISH_REDIS_URL", hide_env_values = true)]
    pub redis_url: Option<Secret>,
    /// Redis servers beside that of --redis-url that limits of ModelRoutes (`global.redis.address`) may name: HOST:PORT, or a
    /// URL that brings login, database and TLS for its host and port. A limit at any other is counted by each replica for
    /// itself. Repeatable.
    #[arg(
        long,
        value_name = "HOST:PORT|URL,...",
        value_delimiter = ',',
        env = "PILOTFISH_REDIS_ALLOW",
        hide_env_values = true
    )]
    pub redis_allow: Vec<Secret>,
    /// Let clients choose endpoints, as the conformance tests of gateways do: the request header
    /// `test-epp-endpoint-selection` restricts candidates before any other restriction, and the response header
    /// `x-conformance-test-served-endpoint` says who served.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_CONFORMANCE")]
    pub conformance: bool,

    // Groups come last: clap puts what follows one under its heading.
    /// Where the ports listen.
    #[command(flatten)]
    pub ports: PortArgs,
    /// What is read from a cluster.
    #[command(flatten)]
    pub kubernetes: KubernetesArgs,
    /// How the gRPC port is secured.
    #[command(flatten)]
    pub tls: TlsArgs,
    /// Who may go, and when.
    #[command(flatten)]
    pub admission: AdmissionArgs,
    /// Prompts computed elsewhere than their output.
    #[command(flatten)]
    pub disaggregation: DisaggregationArgs,
    /// How API servers have objects validated.
    #[command(flatten)]
    pub webhook: WebhookArgs,
    /// Sizes and times.
    #[command(flatten)]
    pub limits: LimitArgs,
    /// The log.
    #[command(flatten)]
    pub log: LogArgs,
    /// Flags without effect.
    #[command(flatten)]
    pub accepted: AcceptedArgs,
}

impl ServeArgs {
    /// Where gRPC and health listen.
    pub fn host(&self) -> IpAddr {
        self.ports.listen.unwrap_or_else(|| self.default_host())
    }

    /// Where the admin port listens.
    pub fn admin_host(&self) -> IpAddr {
        self.ports.admin_listen.unwrap_or_else(|| self.default_host())
    }

    fn default_host(&self) -> IpAddr {
        if self.resources.is_some() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    }

    /// Whether gRPC is served with TLS.
    pub fn secure(&self) -> bool {
        self.tls.secure_serving.unwrap_or(
            self.kubernetes.pool_name.is_some()
                || self.kubernetes.endpoint_selector.is_some()
                || self.tls.cert_path.is_some()
                || self.tls.client_ca_file.is_some(),
        )
    }

    /// Whether the privileged hints are obeyed.
    pub fn obeys_hints(&self) -> bool {
        self.trust_hints.unwrap_or(self.kubernetes.pool_name.is_some())
    }

    /// What flags ask for that cannot be had together.
    pub fn contradiction(&self) -> Option<&'static str> {
        (!self.secure() && self.tls.client_ca_file.is_some()).then_some(
            "--client-ca-file admits clients by their certificates, which needs TLS: leave out --secure-serving=false",
        )
    }

    /// Flags given that do nothing.
    pub fn without_effect(&self) -> impl Iterator<Item = &'static str> {
        let unused = !self.secure() && self.tls.cert_path.is_some();
        self.accepted.without_effect().chain(unused.then_some("--cert-path"))
    }
}
