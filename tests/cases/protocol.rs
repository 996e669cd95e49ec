//! What Envoy and its clients do on the wire.

use serde_json::{Value, json};

use crate::kit::case::{input, list};
use crate::kit::extproc::{CHAT, Stream, chat, headers, post, response, run, serve_steps};
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
    assert_eq!(replies.kinds(), ["rh", "rb", "sh"], "one header reply, the body, nothing for the repetition");
    let whole = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hello\"}]}";
    assert_eq!(replies.body(), whole.as_bytes());
    assert_eq!(replies.ends(), [0]);
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

#[tokio::test(flavor = "multi_thread")]
async fn pro_02_trailers_end_a_body_as_well_as_the_last_piece_does() {
    let case = input("PRO-02");
    let picker = picker(case).await;
    let served = serve_steps(&picker, steps(case)).await;
    let replies = &served.replies;
    let request: Vec<&str> =
        replies.kinds().into_iter().filter(|kind| ["rh", "rb", "rt"].contains(kind)).collect();
    assert_eq!(request.first(), Some(&"rh"));
    assert_eq!(request.last(), Some(&"rt"), "the trailers are answered after the body");
    assert_eq!((replies.count("rh"), replies.count("rt")), (1, 1));
    let whole = "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}";
    assert_eq!(replies.body(), whole.as_bytes());
    assert_eq!(replies.ends(), [0usize; 0], "trailers mark the end, no piece does");
    // The same prompt with an end mark in its body goes to where the prompt is cached now.
    let marked = serve_steps(&picker, &chat(whole)).await;
    assert_eq!(marked.endpoint(), served.endpoint());
    assert_eq!(marked.prompt_tokens(), served.prompt_tokens());
    assert_eq!(marked.replies.ends().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_03_requests_without_a_body_are_routed_by_their_headers() {
    let case = input("PRO-03");
    let everywhere = picker(case).await;
    let answer = b"{\"object\":\"list\",\"data\":[{\"id\":\"m\"}]}";
    let mut stream = Stream::of(&everywhere, &steps(case)[..1]).await;
    let chosen = stream.until_decided().await.first_choice().to_owned();
    assert!(["10.0.0.10:8000", "10.0.0.11:8000"].contains(&&*chosen), "{chosen}");
    assert_eq!(everywhere.metric("pilotfish_reserved_requests", &[("endpoint", &chosen)]).await, 1.0);
    assert_eq!(everywhere.metric("pilotfish_reserved_tokens", &[]).await, 0.0, "a list costs no tokens");
    let replies = stream.respond(&steps(case)[1..]).await;
    assert_eq!(replies.kinds(), ["rh", "sh", "sb"]);
    assert_eq!(replies.response_body(), answer);
    everywhere.until("the list is settled", "pilotfish_requests_total", &[("code", "200")], 1.0).await;
    assert_eq!(everywhere.metric("pilotfish_tokens_total", &[]).await, 0.0, "a list costs no tokens");
    assert_eq!(everywhere.metric("pilotfish_usage_total", &[]).await, 0.0);

    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        let context = |what: &str| format!("{variant}: {what}");
        if variant.starts_with("POST") {
            let replies = run(&everywhere, &[headers("POST", CHAT, &[("content-length", "0")], true)]).await;
            assert_eq!(replies.refused().status(), 400, "{variant}");
            assert_eq!(replies.refused().reason(), "malformed-body", "{variant}");
            assert!(!replies.refused().message().is_empty());
        } else if variant.starts_with("HEAD") || variant.starts_with("OPTIONS") {
            let mut words = variant.split(' ');
            let (method, path) = (words.next().unwrap(), words.next().unwrap());
            let replies = run(&everywhere, &[headers(method, path, &[], true)]).await;
            assert_eq!(replies.kinds(), ["rh"], "{variant}");
            assert!(replies.destination().is_some(), "{}", context("it has a destination"));
        } else if variant.contains("zero ready pods") {
            let nobody = Picker::serve(&pods(&json!([]))).await;
            let replies = run(&nobody, &steps(case)[..1]).await;
            assert_eq!(replies.refused().status(), 503, "{variant}");
            assert_eq!(replies.refused().reason(), "no-endpoints", "{variant}");
            assert_eq!(
                replies.refused().header("x-llm-d-request-dropped-reason").as_deref(),
                Some("rejected-no-endpoints")
            );
        } else {
            assert!(variant.contains("subset_hint"), "unknown variant {variant}");
            let mut asked = steps(case)[0].clone();
            let hint = json!({"x-gateway-destination-endpoint-subset": ["10.0.0.11:8000"]});
            asked["metadata"] = json!({"envoy.lb.subset_hint": hint});
            for _ in 0..20 {
                let replies = run(&everywhere, std::slice::from_ref(&asked)).await;
                assert_eq!(replies.choices(), ["10.0.0.11:8000"], "{variant}");
            }
        }
    }
    everywhere.until_idle("bodyless requests").await;
    assert_eq!(everywhere.get("/healthz").await.0, 200);
}

/// A chat body of exactly so many bytes.
fn chat_of(bytes: usize) -> Vec<u8> {
    let (head, tail) = ("{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"", "\"}]}");
    let text: String = ('a'..='z').cycle().take(bytes - head.len() - tail.len()).collect();
    [head, &text, tail].concat().into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_04_long_bodies_come_back_in_pieces_that_chained_filters_take() {
    let case = input("PRO-04");
    let picker = picker(case).await;
    let generate = &case["generate"];
    for size in list(generate, "body_bytes") {
        for received in list(generate, "recv_chunk_bytes") {
            let (size, received) = (size.as_u64().unwrap() as usize, received.as_u64().unwrap() as usize);
            let context = format!("{size} bytes received in pieces of {received}");
            let body = chat_of(size);
            let mut stream = Stream::of(&picker, &[post(CHAT)]).await;
            let last = body.len().div_ceil(received) - 1;
            for (at, piece) in body.chunks(received).enumerate() {
                stream.send_body(piece, at == last);
            }
            let replies = stream.finish().await;
            assert!(replies.body() == body, "{context}: the body changed");
            let pieces = replies.pieces();
            assert!(pieces.iter().all(|(bytes, _)| bytes.len() <= 62_000), "{context}: a piece is too long");
            assert!(pieces.iter().all(|(bytes, _)| !bytes.is_empty()), "{context}: an empty piece");
            assert_eq!(replies.ends(), [pieces.len() - 1], "{context}: the last piece alone ends the body");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_05_every_mode_that_can_work_works() {
    let case = input("PRO-05");
    let given = steps(case);
    let request = &given[1..];
    let body = given[2]["rb"]["text"].as_str().unwrap().as_bytes();
    let with = |changes: Value| {
        let mut first = given[0].clone();
        for (name, value) in changes.as_object().unwrap() {
            first["first_message"]["protocol_config"][name] = value.clone();
        }
        [&[first], request].concat()
    };
    let full_duplex = [
        ("as given", given.to_vec()),
        ("the flag the other way", with(json!({"send_body_without_waiting_for_header_response": true}))),
        ("protocol_config absent", request.to_vec()),
    ];
    for (context, steps) in full_duplex {
        let picker = picker(case).await;
        let replies = run(&picker, &steps).await;
        assert_eq!(replies.kinds(), ["rh", "rb"], "{context}");
        assert_eq!(replies.choices(), ["10.0.0.10:8000"], "{context}");
        assert_eq!(replies.body(), body, "{context}");
        assert_eq!(replies.ends(), [0], "{context}");
    }

    let variants: Vec<&str> = list(case, "variants").iter().map(|v| v.as_str().unwrap()).collect();
    assert_eq!(
        variants,
        ["protocol_config absent", "response_body_mode NONE", "request_body_mode BUFFERED"],
        "each variant has its check below"
    );

    // Nobody says what a response cost: it is served, and one gauge warns.
    let blind = picker(case).await;
    let mut stream = Stream::of(&blind, &with(json!({"response_body_mode": "NONE"}))).await;
    assert_eq!(stream.until_decided().await.choices(), ["10.0.0.10:8000"]);
    assert_eq!(blind.metric("pilotfish_degraded", &[("source", "usage")]).await, 0.0);
    let replies = stream.respond(&[json!({"sh": {"headers": [[":status", "200"]], "eos": false}})]).await;
    assert!(replies.failed.is_none() && replies.immediate().is_none());
    blind.until("a warning", "pilotfish_degraded", &[("source", "usage")], 1.0).await;
    assert_eq!(blind.metric("pilotfish_usage_total", &[("source", "estimate")]).await, 1.0);
    blind.until_idle("response_body_mode NONE").await;
    // One that says ends the warning.
    serve_steps(&blind, request).await;
    blind.until("the warning ends", "pilotfish_degraded", &[("source", "usage")], 0.0).await;

    let buffered = picker(case).await;
    let replies = run(&buffered, &with(json!({"request_body_mode": "BUFFERED"}))).await;
    assert_eq!(replies.kinds(), ["rh", "rb"], "the headers go on at once, the body carries the decision");
    assert_eq!(replies.choices(), ["10.0.0.10:8000"]);
    assert_eq!(replies.replaced_body(), None, "an unchanged body is not sent back");
    // A changed one is sent back whole.
    let mut asking = with(json!({"request_body_mode": "BUFFERED"}));
    asking[2]["rb"]["text"] = json!("{\"model\":\"m\",\"stream\":true,\"messages\":[]}");
    let replies = run(&buffered, &asking).await;
    let changed = String::from_utf8(replies.replaced_body().expect("a whole body").to_vec()).unwrap();
    assert!(changed.contains("include_usage"), "{changed}");

    let unusable = picker(case).await;
    let replies = run(&unusable, &with(json!({"request_body_mode": "STREAMED"}))).await;
    assert_eq!(replies.refused().status(), 503);
    assert_eq!(replies.refused().reason(), "unsupported-mode");
    assert!(replies.refused().message().contains("request_body_mode STREAMED"), "it names the setting");
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_08_headers_that_route_are_ours_alone() {
    let case = input("PRO-08");
    let picker = picker(case).await;
    let given = steps(case);
    let mut bodyless = given[0].clone();
    bodyless["rh"]["eos"] = json!(true);
    bodyless["rh"]["headers"][0] = json!([":method", "GET"]);
    bodyless["rh"]["headers"][3] = json!([":path", "/v1/models"]);
    for (context, steps) in [("with a body", given.to_vec()), ("without a body", vec![bodyless])] {
        for _ in 0..20 {
            let replies = run(&picker, &steps).await;
            // The destination is set once and replaces; both are asserted by the kit, as is the metadata.
            for choice in replies.choices() {
                assert!(["10.0.0.10:8000", "10.0.0.11:8000"].contains(&&*choice), "{context}: {choice}");
            }
            let removed = replies.removed();
            let internal = list(&given[0]["rh"], "headers").iter().skip(5);
            for name in internal.map(|pair| pair[0].as_str().unwrap().to_ascii_lowercase()) {
                let ours = name == "x-gateway-destination-endpoint";
                assert_eq!(removed.contains(&&*name), !ours, "{context}: {name} in {removed:?}");
            }
        }
    }
}
