//! KV events: what the block pool does, published over ZMQ as vLLM does it, with a replay socket and ways to fail.

mod encoding;
mod publisher;

use std::sync::Arc;

pub use encoding::{EventHashes, EventShape};
pub(super) use publisher::{Ports, Publisher};

use super::cache::BlockHash;

/// How an engine publishes.
#[derive(Clone, Debug)]
pub struct EventConfig {
    /// Port of the events; 0 takes a free one.
    pub port: u16,
    /// Port of the replay socket; 0 takes a free one, none has none.
    pub replay: Option<u16>,
    /// How events are written.
    pub shape: EventShape,
    /// How hashes are written.
    pub hashes: EventHashes,
    /// Batches kept for replay (vLLM: `buffer_steps`).
    pub history: usize,
}

impl Default for EventConfig {
    fn default() -> Self {
        Self { port: 0, replay: Some(0), shape: EventShape::Map, hashes: EventHashes::Int, history: 10_000 }
    }
}

/// What the pool did.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Announcement {
    /// Full blocks of one request, in order.
    Stored(Stored),
    /// A block was evicted.
    Removed(BlockHash),
    /// Nothing is cached any more.
    Cleared,
}

/// Full blocks of one request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Stored {
    pub hashes: Vec<BlockHash>,
    /// The block before; none for the first of a request.
    pub parent: Option<BlockHash>,
    pub tokens: Vec<u32>,
    pub adapter: Arc<str>,
    pub salt: Arc<str>,
}
