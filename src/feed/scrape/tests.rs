//! Pages in, signals out; then the same through sockets.

mod pages;
mod processes;
mod sockets;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Combine;
use super::observer::{Observer, Page};
use crate::state::endpoint::tests::endpoint;
use crate::state::signals::Millis;
use crate::state::{Endpoint, SignalKind};

/// An engine that is looked at page by page.
struct Seen {
    endpoint: Arc<Endpoint>,
    observer: Observer,
    now: Instant,
    own: u64,
}

impl Seen {
    fn new() -> Self {
        Self::with(Combine::Max)
    }

    fn with(kv_usage: Combine) -> Self {
        let endpoint = endpoint("a", "10.0.0.1:8000");
        endpoint.health.accepted();
        let observer = Observer::new(&endpoint, kv_usage);
        Self { endpoint, observer, now: Instant::now(), own: 0 }
    }

    fn page(&mut self, body: impl AsRef<[u8]>) -> bool {
        self.cut_page(body, true)
    }

    fn cut_page(&mut self, body: impl AsRef<[u8]>, whole: bool) -> bool {
        self.now += Duration::from_secs(1);
        let page = Page { body: body.as_ref(), whole, began: self.now, own: self.own };
        self.observer.observe(&self.endpoint, page)
    }

    /// The value and its age in seconds.
    fn aged(&self, kind: SignalKind) -> Option<(f64, u64)> {
        let (value, age) = self.endpoint.signals.last(kind, Millis::at(self.now))?;
        Some((value, age.as_secs()))
    }

    fn value(&self, kind: SignalKind) -> Option<f64> {
        self.aged(kind).map(|aged| aged.0)
    }

    fn values<const N: usize>(&self, kinds: [SignalKind; N]) -> [Option<f64>; N] {
        kinds.map(|kind| self.value(kind))
    }

    fn running_adapters(&self) -> Option<Vec<String>> {
        let active = self.endpoint.active_adapters.load_full()?;
        Some(active.running.iter().map(ToString::to_string).collect())
    }
}

/// What Python's restricted registry answers to such a path: samples by their own names.
fn restricted(page: &str, path: &str) -> String {
    let Some((_, query)) = path.split_once('?') else { return page.to_owned() };
    let names: Vec<&str> = query.split('&').filter_map(|pair| pair.strip_prefix("name%5B%5D=")).collect();
    let wanted = |line: &&str| names.contains(&line.split(['{', ' ']).next().unwrap_or_default());
    page.split_inclusive('\n').filter(wanted).collect()
}
