//! KV that crosses the border of an engine: prompts that are computed elsewhere, and prompts kept for somebody else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::super::cache::Block;

const AWAITED: u8 = 0;
const HERE: u8 = 1;
const NEVER: u8 = 2;

/// The KV of a prompt on its way from another engine. Its sequences are not scheduled before it is settled.
#[derive(Debug, Default)]
pub struct Arrival(AtomicU8);

impl Arrival {
    /// The KV is here, or it never will be and the prompt is computed like any other.
    pub fn settle(&self, here: bool) {
        self.0.store(if here { HERE } else { NEVER }, Relaxed);
    }

    pub(super) fn awaited(&self) -> bool {
        self.0.load(Relaxed) == AWAITED
    }

    pub(super) fn here(&self) -> bool {
        self.0.load(Relaxed) == HERE
    }
}

/// Blocks that nobody keeps any more, until the next step takes them back.
pub(super) type Returned = Arc<Mutex<Vec<Block>>>;

/// The blocks of a finished sequence, kept until this is dropped.
#[derive(Debug)]
pub struct Kept {
    blocks: Mutex<Vec<Block>>,
    returned: Returned,
    wake: Arc<Notify>,
}

impl Kept {
    pub(super) fn new(returned: Returned, wake: Arc<Notify>) -> Self {
        Self { blocks: Mutex::default(), returned, wake }
    }

    pub(super) fn keep(&self, blocks: Vec<Block>) {
        *self.blocks.lock() = blocks;
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Not the scheduler's own lock: sequences that hold this are dropped under it.
        self.returned.lock().append(self.blocks.get_mut());
        self.wake.notify_one();
    }
}
