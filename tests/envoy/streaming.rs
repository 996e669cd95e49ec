//! Answers reach clients as they are generated, and their usage is settled.

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Setup, Stand};
use pilotfish::engine::Fault;

#[rstest]
#[case(Setup::StaticFailOpen, true, "trailers")]
#[case(Setup::FullDuplex, true, "trailers")]
#[case(Setup::GatewayShaped, true, "scanner")]
#[case(Setup::GatewayShaped, false, "scanner")]
#[tokio::test(flavor = "multi_thread")]
async fn tokens_arrive_one_by_one_and_usage_is_settled(
    #[case] setup: Setup,
    #[case] asks_for_usage: bool,
    #[case] source: &str,
) {
    let stand = Stand::of(setup, 1).await;
    let engine = &stand.engines[0].state;
    let mut request = json!({
        "model": "tiny", "max_tokens": 200, "stream": true,
        "messages": [{"role": "user", "content": "count to two hundred"}],
    });
    if asks_for_usage {
        request["stream_options"] = json!({"include_usage": true});
    }
    engine.set_fault(Fault::StallInStream(1));
    let mut stream = stand.client.stream(&request).await;
    assert_eq!(stream.status, 200);
    assert_eq!(stream.header("content-type"), Some("text/event-stream; charset=utf-8"));
    // The role, then the first token; the engine generates no further one until it is told to.
    let mut events = stream.events(2).await;
    for tokens in 2..=100 {
        assert_eq!(engine.in_flight(), 1, "the engine is still generating");
        engine.set_fault(Fault::StallInStream(tokens));
        events.push(stream.event().await);
    }
    let booked = stand.picker.metric("pilotfish_reserved_requests", &[]).await;
    assert_eq!(booked, 1.0, "booked until the last token");
    engine.clear_faults();
    events.extend(stream.all_events().await);

    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (usages, tokens): (Vec<&Value>, Vec<&Value>) =
        events.iter().partition(|event| event["usage"].is_object());
    assert_eq!(tokens.len(), 1 + 200, "the role and every token, each in an event of its own");
    assert_eq!(usages.len(), usize::from(asks_for_usage), "usage is shown to those who asked");
    let picker = &stand.picker;
    picker.until("the usage is counted", "pilotfish_usage_total", &[("source", source)], 1.0).await;
    assert_eq!(picker.metric("pilotfish_usage_total", &[]).await, 1.0, "once, by one source");
    let id = engine.requests().iter().find_map(|r| r.header("x-request-id").map(str::to_owned)).unwrap();
    let decision = picker.decision(&id).await;
    assert_eq!(decision["usage"]["completion"], 200, "{decision}");
    assert_eq!(decision["usage"]["source"], source);
    assert_eq!(decision["outcome"], "complete");
    picker.until_idle("after the stream").await;
}
