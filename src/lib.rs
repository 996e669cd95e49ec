//! x

pub mod request;
pub mod usage;
