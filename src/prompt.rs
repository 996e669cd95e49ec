//! From a prompt's text to the chained block hashes that caches are compared by, only if a plugin of the profile asks.

pub mod blocks;

pub use blocks::Blocks;
