//! Envoy reaches the picker over TLS, set up as the manual says.

use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use crate::kit::envoy::{Gateway, Setup, endpoints, start_engines};
use crate::kit::picker::{self, Picker};
use crate::kit::resources::pool;
use crate::kit::tls::{Ca, put};

/// The cluster of pickers in the shipped configurations.
const CLUSTER: &str = "  - name: pilotfish\n    type: STATIC\n";
const UNVERIFIED: &str = "\
transport_socket:
  name: envoy.transport_sockets.tls
  typed_config:
    \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
";

fn of_the_manual(dir: &Path) -> String {
    let manual = std::fs::read_to_string("docs/tls.md").unwrap();
    let block = manual.split("```yaml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    assert!(block.contains("/etc/pilotfish/ca.crt"));
    block.replace("/etc/pilotfish", dir.to_str().unwrap())
}

async fn serves_through(adjust: impl FnOnce(picker::Setup) -> picker::Setup, socket: &str) {
    let engines = start_engines(1).await;
    let picker = adjust(Picker::with(&(endpoints(&engines) + &pool()))).start().await;
    picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
    let indented: String = socket.lines().flat_map(|line| ["    ", line, "\n"]).collect();
    let secure = |text: String| {
        assert!(text.contains(CLUSTER), "the cluster is written differently: correct the test");
        text.replace(CLUSTER, &format!("{CLUSTER}{indented}"))
    };
    let addresses = [engines[0].state.address()];
    let gateway = Gateway::adjusted(Setup::FullDuplex, &[picker.app.bound.grpc], &addresses, secure).await;
    let request = json!({
        "model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a word in private"}],
    });
    assert_eq!(gateway.client.chat(&request).await.served(), engines[0].state.name());
    assert!(picker.metric("pilotfish_picks_total", &[]).await >= 1.0, "the picker has decided");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_certificates_on_both_sides() {
    let (ca, clients) = (Ca::new("ours"), Ca::new("clients"));
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    ca.issue().write(dir.path());
    put(&at("ca.crt"), &ca.pem());
    put(&at("clients.crt"), &clients.pem());
    let client = clients.issue();
    put(&at("client.crt"), &client.certificate);
    put(&at("client.key"), &client.key);
    let flags = |setup: picker::Setup| {
        setup
            .flag("--cert-path", dir.path().to_str().unwrap())
            .flag("--client-ca-file", at("clients.crt").to_str().unwrap())
    };
    serves_through(flags, &of_the_manual(dir.path())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_the_certificate_that_the_picker_makes() {
    serves_through(|setup| setup.switch("--secure-serving"), UNVERIFIED).await;
}
