//! The end of a picker: no new requests, running ones finish, nothing is lost.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::App;
use crate::args::LimitArgs;
use crate::metrics::Metrics;
use crate::readiness;

/// How long the refusals of requests still held may take to go out.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl App {
    /// Drains and stops: health says no at once, new streams are served during the grace, then the listener closes and
    /// running streams end by themselves within the drain timeout. What is still held then is refused.
    pub async fn drain(self) {
        let LimitArgs { drain_grace, drain_timeout, .. } = self.args.limits;
        tracing::info!(grace = ?drain_grace, timeout = ?drain_timeout, "draining");
        self.admin.readiness.hold(readiness::DRAIN, "the process was asked to end");
        sleep(drain_grace).await;
        self.closing.cancel();
        let mut grpc = self.grpc;
        if timeout(drain_timeout, &mut grpc).await.is_err() {
            let streams = self.admin.shared.metrics.streams.load(Ordering::Relaxed);
            tracing::warn!(
                streams,
                "the drain timeout is over; requests still held are refused, running streams are cut"
            );
            self.admin.shared.drain_over.cancel();
            let _ = timeout(LAST_WORDS, &mut grpc).await;
            grpc.abort();
            streams_ended(&self.admin.shared.metrics).await;
        }
        self.stop.cancel();
        self.tasks.close();
        let _ = timeout(LAST_WORDS, self.tasks.wait()).await;
        self.admin.shared.ledger.settle_all();
        tracing::info!("stopped");
    }
}

/// Waits, not for ever, until every stream has noticed that it is over and has been handed to settlement.
async fn streams_ended(metrics: &Metrics) {
    let ended = async {
        while metrics.streams.load(Ordering::Relaxed) > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let _ = timeout(LAST_WORDS, ended).await;
}
