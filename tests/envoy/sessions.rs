//! Sessions stay at their endpoint, told by token, cookie or id, in every shipped set-up.

use std::sync::Arc;

use pilotfish::engine::{Fault, RecordedRequest};
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Setup, Stand, endpoints};
use crate::kit::eventually::eventually;
use crate::kit::http::{Answer, Opened};
use crate::kit::resources::pool;

const TOKEN: &str = "x-session-token";

fn chat() -> Value {
    json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]})
}

/// Two engines, of which a session's is kept and otherwise the less loaded is chosen.
async fn stand(setup: Setup, parameters: &str) -> Stand {
    let affinity = format!("session-affinity-filter {parameters}");
    Stand::with(setup, 2, &pool(), |picker| picker.plugins(&[&affinity, "least-request"])).await
}

/// Holds a request at the engine of that name, by the headers that bring it there.
async fn hold(stand: &Stand, name: &str, headers: &[(&str, &str)]) -> Opened {
    let engine = &stand.engine(name).state;
    engine.set_fault(Fault::StallInStream(1));
    let mut request = chat();
    (request["stream"], request["max_tokens"]) = (json!(true), json!(10));
    let body = crate::kit::http::whole(request.to_string());
    let mut held = stand.client.post(crate::kit::extproc::CHAT, headers, body).await;
    assert_eq!(held.header("x-engine-name"), Some(name));
    held.events(2).await;
    held
}

fn received(stand: &Stand) -> Vec<Arc<RecordedRequest>> {
    let all = stand.engines.iter().flat_map(|engine| engine.state.requests());
    all.filter(|request| request.method == "POST").collect()
}

