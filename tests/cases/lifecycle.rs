//! How requests end, and what they leave behind.

use serde_json::{Value, json};

use crate::kit::case::{input, list, number};
use crate::kit::extproc::{CHAT, Stream, chat, headers, post, request_of, run};
use crate::kit::picker::Picker;
use crate::kit::resources::pods;

async fn picker(case: &Value) -> Picker {
    Picker::serve(&pods(&case["pods"])).await
}

/// Requests of each row of PRO-09's matrix under way at once.
struct Crowd {
    streams: Vec<Stream>,
    prompt_tokens: f64,
    body_bytes: usize,
}

/// One request of a pool at a time; the others wait.
const ONE_AT_A_TIME: &str =
    "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nqueue: {maxConcurrent: 1}\n";

const ANSWER_TOKENS: f64 = 16.0;
/// PRO-10: bytes that all bodies together may hold.
const TOTAL: usize = 64 << 20;

impl Crowd {
    /// `n` requests whose bodies have come as far as `part`.
    async fn of(picker: &Picker, n: usize, part: impl Fn(&str) -> Vec<Value>) -> Self {
        let body = |n: usize| {
            // Prompts that differ in their first bytes share no block.
            format!(
                "{{\"model\":\"m\",\"max_tokens\":16,\"stream\":true,\"stream_options\":{{\"include_usage\":true}},\
                 \"messages\":[{{\"role\":\"user\",\"content\":\"{n:06} {}\"}}]}}",
                "words ".repeat(100)
            )
        };
        let explained = picker.explain(CHAT, &body(0)).await;
        let opened = (0..n).map(|n| {
            let steps = part(&body(n));
            async move { Stream::of(picker, &steps).await }
        });
        let streams = futures::future::join_all(opened).await;
        let prompt_tokens = explained["prompt_tokens"].as_u64().unwrap() as f64;
        Self { streams, prompt_tokens, body_bytes: body(0).len() }
    }

    async fn decided(picker: &Picker, n: usize) -> Self {
        let mut crowd = Self::of(picker, n, |body| chat(body).to_vec()).await;
        for stream in &mut crowd.streams {
            stream.until_decided().await;
        }
        crowd
    }

    /// Sends every stream these steps and awaits so many replies of each kind.
    async fn say(&mut self, steps: &[Value], kind: &str, replies: usize) {
        for stream in &mut self.streams {
            stream.send_all(steps);
        }
        for stream in &mut self.streams {
            stream.until(|seen| seen.count(kind) >= replies).await;
        }
    }

    /// Half of the streams are reset, as when the client goes, half end in order.
    async fn end(self) {
        let (reset, ended): (Vec<_>, Vec<_>) =
            self.streams.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        drop(reset);
        for (_, stream) in ended {
            stream.finish().await;
        }
    }

    async fn reset(self) {
        drop(self.streams);
    }

