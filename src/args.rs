//! The command line. Every flag is also `PILOTFISH_<FLAG>` in the environment; the texts here are `--help` and the manual.

mod engine;
mod relay;
mod secret;
mod serve;
mod units;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{CommandFactory, Parser, Subcommand, ValueEnum};

use crate::state::ObjectName;

pub use engine::EngineArgs;
pub use relay::{EventEngine, RelayArgs};
pub use secret::Secret;
pub use serve::{
    AcceptedArgs, AdmissionArgs, DebugAccess, Enforcement, KubernetesArgs, LimitArgs, LogArgs, LogFormat,
    PoolPort, PortArgs, Selector, ServeArgs, Switch, TargetPorts, TlsArgs, TlsVersion, WebhookArgs, ZapLevel,
};

/// Picks, for every LLM request that passes through Envoy, the inference endpoint that should serve it.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110, infer_subcommands = false)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    /// Reads a command line, its first member the program. Long flags may have one dash, as Go's have in older charts.
    pub fn read(line: impl IntoIterator<Item = OsString>) -> Result<Self, clap::Error> {
        let command = Self::command();
        let names: Vec<String> =
            command.get_subcommands().flat_map(clap::Command::get_arguments).flat_map(long_names).collect();
        Self::try_parse_from(line.into_iter().map(|word| with_two_dashes(word, &names)))
    }
}

fn long_names(flag: &clap::Arg) -> Vec<String> {
    flag.get_long_and_visible_aliases()
        .into_iter()
        .flatten()
        .chain(flag.get_all_aliases().into_iter().flatten())
        .map(str::to_owned)
        .collect()
}

/// `-grpc-port=1` as `--grpc-port=1`, if that is a flag; anything else as it is.
fn with_two_dashes(word: OsString, names: &[String]) -> OsString {
    let name = word.to_str().and_then(|word| word.strip_prefix('-')?.split('=').next());
    // One letter is a short flag.
    if name.is_some_and(|name| name.len() > 1 && names.iter().any(|known| known == name)) {
        let mut longer = OsString::from("-");
        longer.push(word);
        return longer;
    }
    word
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve Envoy: ext_proc, access log and health over gRPC, metrics and debug pages over HTTP.
    Serve(Box<ServeArgs>),
    /// Read resources and scheduler configuration, print every problem with file, line and column; exit 1 on errors.
    Check(CheckArgs),
    /// Print the CustomResourceDefinitions of ModelRoute and ModelServer, for `kubectl apply --server-side -f -`.
    Crds,
    /// Print the decision table for a request body, from a running server or from files; nothing is booked.
    Explain(ExplainArgs),
    /// Write what one engine holds into the block index that Kthena's routers read in Redis, by its KV events.
    KvRelay(Box<RelayArgs>),
    /// Run a simulated vLLM-compatible engine: OpenAI API with SSE, /metrics, /tokenize, LoRA, faults on demand.
    Engine(EngineArgs),
}

/// How a result is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Flags of `check`.
#[derive(Debug, Parser)]
pub struct CheckArgs {
    /// Directory of YAML resources.
    #[arg(long, value_name = "DIR", env = "PILOTFISH_RESOURCES")]
    pub resources: Option<PathBuf>,
    /// Scheduler configuration file.
    #[arg(long, alias = "config-file", value_name = "FILE", env = "PILOTFISH_CONFIG")]
    pub config: Option<PathBuf>,
    /// The pool of requests that no ModelRoute claims.
    #[arg(long, value_name = "NS/NAME", env = "PILOTFISH_DEFAULT_POOL")]
    pub default_pool: Option<ObjectName>,
    /// Redis with the block index that `kvcache-aware` reads; it is not connected to, only known to be there.
    #[arg(long, value_name = "URL", env = "PILOTFISH_REDIS_URL", hide_env_values = true)]
    pub redis_url: Option<Secret>,
    /// Redis servers that limits of ModelRoutes may name beside that of --redis-url, as `serve` is told.
    #[arg(
        long,
        value_name = "HOST:PORT|URL,...",
        value_delimiter = ',',
        env = "PILOTFISH_REDIS_ALLOW",
        hide_env_values = true
    )]
    pub redis_allow: Vec<Secret>,
    /// How problems are printed.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
    /// Report plugin types that are known elsewhere and missing here as warnings, not errors.
    #[arg(long, env = "PILOTFISH_ALLOW_UNSUPPORTED")]
    pub allow_unsupported: bool,
}

