//! Roles that are missing, change or fail on the decode side, and what else meets a request whose prompt is computed elsewhere.

use std::io::Write as _;
use std::time::Duration;

use pilotfish::engine::Fault;
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::Setup;
use crate::kit::eventually::eventually;
use crate::kit::http::{Answer, whole};
use crate::kit::pairs::{
    ALWAYS, COMPLETIONS, Pairs, Plan, bodies, by_one_engine, completion, endpoints, server, text, unscraped,
};

/// Waits until no prompt is kept for anybody.
async fn unpinned(stand: &Pairs) {
    for engine in &stand.prefill {
        eventually("nothing is kept", async || (engine.state.pinned() == 0).then_some(())).await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn another_decode_endpoint_of_the_group_fetches_the_blocks(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).engines(1, 2).start(unscraped).await;
    stand.decode[0].close().await;
    let dead = stand.decode[0].address();
    let first_choice = async || {
        for at in 0..100 {
            let name = format!("request-{at}");
            let answer = stand.ask(&name).await;
            let decision = stand.check_whole(&name, &answer).await;
            if decision["legs"][0]["picked"][0] == *dead {
                return (at + 1, decision);
            }
        }
        panic!("{dead} was never the first choice");
    };
    let (requests, decision) = first_choice().await;
    assert_eq!(decision["legs"][0]["served"], stand.decode[1].address(), "{decision}");
    assert_eq!(decision["legs"][0]["attempts"], 2, "{decision}");
    assert_eq!(decision["prefill"]["attempts"], 1, "{decision}");
    if connector != "http" {
        assert_eq!(stand.decode[1].state.transferred(), requests);
    }
    unpinned(&stand).await;
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (requests as f64, 0.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn without_the_only_decode_endpoint_the_client_is_told(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    stand.decode[0].close().await;
    let answer = stand.ask("nobody").await;
    assert_eq!(answer.status, 503, "{}", String::from_utf8_lossy(&answer.body));
    assert_eq!(bodies(&stand.prefill[0]).len(), 1, "who prefills is not asked to decode");
    stand.released().await;
    unpinned(&stand).await;
    stand.picker.until("counted", "pilotfish_requests_total", &[], 1.0).await;
    assert_eq!((stand.served(503).await, stand.decided("pair").await), (1.0, 1.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_decode_engine_that_breaks_off_gives_everything_back(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    stand.decode[0].state.set_fault(Fault::StallInStream(1));
    let mut stream = stand.client.post(COMPLETIONS, &[], whole(completion("cut", true))).await;
    stream.event().await;
    stand.decode[0].state.set_fault(Fault::CutStream(1));
    stand.decode[0].state.clear_fault(Fault::StallInStream(1));
    assert!(stream.try_rest().await.is_err(), "no client takes it for whole");
    stand.released().await;
    assert_eq!(stand.prefill[0].state.pinned(), 0);
    assert_eq!(bodies(&stand.decode[0]).len(), 1, "it is not asked again");
    let cause = [("cause", "upstream")];
    stand.picker.until("counted", "pilotfish_broken_streams_total", &cause, 1.0).await;
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_nobody_has_is_done_without_or_refused_with_a_reason(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http", "sglang")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    let (prefill, decode) =
        (endpoints(&stand.prefill, "prefill", None), endpoints(&stand.decode, "decode", None));

    stand.picker.apply(&(server(connector) + &decode)).await;
    let answer = stand.ask("no-prefill").await;
    if connector == "sglang" {
        let message = stand.check_refused(&answer, 503, "no-endpoints").await;
        assert_eq!(
            message,
            "pool default/pairs has no prefill endpoint that takes this request, and sglang needs both"
        );
    } else {
        let decision = stand.check_whole("no-prefill", &answer).await;
        assert_eq!(decision["split"], "no-prefill", "{decision}");
        assert_eq!(stand.decided("no-prefill").await, 1.0);
    }

    stand.picker.apply(&(server(connector) + &prefill)).await;
    let answer = stand.ask("no-decode").await;
    let message = stand.check_refused(&answer, 503, "no-endpoints").await;
    let lack = "has no decode endpoint";
    assert!(message.contains("default/pairs") && message.contains(lack), "{message}");

    stand.picker.apply(&server(connector)).await;
    let answer = stand.ask("nobody").await;
    let message = stand.check_refused(&answer, 503, "no-endpoints").await;
    assert!(message.contains("default/pairs"), "{message}");

    assert!(bodies(&stand.prefill[0]).is_empty(), "nothing was computed in vain");
    stand.picker.apply(&(server(connector) + &prefill + &decode)).await;
    let up = [("state", "up")];
    stand.picker.until("they are back", "pilotfish_endpoints", &up, 2.0).await;
    let answer = stand.ask("back").await;
    let decision = stand.check_whole("back", &answer).await;
    assert_eq!(decision["split"], "pair", "{decision}");
}

/// A pool of which only these engines have roles.
fn roles(stand: &Pairs, connector: &str, prefill: usize, decode: usize) -> String {
    let mut resources = server(connector);
    for (engines, role, chosen) in [(&stand.prefill, "prefill", prefill), (&stand.decode, "decode", decode)] {
        for (at, engine) in engines.iter().enumerate() {
            let role = if at == chosen { role } else { "spare" };
            resources += &endpoints(std::slice::from_ref(engine), role, None);
        }
    }
    resources
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn who_loses_a_role_completes_what_it_has_begun(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).patient().engines(2, 2).start(unscraped).await;
    stand.picker.apply(&roles(&stand, connector, 0, 0)).await;
    stand.prefill[0].state.set_fault(Fault::StallBefore);
    let answer = stand.begin("before");
    stand.sent(&stand.prefill[0]).await;
    stand.picker.apply(&roles(&stand, connector, 1, 1)).await;
    stand.prefill[0].state.clear_fault(Fault::StallBefore);
    let decision = stand.check_whole("before", &answer.await.unwrap()).await;
    assert_eq!(decision["prefill"]["endpoint"], stand.prefill[0].address(), "{decision}");
    assert_eq!(decision["legs"][0]["picked"][0], stand.decode[0].address(), "{decision}");
    let answer = stand.ask("after").await;
    let decision = stand.check_whole("after", &answer).await;
    assert_eq!(decision["prefill"]["endpoint"], stand.prefill[1].address(), "{decision}");
    assert_eq!(decision["legs"][0]["picked"][0], stand.decode[1].address(), "{decision}");
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (2.0, 0.0));
    assert_eq!(stand.prefill[0].state.pinned() + stand.prefill[1].state.pinned(), 0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn engines_that_swap_roles_complete_what_they_have_begun(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Plan::new(setup, "http").start(unscraped).await;
    stand.prefill[0].state.set_fault(Fault::StallBefore);
    let answer = stand.begin("before");
    stand.sent(&stand.prefill[0]).await;
    let swapped = endpoints(&stand.prefill, "decode", None) + &endpoints(&stand.decode, "prefill", None);
    stand.picker.apply(&(server("http") + &swapped)).await;
    stand.prefill[0].state.clear_fault(Fault::StallBefore);
    let decision = stand.check_whole("before", &answer.await.unwrap()).await;
    assert_eq!(decision["prefill"]["endpoint"], stand.prefill[0].address(), "{decision}");
    let answer = stand.ask("after").await;
    assert_eq!(answer.served(), "p0");
    assert_eq!(text(&answer.json()), by_one_engine("after").await);
    stand.released().await;
    let decision = stand.picker.decision("after").await;
    assert_eq!(decision["prefill"]["endpoint"], stand.decode[0].address(), "{decision}");
}

/// Envoy takes the word to wait longer once: it must cover both the queue and the prefill leg.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_request_may_wait_for_its_turn_and_then_for_its_prompt(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let one = format!("{ALWAYS}queue: {{maxConcurrent: 1}}\n");
    let shorter = |text: String| text.replace(" message_timeout: 5s", " message_timeout: 0.2s");
    let stand = Plan::new(setup, "nixl").start_with(|picker| unscraped(picker).config(&one), shorter).await;
    // About 0.6 s, and then as long for the prompt of the next.
    let long = json!({"model": "tiny", "prompt": "first", "max_tokens": 6_000, "stream": true});
    let mut first = stand.client.post(COMPLETIONS, &[], whole(long.to_string())).await;
    first.event().await;
    stand.clear();
    stand.prefill[0].state.set_fault(Fault::Slow(2_500.0));
    let behind = stand.begin("behind");
    stand.picker.until("it waits", "pilotfish_queue_requests", &[], 1.0).await;
    first.all_events().await;
    let decision = stand.check_whole("behind", &behind.await.unwrap()).await;
    for stage in ["queue", "prefill"] {
        let took = Duration::from_micros(decision["stages_us"][stage].as_u64().unwrap());
        assert!(took > Duration::from_millis(200), "{stage} {took:?}: this test shows nothing");
    }
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (2.0, 0.0));
    assert_eq!(stand.decode[0].state.transferred(), 2);
    let running =
        async || (stand.picker.json("/debug/queues").await["queues"][0]["running"] == 0).then_some(());
    eventually("the way is free", running).await;
}

/// What a client might say of transfers, harmless at engines that believe it.
const OWN: &str = "\"kv_transfer_params\":{\"do_remote_prefill\":false,\"do_remote_decode\":false,\
                   \"remote_host\":\"10.9.9.9\"},\"bootstrap_host\":\"10.9.9.9\",\"bootstrap_port\":1,\
                   \"bootstrap_room\":7,";

/// Puts members in front of the others of a body.
fn with(members: &str, body: &str) -> String {
    format!("{{{members}{}", &body[1..])
}

async fn post(stand: &Pairs, body: String) -> Answer {
    stand.client.post(COMPLETIONS, &[], whole(body)).await.rest().await
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_says_of_transfers_reaches_no_engine(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
    #[values(false, true)] split: bool,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    // What the prefill engine alone could say is not split.
    let plain = with(if split { "" } else { "\"echo\":true," }, &completion("mine", false));
    let answer = post(&stand, with(OWN, &plain)).await;
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    stand.released().await;
    let decode = bodies(&stand.decode[0]);
    assert_eq!(decode.len(), 1);
    if split {
        for body in [&bodies(&stand.prefill[0])[0], &decode[0]] {
            assert!(!body.contains("10.9.9.9") && !body.contains("bootstrap"), "{body}");
            assert_eq!(
                body.matches("kv_transfer_params").count(),
                usize::from(connector == "nixl"),
                "{body}"
            );
        }
    } else {
        assert_eq!((&decode[0], bodies(&stand.prefill[0]).len()), (&plain, 0));
    }
    assert_eq!(stand.decided(if split { "pair" } else { "unfit" }).await, 1.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_client_speaks_of_transfers_itself(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
    #[values("", "\"echo\":true,")] more: &str,
) {
    let trusting = |picker| unscraped(picker).switch("--allow-transfer-fields");
    let stand = Plan::new(setup, connector).start(trusting).await;
    let sent = with(OWN, &with(more, &completion("mine", false)));
    let answer = post(&stand, sent.clone()).await;
    assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    assert_eq!((bodies(&stand.decode[0]), bodies(&stand.prefill[0])), (vec![sent], vec![]));
    stand.released().await;
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_encoded_body_goes_to_both_engines_as_plain_text(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(false, true)] alone: bool,
) {
    let quiet = |picker| unscraped(picker).flag("--usage-injection", "off");
    let stand = Plan::new(setup, "nixl").start(quiet).await;
    if alone {
        stand.prefill[0].close().await;
    }
    let plain = completion("zipped", false);
    let headers = [("content-encoding", "gzip"), ("x-request-id", "zipped")];
    let answer = stand.client.post(COMPLETIONS, &headers, whole(gzip(&plain))).await.rest().await;
    let mut engines = vec![&stand.decode[0]];
    if !alone {
        engines.push(&stand.prefill[0]);
    }
    for engine in engines {
        let requests = engine.state.requests();
        let posts: Vec<_> = requests.iter().filter(|request| request.method == "POST").collect();
        let [request] = &posts[..] else { panic!("{posts:?}") };
        assert_eq!(request.header("content-encoding"), None, "{}", engine.state.name());
        let length = request.header("content-length").map(|length| length.parse().unwrap());
        assert!(length.is_none_or(|length: usize| length == request.body.len()), "{}", engine.state.name());
        // In full duplex Envoy announces none.
        let announces = setup == Setup::StaticFailOpen || engine.state.name() == "p0";
        assert_eq!(length.is_some(), announces, "{}", engine.state.name());
        let mut told: Value = serde_json::from_slice(&request.body).unwrap();
        let transfer = told.as_object_mut().unwrap().remove("kv_transfer_params");
        assert_eq!(transfer.is_some(), !alone, "{}", engine.state.name());
        told["max_tokens"] = 8.into();
        assert_eq!(told, serde_json::from_str::<Value>(&plain).unwrap(), "{}", engine.state.name());
    }
    let decision = stand.check_whole("zipped", &answer).await;
    assert_eq!(decision["split"], "pair", "{decision}");
    assert_eq!(stand.decode[0].state.transferred(), u64::from(!alone));
}
