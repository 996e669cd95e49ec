//! Series of vLLM 0.32.0, and the names that older releases had for them.

use crate::state::SignalKind::{KvUsage, Running, TimePerOutputToken, TimeToFirstToken, Waiting};
use crate::state::endpoint::EngineKind;

use super::table::{Combine, EngineTable, Quantity, What};

/// Names of vLLM.
pub const TABLE: EngineTable = EngineTable {
    engine: EngineKind::Vllm,
    part_label: None,
    quantities: &[
        Quantity::gauge(Running, &["vllm:num_requests_running"], Combine::Sum),
        Quantity::gauge(Waiting, &["vllm:num_requests_waiting"], Combine::Sum),
        Quantity::gauge(KvUsage, &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"], Combine::Max),
        Quantity::mean(TimeToFirstToken, &["vllm:time_to_first_token_seconds"]),
        Quantity::mean(
            TimePerOutputToken,
            &[
                "vllm:inter_token_latency_seconds",
                "vllm:request_time_per_output_token_seconds",
                "vllm:time_per_output_token_seconds",
            ],
        ),
        Quantity::other(What::PromptTokens, &["vllm:prompt_tokens_total"]),
        Quantity::other(What::OutputTokens, &["vllm:generation_tokens_total"]),
        Quantity::other(What::CacheConfig, &["vllm:cache_config_info"]),
        // Older releases do not have it.
        Quantity::other(What::SleepState, &["vllm:engine_sleep_state"]).optional(),
        // Only with adapters, and only after the first step.
        Quantity::other(What::Adapters, &["vllm:lora_requests_info"]).optional(),
    ],
};
