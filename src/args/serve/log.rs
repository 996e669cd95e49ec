//! What is logged, in our words and in those of Go's pickers.

use std::num::NonZero;
use std::str::FromStr;

use clap::{Args, ValueEnum};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    #[default]
    #[value(alias = "console")]
    Text,
}

/// Flags of the log.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// How log lines look; text if not given.
    #[arg(long, alias = "zap-encoder", value_enum, env = "PILOTFISH_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// What is logged: error, warn, info, debug, trace, or directives such as info,pilotfish::access=off; info if not given.
    #[arg(long, value_name = "FILTER", env = "PILOTFISH_LOG_LEVEL")]
    pub log_level: Option<String>,
    /// Verbosity as klog counts it: up to 2 info, 3 and 4 debug, from 5 trace. --log-level wins.
    #[arg(long = "v", short = 'v', value_name = "N", env = "PILOTFISH_V")]
    pub verbosity: Option<u8>,
    /// error, info, debug, or a verbosity; --log-level and --v win.
    #[arg(long, value_name = "LEVEL", env = "PILOTFISH_ZAP_LOG_LEVEL")]
    pub zap_log_level: Option<ZapLevel>,
}

impl LogArgs {
    /// How log lines look.
    pub fn format(&self) -> LogFormat {
        self.log_format.unwrap_or_default()
    }

    /// What is logged, as directives.
    pub fn filter(&self) -> &str {
        let level = || self.verbosity.map(filter_of).or(self.zap_log_level.map(|level| level.0));
        self.log_level.as_deref().or_else(level).unwrap_or("info")
    }
}

/// More than info is said by this program alone: what libraries say below the streams would bury it.
fn filter_of(verbosity: u8) -> &'static str {
    match verbosity {
        0..=2 => "info",
        3..=4 => "info,pilotfish=debug",
        _ => "info,pilotfish=trace",
    }
}

/// A level of zap, as the directives it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZapLevel(&'static str);

impl FromStr for ZapLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "error" | "panic" => Ok(Self("error")),
            "info" => Ok(Self("info")),
            "debug" => Ok(Self(filter_of(4))),
            number => number
                .parse::<NonZero<u8>>()
                .map(|verbosity| Self(filter_of(verbosity.get())))
                .map_err(|_| "use error, info, debug or a number from 1".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use rstest::rstest;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        log: LogArgs,
    }

    #[rstest]
    #[case("", LogFormat::Text, "info")]
    #[case("--v 2", LogFormat::Text, "info")]
    #[case("--v=3", LogFormat::Text, "info,pilotfish=debug")]
    #[case("-v 4", LogFormat::Text, "info,pilotfish=debug")]
    #[case("-v=5", LogFormat::Text, "info,pilotfish=trace")]
    #[case("-v9", LogFormat::Text, "info,pilotfish=trace")]
    #[case("--zap-log-level debug", LogFormat::Text, "info,pilotfish=debug")]
    #[case("--zap-log-level 5", LogFormat::Text, "info,pilotfish=trace")]
    #[case("--zap-log-level error --v 1", LogFormat::Text, "info")]
    #[case("--log-level warn --v 5 --zap-log-level debug", LogFormat::Text, "warn")]
    #[case("--zap-encoder json", LogFormat::Json, "info")]
    #[case("--zap-encoder=console", LogFormat::Text, "info")]
    fn levels_and_formats(#[case] flags: &str, #[case] format: LogFormat, #[case] filter: &str) {
        let line = std::iter::once("x").chain(flags.split_whitespace());
        let log = Line::try_parse_from(line).unwrap().log;
        assert_eq!((log.format(), log.filter()), (format, filter));
    }

    #[rstest]
    #[case("0")]
    #[case("loud")]
    #[case("-1")]
    fn no_level(#[case] text: &str) {
        assert!(text.parse::<ZapLevel>().is_err());
    }
}
