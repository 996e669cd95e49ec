use super::*;
use crate::decide::{Decider, Settings};
use crate::extproc::Budget;
use crate::metrics::Metrics;
use crate::schedule::{Pipeline, Scheduler};
use crate::settle::Ledger;
use envoy_types::pb::envoy::service::ext_proc::v3::HttpHeaders;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;

fn shared() -> Arc<Shared> {
    let metrics = Arc::new(Metrics::default());
    let pipeline = Pipeline::assemble("default", crate::plugins::default_parts(), None).unwrap();
    let ledger = Ledger::new(Arc::clone(&metrics), Arc::default(), Arc::default(), "test", Arc::new(|_| {}));
    Arc::new(Shared {
        decider: Decider {
            store: Arc::default(),
            admission: Arc::default(),
            scheduler: Arc::new(Scheduler::new(pipeline, Arc::default(), Duration::from_secs(2))),
            tokenizing: Arc::default(),
            shared: None,
            limiter: None,
            metrics: Arc::clone(&metrics),
            settings: Settings::default(),
        },
        ledger: Arc::new(ledger),
        budget: Arc::new(Budget::new(Arc::clone(&metrics), 1 << 20)),
        metrics,
        options: super::super::Options::default(),
        body_idle_timeout: Duration::from_secs(1),
        decision_timeout: Duration::from_secs(1),
        prefiller: Arc::default(),
        drain_over: tokio_util::sync::CancellationToken::new(),
    })
}

/// Request headers with a body to come, then this.
async fn ends(failure: Status) -> Vec<Reply> {
    let headers = HttpHeaders { end_of_stream: false, ..HttpHeaders::default() };
    let begun = ProcessingRequest { request: Some(Request::RequestHeaders(headers)), ..Default::default() };
    let shared = shared();
    let replies: Vec<Reply> =
        replies_to(Arc::clone(&shared), None, stream::iter([Ok(begun), Err(failure)]).boxed())
            .collect()
            .await;
    assert_eq!(shared.metrics.streams.load(Ordering::Relaxed), 0);
    replies
}

#[tokio::test]
async fn a_stream_that_fails_before_its_answer_never_ends_cleanly() {
    let replies = ends(Status::internal("no message")).await;
    assert!(
        matches!(&replies[..], [Err(status)] if status.code() == tonic::Code::Unavailable),
        "{replies:?}"
    );
    let replies = ends(Status::out_of_range("too large")).await;
    assert!(
        matches!(&replies[..], [Ok(reply)] if format!("{reply:?}").contains("PayloadTooLarge")),
        "{replies:?}"
    );
}