    async fn finish(self) {
        for stream in self.streams {
            stream.finish().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_09_every_end_of_a_request_gives_back_what_it_booked() {
    let case = input("PRO-09");
    let n = number(case, "repeat_each");
    let head = |status: &str| json!({"sh": {"headers": [[":status", status], ["content-type", "text/event-stream"]], "eos": false}});
    let event = |text: &str, eos| json!({"sb": {"text": format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n"), "eos": eos}});
    for row in list(case, "matrix") {
        let row = row.as_str().unwrap();
        let picker = picker(case).await;
        let full = n as f64;
        // Requests, prefill tokens and decode tokens booked at this moment.
        let booked = async |requests: f64, prefill: f64, decode: f64| {
            picker.until(row, "pilotfish_reserved_requests", &[], requests).await;
            picker.until(row, "pilotfish_reserved_tokens", &[("phase", "prefill")], prefill).await;
            picker.until(row, "pilotfish_reserved_tokens", &[("phase", "decode")], decode).await;
        };
        match row {
            "cancel after RH" => {
                let crowd = Crowd::of(&picker, n, |_| vec![post(CHAT)]).await;
                picker.until(row, "pilotfish_streams", &[], full).await;
                booked(0.0, 0.0, 0.0).await;
                crowd.end().await;
            }
            "cancel after half of the body" => {
                let half = |body: &str| {
                    vec![post(CHAT), json!({"rb": {"text": &body[..body.len() / 2], "eos": false}})]
                };
                let crowd = Crowd::of(&picker, n, half).await;
                let held = crowd.streams.len() * (crowd.body_bytes / 2);
                picker.until(row, "pilotfish_streams", &[], full).await;
                picker.until(row, "pilotfish_buffered_bytes", &[], held as f64).await;
                booked(0.0, 0.0, 0.0).await;
                crowd.end().await;
            }
            "cancel while queued for fairness/saturation" => {
                let picker = Picker::with(&pods(&case["pods"])).config(ONE_AT_A_TIME).start().await;
                let first = Crowd::decided(&picker, 1).await;
                let crowd = Crowd::of(&picker, n, |body| chat(body).to_vec()).await;
                picker.until(row, "pilotfish_queue_requests", &[], full).await;
                let held = (crowd.streams.len() * crowd.body_bytes) as f64;
                picker.until(row, "pilotfish_queue_bytes", &[], held).await;
                picker.until(row, "pilotfish_reserved_requests", &[], 1.0).await;
                crowd.end().await;
                picker.until(row, "pilotfish_queue_requests", &[], 0.0).await;
                picker.until(row, "pilotfish_queue_bytes", &[], 0.0).await;
                first.end().await;
                gives_everything_back(&picker, row).await;
                continue;
            }
            "cancel after the decision, before response headers" => {
                let crowd = Crowd::decided(&picker, n).await;
                booked(full, full * crowd.prompt_tokens, full * ANSWER_TOKENS).await;
                crowd.end().await;
            }
            "cancel after 1 SSE chunk" | "gRPC RST from Envoy mid response" => {
                let mut crowd = Crowd::decided(&picker, n).await;
                crowd.say(&[head("200"), event("a", false)], "sb", 1).await;
                booked(full, 0.0, full * (crowd.prompt_tokens + ANSWER_TOKENS)).await;
                if row.starts_with("cancel") { crowd.end().await } else { crowd.reset().await }
            }
            "upstream reset: response headers 503 then end" => {
                let mut crowd = Crowd::decided(&picker, n).await;
                crowd.say(&[head("503")], "sh", 1).await;
                booked(full, full * crowd.prompt_tokens, full * ANSWER_TOKENS).await;
                crowd.finish().await;
            }
            "response trailers end the stream" => {
                let mut crowd = Crowd::decided(&picker, n).await;
                crowd
                    .say(&[head("200"), event("a", false), json!({"st": [["grpc-status", "0"]]})], "st", 1)
                    .await;
                booked(full, 0.0, full * (crowd.prompt_tokens + ANSWER_TOKENS)).await;
                crowd.finish().await;
            }
            "normal stream of 3 chunks: probe the counter between chunk 1 and 3" => {
                let mut crowd = Crowd::decided(&picker, n).await;
                crowd.say(&[head("200"), event("a", false)], "sb", 1).await;
                booked(full, 0.0, full * (crowd.prompt_tokens + ANSWER_TOKENS)).await;
                crowd.say(&[event("b", false)], "sb", 2).await;
                booked(full, 0.0, full * (crowd.prompt_tokens + ANSWER_TOKENS)).await;
                crowd.say(&[event("c", true)], "sb", 3).await;
                crowd.finish().await;
            }
            other => panic!("no check for {other}"),
        }
        gives_everything_back(&picker, row).await;
    }
}

async fn gives_everything_back(picker: &Picker, row: &str) {
    picker.until_idle(row).await;
    picker.until(row, "pilotfish_streams", &[], 0.0).await;
    picker.until(row, "pilotfish_buffered_bytes", &[], 0.0).await;
    for endpoint in list(&picker.json("/debug/endpoints").await, "endpoints") {
        let reserved = endpoint["reserved"].as_object().unwrap();
        assert!(
            reserved.len() >= 3 && reserved.values().all(|booked| booked.as_f64() == Some(0.0)),
            "{row}: {reserved:?}"
        );
    }
    for queue in list(&picker.json("/debug/queues").await, "queues") {
        assert_eq!((&queue["running"], &queue["flows"]), (&json!(0), &json!(0)), "{row}: {queue}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pro_10_bodies_that_stop_arriving_are_bounded_and_refused() {
    let case = input("PRO-10");
    let (config, generate) = (&case["config"], &case["generate"]);
    let idle = number(config, "body_idle_timeout_ms");
    let limit = number(config, "max_body_bytes");
    let picker = Picker::with(&pods(&case["pods"]))
        .flag("--max-body-bytes", &limit.to_string())
        .flag("--body-idle-timeout", &format!("{idle}ms"))
        .flag("--max-buffered-bytes", &TOTAL.to_string())
        .start()
        .await;
    assert!(generate["each"].as_str().unwrap().contains("60 KiB"));
    let part = vec![b' '; 60 << 10];
    let opened = (0..number(generate, "streams")).map(|_| async {
        let mut stream = Stream::of(&picker, &[post(CHAT)]).await;
        stream.send_body(&part, false);
        stream
    });
    let mut silent = futures::future::join_all(opened).await;
    let outcomes = silent.iter_mut().map(|stream| async {
        stream.until(|replies| replies.immediate().is_some()).await;
        let refused = stream.replies.refused();
        assert!(!refused.message().is_empty());
        (refused.status(), refused.reason(), refused.header("retry-after").is_some())
    });
    let watching = async {
        let mut most = 0.0f64;
        loop {
            most = most.max(picker.metric("pilotfish_buffered_bytes", &[]).await);
            assert!(most <= TOTAL as f64, "{most} bytes are held");
            // Others are served all the while.
            let replies = run(&picker, &chat("{\"model\":\"m\",\"messages\":[]}")).await;
            let overloaded = replies.immediate().is_some_and(|refused| refused.reason() == "overloaded");
            assert!(overloaded || replies.destination().is_some());
        }
    };
    let outcomes = tokio::select! {
        outcomes = futures::future::join_all(outcomes) => outcomes,
        never = watching => never,
    };
    let timed_out = outcomes.iter().filter(|o| (o.0, &*o.1) == (408, "body-timeout")).count();
    let over_total = outcomes.iter().filter(|o| (o.0, &*o.1, o.2) == (503, "overloaded", true)).count();
    assert_eq!(timed_out + over_total, outcomes.len(), "{:?}", outcomes.iter().take(5).collect::<Vec<_>>());
    assert!(timed_out > 0 && timed_out <= TOTAL / part.len(), "{timed_out} bodies fit");
    picker.until("all is given back", "pilotfish_buffered_bytes", &[], 0.0).await;
    drop(silent);

    let mut large = Stream::of(&picker, &[post(CHAT)]).await;
    for _ in 0..=limit / (60 << 10) {
        large.send_body(&part, false);
    }
    large.until(|replies| replies.immediate().is_some()).await;
    let refused = large.replies.refused();
    assert_eq!(
        (refused.status(), &*refused.reason()),
        (413, "body-too-large"),
        "without its end having come"
    );
    assert!(refused.message().contains(&limit.to_string()), "{}", refused.message());
    let announced = headers("POST", CHAT, &[("content-length", &(limit + 1).to_string())], false);
    let replies = run(&picker, &[announced]).await;
    assert_eq!(replies.refused().status(), 413, "an announced length is refused before the first byte");
    let replies = run(&picker, &request_of(CHAT, &[], "{\"model\":\"m\",\"messages\":[]}")).await;
    assert!(replies.destination().is_some(), "others are served");
}
