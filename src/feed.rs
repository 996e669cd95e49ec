//! Where the state comes from: files and API servers that describe endpoints, pools and routes, and what engines report of themselves.

pub mod client;
pub mod file;
pub mod kube;
pub mod kv_events;
pub mod redis;
pub mod relay;
pub mod render;
pub mod scrape;
