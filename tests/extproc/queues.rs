//! Turns, over the port that Envoy speaks to: shares of identities, bounds, and many that wait.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use futures::future::join_all;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, request_of, response};
use crate::kit::picker::{Picker, Setup};
use crate::kit::resources::{endpoint, pool};

/// A pool of one endpoint that nothing scrapes, with this queue.
fn queue(section: &str) -> Setup {
    Picker::with(&(pool() + &endpoint("e", "10.0.0.1:8000")))
        .config(&format!(
            "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nqueue: {section}\n"
        ))
        .flag("--identity", "header:x-client")
        .flag("--queue-requests", "20000")
}

fn of(client: &str, bytes: usize) -> Vec<Value> {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(bytes)}]});
    request_of(CHAT, &[("x-client", client)], &body.to_string()).to_vec()
}

/// Requests that are served before the first client has nothing more to ask.
const SERVED: usize = 1_000;

#[rstest]
#[case::equal_shares("{a: 1, b: 1}", [0.5, 0.5], [400, 400])]
#[case::equal_shares_of_prompts_ten_times_as_long("{a: 1, b: 1}", [0.5, 0.5], [4_000, 400])]
#[case::three_to_one("{a: 3, b: 1}", [0.75, 0.25], [400, 4_000])]
#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_shared_as_the_weights_say(
    #[case] weights: &str,
    #[case] shares: [f64; 2],
    #[case] bytes: [usize; 2],
) {
    let picker = queue(&format!("{{maxConcurrent: 4, weights: {weights}}}")).start().await;
    // Whoever blocks the way until all wait.
    let mut first = Vec::new();
    for _ in 0..4 {
        let mut stream = Stream::of(&picker, &of("other", 4)).await;
        stream.until_decided().await;
        first.push(stream);
    }
    let (served, tokens) = (AtomicUsize::new(0), [AtomicU64::new(0), AtomicU64::new(0)]);
    let order = [Mutex::new(Vec::new()), Mutex::new(Vec::new())];
    // Longer answers than anybody expected of one, shorter of the other: only the end tells.
    let answers = [20, 60];
    let one = |who: usize, at: usize| {
        let (picker, served, tokens, order) = (&picker, &served, &tokens[who], &order[who]);
        async move {
            let mut stream = Stream::of(picker, &of(["a", "b"][who], bytes[who])).await;
            stream.until_decided().await;
            order.lock().await.push(at);
            if served.fetch_add(1, Ordering::SeqCst) < SERVED {
                let prompt = bytes[who] as u64 / 4;
                tokens.fetch_add(prompt + 2 * answers[who], Ordering::SeqCst);
            }
            stream.respond(&response(bytes[who] as u64 / 4, answers[who])).await;
        }
    };
    let requests = (0..SERVED).flat_map(|at| [one(0, at), one(1, at)]);
    let waiting = async {
        let all = 2.0 * SERVED as f64;
        picker.until("all wait", "pilotfish_queue_requests", &[], all).await;
        for stream in first {
            stream.respond(&response(1, 1)).await;
        }
    };
    futures::join!(join_all(requests), waiting);
    let tokens = tokens.map(|tokens| tokens.load(Ordering::SeqCst) as f64);
    for (given, share) in tokens.iter().zip(shares) {
        let found = given / tokens.iter().sum::<f64>();
        assert!((found - share).abs() < 0.05, "{found} instead of {share}: {tokens:?}");
    }
    picker.until_idle("all are served").await;
    let queues = picker.json("/debug/queues").await;
    assert_eq!((&queues["queues"][0]["running"], &queues["queues"][0]["flows"]), (&json!(0), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_configuration_frees_who_waits_and_a_pool_that_goes_refuses_them() {
    let picker = queue("{maxConcurrent: 1}").start().await;
    let mut first = Stream::of(&picker, &of("a", 4)).await;
    first.until_decided().await;
    let mut second = Stream::of(&picker, &of("a", 4)).await;
    let mut third = Stream::of(&picker, &of("b", 4)).await;
    picker.until("both wait", "pilotfish_queue_requests", &[], 2.0).await;
    picker.configure(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\nqueue: {maxConcurrent: 2}\n",
    );
    second.until_decided().await;
    assert!(second.replies.destination().is_some());
    let rest = endpoint("e", "10.0.0.1:8000");
    picker.apply(&rest).await;
    third.until_decided().await;
    let refused = third.replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (503, "no-endpoints"));
    assert!(refused.message().contains("default/pool"), "{}", refused.message());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_is_not_sent_to_endpoints_that_have_just_gone() {
    let picker = queue("{maxConcurrent: 1}").start().await;
    let mut first = Stream::of(&picker, &of("a", 4)).await;
    first.until_decided().await;
    let mut waiting = join_all((0..50).map(|_| async { Stream::of(&picker, &of("a", 4)).await })).await;
    picker.until("all wait", "pilotfish_queue_requests", &[], 50.0).await;
    picker.apply(&pool()).await;
    for stream in &mut waiting {
        stream.until_decided().await;
        let refused = stream.replies.immediate().map(|refused| (refused.status(), refused.reason()));
        assert_eq!(refused, Some((503, "no-endpoints".to_owned())));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_scaled_to_nothing_holds_requests_for_its_first_endpoint_if_it_may() {
    let picker =
        Picker::with(&pool()).flag("--hold-timeout", "30s").flag("--hold-requests", "3").start().await;
    let held = "pilotfish_held_requests";
    let mut waiting = join_all((0..3).map(|_| async { Stream::of(&picker, &of("a", 4)).await })).await;
    picker.until("the autoscaler is told", held, &[("pool", "default/pool")], 3.0).await;
    let mut fourth = Stream::of(&picker, &of("a", 4)).await;
    fourth.until_decided().await;
    let refused = fourth.replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (503, "no-endpoints"));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let server = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
    picker.apply(&(pool() + &endpoint("e", &address))).await;
    for stream in &mut waiting {
        stream.until_decided().await;
        assert_eq!(stream.replies.first_choice(), address);
    }
    picker.until("nobody is held", held, &[], 0.0).await;
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn many_that_wait_are_all_answered_and_leave_nothing() {
    let picker = queue("{maxConcurrent: 16}").start().await;
    let all = 1_000;
    let served = AtomicUsize::new(0);
    let one = |at: usize| {
        let (picker, served) = (&picker, &served);
        async move {
            let mut stream = Stream::of(picker, &of(&format!("client-{}", at % 37), 40)).await;
            if at % 10 == 9 {
                // One of ten gives up as soon as it can.
                return;
            }
            stream.until_decided().await;
            served.fetch_add(1, Ordering::SeqCst);
            stream.respond(&response(10, 10)).await;
        }
    };
    join_all((0..all).map(one)).await;
    assert_eq!(served.load(Ordering::SeqCst), all - all / 10);
    picker.until_idle("all are served").await;
    eventually("nothing is left", async || {
        let queue = picker.json("/debug/queues").await["queues"][0].clone();
        (queue["running"] == 0 && queue["flows"] == 0 && queue["bands"] == json!([])).then_some(())
    })
    .await;
}
