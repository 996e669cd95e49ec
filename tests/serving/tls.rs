//! The gRPC port with TLS, as clients with and without the right certificates see it.

use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tonic::transport::{Channel, ClientTlsConfig};

use crate::kit::eventually::{eventually, within};
use crate::kit::extproc::{Stream, chat};
use crate::kit::health::{check, plain, serves};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoint, pool};
use crate::kit::tls::{Ca, connect, put};

const ENGINE: &str = "10.0.0.1:8000";

async fn secured(certificates: &TempDir, flags: &[(&str, &str)]) -> Picker {
    let setup = Picker::with(&(endpoint("e", ENGINE) + &pool()))
        .flag("--cert-path", certificates.path().to_str().unwrap());
    flags.iter().fold(setup, |setup, (name, value)| setup.flag(name, value)).start().await
}

fn folder_of(ca: &Ca) -> TempDir {
    let dir = TempDir::new().unwrap();
    ca.issue().write(dir.path());
    dir
}

/// Whether a new connection is served to its end.
async fn is_served(picker: &Picker, tls: ClientTlsConfig) -> bool {
    match connect(picker.app.bound.grpc, tls).await {
        Ok(channel) => check(channel, "").await.is_ok(),
        Err(_) => false,
    }
}

async fn decided(channel: Channel) -> String {
    let mut stream = Stream::over(channel).await;
    stream.send_all(&chat("{\"model\":\"m\",\"messages\":[]}"));
    stream.until_decided().await;
    stream.replies.first_choice().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_decided_over_tls_for_clients_that_know_the_ca() {
    let ca = Ca::new("ours");
    let dir = folder_of(&ca);
    let picker = secured(&dir, &[]).await;
    let channel = connect(picker.app.bound.grpc, ca.client()).await.unwrap();
    assert_eq!(decided(channel).await, ENGINE);
    assert!(!is_served(&picker, Ca::new("another").client()).await, "the client does not know the CA");
    assert!(check(picker.channel(), "").await.is_err(), "without TLS");
    assert_eq!(serves(plain(picker.app.bound.health).await, "").await, Some(true), "health has none");
    failures(&picker, 2.0).await;
}

/// Waits until so many handshakes have failed.
async fn failures(picker: &Picker, least: f64) {
    eventually("failed handshakes are counted", async || {
        (picker.metric("pilotfish_tls_handshakes_failed_total", &[]).await >= least).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_silent_and_the_strange_keep_nobody_waiting() {
    let ca = Ca::new("ours");
    let dir = folder_of(&ca);
    let picker = secured(&dir, &[]).await;
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(TcpStream::connect(picker.app.bound.grpc).await.unwrap());
    }
    for _ in 0..8 {
        let mut strange = TcpStream::connect(picker.app.bound.grpc).await.unwrap();
        strange.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    }
    assert!(within("a handshake beside them", is_served(&picker, ca.client())).await);
    failures(&picker, 8.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_client_ca_only_its_clients_are_admitted() {
    let (ca, clients) = (Ca::new("ours"), Ca::new("clients"));
    let dir = folder_of(&ca);
    let file = dir.path().join("clients.pem");
    put(&file, &clients.pem());
    let picker = secured(&dir, &[("--client-ca-file", file.to_str().unwrap())]).await;
    assert!(!is_served(&picker, ca.client()).await, "without a certificate");
    let foreign = Ca::new("foreign").issue();
    assert!(!is_served(&picker, ca.client().identity(foreign.identity())).await, "of another CA");
    let known = clients.issue();
    assert!(is_served(&picker, ca.client().identity(known.identity())).await);
    put(&file, &Ca::new("next").pem());
    eventually("the CA that is there now decides", async || {
        (!is_served(&picker, ca.client().identity(known.identity())).await).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_connections_get_the_certificate_that_is_there_now() {
    let (first, second) = (Ca::new("first"), Ca::new("second"));
    let dir = folder_of(&first);
    let picker = secured(&dir, &[]).await;
    let old = connect(picker.app.bound.grpc, first.client()).await.unwrap();
    let degraded = ("pilotfish_degraded", [("source", "certificate")]);

    let next = second.issue();
    put(&dir.path().join("tls.key"), &next.key);
    picker.until("half of a pair is told", degraded.0, &degraded.1, 1.0).await;
    assert!(is_served(&picker, first.client()).await, "by the last good one");

    put(&dir.path().join("tls.crt"), &next.certificate);
    picker.until("the pair is whole", degraded.0, &degraded.1, 0.0).await;
    assert!(is_served(&picker, second.client()).await);
    assert!(!is_served(&picker, first.client()).await, "the old one is gone");
    assert_eq!(decided(old).await, ENGINE, "connections stay");

    put(&dir.path().join("tls.crt"), "nonsense");
    picker.until("nonsense is told", degraded.0, &degraded.1, 1.0).await;
    assert!(is_served(&picker, second.client()).await, "by the last good one");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_reload_files_are_read_once() {
    let ca = Ca::new("ours");
    let dir = folder_of(&ca);
    let picker = Picker::with(&pool())
        .flag("--cert-path", dir.path().to_str().unwrap())
        .switch("--enable-cert-reload=false")
        .start()
        .await;
    Ca::new("another").issue().write(dir.path());
    // What was written later has been noticed, by a watch as patient.
    picker.apply(&(endpoint("e", ENGINE) + &pool())).await;
    assert!(is_served(&picker, ca.client()).await);
}

#[rstest::rstest]
#[case("--tls-min-version=VersionTLS13", true)]
#[case("--tls-min-version=VersionTLS12", true)]
#[case("--tls-cipher-suites=TLS_RSA_WITH_AES_128_CBC_SHA", true)]
#[tokio::test(flavor = "multi_thread")]
async fn versions_and_suites_leave_tls_1_3(#[case] flag: &str, #[case] served: bool) {
    let ca = Ca::new("ours");
    let dir = folder_of(&ca);
    let setup = Picker::with(&pool()).flag("--cert-path", dir.path().to_str().unwrap()).switch(flag);
    assert_eq!(is_served(&setup.start().await, ca.client()).await, served);
}
