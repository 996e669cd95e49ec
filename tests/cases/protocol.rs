//! What Envoy and its clients do on the wire.

use serde_json::{Value, json};

use crate::kit::case::{input, list, number};
use crate::kit::extproc::{
    CHAT, Stream, body_step, chat, headers, post, request_of, response, run, serve_steps,
};
use crate::kit::picker::Picker;
use crate::kit::resources::pods;

fn steps(case: &Value) -> &[Value] {
    list(case, "steps")
}

async fn picker(case: &Value) -> Picker {
    Picker::serve(&pods(&case["pods"])).await
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_01_a_body_piece_delivered_twice_is_decided_once() {
    let case = input("PRO-01");
    let picker = picker(case).await;
    let mut stream = Stream::of(&picker, steps(case)).await;
    stream.until_decided().await;
    // The reply to the response headers comes behind anything that the repeated piece could cause.
    let [head, end] = response(5, 1);
    stream.send(&head);
    let replies = stream.until(|replies| replies.count("sh") == 1).await;
    assert_eq!(
        replies.kinds(),
        ["rh", "rb", "rb", "sh"],
        "one header reply, the body, nothing for the repetition"
    );
    let whole = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}";
    assert_eq!(replies.body(), whole.as_bytes());
    assert_eq!(replies.ends(), [1]);
    let chosen = replies.first_choice().to_owned();
    let metrics = picker.metrics().await;
    assert_eq!(metrics.sum("pilotfish_reserved_requests", &[("endpoint", &chosen)]), 1.0);
    assert_eq!(metrics.sum("pilotfish_reserved_requests", &[]), 1.0);
    assert_eq!(metrics.sum("pilotfish_picks_total", &[]), 1.0, "one decision");
    let endpoints = picker.json("/debug/endpoints").await;
    let blocks: u64 = list(&endpoints, "endpoints").iter().map(|e| e["index_blocks"].as_u64().unwrap()).sum();
    assert_eq!(blocks, 1, "one prefix was inserted, once");
    let replies = stream.respond(&[end]).await;
    assert!(replies.immediate().is_none() && replies.failed.is_none());
    picker.until("one request is counted", "pilotfish_requests_total", &[], 1.0).await;
}