/// Flags of `explain`.
#[derive(Debug, Parser)]
pub struct ExplainArgs {
    /// File with the request body, `-` for standard input.
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub body: String,
    /// Path of the request.
    #[arg(long, default_value = "/v1/chat/completions")]
    pub path: String,
    /// A request header; repeatable.
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = units::header)]
    pub headers: Vec<(String, String)>,
    /// Admin address of a running server.
    #[arg(long, value_name = "URL", conflicts_with = "resources")]
    pub server: Option<String>,
    /// Directory of YAML resources, to explain without a server.
    #[arg(long, value_name = "DIR", env = "PILOTFISH_RESOURCES")]
    pub resources: Option<PathBuf>,
    /// Scheduler configuration file.
    #[arg(long, alias = "config-file", value_name = "FILE", env = "PILOTFISH_CONFIG")]
    pub config: Option<PathBuf>,
    /// How the table is printed.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn serve(flags: &str) -> Result<Box<ServeArgs>, clap::Error> {
        let line = ["pilotfish", "serve"].into_iter().chain(flags.split_whitespace()).map(OsString::from);
        let Command::Serve(args) = Args::read(line)?.command else { panic!("not serve") };
        Ok(args)
    }

    #[test]
    fn the_command_line_is_consistent_and_every_flag_is_explained() {
        Args::command().debug_assert();
        for command in Args::command().get_subcommands() {
            for flag in
                command.get_arguments().filter(|flag| !["help", "version"].contains(&flag.get_id().as_str()))
            {
                assert!(flag.get_help().is_some(), "{} of {} has no help", flag.get_id(), command.get_name());
            }
        }
    }

    #[test]
    fn an_unknown_flag_names_the_nearest_and_exits_2() {
        let error = Args::try_parse_from(["pilotfish", "serve", "--resorces", "x"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--resources"), "{error}");
    }

    #[test]
    fn aliases_and_units_are_understood() {
        let parsed = Args::try_parse_from([
            "pilotfish",
            "serve",
            "--resources",
            "r",
            "--config-file",
            "c",
            "--admin-port",
            "0",
            "--max-body-bytes",
            "1Mi",
            "--scrape-interval",
            "1.5s",
            "--trusted-clients",
            "10.0.0.0/8,fd00::/8",
        ]);
        let Command::Serve(serve) = parsed.unwrap().command else { panic!("not serve") };
        assert_eq!((serve.ports.metrics_port, serve.limits.max_body_bytes), (0, 1 << 20));
        assert_eq!(serve.scrape_interval.as_millis(), 1_500);
        assert_eq!(serve.trusted_clients.len(), 2);
    }

    /// Every flag of llm-d's picker and of the reference picker; those named have no effect.
    #[rstest]
    #[case("--pool-name p --pool-namespace n --pool-group inference.networking.k8s.io", &[])]
    #[case("--grpc-port 9002 --grpc-health-port 9003 --metrics-port 9090", &[])]
    #[case("--endpoint-selector app=vllm,env=prod --endpoint-target-ports 8000,8001", &[])]
    #[case("--secure-serving", &[])]
    #[case("--secure-serving=false", &[])]
    #[case("--secure-serving=true --cert-path /certs --enable-cert-reload", &[])]
    #[case("--secure-serving=false --cert-path /certs", &["--cert-path"])]
    #[case("--tls-min-version VersionTLS13 --tls-cipher-suites TLS_AES_128_GCM_SHA256,TLS_CHACHA20_POLY1305_SHA256", &[])]
    #[case("--health-checking --tracing=false --metrics-endpoint-auth=false --enable-pprof=0", &[])]
    #[case("--health-checking=false", &["--health-checking"])]
    #[case("--tracing --enable-pprof --metrics-endpoint-auth", &["--tracing", "--enable-pprof", "--metrics-endpoint-auth"])]
    #[case("--ha-enable-leader-election=False", &[])]
    #[case("--ha-enable-leader-election=true", &["--ha-enable-leader-election"])]
    #[case("--v 4 --zap-encoder json --zap-log-level info", &[])]
    #[case("-v 4", &[])]
    #[case("--zap-devel=false --zap-time-encoding rfc3339", &[])]
    #[case("--zap-devel --zap-stacktrace-level error --zap-time-encoding epoch", &["--zap-devel", "--zap-stacktrace-level", "--zap-time-encoding"])]
    #[case("--refresh-metrics-interval 50ms --metrics-staleness-threshold 2s --drain-timeout 30s", &[])]
    #[case("--refresh-prometheus-metrics-interval 5s", &["--refresh-prometheus-metrics-interval"])]
    #[case("--metrics-cert-dir /certs --metrics-client-ca-file /ca", &["--metrics-cert-dir", "--metrics-client-ca-file"])]
    #[case("--grpc-max-recv-msg-size 16777216 --grpc-max-send-msg-size=16777216", &[])]
    #[case("--disable-endpoint-subset-filter --emit-endpoint-scores --allow-experimental-plugins", &[])]
    #[case("--enable-grpc-stream-metrics --config-file f", &[])]
    #[case("--config-text x --kubeconfig f --namespaces a,b --client-ca-file f", &[])]
    #[case("-pool-name p -tracing=false -config-file=f -grpc-port 1", &[])]
    fn llm_ds_flags_act_or_are_named(#[case] flags: &str, #[case] without_effect: &[&str]) {
        let args = serve(flags).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(args.without_effect().collect::<Vec<_>>(), without_effect);
        assert_eq!(args.contradiction(), None);
    }

    #[rstest]
    #[case("--pool-nam p", "--pool-name")]
    #[case("--secure-servng=false", "--secure-serving")]
    #[case("--refresh-metric-interval 50ms", "--refresh-metrics-interval")]
    #[case("--enable-cert-reloads", "--enable-cert-reload")]
    #[case("--zap-encodr json", "--zap-encoder")]
    #[case("--endpoint-target-port 1", "--endpoint-target-ports")]
    #[case("-pool-nam p", "-p")]
    fn a_misspelt_flag_exits_2_and_names_the_nearest(#[case] flags: &str, #[case] nearest: &str) {
        let error = serve(flags).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains(nearest), "{error}");
    }

    #[rstest]
    #[case("--resources r", false, false)]
    #[case("--pool-name p", true, true)]
    #[case("--pool-name p --secure-serving=false --trust-hints=false", false, false)]
    #[case("--endpoint-selector a=b --endpoint-target-ports 1", true, false)]
    #[case("--resources r --secure-serving --trust-hints", true, true)]
    #[case("--resources r --cert-path /certs", true, false)]
    #[case("--resources r --client-ca-file /ca", true, false)]
    fn tls_and_trust_by_default(#[case] flags: &str, #[case] secure: bool, #[case] trusts: bool) {
        let args = serve(flags).unwrap();
        assert_eq!((args.secure(), args.obeys_hints()), (secure, trusts));
    }

    #[test]
    fn client_certificates_need_tls() {
        let args = serve("--client-ca-file /ca --secure-serving=false").unwrap();
        assert!(args.contradiction().is_some_and(|why| why.contains("--secure-serving")));
    }
}
