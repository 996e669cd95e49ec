//! Log lines on standard error, as JSON or text.

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// Starts logging; call once.
pub fn init(format: LogFormat, filter: &str) -> Result<()> {
    let filter = EnvFilter::try_new(filter).with_context(|| {
        format!("--log-level {filter}: use error, warn, info, debug, trace or target=level")
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.with_ansi(false).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("logging is already running: {error}"))
}
