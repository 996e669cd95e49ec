//! What objects of a cluster are told of themselves: conditions where their definition has room for them, else events.
//!
//! [`conditions`] decides what is said, without IO; [`writer`] says it, and only what is not said already: replicas say the
//! same, and the first one is enough.

pub mod conditions;
pub mod events;
pub mod writer;

pub use conditions::{Condition, Report, reports};
pub use writer::Writer;
