//! Whatever ends a request, its booking ends with it: the matrix of PRO-09, as far as Envoy can cause it.

use std::sync::atomic::Ordering;

use futures::future::join_all;
use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Setup, Stand};
use crate::kit::eventually::eventually;
use crate::kit::extproc::CHAT;
use crate::kit::http::{Opened, whole};

/// Requests at once in every row.
const REQUESTS: usize = 200;

fn chat(tokens: u32) -> Value {
    json!({
        "model": "tiny", "max_tokens": tokens, "stream": true,
        "messages": [{"role": "user", "content": "a prompt of a few tokens, more than one block of them in fact"}],
    })
}

async fn streams(stand: &Stand, tokens: u32) -> Vec<Opened> {
    let request = chat(tokens);
    join_all((0..REQUESTS).map(|_| stand.client.stream(&request))).await
}

/// Every request booked, in requests and in tokens.
async fn booked(stand: &Stand) {
    let all = REQUESTS as f64;
    stand.picker.until("all are booked", "pilotfish_reserved_requests", &[], all).await;
    let tokens = stand.picker.metric("pilotfish_reserved_tokens", &[]).await;
    assert!(tokens >= all, "tokens are booked: {tokens}");
}

/// Nothing is booked, and no stream of Envoy is left.
async fn released(stand: &Stand) {
    stand.picker.until_idle("everything is released").await;
    let open = &stand.picker.app.admin.shared.metrics.streams;
    eventually("no open stream", async || (open.load(Ordering::SeqCst) == 0).then_some(())).await;
}

fn set(stand: &Stand, fault: Fault) {
    for engine in &stand.engines {
        engine.state.set_fault(fault);
    }
}

fn clear(stand: &Stand, fault: Fault) {
    for engine in &stand.engines {
        engine.state.clear_fault(fault);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_after_half_of_the_body(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    let request = chat(1);
    let halves = join_all((0..REQUESTS).map(|_| stand.client.half_a_chat(&request))).await;
    let open = &stand.picker.app.admin.shared.metrics.streams;
    eventually("all requests begun", async || (open.load(Ordering::SeqCst) == REQUESTS as i64).then_some(()))
        .await;
    assert_eq!(stand.picker.metric("pilotfish_reserved_requests", &[]).await, 0.0, "nothing is decided");
    drop(halves);
    released(&stand).await;
    assert_eq!(stand.picker.metric("pilotfish_picks_total", &[]).await, 0.0);
    assert_eq!(stand.picker.metric("pilotfish_buffered_bytes", &[]).await, 0.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_after_the_decision(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    set(&stand, Fault::StallBefore);
    let waiting: Vec<_> = (0..REQUESTS)
        .map(|_| {
            let client = stand.client.clone();
            tokio::spawn(async move {
                let headers = [("content-type", "application/json")];
                client.open("POST", CHAT, &headers, whole(chat(1).to_string())).await.map(|_| ())
            })
        })
        .collect();
    booked(&stand).await;
    for request in &waiting {
        assert!(!request.is_finished(), "no engine has answered");
        request.abort();
    }
    released(&stand).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_after_one_event(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    set(&stand, Fault::StallInStream(1));
    let mut open = streams(&stand, 5).await;
    join_all(open.iter_mut().map(Opened::event)).await;
    booked(&stand).await;
    drop(open);
    released(&stand).await;
    let cause = [("cause", "client")];
    stand.picker.until("counted", "pilotfish_broken_streams_total", &cause, REQUESTS as f64).await;
    assert_eq!(stand.picker.metric("pilotfish_broken_streams_total", &[]).await, REQUESTS as f64);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn reset_by_every_engine_before_it_answers(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    set(&stand, Fault::StallBefore);
    let answers = (0..REQUESTS).map(|_| {
        let client = stand.client.clone();
        tokio::spawn(async move { client.chat(&chat(1)).await })
    });
    let answers: Vec<_> = answers.collect();
    booked(&stand).await;
    // Requests that wait are answered 503 by their engines, retries of them are reset.
    set(&stand, Fault::Status503);
    set(&stand, Fault::ResetRequest);
    clear(&stand, Fault::StallBefore);
    for answer in join_all(answers).await {
        assert_eq!(answer.unwrap().status, 503);
    }
    released(&stand).await;
    stand.picker.until("all counted", "pilotfish_requests_total", &[("code", "503")], REQUESTS as f64).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn cut_by_the_engine_in_the_middle(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    set(&stand, Fault::StallInStream(1));
    let mut open = streams(&stand, 5).await;
    join_all(open.iter_mut().map(|stream| stream.events(2))).await;
    booked(&stand).await;
    set(&stand, Fault::CutStream(1));
    clear(&stand, Fault::StallInStream(1));
    let ends = join_all(open.into_iter().map(Opened::try_rest)).await;
    assert!(ends.iter().all(Result::is_err), "no client takes a cut stream for a whole one");
    released(&stand).await;
    let cause = [("cause", "upstream")];
    stand.picker.until("counted", "pilotfish_broken_streams_total", &cause, REQUESTS as f64).await;
    assert_eq!(stand.picker.metric("pilotfish_broken_streams_total", &[]).await, REQUESTS as f64);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn booked_from_the_first_event_to_the_last(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::of(setup, 2).await;
    set(&stand, Fault::StallInStream(1));
    let mut open = streams(&stand, 3).await;
    join_all(open.iter_mut().map(|stream| stream.events(2))).await;
    booked(&stand).await;
    set(&stand, Fault::StallInStream(2));
    join_all(open.iter_mut().map(Opened::event)).await;
    booked(&stand).await;
    clear(&stand, Fault::StallInStream(1));
    for events in join_all(open.into_iter().map(Opened::all_events)).await {
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    }
    released(&stand).await;
    stand.picker.until("all counted", "pilotfish_requests_total", &[("code", "200")], REQUESTS as f64).await;
    assert_eq!(stand.picker.metric("pilotfish_broken_streams_total", &[]).await, 0.0);
}
