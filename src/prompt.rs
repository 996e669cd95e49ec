//! From a prompt's text to what caches are compared by: chained hashes of its text, or the token ids its engine computes.
//!
//! ```text
//!   tokenize   the service: queue, worker threads, budget, warming       <- app wires it, feed::render is its remote side
//!     chat       body -> conversation, as the engine converts it
//!     template   conversation -> text, as Python's jinja2 renders it
//!     tokenizer  text -> ids, in pieces that stand for themselves
//!     token_cache  pieces, texts and bodies that were seen before
//!   blocks     text or ids -> chained hashes  ->  prepared, what a scheduling cycle sees
//! ```

pub mod blocks;
mod chat;
mod json;
mod prepared;
mod skipped;
pub mod template;
mod text_blocks;
pub mod token_cache;
pub mod tokenize;
pub mod tokenizer;
mod tokens;

pub use crate::state::TokenizerSource;
pub use blocks::{Blocks, Namespace};
pub use prepared::Prepared;
pub use skipped::{Skipped, SkippedCounts};
pub use text_blocks::BlockNeeds;
pub use tokenize::Tokenizers;
pub use tokens::{Origin, Tokens};
