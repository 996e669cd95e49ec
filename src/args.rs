//! The command line. Every flag is also `PILOTFISH_<FLAG>` in the environment; the texts here are `--help` and the manual.

mod engine;
mod relay;
mod secret;
mod serve;
mod units;

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

pub use engine::EngineArgs;
pub use relay::{EventEngine, RelayArgs};
pub use secret::Secret;
pub use serve::{DebugAccess, LogFormat, ServeArgs};

/// Picks, for every LLM request that passes through Envoy, the inference endpoint that should serve it.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 110, infer_subcommands = false)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve Envoy: ext_proc, access log and health over gRPC, metrics and debug pages over HTTP.
    Serve(Box<ServeArgs>),
    /// Read resources and scheduler configuration, print every problem with file, line and column; exit 1 on errors.
    Check(CheckArgs),
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
    pub default_pool: Option<String>,
    /// Redis with the block index that `kvcache-aware` reads; it is not connected to, only known to be there.
    #[arg(long, value_name = "URL", env = "PILOTFISH_REDIS_URL", hide_env_values = true)]
    pub redis_url: Option<Secret>,
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
    use clap::CommandFactory;

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
        assert_eq!((serve.metrics_port, serve.max_body_bytes), (0, 1 << 20));
        assert_eq!(serve.scrape_interval.as_millis(), 1_500);
        assert_eq!(serve.trusted_clients.len(), 2);
    }
}
