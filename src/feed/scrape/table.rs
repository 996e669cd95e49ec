//! What engines call their series: one table per engine, and the index that finds a name of any of them.

use std::sync::LazyLock;

use crate::state::SignalKind;
use crate::state::endpoint::EngineKind;

use super::{sglang, tgi, vllm};

/// How an engine reports itself.
#[derive(Debug)]
pub struct EngineTable {
    /// The engine.
    pub engine: EngineKind,
    /// What it reports.
    pub quantities: &'static [Quantity],
    /// A label whose series are parts of a total, which carries the label empty; the parts are not added to it.
    pub part_label: Option<&'static str>,
}

/// One thing an engine reports.
#[derive(Debug)]
pub struct Quantity {
    /// What it is.
    pub what: What,
    /// Its names, newest first. The first that a page holds counts, the others are ignored: an engine that reports one
    /// number under two names must not count twice.
    pub names: &'static [&'static str],
    /// What several series of the name (one per data-parallel rank) make together.
    pub over: Combine,
    /// Whether a page without it is worth a warning.
    pub expected: bool,
}

/// What a quantity is and so how its samples are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A number that becomes a signal as it is.
    Gauge(SignalKind),
    /// A histogram whose mean over new samples becomes a signal. Names stand without `_sum` and `_count`.
    Mean(SignalKind),
    /// Prompt tokens computed, a part of [`SignalKind::TokensDone`].
    PromptTokens,
    /// Output tokens, a part of [`SignalKind::TokensDone`].
    OutputTokens,
    /// One series per state of sleep, 1 for the present one.
    SleepState,
    /// Block size and number of blocks as labels.
    CacheConfig,
    /// Adapters at work as labels, the time of their last change as value.
    Adapters,
}

impl What {
    /// The signal it feeds, by which it is named.
    pub fn signal(self) -> SignalKind {
        match self {
            What::Gauge(kind) | What::Mean(kind) => kind,
            What::PromptTokens | What::OutputTokens => SignalKind::TokensDone,
            What::SleepState => SignalKind::Asleep,
            What::CacheConfig => SignalKind::BlockSize,
            What::Adapters => SignalKind::MaxLora,
        }
    }
}

/// What several series of one name make together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Combine {
    /// Their sum: requests, tokens, blocks.
    Sum,
    /// The largest: a request goes to one rank, and a full one may be it.
    #[default]
    Max,
    /// Their mean.
    Mean,
}

impl Quantity {
    /// A gauge that every engine of the kind reports.
    pub const fn gauge(kind: SignalKind, names: &'static [&'static str], over: Combine) -> Self {
        Self { what: What::Gauge(kind), names, over, expected: true }
    }

    /// A histogram that every engine of the kind reports.
    pub const fn mean(kind: SignalKind, names: &'static [&'static str]) -> Self {
        Self { what: What::Mean(kind), names, over: Combine::Sum, expected: true }
    }

    /// Anything else; numbers add up.
    pub const fn other(what: What, names: &'static [&'static str]) -> Self {
        Self { what, names, over: Combine::Sum, expected: true }
    }

    /// The same, but engines may well lack it.
    pub const fn optional(self) -> Self {
        Self { expected: false, ..self }
    }
}

/// The tables of all engines; among dialects on one page the first counts.
pub const TABLES: [&EngineTable; 3] = [&vllm::TABLE, &sglang::TABLE, &tgi::TABLE];

/// Start of the process, from the Python client: of no engine, and the same for all.
pub const PROCESS_START: &str = "process_start_time_seconds";

/// The place of an engine's table.
pub fn table_of(engine: EngineKind) -> usize {
    TABLES.iter().position(|table| table.engine == engine).unwrap_or(0)
}

/// Which part of a quantity a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The value itself.
    Value,
    /// Sum of a histogram.
    Sum,
    /// Count of a histogram.
    Count,
}

/// What a name of a sample means.
#[derive(Debug)]
pub struct Meaning {
    /// The name as it stands on the page.
    pub name: String,
    /// Table, quantity in it and name of that; `None` for [`PROCESS_START`].
    pub at: Option<(usize, usize, usize)>,
    /// Part of the quantity.
    pub part: Part,
}

