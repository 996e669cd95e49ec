//! Flags of `engine`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::Parser;

use crate::engine::{EngineConfig, EngineRole, EventConfig, EventHashes, EventShape, Fault, KvConnector};

/// Flags of `engine`.
#[derive(Debug, Parser)]
pub struct EngineArgs {
    /// Port to listen on; 0 picks a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub listen: IpAddr,
    /// Name in the `x-engine-name` response header; engine-PORT if not given.
    #[arg(long)]
    pub name: Option<String>,
    /// A served model name; repeatable.
    #[arg(long = "model", value_name = "NAME", default_value = "tiny")]
    pub models: Vec<String>,
    /// A LoRA adapter; repeatable.
    #[arg(long = "lora", value_name = "NAME")]
    pub loras: Vec<String>,
    /// How much faster than a real engine it works.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f64,
    /// KV blocks.
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub blocks: u64,
    /// Tokens in a block.
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,
    /// Sequences computed at once.
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_running: u32,
    /// Requests beyond which 503 is answered.
    #[arg(long, value_name = "N")]
    pub max_queued: Option<u32>,
    /// Bytes to fill the metrics page up to, 0 for none; a real vLLM's page has about 60,000.
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    pub page_padding: usize,
    /// A tokenizer.json, or a folder with one and its chat template; without it four bytes of text are a token.
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Serve /render beside completions and chat, as vLLM does with --enable-scale-out; else 403.
    #[arg(long)]
    pub scale_out: bool,
    /// Port on which KV events are published; 0 picks a free one, and without it there are none.
    #[arg(long, value_name = "PORT")]
    pub kv_events: Option<u16>,
    /// Port from which missed KV events are replayed; 0 picks a free one.
    #[arg(long, value_name = "PORT", requires = "kv_events")]
    pub replay: Option<u16>,
    /// How KV events are written.
    #[arg(long, value_name = "SHAPE", default_value = "map")]
    pub kv_event_format: EventShape,
    /// How block hashes are written in KV events.
    #[arg(long, value_name = "FORM", default_value = "int")]
    pub kv_event_hashes: EventHashes,
    /// Batches of KV events kept for replay.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub kv_event_history: usize,
    /// Which phase of a request the engine serves; matters with --kv-connector.
    #[arg(long, value_name = "ROLE", default_value = "both")]
    pub role: EngineRole,
    /// How KV caches move between prefill and decode engines; without it, requests for transfers are ignored.
    #[arg(long, value_name = "CONNECTOR")]
    pub kv_connector: Option<KvConnector>,
    /// Port on which decode engines find a mooncake or sglang prefill engine; 0 picks a free one.
    #[arg(long, value_name = "PORT", requires = "kv_connector")]
    pub bootstrap_port: Option<u16>,
    /// Compute a prompt whose KV cache does not arrive, instead of answering 500.
    #[arg(long)]
    pub kv_load_recompute: bool,
    /// A fault from the start; repeatable, and settable at run time by `POST /fault`.
    #[arg(long = "fault", value_name = "KIND[:ARG]")]
    pub faults: Vec<Fault>,
}

impl From<EngineArgs> for EngineConfig {
    fn from(args: EngineArgs) -> Self {
        let events = args.kv_events.map(|port| EventConfig {
            port,
            replay: args.replay,
            shape: args.kv_event_format,
            hashes: args.kv_event_hashes,
            history: args.kv_event_history,
        });
        Self {
            events,
            listen: SocketAddr::new(args.listen, args.port),
            name: args.name,
            models: args.models,
            loras: args.loras,
            speed: args.speed,
            blocks: args.blocks,
            block_size: args.block_size,
            max_running: args.max_running,
            max_queued: args.max_queued,
            page_padding: args.page_padding,
            faults: args.faults,
            tokenizer: args.tokenizer,
            scale_out: args.scale_out,
            role: args.role,
            connector: args.kv_connector,
            bootstrap: args.bootstrap_port,
            kv_load_recompute: args.kv_load_recompute,
            ..Self::default()
        }
    }
}
