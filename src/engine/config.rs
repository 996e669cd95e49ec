//! Everything that shapes one engine, and what makes no sense.

use std::net::SocketAddr;
use std::path::PathBuf;

use super::scheduler::Limits;
use super::{EngineError, EngineRole, EventConfig, Fault, KvConnector, Timing};

/// Longest request unless the cache is smaller, tokens.
const MAX_MODEL_LEN: u64 = 1 << 20;

/// Everything that shapes one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Address to listen on; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Value of the response header `x-engine-name`; `engine-PORT` when absent.
    pub name: Option<String>,
    /// Served names of the base model, at least one; the first labels the metrics.
    pub models: Vec<String>,
    /// Names of LoRA adapters.
    pub loras: Vec<String>,
    /// Divisor of all times: 1 is realistic, 100 is a hundred times faster.
    pub speed: f64,
    /// What a step costs at speed 1.
    pub timing: Timing,
    /// KV blocks.
    pub blocks: u64,
    /// Tokens per block.
    pub block_size: u32,
    /// Sequences in one batch.
    pub max_running: u32,
    /// Tokens computed in one step; longer prompts are computed in chunks.
    pub max_batched_tokens: u32,
    /// Sequences running and waiting from which on requests get 503 (vLLM: `--max-num-queued-reqs`).
    pub max_queued: Option<u32>,
    /// Distinct adapters in one batch.
    pub max_lora: u32,
    /// Prompt and answer together, tokens; as much as the cache holds when absent.
    pub max_model_len: Option<u32>,
    /// Decides the generated words and the ids.
    pub seed: u64,
    /// Faults in force from the start.
    pub faults: Vec<Fault>,
    /// Bytes to which unrelated series fill an unfiltered `/metrics` page (a real one has about 60,000); 0 for none.
    pub page_padding: usize,
    /// Whether `/metrics` answers whole whatever `?name[]=` asks for, as servers that do not know the query do.
    pub whole_pages: bool,
    /// How KV events are published; absent, none are.
    pub events: Option<EventConfig>,
    /// How many received requests are kept for inspection.
    pub recorded: usize,
    /// A `tokenizer.json`, or a folder with one and its chat template; four bytes are a token when absent.
    pub tokenizer: Option<PathBuf>,
    /// Whether `/render` is served (vLLM: `--enable-scale-out`).
    pub scale_out: bool,
    /// The phases that it serves; matters with a connector only.
    pub role: EngineRole,
    /// How KV moves between engines; without one, what requests say of transfers is ignored.
    pub connector: Option<KvConnector>,
    /// Port of the bootstrap server of Mooncake and SGLang, which decode engines do not open; 0 takes a free one.
    pub bootstrap: Option<u16>,
    /// Whether a prompt whose KV does not arrive is computed here (vLLM: `kv_load_failure_policy`) instead of failing.
    pub kv_load_recompute: bool,
    /// Rank and number of ranks in data parallelism, which rooms of SGLang must belong to.
    pub data_parallel: Option<(u32, u32)>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            name: None,
            models: vec!["tiny".to_owned()],
            loras: Vec::new(),
            speed: 1.0,
            timing: Timing::default(),
            blocks: 512,
            block_size: 16,
            max_running: 256,
            max_batched_tokens: 2048,
            max_queued: None,
            max_lora: 2,
            max_model_len: None,
            seed: 0,
            faults: Vec::new(),
            page_padding: 0,
            whole_pages: false,
            events: None,
            recorded: 256,
            tokenizer: None,
            scale_out: false,
            role: EngineRole::default(),
            connector: None,
            bootstrap: None,
            kv_load_recompute: false,
            data_parallel: None,
        }
    }
}

impl EngineConfig {
    /// The longest request, in tokens.
    pub(super) fn check(&self) -> Result<u32, EngineError> {
        let capacity = self.blocks.saturating_mul(u64::from(self.block_size));
        let rule = |holds: bool, message| if holds { Ok(()) } else { Err(EngineError::Config(message)) };
        rule(!self.models.is_empty(), "give at least one model name")?;
        rule(self.speed.is_finite() && self.speed > 0.0, "speed must be greater than 0")?;
        rule(capacity > 0, "blocks and block_size must be at least 1")?;
        rule(self.max_running > 0, "max_running must be at least 1")?;
        rule(self.max_batched_tokens > 0, "max_batched_tokens must be at least 1")?;
        rule(self.max_lora > 0, "max_lora must be at least 1")?;
        let meets = matches!(self.connector, Some(KvConnector::Mooncake | KvConnector::Sglang));
        rule(self.bootstrap.is_none() || meets, "a bootstrap port needs the connector mooncake or sglang")?;
        let rank_exists = self.data_parallel.is_none_or(|(rank, size)| rank < size);
        rule(rank_exists, "the data-parallel rank must be less than the number of ranks")?;
        let max_model_len = self.max_model_len.map_or(capacity.min(MAX_MODEL_LEN), u64::from);
        rule(max_model_len > 0, "max_model_len must be at least 1")?;
        rule(max_model_len <= capacity, "max_model_len must fit into blocks * block_size: raise blocks")?;
        Ok(max_model_len as u32)
    }

    pub(super) fn limits(&self) -> Limits {
        Limits {
            blocks: self.blocks,
            block_size: self.block_size,
            max_running: self.max_running,
            max_queued: self.max_queued,
            max_batched_tokens: self.max_batched_tokens,
            max_lora: self.max_lora,
            has_loras: !self.loras.is_empty(),
            speed: self.speed,
            timing: self.timing,
            connected: self.connector.is_some(),
        }
    }
}
