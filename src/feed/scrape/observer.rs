//! What pages in succession say of one endpoint: its signals, its sleep, its restarts, and whether it stands still.

use std::time::Duration;

use tokio::time::Instant;
use tracing::warn;

use crate::state::signals::Millis;
use crate::state::{Endpoint, SignalKind};

use super::adapters::AdapterSets;
use super::histogram::Means;
use super::reading::{MAX_QUANTITIES, Reading, Samples};
use super::table::{Combine, NAMES, What, table_of};
use super::text::whole_lines;

/// Token counters that stand still this long with our requests open mean that the engine is wedged.
const FLAT_UNTIL_WEDGED: Duration = Duration::from_secs(10);
/// The request path of a page with everything.
const FULL_PATH: &str = "/metrics";

/// One page.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    /// Its text.
    pub body: &'a [u8],
    /// Whether it was read to its end.
    pub whole: bool,
    /// When it was asked for.
    pub began: Instant,
    /// Requests of ours that were booked on the endpoint at that moment.
    pub own: u64,
}

/// What was found out about how an endpoint reports itself, for the debug output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrapeStatus {
    /// The engine whose names were on the page; `None` before the first page that had any.
    pub dialect: Option<&'static str>,
    /// Whether the endpoint is asked for the wanted series only.
    pub filtered: bool,
    /// Signals the engine should report and does not.
    pub missing: Vec<&'static str>,
    /// Signals with the name under which the engine reports them; of a histogram without `_sum` and `_count`.
    pub names: Vec<(&'static str, &'static str)>,
}

/// Follows one endpoint.
#[derive(Debug)]
pub struct Observer {
    kv_usage: Combine,
    dialect: usize,
    filtered: bool,
    process_start: Option<f64>,
    prompt_tokens: Option<f64>,
    output_tokens: Option<f64>,
    flat_since: Option<Instant>,
    means: [Means; MAX_QUANTITIES],
    adapters: AdapterSets,
    warned: u32,
    warned_of_nothing: bool,
    shown: Option<(usize, [u8; MAX_QUANTITIES])>,
    status: ScrapeStatus,
}

impl Observer {
    /// Starts with the engine that the endpoint is said to run, which the first page may correct.
    pub fn new(endpoint: &Endpoint, kv_usage: Combine) -> Self {
        Self {
            kv_usage,
            dialect: table_of(endpoint.engine),
            filtered: true,
            // An endpoint that left for a while and came back still knows its process.
            process_start: endpoint.signals.last(SignalKind::ProcessStart, Millis::now()).map(|last| last.0),
            prompt_tokens: None,
            output_tokens: None,
            flat_since: None,
            means: std::array::from_fn(|_| Means::default()),
            adapters: AdapterSets::default(),
            warned: 0,
            warned_of_nothing: false,
            shown: None,
            status: ScrapeStatus { filtered: true, ..ScrapeStatus::default() },
        }
    }

