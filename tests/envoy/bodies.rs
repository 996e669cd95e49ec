//! Request bodies arrive as they were sent, or are refused with a reason.

use std::io::Write;

use bytes::Bytes;
use rstest::rstest;
use serde_json::json;
use xxhash_rust::xxh3::xxh3_64;

use crate::kit::envoy::{Setup, Stand};
use crate::kit::extproc::CHAT;
use crate::kit::http::{chunked, whole};
use crate::kit::resources::{APP, pool, route, server};

/// `alias` is served by endpoints that know the model as `tiny`.
fn alias() -> String {
    server("tiny", APP, "  model: tiny\n")
        + &route(
            "alias",
            "  modelName: alias\n  rules:\n  - name: all\n    targetModels: [{modelServerName: tiny}]\n",
        )
}

/// A chat of this size whose text no compression shortens much.
fn chat_of(model: &str, size: usize) -> String {
    let head =
        format!("{{\"model\":\"{model}\",\"max_tokens\":1,\"messages\":[{{\"role\":\"user\",\"content\":\"");
    let tail = "\"}]}";
    let mut body = head;
    let mut state = 0x9e37_79b9_u32;
    while body.len() + tail.len() < size {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        body.push(char::from(b'0' + ((state >> 24) % 75) as u8).to_ascii_lowercase());
        if body.ends_with('\\') {
            body.pop();
        }
    }
    body + tail
}

/// What is wrong, the headers and the body; the status and the reason that it gets.
type Refused<'a> = (&'a str, &'a [(&'a str, &'a str)], Vec<u8>, u16, &'a str);

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_engine_receives_exactly_the_right_bytes(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(false, true)] rewrite: bool,
) {
    let resources = if rewrite { alias() } else { pool() };
    let stand = Stand::with(setup, 1, &resources, |picker| picker).await;
    let model = if rewrite { "alias" } else { "tiny" };
    let engine = &stand.engines[0].state;
    for size in [100, 100_000, 5_000_000, 50_000_000] {
        let sent = chat_of(model, size);
        let plain = sent.replacen(model, "tiny", 1);
        for zipped in [false, true] {
            let (body, encoding): (Bytes, &[_]) = if zipped {
                (gzip(sent.as_bytes()).into(), &[("content-encoding", "gzip")])
            } else {
                (sent.clone().into(), &[])
            };
            // A rewritten body has been decoded for it; any other one passes as it came.
            let expected = if rewrite { Bytes::from(plain.clone()) } else { body.clone() };
            engine.clear_requests();
            let answer = stand.client.post(CHAT, encoding, whole(body)).await.rest().await;
            let what = format!("{size} bytes, zipped: {zipped}, {}", String::from_utf8_lossy(&answer.body));
            // The largest prompts are beyond the engine's context: that is its own 400.
            assert_eq!(answer.status, if size > 100_000 { 400 } else { 200 }, "{what}");
            assert_eq!(answer.header("x-received-bytes"), Some(&*expected.len().to_string()), "{what}");
            let digest = format!("{:016x}", xxh3_64(&expected));
            assert_eq!(answer.header("x-received-xxh3"), Some(&*digest), "{what}");
            let received = engine.requests().into_iter().filter(|request| request.method == "POST");
            let [received] = &received.collect::<Vec<_>>()[..] else { panic!("received once: {what}") };
            assert_eq!((received.length, received.digest), (expected.len(), xxh3_64(&expected)), "{what}");
            let encoding = received.header("content-encoding");
            assert_eq!(encoding, (zipped && !rewrite).then_some("gzip"), "{what}");
            let announced = received.header("content-length").map(|length| length.parse().unwrap());
            assert!(announced.is_none_or(|length: usize| length == expected.len()), "{what}");
        }
    }
    stand.picker.until_idle("after all bodies").await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_cannot_be_served_is_refused_with_a_reason(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let limit = |picker: crate::kit::picker::Setup| picker.flag("--max-body-bytes", "64Ki");
    let stand = Stand::with(setup, 1, &alias(), limit).await;
    let good = chat_of("alias", 1_000);
    let large = chat_of("alias", 100_000);
    let inflated =
        gzip(json!({"model": "alias", "messages": [], "pad": "a".repeat(100_000)}).to_string().as_bytes());
    let no_text = [&good.as_bytes()[..500], b"\xff\xfe", &good.as_bytes()[500..]].concat();
    let zipped: &[_] = &[("content-encoding", "gzip")];
    let twice: &[_] = &[("content-encoding", "gzip, gzip")];
    let cases: [Refused<'_>; 12] = [
        ("cut off", &[], good.as_bytes()[..700].to_vec(), 400, "malformed-body"),
        ("no model", &[], br#"{"messages":[]}"#.to_vec(), 400, "malformed-body"),
        ("unknown model", &[], chat_of("other", 200).into_bytes(), 404, "unknown-model"),
        ("text behind it", &[], (good.clone() + "]").into_bytes(), 400, "malformed-body"),
        ("not gzip", zipped, good.clone().into_bytes(), 400, "malformed-body"),
        ("half of gzip", zipped, gzip(good.as_bytes())[..400].to_vec(), 400, "malformed-body"),
        ("two encodings", twice, gzip(&gzip(good.as_bytes())), 415, "unsupported-encoding"),
        (
            "unknown encoding",
            &[("content-encoding", "rot13")],
            good.clone().into(),
            415,
            "unsupported-encoding",
        ),
        ("no UTF-8", &[], no_text, 400, "malformed-body"),
        ("empty", &[], Vec::new(), 400, "malformed-body"),
        ("too large", &[], large.into_bytes(), 413, "body-too-large"),
        ("too large inside", zipped, inflated, 413, "body-too-large"),
    ];
    for (what, headers, body, status, reason) in cases {
        for announced in [true, false] {
            let sent = if announced { whole(body.clone()) } else { chunked(body.clone()) };
            let answer = stand.client.post(CHAT, headers, sent).await.rest().await;
            let what = format!("{what}, length announced: {announced}");
            let got = (answer.status, answer.header("x-pilotfish-reason"));
            assert_eq!(got, (status, Some(reason)), "{what}: {}", String::from_utf8_lossy(&answer.body));
            assert_eq!(answer.header("content-type"), Some("application/json"), "{what}");
            let error = &answer.json()["error"];
            assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{what}: {error}");
            assert_eq!(
                (&error["type"], &error["code"]),
                (&json!("invalid_request_error"), &json!(reason)),
                "{what}"
            );
        }
    }
    assert!(
        stand.engines[0].state.requests().iter().all(|request| request.uri == "/v1/models"),
        "no engine saw any"
    );
    let answer = stand.client.post(CHAT, &[], whole(good)).await.rest().await;
    answer.served();
    stand.picker.until_idle("after all refusals").await;
}
