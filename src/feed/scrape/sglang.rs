//! Series of SGLang 0.5.23 and older, which it has with `--enable-metrics` only.

use crate::state::SignalKind::{
    BlockSize, Blocks, KvUsage, MaxLora, Running, TimePerOutputToken, TimeToFirstToken, Waiting,
};
use crate::state::endpoint::EngineKind;

use super::table::{Combine, EngineTable, Quantity, What};

/// Names of SGLang.
pub const TABLE: EngineTable = EngineTable {
    engine: EngineKind::Sglang,
    part_label: Some("priority"),
    quantities: &[
        Quantity::gauge(Running, &["sglang:num_running_reqs"], Combine::Sum),
        Quantity::gauge(Waiting, &["sglang:num_queue_reqs"], Combine::Sum),
        Quantity::gauge(KvUsage, &["sglang:token_usage"], Combine::Max),
        Quantity::mean(TimeToFirstToken, &["sglang:time_to_first_token_seconds"]),
        Quantity::mean(
            TimePerOutputToken,
            &[
                "sglang:inter_token_latency_seconds",
                "sglang:request_time_per_output_token_seconds",
                "sglang:time_per_output_token_seconds",
            ],
        ),
        Quantity::other(What::PromptTokens, &["sglang:prompt_tokens_total"]),
        Quantity::other(What::OutputTokens, &["sglang:generation_tokens_total"]),
        Quantity::gauge(BlockSize, &["sglang:page_size"], Combine::Max).optional(),
        Quantity::gauge(Blocks, &["sglang:num_pages"], Combine::Sum).optional(),
        Quantity::gauge(MaxLora, &["sglang:lora_pool_slots_total"], Combine::Max).optional(),
    ],
};
