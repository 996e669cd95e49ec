//! Time to find the signals on a page of vLLM with everything on it, and on one with the wanted series only.

use std::hint::black_box;

use divan::Bencher;
use divan::counter::BytesCount;
use pilotfish::feed::scrape::Combine;
use pilotfish::feed::scrape::observer::{Observer, Page};
use pilotfish::feed::scrape::reading::Samples;
use pilotfish::feed::scrape::table::NAMES;
use pilotfish::state::ObjectName;
use pilotfish::state::endpoint::{Endpoint, EndpointSpec, EngineKind, EventPorts};
use tokio::time::Instant;

fn main() {
    divan::main();
}

const PAGE: &str = include_str!("../tests/data/vllm/metrics-busy.txt");

/// The page, or what the engine would answer to a filtered request.
fn page(filtered: bool) -> String {
    let wanted = |line: &&str| {
        let name = line.split(['{', ' ']).next().unwrap_or_default();
        !filtered || NAMES.find(name.as_bytes()).is_some()
    };
    PAGE.split_inclusive('\n').filter(wanted).collect()
}

#[divan::bench(args = [false, true])]
fn scan(bencher: Bencher<'_, '_>, filtered: bool) {
    let page = page(filtered);
    bencher.counter(BytesCount::new(page.len())).bench_local(|| Samples::read(black_box(page.as_bytes())));
}

#[divan::bench(args = [false, true])]
fn observe(bencher: Bencher<'_, '_>, filtered: bool) {
    let page = page(filtered);
    let endpoint = Endpoint::new(EndpointSpec {
        name: ObjectName::new("default", "a"),
        address: ([127, 0, 0, 1], 8000).into(),
        weight: 1.0,
        gpu: pilotfish::state::rates::Speed::default(),
        labels: std::collections::BTreeMap::new(),
        engine: EngineKind::Vllm,
        event_ports: EventPorts::default(),
        transfer: pilotfish::state::disaggregation::TransferSpec::default(),
        drain: false,
        pod: None,
    });
    let mut observer = Observer::new(&endpoint, Combine::Max);
    bencher.counter(BytesCount::new(page.len())).bench_local(|| {
        let page = Page { body: black_box(page.as_bytes()), whole: true, began: Instant::now(), own: 3 };
        observer.observe(&endpoint, page)
    });
}
