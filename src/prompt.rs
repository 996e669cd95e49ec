//! From a prompt to the chained blocks that caches are compared by, only if a plugin of the profile asks.

pub mod blocks;
mod text_blocks;

pub use blocks::{Blocks, Namespace};

/// A prompt as a scheduling cycle sees it: cut in every way that a source of cache knowledge compares.
#[derive(Clone, Debug, Default)]
pub struct Prepared {
    /// Prompt tokens, counted or estimated; 0 if unknown.
    pub tokens: u64,
    /// Whether `tokens` was counted.
    pub counted: bool,
    /// Its canonical text in blocks of bytes; empty if nobody asks or the text is unknown.
    pub text: Blocks,
    /// Its token ids in blocks of the engines' size; empty if nobody asks or the ids are unknown.
    pub ids: Blocks,
}
