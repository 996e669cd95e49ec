//! The block index that Kthena's engines and routers share in Redis: its keys, its hashes, and how a match is counted.
//!
//! A block is named by its own tokens alone; what stands before it, its adapter and its salt are not part of the name. So a
//! block counts only where every block before it is held as well, and even then another prompt may have left it.
//!
//! The index is reached over [`SharedIndex`]; this module does no IO.

mod hash;
mod owners;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;

pub use hash::{Chunks, standard_hash};
pub use owners::{Answer, BlockOwners, SharedOwners};

/// What every key of the index begins with.
pub const PREFIX: &str = "matrix:kv:block:";

/// The key under which the owners of a block are, a hash of owner to the Unix time at which it claimed the block.
pub fn key(model: &str, hash: u64) -> String {
    format!("{PREFIX}{model}@{hash}")
}

/// Who holds the blocks of a prompt?
#[derive(Clone, Debug)]
pub struct Question {
    /// The name under which engines write.
    pub model: Arc<str>,
    /// The name to look under if nobody holds the first block by `model`.
    pub fallback: Option<Arc<str>>,
    /// The blocks in order, each by its [`standard_hash`].
    pub hashes: Vec<u64>,
    /// Time until nothing is known.
    pub deadline: Duration,
}

/// An index that other processes write.
pub trait SharedIndex: Debug + Send + Sync {
    /// Who holds the blocks; none if the index did not answer before the deadline.
    fn owners(&self, question: Question) -> BoxFuture<'_, Option<Arc<Answer>>>;
}
