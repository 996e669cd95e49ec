//! Faults of the leg that computes a prompt elsewhere: the client gets its whole answer once, or a clear error, and nothing
//! stays behind.

use pilotfish::engine::Fault;
use rstest::rstest;

use crate::kit::engine::{Script, ScriptedEngine};
use crate::kit::envoy::Setup;
use crate::kit::eventually::eventually;
use crate::kit::http::whole;
use crate::kit::pairs::{COMPLETIONS, Pairs, Plan, bodies, completion, unscraped};
use crate::kit::resources::route;

/// Asks until this endpoint is the first choice for a prompt; the name of that request.
async fn first_choice(stand: &Pairs, address: &str) -> String {
    for at in 0..100 {
        let name = format!("request-{at}");
        let answer = stand.ask(&name).await;
        let decision = stand.check_whole(&name, &answer).await;
        if decision["legs"][1]["picked"][0] == address {
            return name;
        }
        assert_eq!(decision["prefill"]["attempts"], 1, "{decision}");
    }
    panic!("{address} was never the first choice");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn without_the_only_prefill_endpoint_one_engine_does_all(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    stand.prefill[0].close().await;
    let answer = stand.ask("first").await;
    let decision = stand.check_whole("first", &answer).await;
    assert_eq!((&decision["split"], &decision["prefill"]["failure"]), (&"pair".into(), &"refused".into()));
    assert_eq!(decision["prefill"]["attempts"], 2, "{decision}");
    let answer = stand.ask("later").await;
    let decision = stand.check_whole("later", &answer).await;
    assert_eq!((&decision["split"], decision["prefill"].is_null()), (&"no-prefill".into(), true));
    assert_eq!((stand.decided("pair").await, stand.decided("no-prefill").await), (1.0, 1.0));
    assert_eq!((stand.fell_back("refused").await, stand.fell_back("").await), (1.0, 1.0));
    assert_eq!(stand.served(200).await, 2.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn sglang_without_the_only_prefill_endpoint_is_refused(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Plan::new(setup, "sglang").start(unscraped).await;
    stand.prefill[0].close().await;
    let answer = stand.ask("first").await;
    let message = stand.check_refused(&answer, 503, "prefill-failed").await;
    assert!(message.contains("refused") && message.contains("default/pairs"), "{message}");
    // It is tried all the same: no endpoint of the pool could do without it.
    let answer = stand.ask("later").await;
    stand.check_refused(&answer, 503, "prefill-failed").await;
    assert_eq!(bodies(&stand.decode[0]), Vec::<String>::new());
    assert_eq!((stand.fell_back("refused").await, stand.fell_back("").await), (2.0, 2.0));
    assert_eq!(stand.served(503).await, 2.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_next_prefill_endpoint_computes_it_and_the_dead_one_is_avoided(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "sglang", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).engines(2, 1).start(unscraped).await;
    let dead = stand.prefill[0].address();
    stand.prefill[0].close().await;
    let name = first_choice(&stand, &dead).await;
    let decision = stand.picker.decision(&name).await;
    assert_eq!(decision["prefill"]["attempts"], 2, "{decision}");
    assert_eq!(decision["prefill"]["endpoint"], stand.prefill[1].address(), "{decision}");
    assert_eq!(decision["prefill"]["failure"], serde_json::Value::Null, "{decision}");
    let mut at = 0;
    let mut in_vain = 1;
    let mut ask = async || {
        at += 1;
        let name = format!("later-{at}");
        let answer = stand.ask(&name).await;
        let decision = stand.check_whole(&name, &answer).await;
        assert_eq!(decision["prefill"]["endpoint"], stand.prefill[1].address(), "{decision}");
        in_vain += decision["prefill"]["attempts"].as_u64().unwrap() - 1;
        in_vain
    };
    eventually("the picker knows", async || {
        ask().await;
        (stand.picker.endpoint(&dead).await["state"] == "down").then_some(())
    })
    .await;
    for _ in 0..8 {
        assert!(ask().await <= 2, "as many as prove that it is down");
    }
    assert_eq!(stand.fell_back("").await, 0.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_connection_that_breaks_costs_no_answer(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http", "sglang")] connector: &'static str,
    #[values(Fault::ResetAccept, Fault::ResetRequest)] fault: Fault,
) {
    let stand = Plan::new(setup, connector).patient().start(unscraped).await;
    stand.prefill[0].state.set_fault(fault);
    // Who is reset as soon as it is connected may see no connection.
    let reasons: &[_] = if fault == Fault::ResetAccept { &["broken", "refused"] } else { &["broken"] };
    let answer = stand.ask("broken").await;
    if connector == "sglang" {
        stand.check_refused(&answer, 503, "prefill-failed").await;
        assert_eq!(stand.served(503).await, 1.0);
    } else {
        let decision = stand.check_whole("broken", &answer).await;
        assert!(reasons.iter().any(|reason| decision["prefill"]["failure"] == *reason), "{decision}");
        assert_eq!(decision["prefill"]["attempts"], 2, "{decision}");
        assert_eq!(stand.served(200).await, 1.0);
    }
    let mut counted = 0.0;
    for reason in reasons {
        counted += stand.fell_back(reason).await;
    }
    assert_eq!((counted, stand.fell_back("").await), (1.0, 1.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_engine_that_dies_with_a_prompt_costs_no_answer(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector).start(unscraped).await;
    stand.prefill[0].state.set_fault(Fault::StallBefore);
    let answer = stand.begin("dying");
    stand.sent(&stand.prefill[0]).await;
    stand.prefill[0].state.set_fault(Fault::Die);
    stand.prefill[0].state.clear_fault(Fault::StallBefore);
    let decision = stand.check_whole("dying", &answer.await.unwrap()).await;
    assert_eq!(decision["prefill"]["failure"], "engine-error", "{decision}");
    assert_eq!((stand.fell_back("engine-error").await, stand.fell_back("").await), (1.0, 1.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_are_gone_when_they_are_fetched_are_the_decode_engines_to_answer_for(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(false, true)] recompute: bool,
) {
    let mut plan = Plan::new(setup, "nixl");
    plan.engine.kv_load_recompute = recompute;
    let stand = plan.start(unscraped).await;
    stand.decode[0].state.set_fault(Fault::StallBefore);
    let answer = stand.begin("gone");
    stand.sent(&stand.decode[0]).await;
    assert_eq!(stand.prefill[0].state.pinned(), 1, "it has been computed");
    stand.prefill[0].state.set_fault(Fault::Die);
    stand.decode[0].state.clear_fault(Fault::StallBefore);
    let answer = answer.await.unwrap();
    if recompute {
        stand.check_whole("gone", &answer).await;
    } else {
        assert_eq!((answer.status, answer.header("x-engine-name")), (500, Some("d0")));
        assert_eq!(answer.json()["error"]["code"], 500, "the engine's own words");
        assert_eq!(bodies(&stand.decode[0]).len(), 1, "it is not asked again");
        stand.released().await;
    }
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
    stand.picker.until("counted", "pilotfish_requests_total", &[], 1.0).await;
    assert_eq!(stand.served(if recompute { 200 } else { 500 }).await, 1.0);
}

/// A stand whose only prefill endpoint answers by script.
async fn scripted(setup: Setup, connector: &'static str, script: Script) -> (ScriptedEngine, Pairs) {
    let prefill = ScriptedEngine::start(script).await;
    let plan = Plan::new(setup, connector).patient().engines(0, 1).scripted(prefill.address);
    let stand = plan.start(unscraped).await;
    (prefill, stand)
}

/// An answer of an engine without transfer fields.
fn without_fields(status: u16) -> Script {
    Script::Answer(
        status,
        "application/json",
        r#"{"id":"x","choices":[],"kv_transfer_params":null}"#.to_owned(),
    )
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_no_use_leaves_all_to_the_decode_engine(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(
        (without_fields(500), "engine-error", 2),
        (without_fields(503), "engine-error", 2),
        (without_fields(200), "no-fields", 1),
        (Script::Answer(200, "text/html", "<html>".to_owned()), "no-fields", 1),
        (Script::Answer(200, "application/json", String::new()), "no-fields", 1),
        (Script::BreakOff, "broken", 2),
    )]
    (script, reason, attempts): (Script, &str, u64),
) {
    let (prefill, stand) = scripted(setup, "nixl", script).await;
    let answer = stand.ask("useless").await;
    let decision = stand.check_whole("useless", &answer).await;
    assert_eq!(decision["prefill"]["failure"], reason, "{decision}");
    assert_eq!((prefill.asked(), &decision["prefill"]["attempts"]), (attempts, &attempts.into()));
    assert_eq!((stand.fell_back(reason).await, stand.fell_back("").await), (1.0, 1.0));
    assert_eq!((stand.decided("pair").await, stand.served(200).await), (1.0, 1.0));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_fails_is_followed_by_the_next(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
    #[values(500, 503)] status: u16,
) {
    let failing = ScriptedEngine::start(without_fields(status)).await;
    let stand = Plan::new(setup, connector).scripted(failing.address).start(unscraped).await;
    let name = first_choice(&stand, &failing.address.to_string()).await;
    let decision = stand.picker.decision(&name).await;
    assert_eq!(decision["prefill"]["endpoint"], stand.prefill[0].address(), "{decision}");
    assert_eq!((failing.asked(), &decision["prefill"]["attempts"]), (1, &2.into()), "{decision}");
    assert_eq!(stand.fell_back("").await, 0.0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_a_prefill_engine_says_to_the_client_reaches_it(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("nixl", "http")] connector: &'static str,
    #[values(400, 404, 429)] status: u16,
) {
    let said = format!("{{\"detail\" : \"no, {status}\"}}");
    let kind = "application/problem+json; charset=utf-8";
    let (prefill, stand) = scripted(setup, connector, Script::Answer(status, kind, said.clone())).await;
    let answer = stand.ask("refused").await;
    assert_eq!((answer.status, answer.header("content-type")), (status, Some(kind)));
    assert_eq!(answer.body, said);
    stand.released().await;
    assert_eq!((prefill.asked(), bodies(&stand.decode[0]).len()), (1, 0));
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (1.0, 0.0));
    assert_eq!(stand.served(status).await, 1.0);
    assert_eq!(stand.picker.metric("pilotfish_requests_total", &[]).await, 1.0, "counted once");
    let decision = stand.picker.decision("refused").await;
    assert_eq!((&decision["status"], &decision["prefill"]["attempts"]), (&status.into(), &1.into()));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn who_is_refused_by_a_prefill_engine_pays_nothing(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let refusal = Script::Answer(400, "application/json", "{}".to_owned());
    let (prefill, stand) = scripted(setup, "nixl", refusal).await;
    // Enough for one of these prompts.
    let limit = "  modelName: tiny\n  rateLimit: {inputTokensPerUnit: 200, unit: hour}\n  rules:\n  - name: all\n    \
                 targetModels: [{modelServerName: pairs}]\n";
    let plan = Plan::new(setup, "nixl").scripted(prefill.address);
    stand.picker.apply(&(plan.resources(&[], &stand.decode) + &route("limited", limit))).await;
    for name in ["first", "second"] {
        assert_eq!(stand.ask(name).await.status, 400);
        stand.released().await;
    }
    prefill.play(without_fields(200));
    let answer = stand.ask("third").await;
    stand.check_whole("third", &answer).await;
    let answer = stand.ask("fourth").await;
    assert_eq!(answer.status, 429, "that was all: {}", String::from_utf8_lossy(&answer.body));
}

/// With SGLang the decode engine waits by then; ten seconds later it would answer 500 by itself.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn sglang_an_answer_after_the_decode_leg_was_sent_ends_the_request(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(400, 429, 500, 503)] status: u16,
) {
    let (prefill, stand) = scripted(setup, "sglang", Script::Hold).await;
    let answer = stand.begin("late");
    stand.at_work(&stand.decode[0]).await;
    let said = format!("{{\"detail\" : \"no, {status}\"}}");
    prefill.play(Script::Answer(status, "application/problem+json", said.clone()));
    let answer = answer.await.unwrap();
    if status < 500 {
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (status, Some("application/problem+json"))
        );
        assert_eq!(answer.body, said);
        stand.released().await;
    } else {
        stand.check_refused(&answer, 503, "prefill-failed").await;
    }
    assert_eq!(bodies(&stand.decode[0]).len(), 1, "it is asked once");
    let fell_back = if status < 500 { 0.0 } else { 1.0 };
    assert_eq!((stand.fell_back("engine-error").await, stand.fell_back("").await), (fell_back, fell_back));
    assert_eq!(stand.served(if status < 500 { status } else { 503 }).await, 1.0);
    assert_eq!(stand.picker.metric("pilotfish_requests_total", &[]).await, 1.0, "counted once");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn sglang_a_stream_whose_prompt_never_comes_ends_with_an_error(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let (prefill, stand) = scripted(setup, "sglang", Script::Hold).await;
    let client = stand.client.clone();
    let answer = tokio::spawn(async move {
        let stream = client.post(COMPLETIONS, &[], whole(completion("stream", true))).await;
        (stream.status, stream.try_rest().await.map(|answer| answer.body))
    });
    stand.at_work(&stand.decode[0]).await;
    prefill.play(without_fields(500));
    let (status, rest) = answer.await.unwrap();
    assert!(status == 503 || rest.is_err(), "the engine has not given up yet: {status} {rest:?}");
    stand.released().await;
    assert_eq!(stand.fell_back("engine-error").await, 1.0);
}