async fn outcome(stand: &Stand, headers: &[(&str, &str)], id: &str) -> (Answer, Value) {
    let headers = [headers, &[("x-request-id", id)]].concat();
    let answer = stand.client.chat_with(&headers, &chat()).await;
    let decision = stand.picker.decision(id).await;
    (answer, decision["session"].clone())
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_token_pins_a_session_until_its_endpoint_is_gone(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = stand(setup, "{}").await;
    let (first, session) = outcome(&stand, &[], "first").await;
    let (bound, token) = (first.served(), first.header(TOKEN).expect("a token").to_owned());
    assert_eq!(session, "absent");

    let held = hold(&stand, &bound, &[(TOKEN, &token)]).await;
    assert_eq!(held.header(TOKEN), Some(&*token), "a streamed answer carries it, too");
    let (free, _) = outcome(&stand, &[], "free").await;
    assert_ne!(free.served(), bound, "the other is less loaded");
    let (next, session) = outcome(&stand, &[(TOKEN, &token)], "next").await;
    assert_eq!((next.served(), session), (bound.clone(), json!("kept")));
    assert_eq!(next.header(TOKEN), Some(&*token));

    let mut forged = token.clone();
    let last = if forged.pop() == Some('A') { 'E' } else { 'A' };
    forged.push(last);
    let (other, session) = outcome(&stand, &[(TOKEN, &forged)], "forged").await;
    assert_eq!(session, "ignored");
    assert_ne!(other.served(), bound, "as without one");
    assert_ne!(other.header(TOKEN), Some(&*forged));

    stand.engine(&bound).state.clear_faults();
    held.all_events().await;
    let left = stand.engines.iter().position(|engine| engine.state.name() != bound).unwrap();
    stand.picker.apply(&(pool() + &endpoints(&stand.engines[left..=left]))).await;
    let (moved, session) = outcome(&stand, &[(TOKEN, &token)], "moved").await;
    assert_eq!((moved.served(), session), (stand.engines[left].state.name().to_owned(), json!("ignored")));
    let fresh = moved.header(TOKEN).expect("a new token");
    assert_ne!(fresh, token);
    let (_, session) = outcome(&stand, &[(TOKEN, fresh)], "again").await;
    assert_eq!(session, "kept");
    for request in received(&stand) {
        assert_eq!(request.header(TOKEN), None, "the token is not the engine's");
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_cookie_pins_a_session_and_other_cookies_pass(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = stand(setup, "{cookie: chat}").await;
    let (first, _) = outcome(&stand, &[], "first").await;
    let bound = first.served();
    let cookies: Vec<_> = first.headers.get_all("set-cookie").iter().collect();
    let [set] = cookies[..] else { panic!("one cookie: {cookies:?}") };
    let set = set.to_str().unwrap();
    let token = set.strip_prefix("chat=").unwrap().strip_suffix("; Path=/; HttpOnly; SameSite=Lax").unwrap();
    assert_eq!(first.header(TOKEN), None);

    let with = format!("a=1; chat={token}; b=2");
    let held = hold(&stand, &bound, &[("cookie", &with)]).await;
    let (next, session) = outcome(&stand, &[("cookie", &format!("chat={token}"))], "next").await;
    assert_eq!((next.served(), session), (bound.clone(), json!("kept")));
    let (_, session) = outcome(&stand, &[("cookie", "chat=nonsense; c=3")], "forged").await;
    assert_eq!(session, "ignored");
    stand.engine(&bound).state.clear_faults();
    held.all_events().await;
    let mut seen: Vec<_> =
        received(&stand).iter().map(|request| request.header("cookie").map(str::to_owned)).collect();
    seen.sort();
    assert_eq!(seen, [None, None, Some("a=1; b=2".to_owned()), Some("c=3".to_owned())]);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn of_two_sources_of_session_ids_the_first_wins(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let sources = "[{header: x-session-id}, {cookie: chat}]";
    let parameters = format!("{{strategy: session_id, sessionIdConfig: {{sources: {sources}}}}}");
    let stand = stand(setup, &parameters).await;
    let (by_header, by_cookie) = (("x-session-id", "one"), ("cookie", "chat=two"));
    let (first, session) = outcome(&stand, &[by_header], "first").await;
    assert_eq!((session, first.header(TOKEN)), (json!("new"), None));
    let bound = first.served();
    let held = hold(&stand, &bound, &[by_header]).await;
    let (second, session) = outcome(&stand, &[by_cookie], "second").await;
    assert_eq!(session, "new");
    assert_ne!(second.served(), bound, "the other is less loaded");
    let (both, session) = outcome(&stand, &[by_header, by_cookie], "both").await;
    assert_eq!((both.served(), session), (bound.clone(), json!("kept")));
    stand.engine(&bound).state.clear_faults();
    held.all_events().await;
    eventually("the binding by cookie", async || {
        let (third, session) = outcome(&stand, &[by_cookie], "third").await;
        (third.served() == second.served() && session == "kept").then_some(())
    })
    .await;
    for request in received(&stand) {
        assert_eq!(request.header("x-session-id"), None, "the hint is not the engine's");
    }
}

/// Engines are scraped when they come and not again: the picker learns of the refusal from the request alone.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_token_names_the_endpoint_that_served_after_a_retry(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::with(setup, 2, &pool(), |picker| {
        let plugins = ["session-affinity-scorer", "random-picker"];
        picker.plugins(&plugins).flag("--scrape-interval", "1h").flag("--staleness", "2h")
    })
    .await;
    let mut tokens = [None, None];
    for at in 0..50 {
        let (answer, _) = outcome(&stand, &[], &format!("open-{at}")).await;
        let engine = usize::from(answer.served() == stand.engines[1].state.name());
        tokens[engine] = answer.header(TOKEN).map(str::to_owned);
        if tokens.iter().all(Option::is_some) {
            break;
        }
    }
    let [Some(closed), Some(other)] = tokens else { panic!("both serve") };
    stand.engines[0].close().await;
    for at in 0..50 {
        let id = format!("retried-{at}");
        let (answer, _) = outcome(&stand, &[(TOKEN, &closed)], &id).await;
        assert_eq!(answer.served(), stand.engines[1].state.name());
        assert_eq!(answer.header(TOKEN), Some(&*other));
        if stand.picker.decision(&id).await["legs"][0]["attempts"] == 2 {
            return;
        }
    }
    panic!("the closed engine was never the first in line");
}

/// As above, the refusal is learned from the request alone: the closed engine is not down yet when the session comes again.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_id_follows_who_served_after_a_retry(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = Stand::with(setup, 2, &pool(), |picker| {
        let plugins = ["session-affinity-scorer {strategy: session_id}", "max-score-picker"];
        picker.plugins(&plugins).flag("--scrape-interval", "1h").flag("--staleness", "2h")
    })
    .await;
    let mut sessions = (0..50).map(|at| format!("session-{at}"));
    let bound = loop {
        let name = sessions.next().expect("both serve");
        let (answer, session) = outcome(&stand, &[("x-session-id", &name)], &name).await;
        assert_eq!(session, "new");
        if answer.served() == stand.engines[0].state.name() {
            break name;
        }
    };
    stand.engines[0].close().await;
    let (other, header) = (stand.engines[1].state.name().to_owned(), [("x-session-id", &*bound)]);
    for (id, attempts) in [("retried", 2), ("again", 1)] {
        let (answer, session) = outcome(&stand, &header, id).await;
        assert_eq!((answer.served(), session), (other.clone(), json!("kept")), "{id}");
        assert_eq!(stand.picker.decision(id).await["legs"][0]["attempts"], attempts, "{id}");
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn failures_bind_nobody(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let stand = stand(setup, "{}").await;
    for engine in &stand.engines {
        engine.state.set_fault(Fault::Die);
    }
    let answer = stand.client.chat(&chat()).await;
    assert_eq!((answer.status, answer.header(TOKEN)), (500, None), "an engine's failure");
    for engine in &stand.engines {
        engine.close().await;
    }
    let answer = stand.client.chat(&chat()).await;
    assert_eq!((answer.status, answer.header(TOKEN)), (503, None), "Envoy's");
}
