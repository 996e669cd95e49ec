//! Flags of `kv-relay`.

use std::net::SocketAddr;

use clap::{Parser, ValueEnum};

use super::serve::LogFormat;
use super::{Secret, units};
use crate::state::endpoint::EngineKind;

/// Engines that publish KV events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum EventEngine {
    /// vLLM.
    #[default]
    Vllm,
    /// SGLang.
    Sglang,
}

impl From<EventEngine> for EngineKind {
    fn from(engine: EventEngine) -> Self {
        match engine {
            EventEngine::Vllm => EngineKind::Vllm,
            EventEngine::Sglang => EngineKind::Sglang,
        }
    }
}

/// Flags of `kv-relay`.
#[derive(Clone, Debug, Parser)]
pub struct RelayArgs {
    /// Redis to write to; the forms are those of `serve --redis-url`.
    #[arg(long, value_name = "URL", env = "PILOTFISH_REDIS_URL", hide_env_values = true)]
    pub redis_url: Secret,
    /// Where the engine serves HTTP: it is asked which sockets and how many ranks it has.
    #[arg(long, value_name = "IP:PORT", env = "PILOTFISH_ENGINE")]
    pub engine: SocketAddr,
    /// The engine's name in the index: that of its pod or Endpoint and its namespace.
    #[arg(long, value_name = "NAME.NAMESPACE", value_parser = units::identity, env = "PILOTFISH_IDENTITY")]
    pub identity: String,
    /// The model under which blocks are written; blocks of a LoRA adapter are written under the adapter's name.
    #[arg(long, value_name = "NAME", env = "PILOTFISH_MODEL")]
    pub model: String,
    /// Where rank 0 publishes KV events, rank r is r ports further; without it the engine is asked.
    #[arg(long, value_name = "HOST:PORT", value_parser = units::socket, env = "PILOTFISH_EVENTS")]
    pub events: Option<String>,
    /// Where rank 0 replays missed events, rank r is r ports further; without it the engine is asked.
    #[arg(long, value_name = "HOST:PORT", value_parser = units::socket, env = "PILOTFISH_REPLAY")]
    pub replay: Option<String>,
    /// Which engine it is.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_ENGINE_KIND")]
    pub engine_kind: EventEngine,
    /// How log lines look.
    #[arg(long, value_enum, default_value_t, env = "PILOTFISH_LOG_FORMAT")]
    pub log_format: LogFormat,
    /// What is logged: error, warn, info, debug, trace, or directives.
    #[arg(long, value_name = "FILTER", default_value = "info", env = "PILOTFISH_LOG_LEVEL")]
    pub log_level: String,
}
