//! What the conformance tests of gateways ask of a picker, and what its flags tell Envoy beside the choice.

use std::collections::BTreeSet;

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::extproc::{CHAT, Stream, request_of, run};
use crate::kit::picker::{Picker, Setup};
use crate::kit::replies::Replies;
use crate::kit::resources::{endpoint, pool};

const SELECTION: &str = "test-epp-endpoint-selection";
const BODY: &str = "{\"model\":\"m\",\"messages\":[]}";
/// Two ranks of one pod, and another pod.
const ENDPOINTS: [&str; 3] = ["10.0.0.1:3000", "10.0.0.1:3002", "10.0.0.2:3000"];

fn setup() -> Setup {
    let endpoints = ENDPOINTS.iter().enumerate().map(|(at, address)| endpoint(&format!("e{at}"), address));
    Picker::with(&(endpoints.collect::<String>() + &pool()))
}

/// A request with a selection by header and a subset by metadata, each if given.
fn request(selection: Option<&str>, subset: Option<Value>) -> [Value; 2] {
    let headers: Vec<_> = selection.iter().map(|list| (SELECTION, *list)).collect();
    let mut steps = request_of(CHAT, &headers, BODY);
    if let Some(subset) = subset {
        // Gateways send it with every message.
        for step in &mut steps {
            step["metadata"] =
                json!({"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": subset}});
        }
    }
    steps
}

/// Every endpoint that a request may go to, as its ranked list names them.
fn candidates(replies: &Replies) -> BTreeSet<String> {
    replies.choices().into_iter().collect()
}

#[rstest]
#[case("10.0.0.1", None, &[0, 1])]
#[case("10.0.0.1:3002", None, &[1])]
#[case("10.0.0.1:3002, 10.0.0.2", None, &[1, 2])]
#[case("10.0.0.1,10.0.0.2", None, &[0, 1, 2])]
#[case("10.0.0.9,10.0.0.2:3000", None, &[2])]
#[case("10.0.0.9", None, &[])]
#[case("10.0.0.2:3002", None, &[])]
#[case("nonsense", None, &[])]
#[case("10.0.0.1:3000", Some(json!(["10.0.0.2:3000"])), &[0])]
#[case("10.0.0.9", Some(json!(["10.0.0.2:3000"])), &[])]
#[case(" ", Some(json!(["10.0.0.2:3000"])), &[2])]
#[tokio::test(flavor = "multi_thread")]
async fn the_header_chooses_candidates_before_the_subset_does(
    #[case] selection: &str,
    #[case] subset: Option<Value>,
    #[case] expected: &[usize],
) {
    let picker = setup().switch("--conformance").start().await;
    let replies = run(&picker, &request(Some(selection), subset)).await;
    if expected.is_empty() {
        let refused = replies.refused();
        assert_eq!((refused.status(), &*refused.reason()), (503, "no-endpoints"));
    } else {
        let expected = expected.iter().map(|at| ENDPOINTS[*at].to_owned()).collect();
        assert_eq!(candidates(&replies), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_flag_neither_header_means_anything() {
    let picker = setup().start().await;
    let replies = run(&picker, &request(Some("10.0.0.1:3002"), None)).await;
    assert_eq!(candidates(&replies).len(), ENDPOINTS.len());
    let replies = run(&picker, &request(Some("10.0.0.1:3002"), Some(json!(["10.0.0.2:3000"])))).await;
    assert_eq!(replies.choices(), ["10.0.0.2:3000"]);
    assert_eq!(served_header(&picker, Some("10.0.0.2:3000")).await, None);
}

async fn served_header(picker: &Picker, served: Option<&str>) -> Option<String> {
    let mut stream = Stream::of(picker, &request(None, None)).await;
    stream.until_decided().await;
    let mut head = json!({"sh": {"headers": [[":status", "200"]], "eos": true}});
    if let Some(served) = served {
        head["metadata"] = json!({"envoy.lb": {"x-gateway-destination-endpoint-served": served}});
    }
    stream.respond(&[head]).await.response_header("x-conformance-test-served-endpoint")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_response_says_who_the_gateway_says_served() {
    let picker = setup().switch("--conformance").start().await;
    assert_eq!(served_header(&picker, Some("10.0.0.2:3000")).await.as_deref(), Some("10.0.0.2:3000"));
    assert_eq!(served_header(&picker, None).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_subset_can_be_ignored() {
    let picker = setup().switch("--disable-endpoint-subset-filter").start().await;
    let replies = run(&picker, &request(None, Some(json!(["10.0.0.9:1"])))).await;
    assert_eq!(candidates(&replies).len(), ENDPOINTS.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn scores_of_all_candidates_are_told_if_asked_for() {
    let picker = setup().switch("--emit-endpoint-scores").start().await;
    let replies = run(&picker, &request(None, Some(json!(["10.0.0.1:3002", "10.0.0.2:3000"])))).await;
    let scores = replies.scores().unwrap();
    assert_eq!(scores.keys().collect::<Vec<_>>(), ["10.0.0.1:3002", "10.0.0.2:3000"]);
    let best = scores.iter().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().1;
    assert_eq!(scores[replies.first_choice()].to_bits(), best.to_bits(), "{scores:?}");
    let silent = setup().start().await;
    assert_eq!(run(&silent, &request(None, None)).await.scores(), None);
}

/// More endpoints than a record keeps whole.
#[tokio::test(flavor = "multi_thread")]
async fn large_pools_are_told_whole() {
    let endpoints = (0..200).map(|n| endpoint(&format!("e{n}"), &format!("10.0.1.{n}:80")));
    let resources = endpoints.collect::<String>() + &pool();
    let picker = Picker::with(&resources).switch("--emit-endpoint-scores").start().await;
    assert_eq!(run(&picker, &request(None, None)).await.scores().map(|scores| scores.len()), Some(200));
}
