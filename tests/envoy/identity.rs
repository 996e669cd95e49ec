//! Envoy says who sends a request, by API key or token, and neither the body nor headers say otherwise.

use std::net::SocketAddr;
use std::path::Path;

use pilotfish::engine::RecordedRequest;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines, with_keys};
use crate::kit::eventually::eventually;
use crate::kit::http::Answer;
use crate::kit::jwt::{Issuer, KeyServer, seconds, unsigned};
use crate::kit::process::Process;
use crate::kit::resources::pool;
use crate::kit::tls::{Ca, put};

const IDENTITY: &str = "x-pilotfish-identity";
const KEYS_FOLDER: &str = "/etc/envoy/keys";
const KEYS_FILE: &str = "api-keys.yaml";
const JWKS_FILE: &str = "/etc/envoy/jwks.json";

/// An Envoy that asks who sends, a picker in a process of its own, and an engine.
struct Door {
    gateway: Gateway,
    picker: Process,
    engines: Vec<SimulatedEngine>,
}

impl Door {
    async fn open(setup: Setup, piece: &str, identity: &str, adjust: impl FnOnce(String) -> String) -> Self {
        let engines = start_engines(1).await;
        let resources = endpoints(&engines) + &pool();
        let picker = Process::start(&resources, &format!("--identity {identity} --log-format json")).await;
        picker.until("pilotfish_endpoints", &[("state", "up")], 1.0).await;
        let addresses: Vec<SocketAddr> = engines.iter().map(|engine| engine.state.address()).collect();
        let gateway = Gateway::assembled(setup, &[piece], &[picker.grpc], &addresses, adjust).await;
        Self { gateway, picker, engines }
    }

    async fn ask(&self, headers: &[(&str, &str)], user: Option<&str>) -> Answer {
        let mut request = json!({
            "model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}],
        });
        if let Some(user) = user {
            request["user"] = json!(user);
        }
        self.gateway.client.chat_with(headers, &request).await
    }

    /// The status, and of those served who the picker takes the sender for.
    async fn sender(&self, id: &str, headers: &[(&str, &str)]) -> (u16, Value) {
        let answer = self.ask(&[headers, &[("x-request-id", id)]].concat(), Some("bob")).await;
        if answer.status != 200 {
            return (answer.status, Value::Null);
        }
        let decision = eventually(format!("the decision of {id}"), async || {
            let page = self.picker.get(&format!("/debug/decisions?request_id={id}")).await.json();
            page["decisions"].get(0).cloned()
        });
        (answer.status, decision.await["user"].clone())
    }

    fn received(&self) -> Vec<std::sync::Arc<RecordedRequest>> {
        let all = self.engines.iter().flat_map(|engine| engine.state.requests());
        all.filter(|request| request.method == "POST").collect()
    }
}

fn write_keys(dir: &Path, change: impl FnOnce(String) -> String) {
    let shipped = std::fs::read_to_string("envoy/auth/api-keys.yaml").unwrap();
    put(&dir.join(KEYS_FILE), &change(with_keys(&shipped)));
}

fn unauthorized() -> (u16, Value) {
    (401, Value::Null)
}

fn known(name: &str) -> (u16, Value) {
    (200, json!(name))
}

