//! The flags of `serve` as a page, written from the command line's own description.

use std::fmt::Write;

use clap::{Arg, Command, CommandFactory};

use super::{COMMAND, cell};
use crate::args::Args;

const INTRODUCTION: &str = "\
# Flags of `pilotfish serve`

Every flag is also `PILOTFISH_<FLAG>` in the environment, `--max-body-bytes` as `PILOTFISH_MAX_BODY_BYTES`. A flag of yes or no may
stand alone or as `--flag=false`. An unknown flag exits 2 and names the nearest. The flags of llm-d's endpoint picker and of the
reference picker of the Gateway API Inference Extension work as they are, with one dash too: they act as below, or the log names them
once as without effect.
";

/// The page.
pub fn markdown() -> String {
    let mut text = format!("<!-- Written by `{COMMAND}`; edit the doc comments in src/args instead. -->\n\n");
    text.push_str(INTRODUCTION);
    let root = Args::command();
    let Some(serve) = root.find_subcommand("serve") else { return text };
    let mut headings: Vec<Option<&str>> = Vec::new();
    for flag in flags(serve) {
        if !headings.contains(&flag.get_help_heading()) {
            headings.push(flag.get_help_heading());
        }
    }
    for heading in headings {
        _ = writeln!(text, "\n## {}\n", heading.unwrap_or("Resources and scheduling"));
        text.push_str("| flag | default | meaning |\n|---|---|---|\n");
        for flag in flags(serve).filter(|flag| flag.get_help_heading() == heading) {
            row(flag, &mut text);
        }
    }
    text
}

fn flags(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|flag| !["help", "version"].contains(&flag.get_id().as_str()))
}

fn row(flag: &Arg, text: &mut String) {
    let long = flag.get_long().unwrap_or_default();
    let value = flag.get_value_names().and_then(|names| names.first()).map(|name| format!(" {name}"));
    let choices: Vec<String> = flag
        .get_possible_values()
        .iter()
        .filter(|value| !value.is_hide_set())
        .map(|value| value.get_name().to_owned())
        .collect();
    let value = match (&choices[..], value) {
        ([], value) => value.unwrap_or_default(),
        (choices, _) => format!(" {}", choices.join("\\|")),
    };
    let short = flag.get_short().map(|short| format!(", `-{short}`")).unwrap_or_default();
    let aliases = flag.get_all_aliases().unwrap_or_default();
    let aliases = aliases.iter().fold(String::new(), |listed, alias| listed + ", `--" + alias + "`");
    let defaults: Vec<_> = flag.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = if defaults.is_empty() { String::new() } else { format!("`{}`", defaults.join(",")) };
    let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
    _ = writeln!(text, "| `--{long}{value}`{short}{aliases} | {default} | {} |", cell(&help));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flag_stands_under_its_heading_with_default_and_meaning() {
        let text = markdown();
        for line in [
            "## TLS of the gRPC port",
            "| `--metrics-port PORT`, `--admin-port` | `9090` | Port of metrics, debug pages, /healthz and /readyz; 0 \
             picks a free one |",
            "| `--usage-injection auto\\|always\\|off` | `auto` |",
            "| `--v N`, `-v` |  |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
