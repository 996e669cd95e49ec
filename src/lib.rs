//! x
pub mod engine;
