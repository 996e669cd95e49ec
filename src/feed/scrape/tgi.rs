//! Series of Text Generation Inference. Its token counters move only when a request ends, so they cannot tell a wedged
//! engine from a long answer and are left out; it does not say how full its cache is.

use crate::state::SignalKind::{Running, TimePerOutputToken, Waiting};
use crate::state::endpoint::EngineKind;

use super::table::{Combine, EngineTable, Quantity};

/// Names of Text Generation Inference.
pub const TABLE: EngineTable = EngineTable {
    engine: EngineKind::Tgi,
    part_label: None,
    quantities: &[
        Quantity::gauge(Running, &["tgi_batch_current_size"], Combine::Sum),
        Quantity::gauge(Waiting, &["tgi_queue_size"], Combine::Sum),
        Quantity::mean(TimePerOutputToken, &["tgi_request_mean_time_per_token_duration"]).optional(),
    ],
};
