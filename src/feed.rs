//! Where the state comes from: files that describe endpoints, pools and routes, and what engines report of themselves.

pub mod file;
pub mod kv_events;
pub mod scrape;
