//! Who holds which prompt blocks.

pub mod approximate;

pub use approximate::ApproximateIndex;