/// All names, ordered by length: most lines of a page are dismissed by the length of their name.
#[derive(Debug)]
pub struct Names {
    meanings: Vec<Meaning>,
    /// Where names of that length begin; one past the end where the next length begins.
    starts: Vec<u16>,
    queries: Vec<String>,
}

/// The names of [`TABLES`].
pub static NAMES: LazyLock<Names> = LazyLock::new(Names::new);

impl Names {
    fn new() -> Self {
        let mut meanings = vec![Meaning { name: PROCESS_START.to_owned(), at: None, part: Part::Value }];
        for (table_at, table) in TABLES.iter().enumerate() {
            for (quantity_at, quantity) in table.quantities.iter().enumerate() {
                for (name_at, name) in quantity.names.iter().enumerate() {
                    let at = Some((table_at, quantity_at, name_at));
                    let mut add = |name, part| meanings.push(Meaning { name, at, part });
                    if matches!(quantity.what, What::Mean(_)) {
                        add(format!("{name}_sum"), Part::Sum);
                        add(format!("{name}_count"), Part::Count);
                    } else {
                        add((*name).to_owned(), Part::Value);
                    }
                }
            }
        }
        // Brackets are not allowed in a query as they are (RFC 3986 3.4), and every server decodes them.
        let query = |table_at| {
            let wanted = meanings.iter().filter(|m| m.at.is_none_or(|(table, ..)| table == table_at));
            let names: Vec<String> = wanted.map(|m| format!("name%5B%5D={}", m.name)).collect();
            format!("/metrics?{}", names.join("&"))
        };
        let queries = (0..TABLES.len()).map(query).collect();
        meanings.sort_by_key(|meaning| meaning.name.len());
        let longest = meanings.last().map_or(0, |meaning| meaning.name.len());
        let starts = (0..=longest + 1).map(|len| meanings.partition_point(|m| m.name.len() < len) as u16);
        Self { starts: starts.collect(), meanings, queries }
    }

    /// The number of a name, for [`Names::meaning`].
    pub fn find(&self, name: &[u8]) -> Option<u16> {
        let (start, end) = (*self.starts.get(name.len())?, *self.starts.get(name.len() + 1)?);
        (start..end).find(|&at| self.meanings[usize::from(at)].name.as_bytes() == name)
    }

    /// What the name of that number means.
    pub fn meaning(&self, number: u16) -> &Meaning {
        &self.meanings[usize::from(number)]
    }

    /// The request path that asks for the series of one table only. Python's `prometheus_client` knows `name[]`
    /// (names of samples, not of families); servers that do not answer with everything.
    pub fn filtered_path(&self, table: usize) -> &str {
        &self.queries[table]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_and_no_other() {
        for (at, meaning) in NAMES.meanings.iter().enumerate() {
            assert_eq!(NAMES.find(meaning.name.as_bytes()), Some(at as u16), "{} is unique", meaning.name);
            assert_eq!(NAMES.find(&meaning.name.as_bytes()[1..]), None);
        }
        assert_eq!(NAMES.find(b""), None);
        assert_eq!(NAMES.find(&[b'a'; 4096]), None);
        assert_eq!(NAMES.find(b"vllm:time_to_first_token_seconds_bucket"), None);
    }

    #[test]
    fn a_filtered_path_asks_for_samples_of_one_engine() {
        let path = NAMES.filtered_path(table_of(EngineKind::Vllm));
        assert!(path.starts_with("/metrics?name%5B%5D=process_start_time_seconds&name%5B%5D=vllm:"));
        for name in
            ["vllm:num_requests_running", "vllm:time_to_first_token_seconds_sum", "vllm:gpu_cache_usage_perc"]
        {
            assert!(path.contains(&format!("name%5B%5D={name}")), "{name}");
        }
        assert!(!path.contains("tgi_") && !path.contains("sglang:"));
        assert!(path.parse::<http::Uri>().is_ok());
    }

    #[test]
    fn tables_are_complete_enough_to_schedule_by() {
        for table in TABLES {
            for kind in [SignalKind::Running, SignalKind::Waiting] {
                let gauge = table.quantities.iter().find(|q| q.what == What::Gauge(kind));
                assert!(
                    gauge.is_some_and(|q| q.over == Combine::Sum && q.expected),
                    "{:?} {kind:?}",
                    table.engine
                );
            }
        }
    }
}
