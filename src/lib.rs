//! x

pub mod request;
