//! What one decision costs, from headers and body to a booked endpoint, without gRPC.

use std::fmt::Write as _;
use std::sync::Arc;

use divan::{Bencher, black_box};
use futures::FutureExt;
use pilotfish::admission::identity::Attributes;
use pilotfish::decide::{Arrived, Body, Chunks, Decider, Settings, Verdict};
use pilotfish::metrics::Metrics;
use pilotfish::plugins;
use pilotfish::request::head::Head;
use pilotfish::resources::lower::lower;
use pilotfish::schedule::{Pipeline, Scheduler};
use pilotfish::snapshot::Store;
use pilotfish::topology::Topology;
use tokio::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

fn decider(endpoints: usize) -> Decider {
    let mut text = "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: p}\n\
                    spec: {selector: {matchLabels: {app: x}}}\n"
        .to_owned();
    for at in 0..endpoints {
        let _ = write!(
            text,
            "---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {{name: e{at}, labels: {{app: x}}}}\n\
             spec: {{address: '10.0.{}.{}:8000'}}\n",
            at / 250,
            at % 250 + 1
        );
    }
    let world = lower(&[("bench.yaml", Arc::from(text))]).world;
    let snapshot = Topology::default().apply(world, Instant::now());
    snapshot.endpoints.iter().for_each(|endpoint| endpoint.health.accepted());
    let store = Store::default();
    store.replace(snapshot);
    let Ok(pipeline) = Pipeline::assemble("default", plugins::default_parts(), None) else {
        unreachable!("built in")
    };
    Decider {
        store: Arc::new(store),
        admission: Arc::default(),
        scheduler: Arc::new(Scheduler::new(pipeline, Arc::default(), std::time::Duration::from_secs(2))),
        tokenizing: Arc::default(),
        shared: None,
        limiter: None,
        metrics: Arc::new(Metrics::default()),
        settings: Settings::default(),
    }
}

fn arrived(prompt_bytes: usize, distinct: u64) -> Arrived {
    let filler = "All work and no play makes a dull boy. ".repeat(prompt_bytes / 39 + 1);
    let text = format!("{distinct} {}", &filler[..prompt_bytes]);
    let body =
        format!(r#"{{"model":"tiny","max_tokens":16,"messages":[{{"role":"user","content":"{text}"}}]}}"#);
    let headers =
        [(":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json")];
    let now = Instant::now();
    Arrived {
        pool: None,
        head: Head::new(headers.map(|(name, value)| (name.to_owned(), value.to_owned()))),
        body: Body::Whole(Chunks::of(body.into_bytes())),
        attributes: Attributes::new(),
        subset: None,
        sees_response: false,
        started: now,
        complete: now,
    }
}

fn run(bencher: Bencher<'_, '_>, endpoints: usize, bytes: usize, distinct: bool) {
    let decider = decider(endpoints);
    let mut n = 0;
    bencher
        .with_inputs(|| {
            n += u64::from(distinct);
            arrived(bytes, n)
        })
        .bench_local_values(|arrived| {
            let decided = decider.decide(arrived).now_or_never();
            assert!(matches!(decided.as_ref().map(|d| &d.verdict), Some(Verdict::Serve(_))));
            black_box(decided)
        });
}

#[divan::bench(args = [1, 8, 100])]
fn shared_1kb(bencher: Bencher<'_, '_>, endpoints: usize) {
    run(bencher, endpoints, 1_000, false);
}

#[divan::bench(args = [1, 8, 100])]
fn distinct_1kb(bencher: Bencher<'_, '_>, endpoints: usize) {
    run(bencher, endpoints, 1_000, true);
}

#[divan::bench(args = [1, 8, 100])]
fn shared_128kb(bencher: Bencher<'_, '_>, endpoints: usize) {
    run(bencher, endpoints, 128_000, false);
}

#[divan::bench(args = [1, 8, 100])]
fn distinct_128kb(bencher: Bencher<'_, '_>, endpoints: usize) {
    run(bencher, endpoints, 128_000, true);
}