    /// The request path of the next page.
    pub fn path(&self) -> &'static str {
        if self.filtered { NAMES.filtered_path(self.dialect) } else { FULL_PATH }
    }

    /// What was found out so far.
    pub fn status(&self) -> &ScrapeStatus {
        &self.status
    }

    /// The endpoint answered the request for a page with an error: 4xx may mean that it does not like the query.
    pub fn answered(&mut self, endpoint: &Endpoint, status: u16) {
        let disliked = self.filtered && (400..500).contains(&status);
        self.filtered ^= (400..500).contains(&status);
        self.status.filtered = self.filtered;
        if !disliked {
            self.warn_of_nothing(endpoint, status);
        }
    }

    /// Takes a page. True if the engine is another process than before.
    pub fn observe(&mut self, endpoint: &Endpoint, page: Page<'_>) -> bool {
        let samples = Samples::read(if page.whole { page.body } else { whole_lines(page.body) });
        let dialect = samples.dialect(self.dialect);
        match dialect {
            // Several processes behind one port answer a filtered request with an empty page. If the full page has
            // nothing either, the next request is filtered again.
            None => {
                if !self.filtered {
                    self.warn_of_nothing(endpoint, 200);
                }
                self.filtered = !self.filtered;
            }
            Some(dialect) if dialect != self.dialect => {
                self.dialect = dialect;
                self.filtered = true;
                self.means.iter_mut().for_each(Means::reset);
            }
            Some(_) => {}
        }
        let reading = dialect.map(|dialect| Reading::of(&samples, dialect));
        let restarted = self.find_restart(reading.as_ref(), samples.process_start(), page.whole);
        if restarted {
            self.forget(endpoint);
        }
        let seen = Millis::at(page.began);
        if let Some(start) = samples.process_start() {
            self.process_start = Some(start);
            endpoint.signals.set(SignalKind::ProcessStart, start, seen);
        }
        if let Some(reading) = &reading {
            self.write(endpoint, reading, seen, page.own);
            if page.whole {
                self.follow_progress(endpoint, reading, page);
                self.warn_of_missing(endpoint, reading);
                self.show(reading);
            }
        }
        self.status.filtered = self.filtered;
        restarted
    }

    /// A token counter that fell belongs to a new process, as does another start time. A cut page proves nothing by its
    /// counters, since it may lack a rank.
    fn find_restart(&self, reading: Option<&Reading<'_>>, start: Option<f64>, whole: bool) -> bool {
        let fell = |what, last: Option<f64>| {
            let now = reading.and_then(|reading| tokens(reading, what));
            matches!((last, now), (Some(last), Some(now)) if now < last)
        };
        let started =
            matches!((self.process_start, start), (Some(last), Some(now)) if last.to_bits() != now.to_bits());
        started
            || whole
                && (fell(What::PromptTokens, self.prompt_tokens)
                    || fell(What::OutputTokens, self.output_tokens))
    }

    fn forget(&mut self, endpoint: &Endpoint) {
        endpoint.health.restarted();
        endpoint.health.set_asleep(false);
        endpoint.signals.forget_all();
        endpoint.capacity.forget();
        endpoint.active_adapters.store(None);
        (self.prompt_tokens, self.output_tokens, self.flat_since) = (None, None, None);
        self.means.iter_mut().for_each(Means::reset);
        self.adapters.reset();
        self.filtered = true;
    }

    fn write(&mut self, endpoint: &Endpoint, reading: &Reading<'_>, seen: Millis, own: u64) {
        let set = |kind, value: Option<f64>| {
            if let Some(value) = value {
                endpoint.signals.set(kind, value, seen);
            }
        };
        let (mut running, mut waiting) = (None, None);
        for (at, quantity) in reading.quantities().filter(|(at, _)| reading.name(*at).is_some()) {
            match quantity.what {
                What::Gauge(kind) => {
                    let over = if kind == SignalKind::KvUsage { self.kv_usage } else { quantity.over };
                    let value = reading.number(at, over);
                    set(kind, value);
                    match kind {
                        SignalKind::Running => running = value,
                        SignalKind::Waiting => waiting = value,
                        _ => {}
                    }
                }
                What::Mean(kind) => {
                    let name = usize::from(reading.names[at]);
                    set(kind, self.means[at].advance(name, reading.totals(at)));
                }
                What::CacheConfig => {
                    set(SignalKind::BlockSize, reading.label_number(at, "block_size", Combine::Max));
                    set(SignalKind::Blocks, reading.label_number(at, "num_gpu_blocks", Combine::Sum));
                }
                What::SleepState => {
                    if let Some(asleep) = reading.asleep(at) {
                        endpoint.health.set_asleep(asleep);
                        set(SignalKind::Asleep, Some(f64::from(u8::from(asleep))));
                    }
                }
                What::Adapters => {
                    set(SignalKind::MaxLora, reading.max_lora(at));
                    let idle = running == Some(0.0) && waiting == Some(0.0);
                    let active = self.adapters.advance(&reading.keyed(at), reading.ranks(), idle);
                    let known = endpoint.active_adapters.load();
                    if let Some(active) = active.filter(|active| known.as_deref() != Some(active)) {
                        endpoint.active_adapters.store(Some(active.into()));
                    }
                }
                What::PromptTokens | What::OutputTokens => {}
            }
        }
        if let (Some(running), Some(waiting)) = (running, waiting) {
            set(SignalKind::Foreign, Some((running + waiting - own as f64).max(0.0)));
            endpoint.capacity.observe(running, waiting, (running + waiting).max(own as f64));
        }
    }

    fn follow_progress(&mut self, endpoint: &Endpoint, reading: &Reading<'_>, page: Page<'_>) {
        if page.own == 0 {
            self.flat_since = None;
            endpoint.health.set_wedged(false);
        }
        let prompt = tokens(reading, What::PromptTokens);
        let output = tokens(reading, What::OutputTokens);
        let Some(done) = prompt.into_iter().chain(output).reduce(|a, b| a + b) else { return };
        endpoint.signals.set(SignalKind::TokensDone, done, Millis::at(page.began));
        let moved = |last: Option<f64>, now: Option<f64>| now.is_some() && last != now;
        let moves = moved(self.prompt_tokens, prompt) || moved(self.output_tokens, output);
        self.prompt_tokens = prompt.or(self.prompt_tokens);
        self.output_tokens = output.or(self.output_tokens);
        if moves {
            self.flat_since = None;
        }
        let since = *self.flat_since.get_or_insert(page.began);
        endpoint.health.set_wedged(page.began.duration_since(since) >= FLAT_UNTIL_WEDGED);
    }

    fn warn_of_missing(&mut self, endpoint: &Endpoint, reading: &Reading<'_>) {
        for (at, quantity) in reading.quantities() {
            let bit = 1 << quantity.what.signal() as u32;
            if quantity.expected && reading.name(at).is_none() && self.warned & bit == 0 {
                self.warned |= bit;
                warn!(
                    endpoint = %endpoint.name,
                    address = &*endpoint.destination,
                    engine = reading.table.engine.name(),
                    metric = quantity.what.signal().name(),
                    "the engine does not report a metric: plugins that need it abstain for this endpoint; \
                     check that its version and its flags expose it"
                );
            }
        }
    }

    fn warn_of_nothing(&mut self, endpoint: &Endpoint, status: u16) {
        if !std::mem::replace(&mut self.warned_of_nothing, true) {
            warn!(
                endpoint = %endpoint.name,
                address = &*endpoint.destination,
                status,
                "GET /metrics shows no metric of a known engine: all signals of this endpoint are unknown; \
                 check that its address is an engine's and that the engine exposes metrics"
            );
        }
    }

    /// Renews the status if the page has other names than the one before.
    fn show(&mut self, reading: &Reading<'_>) {
        if self.shown.replace((self.dialect, reading.names)) == Some((self.dialect, reading.names)) {
            return;
        }
        let dialect = Some(reading.table.engine.name());
        let mut status = ScrapeStatus { dialect, ..ScrapeStatus::default() };
        for (at, quantity) in reading.quantities() {
            let signal = quantity.what.signal().name();
            match reading.name(at) {
                Some(name) => status.names.push((signal, name)),
                None if quantity.expected && !status.missing.contains(&signal) => status.missing.push(signal),
                None => {}
            }
        }
        self.status = status;
    }
}

fn tokens(reading: &Reading<'_>, what: What) -> Option<f64> {
    let (at, quantity) = reading.quantities().find(|(_, quantity)| quantity.what == what)?;
    reading.number(at, quantity.over)
}
