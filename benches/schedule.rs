//! One scheduling cycle over a large pool: lookups, scores, pick, booking.

#[path = "../tests/kit/crowd.rs"]
mod crowd;

use crowd::Crowd;
use divan::Bencher;

#[global_allocator]
static ALLOCATOR: divan::AllocProfiler<mimalloc::MiMalloc> = divan::AllocProfiler::new(mimalloc::MiMalloc);

fn main() {
    divan::main();
}

/// A prompt of 8,192 tokens of which every endpoint was sent the first half.
#[divan::bench(args = [8, 100, 1_000])]
fn pick_by_marginal_cost(bencher: Bencher<'_, '_>, endpoints: usize) {
    let crowd = Crowd::new(endpoints, 8_192);
    let pipeline = crowd.scheduler.pipeline();
    let mut seed = 0;
    bencher.bench_local(|| {
        seed += 1;
        crowd.scheduler.pick(&pipeline, &crowd.pool, &crowd.ask(seed)).is_ok()
    });
}
