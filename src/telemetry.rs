//! Log lines on standard error, as JSON or text.

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// Starts logging; call once.
pub fn init(format: LogFormat, filter: &str) -> Result<()> {
    let filter = directives(filter)?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.with_ansi(false).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("logging is already running: {error}"))
}

/// What the client of the API server says of every failed attempt, which are some a second while the server is away. The watches
/// say it once; a directive for these targets shows it all the same.
const REPETITIVE: &str = "kube_client::client::builder=off,kube_runtime::watcher=off";

fn directives(filter: &str) -> Result<EnvFilter> {
    let explained = || format!("--log-level {filter}: use error, warn, info, debug, trace or target=level");
    // Checked alone: an error must show what was given.
    EnvFilter::try_new(filter).with_context(explained)?;
    EnvFilter::try_new(format!("{REPETITIVE},{filter}")).with_context(explained)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetition_is_silent_unless_it_is_asked_for() {
        let shown = |filter: &str| directives(filter).unwrap().to_string();
        assert!(shown("info").contains("kube_client::client::builder=off"), "{}", shown("info"));
        let asked = shown("info,kube_client::client::builder=warn");
        assert!(
            asked.contains("kube_client::client::builder=warn") && !asked.contains("builder=off"),
            "{asked}"
        );
        let error = format!("{:#}", directives("info=loud").unwrap_err());
        assert!(error.starts_with("--log-level info=loud: use"), "{error}");
    }
}