async fn keyed(setup: Setup, piece: &str, dir: &Path, identity: &str) -> Door {
    write_keys(dir, |text| text);
    let in_file = piece.contains("file");
    let folder = dir.to_str().unwrap().to_owned();
    let adjust =
        move |text: String| if in_file { text.replace(KEYS_FOLDER, &folder) } else { with_keys(&text) };
    Door::open(setup, piece, identity, adjust).await
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_api_key_says_who_sends(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("auth/api-key.yaml", "auth/api-key-file.yaml")] piece: &str,
) {
    let dir = TempDir::new().unwrap();
    let door = keyed(setup, piece, dir.path(), "header:x-pilotfish-identity,user").await;
    let alice = ("authorization", "Bearer sk-alice");
    assert_eq!(door.sender("missing", &[]).await, unauthorized());
    assert_eq!(door.sender("empty", &[("x-api-key", "")]).await, unauthorized());
    assert_eq!(door.sender("unknown", &[("x-api-key", "sk-mallory")]).await, unauthorized());
    assert_eq!(door.sender("named", &[(IDENTITY, "alice")]).await, unauthorized());
    assert_eq!(door.received().len(), 0, "nothing gets past Envoy without a key");
    assert_eq!(door.sender("bearer", &[alice]).await, known("alice"), "the body says bob");
    assert_eq!(door.sender("header", &[("x-api-key", "sk-bob")]).await, known("bob"));
    assert_eq!(door.sender("forged", &[alice, (IDENTITY, "bob")]).await, known("alice"));
    assert_eq!(door.sender("cased", &[alice, ("X-Pilotfish-Identity", "bob")]).await, known("alice"));
    let two = [alice, (IDENTITY, "bob"), (IDENTITY, "carol"), ("x-api-key", "sk-bob")];
    assert_eq!(door.sender("both", &two).await, known("alice"), "the first source of keys decides");

    assert_eq!(door.received().len(), 5);
    for request in door.received() {
        for name in [IDENTITY, "authorization", "x-api-key"] {
            assert_eq!(request.header(name), None, "{name} is not the engine's");
        }
    }
    let log = eventually("the access log", async || {
        let log = door.picker.log();
        (log.matches("\"request\"").count() == 5).then_some(log)
    });
    let log = log.await;
    let users = |name: &str| log.matches(&format!("\"user\":\"{name}\"")).count();
    assert_eq!((users("alice"), users("bob")), (4, 1), "{log}");
    assert!(!log.contains("sk-"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_get_a_key_of_their_own() {
    let adjust = |text: String| {
        let late = "              request_headers_to_remove:\n";
        assert!(text.contains(late), "the route is written differently: correct the test");
        let key = "request_headers_to_add: [{header: {key: authorization, value: Bearer engine}}]";
        with_keys(&text).replace(late, &format!("              {key}\n{late}"))
    };
    let door = Door::open(Setup::StaticFailOpen, "auth/api-key.yaml", HEADER, adjust).await;
    assert_eq!(door.sender("key", &[("authorization", "Bearer sk-alice")]).await, known("alice"));
    assert_eq!(door.received()[0].header("authorization"), Some("Bearer engine"));
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_read_again_when_their_file_changes() {
    let dir = TempDir::new().unwrap();
    let piece = "auth/api-key-file.yaml";
    let door = keyed(Setup::StaticFailOpen, piece, dir.path(), "header:x-pilotfish-identity").await;
    let (alice, bob) = ([("x-api-key", "sk-alice")], [("x-api-key", "sk-bob")]);
    assert_eq!(door.sender("before", &bob).await, known("bob"));
    write_keys(dir.path(), |text| text.replace("sk-bob", "sk-bobs-next"));
    eventually("the key of old is refused", async || {
        (door.ask(&bob, None).await.status == 401).then_some(())
    })
    .await;
    assert_eq!(door.sender("next", &[("x-api-key", "sk-bobs-next")]).await, known("bob"));
    assert_eq!(door.sender("stays", &alice).await, known("alice"));

    write_keys(dir.path(), |_| "resources: [".to_owned());
    let errors = "extension_config_discovery.http_filter.api_keys.update_failure";
    eventually("a broken file is refused", async || {
        (door.gateway.statistic(errors).await? > 0).then_some(())
    })
    .await;
    assert_eq!(door.sender("last-good", &alice).await, known("alice"));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn keys_are_asked_for_while_no_picker_lives(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("auth/api-key.yaml", "auth/api-key-file.yaml")] piece: &str,
) {
    let dir = TempDir::new().unwrap();
    let mut door = keyed(setup, piece, dir.path(), "header:x-pilotfish-identity").await;
    door.picker.kill();
    // Where the picker sees responses, Envoy's own 401 cannot pass it, either.
    let refused = if setup == Setup::GatewayShaped { 503 } else { 401 };
    for headers in [&[][..], &[("x-api-key", "sk-mallory")], &[(IDENTITY, "alice")]] {
        assert_eq!(door.ask(headers, None).await.status, refused);
    }
    assert_eq!(door.received().len(), 0);
    let answer = door.ask(&[("x-api-key", "sk-alice"), ("prefer", "if-available")], None).await;
    if setup != Setup::StaticFailOpen {
        assert!(answer.status >= 500, "{answer:?}");
        return;
    }
    answer.served();
    let received = door.received();
    let [request] = &received[..] else { panic!("{received:?}") };
    for name in [IDENTITY, "x-api-key", "authorization", "prefer"] {
        assert_eq!(request.header(name), None, "{name} is not the engine's");
    }
}

fn claims() -> Value {
    json!({"iss": "https://issuer.example", "aud": "llm", "sub": "alice", "exp": seconds(600)})
}

fn with(name: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[name] = value;
    claims
}

fn without(name: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().unwrap().remove(name);
    claims
}

impl Door {
    async fn bearer(&self, id: &str, token: &str) -> (u16, Value) {
        self.sender(id, &[("authorization", &format!("Bearer {token}")), (IDENTITY, "bob")]).await
    }

    /// Tokens that must be refused, and some that must not.
    async fn check_tokens(&self, issuer: &Issuer) {
        let stranger = Issuer::new();
        assert_eq!(self.sender("missing", &[]).await, unauthorized());
        assert_eq!(self.sender("named", &[(IDENTITY, "alice")]).await, unauthorized());
        let refused = [
            ("garbage", "a.b.c".to_owned()),
            ("expired", issuer.sign(&with("exp", json!(seconds(-600))))),
            ("endless", issuer.sign(&without("exp"))),
            ("early", issuer.sign(&with("nbf", json!(seconds(600))))),
            ("strange", stranger.sign(&claims())),
            ("unsigned", unsigned(&json!({"alg": "none"}), &claims()) + "."),
            ("issuer", issuer.sign(&with("iss", json!("https://other.example")))),
        ];
        for (id, token) in &refused {
            assert_eq!(self.bearer(id, token).await, unauthorized(), "{id}");
        }
        for claims in [with("aud", json!("mail")), without("aud")] {
            assert_eq!(self.bearer("audience", &issuer.sign(&claims)).await, (403, Value::Null));
        }
        let mut altered = issuer.sign(&claims());
        let bobs = issuer.sign(&with("sub", json!("bob")));
        altered.replace_range(..altered.rfind('.').unwrap(), &bobs[..bobs.rfind('.').unwrap()]);
        assert_eq!(self.bearer("altered", &altered).await, unauthorized());
        assert_eq!(self.received().len(), 0, "nothing gets past Envoy without a token");

        assert_eq!(self.bearer("right", &issuer.sign(&claims())).await, known("alice"));
        let several = issuer.sign(&with("aud", json!(["mail", "llm"])));
        assert_eq!(self.bearer("several", &several).await, known("alice"));
        let nobody = issuer.sign(&without("sub"));
        assert_eq!(self.bearer("nobody", &nobody).await, (200, Value::Null), "no claim, and no forged one");
        for request in self.received() {
            assert_eq!((request.header(IDENTITY), request.header("authorization")), (None, None));
        }
    }
}

const HEADER: &str = "header:x-pilotfish-identity";
const ATTRIBUTE: &str = "attribute:metadata.filter_metadata['envoy.filters.http.jwt_authn']['claims']['sub']";

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_token_says_who_sends(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values(("auth/jwt.yaml", HEADER), ("auth/jwt-attribute.yaml", ATTRIBUTE))] piece: (&str, &str),
) {
    let (dir, issuer) = (TempDir::new().unwrap(), Issuer::new());
    let file = dir.path().join("jwks.json");
    put(&file, &issuer.keys().to_string());
    let adjust = |text: String| text.replace(JWKS_FILE, file.to_str().unwrap());
    let door = Door::open(setup, piece.0, piece.1, adjust).await;
    door.check_tokens(&issuer).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_key_or_a_token_will_do_and_neither_lets_the_other_off(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let (dir, issuer) = (TempDir::new().unwrap(), Issuer::new());
    let file = dir.path().join("jwks.json");
    put(&file, &issuer.keys().to_string());
    let adjust = |text: String| with_keys(&text).replace(JWKS_FILE, file.to_str().unwrap());
    let door = Door::open(setup, "auth/api-key-or-jwt.yaml", HEADER, adjust).await;
    door.check_tokens(&issuer).await;
    let token = format!("Bearer {}", issuer.sign(&claims()));
    let (token, bob) = (("authorization", &*token), ("x-api-key", "sk-bob"));
    for wrong in [("x-api-key", "sk-mallory"), ("x-api-key", &token.1["Bearer ".len()..])] {
        assert_eq!(door.sender("wrong", &[wrong]).await, unauthorized());
        assert_eq!(door.sender("wrong-first", &[wrong, token]).await, unauthorized());
        assert_eq!(door.sender("wrong-last", &[token, wrong]).await, unauthorized());
        assert_eq!(door.sender("wrong-twice", &[wrong, bob]).await, unauthorized());
    }
    assert_eq!(door.sender("key", &[bob, (IDENTITY, "alice")]).await, known("bob"));
    assert_eq!(door.sender("both", &[token, bob]).await, known("bob"));
    assert_eq!(door.sender("strange", &[bob, ("authorization", "Bearer a.b.c")]).await, known("bob"));
    for request in door.received() {
        for name in [IDENTITY, "authorization", "x-api-key"] {
            assert_eq!(request.header(name), None, "{name} is not the engine's");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn public_keys_may_stand_inline() {
    let issuer = Issuer::new();
    let inline = format!("{{inline_string: '{}'}}", issuer.keys());
    let adjust = |text: String| {
        let file = format!("{{filename: {JWKS_FILE}}}");
        assert!(text.contains(&file), "the file is written differently: correct the test");
        text.replace(&file, &inline)
    };
    let door = Door::open(Setup::StaticFailOpen, "auth/jwt.yaml", HEADER, adjust).await;
    door.check_tokens(&issuer).await;
}

/// Envoy with the issuer of the piece at this address, with a certificate of this CA.
async fn asking(setup: Setup, dir: &Path, ca: &Ca, issuer: SocketAddr) -> Door {
    let file = dir.join("ca.crt");
    put(&file, &ca.pem());
    let endpoint = format!("{{address: {}, port_value: {}}}", issuer.ip(), issuer.port());
    let adjust = |text: String| {
        let text = text.replace("{address: issuer.example, port_value: 443}", &endpoint);
        let text = text.replace("/etc/ssl/certs/ca-certificates.crt", file.to_str().unwrap());
        // The certificates of the kit are for this name; the issuer's own name stays in tokens.
        text.replace("sni: issuer.example", "sni: localhost")
            .replace("exact: issuer.example", "exact: localhost")
    };
    Door::open(setup, "auth/jwt-remote.yaml", HEADER, adjust).await
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn public_keys_come_from_the_issuer(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let (dir, issuer, ca) = (TempDir::new().unwrap(), Issuer::new(), Ca::new("issuer"));
    let server = KeyServer::start(([127, 0, 0, 1], 0).into(), &ca.issue(), &issuer.keys()).await;
    let door = asking(setup, dir.path(), &ca, server.address).await;
    door.check_tokens(&issuer).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_is_let_in_while_the_issuer_cannot_be_asked() {
    let (dir, issuer, ca) = (TempDir::new().unwrap(), Issuer::new(), Ca::new("issuer"));
    let impostor =
        KeyServer::start(([127, 0, 0, 1], 0).into(), &Ca::new("other").issue(), &issuer.keys()).await;
    let door = asking(Setup::StaticFailOpen, dir.path(), &ca, impostor.address).await;
    let token = format!("Bearer {}", issuer.sign(&claims()));
    let headers = [("authorization", token.as_str())];
    assert_eq!(door.ask(&headers, None).await.status, 401, "the server has no certificate of the CA");
    let address = impostor.address;
    drop(impostor);
    let _server = eventually("the port is free", async || {
        tokio::net::TcpListener::bind(address).await.ok()?;
        Some(KeyServer::start(address, &ca.issue(), &issuer.keys()).await)
    })
    .await;
    eventually("the keys are fetched", async || (door.ask(&headers, None).await.status == 200).then_some(()))
        .await;
}
