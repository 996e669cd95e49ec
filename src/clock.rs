//! Times of day as RFC 3339 text.

use std::time::{SystemTime, UNIX_EPOCH};

/// `2026-01-31T12:00:00.123Z`.
pub fn rfc3339(time: SystemTime) -> String {
    humantime::format_rfc3339_millis(time).to_string()
}

/// Seconds since the epoch of an RFC 3339 time in UTC; `None` for anything else.
pub fn parse_rfc3339(text: &str) -> Option<i64> {
    let time = humantime::parse_rfc3339(text).ok()?;
    Some(time.duration_since(UNIX_EPOCH).ok()?.as_secs() as i64)
}
