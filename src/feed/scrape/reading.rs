//! What one page says: the samples of every engine's names, then the numbers one engine's table makes of them.

use ahash::AHashMap;
use xxhash_rust::xxh3::xxh3_64;

use crate::state::SignalKind;

use super::adapters::max_lora;
use super::histogram::Totals;
use super::table::{Combine, EngineTable, NAMES, Part, Quantity, TABLES, What};
use super::text::{Sample, label, scan};

/// Wanted samples of a page. A page can hold any number of them; an engine has a few for each rank.
const MAX_SAMPLES: usize = 16_384;
/// The name of a quantity that the page does not hold.
const ABSENT: u8 = u8::MAX;
/// More quantities than any table has.
pub const MAX_QUANTITIES: usize = 16;
const _: () = {
    let mut at = 0;
    while at < TABLES.len() {
        assert!(TABLES[at].quantities.len() <= MAX_QUANTITIES);
        at += 1;
    }
};

/// The wanted samples of a page.
#[derive(Debug)]
pub struct Samples<'a> {
    found: Vec<Sample<'a>>,
    of_table: [bool; TABLES.len()],
}

impl<'a> Samples<'a> {
    /// Finds them.
    pub fn read(page: &'a [u8]) -> Self {
        let names = &*NAMES;
        let mut samples = Self { found: Vec::with_capacity(32), of_table: [false; TABLES.len()] };
        scan(
            page,
            |name| names.find(name),
            |sample| {
                if samples.found.len() < MAX_SAMPLES {
                    samples.found.push(sample);
                    if let Some((table, ..)) = names.meaning(sample.series).at {
                        samples.of_table[table] = true;
                    }
                }
            },
        );
        samples
    }

    /// The table whose names are on the page, `likely` if several are.
    pub fn dialect(&self, likely: usize) -> Option<usize> {
        if self.of_table[likely] { Some(likely) } else { self.of_table.iter().position(|found| *found) }
    }

    /// When the process started, Unix seconds.
    pub fn process_start(&self) -> Option<f64> {
        let starts = self.found.iter().filter(|sample| NAMES.meaning(sample.series).at.is_none());
        starts.map(|sample| sample.value).filter(|value| value.is_finite()).reduce(f64::max)
    }
}

/// A page through the table of one engine.
#[derive(Debug)]
pub struct Reading<'a> {
    /// The table.
    pub table: &'static EngineTable,
    /// For each quantity which of its names counts.
    pub names: [u8; MAX_QUANTITIES],
    /// Quantity and sample, names that do not count and parts of totals left out.
    samples: Vec<(u8, Part, Sample<'a>)>,
}

impl<'a> Reading<'a> {
    /// Reads the samples of table number `table`.
    pub fn of(samples: &Samples<'a>, table: usize) -> Self {
        let mut names = [ABSENT; MAX_QUANTITIES];
        let meant = samples.found.iter().filter_map(|sample| {
            let meaning = NAMES.meaning(sample.series);
            let (_, quantity, name) = meaning.at.filter(|at| at.0 == table)?;
            Some((quantity, name as u8, meaning.part, sample))
        });
        for (quantity, name, ..) in meant.clone() {
            names[quantity] = names[quantity].min(name);
        }
        let table = TABLES[table];
        let is_part = |labels| {
            table.part_label.is_some_and(|part| label(labels, part).is_some_and(|value| !value.is_empty()))
        };
        let samples = meant
            .filter(|(quantity, name, _, sample)| names[*quantity] == *name && !is_part(sample.labels))
            .map(|(quantity, _, part, sample)| (quantity as u8, part, *sample))
            .collect();
        Self { table, names, samples }
    }

    /// Number and description of every quantity.
    pub fn quantities(&self) -> impl Iterator<Item = (usize, &'static Quantity)> + use<> {
        self.table.quantities.iter().enumerate()
    }

    /// The name under which the page reports a quantity.
    pub fn name(&self, quantity: usize) -> Option<&'static str> {
        self.table.quantities[quantity].names.get(usize::from(self.names[quantity])).copied()
    }

    /// Its series.
    pub fn series(&self, quantity: usize) -> impl Iterator<Item = (Part, Sample<'a>)> + '_ {
        self.samples.iter().filter(move |s| usize::from(s.0) == quantity).map(|s| (s.1, s.2))
    }

    /// Its series put together; `None` if no series has a finite number.
    pub fn number(&self, quantity: usize, over: Combine) -> Option<f64> {
        combine(self.series(quantity).map(|(_, sample)| sample.value), over)
    }

    /// A number in a label of its series, put together.
    pub fn label_number(&self, quantity: usize, name: &str, over: Combine) -> Option<f64> {
        let numbers = self.series(quantity).filter_map(|(_, s)| label(s.labels, name)?.parse().ok());
        combine(numbers, over)
    }

    /// Its series of a histogram by key; those without a finite sum and count are left out.
    pub fn totals(&self, quantity: usize) -> impl Iterator<Item = (u64, Totals)> + use<> {
        let mut by_series: AHashMap<u64, (f64, f64)> = AHashMap::new();
        for (part, sample) in self.series(quantity) {
            let totals = by_series.entry(xxh3_64(sample.labels)).or_insert((f64::NAN, f64::NAN));
            match part {
                Part::Sum => totals.0 = sample.value,
                Part::Count => totals.1 = sample.value,
                Part::Value => {}
            }
        }
        by_series.into_iter().filter_map(|(key, (sum, count))| {
            (sum.is_finite() && count.is_finite()).then_some((key, Totals { sum, count }))
        })
    }

    /// Whether an engine process of those that report sleeps; `None` if none says.
    pub fn asleep(&self, quantity: usize) -> Option<bool> {
        let states = self.series(quantity).filter_map(|(_, sample)| {
            let awake = label(sample.labels, "sleep_state")? == "awake";
            sample.value.is_finite().then_some(awake == (sample.value == 0.0))
        });
        states.reduce(|a, b| a || b)
    }

    /// Key, labels and value of its series.
    pub fn keyed(&self, quantity: usize) -> Vec<(u64, &'a [u8], f64)> {
        self.series(quantity).map(|(_, s)| (xxh3_64(s.labels), s.labels, s.value)).collect()
    }

    /// Adapters the engine can hold at once.
    pub fn max_lora(&self, quantity: usize) -> Option<f64> {
        combine(self.series(quantity).filter_map(|(_, sample)| max_lora(sample.labels)), Combine::Max)
    }

    /// Engine processes that report: series of the gauge of running requests.
    pub fn ranks(&self) -> usize {
        let running = self.quantities().find(|(_, q)| q.what == What::Gauge(SignalKind::Running));
        running.map_or(0, |(at, _)| self.series(at).count())
    }
}

fn combine(numbers: impl Iterator<Item = f64>, over: Combine) -> Option<f64> {
    let (mut count, mut sum, mut max) = (0, 0.0, f64::NEG_INFINITY);
    for number in numbers.filter(|number| number.is_finite()) {
        count += 1;
        sum += number;
        max = number.max(max);
    }
    (count > 0).then(|| match over {
        Combine::Sum => sum,
        Combine::Max => max,
        Combine::Mean => sum / f64::from(count),
    })
}
