//! What a token limit costs a request: charged before it goes, settled when it has ended.

use std::hint::black_box;
use std::sync::Arc;

use divan::Bencher;
use futures::FutureExt;
use pilotfish::admission::Identity;
use pilotfish::admission::limits::{Both, Limit, Limiter, Per, Rate, Settings, Tokens, Unit};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    divan::main();
}

const ASKS: Both<Option<u64>> = Both { input: Some(100), output: Some(0) };

/// Charge and settle in this process; of so many identities, one after the other.
#[divan::bench(args = [1, 1_000, 100_000], threads = [1, 2])]
fn charge_and_settle(bencher: Bencher<'_, '_>, identities: usize) {
    let rate = Some(Rate { tokens: u32::MAX, unit: Unit::Second });
    let limit = Arc::new(Limit {
        route: "default/r".into(),
        model: "m".into(),
        rates: Both { input: rate, output: rate },
        per: Per::Identity,
        together: None,
    });
    let limiter = Arc::new(Limiter::new(Settings::default(), None));
    limiter.follow(std::iter::once(&limit));
    let identities: Vec<Identity> = (0..identities).map(|n| Identity::named(&n.to_string())).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    bencher.bench(|| {
        let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % identities.len();
        let charged = limiter.charge(&limit, &identities[at], ASKS).now_or_never();
        if let Some(Ok(charge)) = charged {
            charge.settle(black_box(Tokens { input: 100, output: 500 }));
        }
    });
}
