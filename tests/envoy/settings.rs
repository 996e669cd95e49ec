//! The numbers in the shipped configurations that depend on each other, on the picker's flags and on its lists of headers.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Parser;
use futures::future::join_all;
use pilotfish::admission::QueueSettings;
use pilotfish::args::{Args, Command, ServeArgs};
use pilotfish::engine::Fault;
use pilotfish::request::head::{CONTROL, HINTS, PRIVILEGED};
use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::{Settings, Setup, Stand};
use crate::kit::resources::pool;

/// Longest time for which the picker holds a request, as it is by default.
fn longest_hold() -> Duration {
    QueueSettings::default().timeout.unwrap()
}

/// Requests held at once that must find room.
const HELD: u64 = 10_000;
/// Streams that the picker's server takes on one connection.
const STREAMS_OF_PICKER: u64 = 16_384;

fn duration(value: &Value) -> Duration {
    let seconds = value.as_str().and_then(|text| text.strip_suffix('s')).expect("a time in seconds");
    Duration::from_secs_f64(seconds.parse().unwrap())
}

fn defaults() -> ServeArgs {
    let parsed = Args::try_parse_from(["pilotfish", "serve", "--resources", "."]).unwrap();
    let Command::Serve(args) = parsed.command else { panic!("not serve") };
    *args
}

fn names(values: &Value) -> BTreeSet<&str> {
    values.as_array().unwrap().iter().map(|value| value.as_str().unwrap()).collect()
}

/// Half a configuration would be one without authentication.
#[rstest]
#[case("envoy/full-duplex.yaml", "envoy/auth/none.yaml", "envoy/auth/none.yaml is no file")]
#[case("envoy/full-duplex.yaml", "envoy/auth/api-keys.yaml", "has no place for `resources`")]
#[case("envoy/full-duplex.yaml", "envoy/full-duplex.yaml", "belongs to no section")]
#[case("docs/gateways/values.yaml", "envoy/auth/api-key.yaml", "has no place for `before_picker`")]
fn what_does_not_fit_is_not_assembled(#[case] setup: &str, #[case] piece: &str, #[case] why: &str) {
    let done = std::process::Command::new("envoy/assemble.sh").args([setup, piece]).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success() && said.contains(why), "{said}");
    assert!(done.stdout.is_empty());
}

#[rstest]
#[case("before_picker:\n")]
#[case("before_picker:\n# - name: envoy.filters.http.api_key_auth\n\n")]
#[case("# no section\n")]
#[case("clusters:\n- name: a\nbefore_picker:\n  # REPLACE\n")]
fn a_piece_that_brings_nothing_is_not_assembled(#[case] piece: &str) {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("piece.yaml");
    std::fs::write(&file, piece).unwrap();
    what_does_not_fit_is_not_assembled("envoy/full-duplex.yaml", file.to_str().unwrap(), "nothing stands in");
}

#[rstest]
fn a_request_may_be_held_for_as_long_as_the_picker_holds_any(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let settings = Settings::of(setup);
    let picker = settings.filter("envoy.filters.http.ext_proc");
    let (answer, longest) = (duration(&picker["message_timeout"]), duration(&picker["max_message_timeout"]));
    // The picker asks for more time while it holds a request. What exceeds the maximum is ignored.
    assert!(longest >= longest_hold() + answer, "{longest:?}");
    assert!(answer > defaults().limits.decision_timeout, "{answer:?}");
    // Held, then prefilled, all in silence.
    let silence = duration(&settings.connections()["stream_idle_timeout"]);
    assert!(silence >= 2 * longest_hold() && silence >= longest, "{silence:?}");
    let route = &settings.virtual_host()["routes"][0]["route"];
    assert_eq!(duration(&route["timeout"]), Duration::ZERO, "responses stream for as long as they take");
    assert!(route["idle_timeout"].is_null(), "it would take the place of the stream's");
    let sending = duration(&settings.connections()["request_timeout"]);
    assert!(sending > Duration::ZERO && sending < silence, "a client that does not send is not waited for");
}

#[rstest]
fn as_many_requests_may_be_held_as_the_picker_takes(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let settings = Settings::of(setup);
    for cluster in settings.clusters() {
        let thresholds = &cluster["circuit_breakers"]["thresholds"][0];
        for limit in ["max_connections", "max_pending_requests", "max_requests"] {
            assert!(thresholds[limit].as_u64() >= Some(10 * HELD), "{limit} of {}", cluster["name"]);
        }
        assert!(thresholds["max_retries"].as_u64() >= Some(HELD), "{}", cluster["name"]);
    }
    let picker = settings.clusters().iter().find(|cluster| cluster["name"] == "pilotfish").unwrap();
    let options =
        &picker["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
    let http2 = &options["explicit_http_config"]["http2_protocol_options"];
    let streams = http2["max_concurrent_streams"].as_u64().unwrap();
    assert!(streams <= STREAMS_OF_PICKER, "{streams}: what the picker refuses Envoy must not send");
}

#[rstest]
fn sizes_and_headers_are_those_of_the_picker(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let settings = Settings::of(setup);
    let route = &settings.virtual_host()["routes"][0];
    assert_eq!(route["request_body_buffer_limit"].as_u64(), Some(defaults().limits.max_body_bytes as u64));
    let early = &settings.connections()["early_header_mutation_extensions"][0]["typed_config"]["mutations"];
    let early = early.as_array().unwrap();
    let removed: BTreeSet<&str> = early.iter().filter_map(|one| one["remove"].as_str()).collect();
    assert_eq!(removed, CONTROL.into_iter().collect());
    let prefixes = early.iter().filter_map(|one| one["remove_on_match"]["key_matcher"]["prefix"].as_str());
    assert_eq!(prefixes.collect::<Vec<_>>(), ["x-pilotfish-"]);
    // What the picker reads and engines do not get, also while there is no picker to take it away.
    let late = names(&settings.virtual_host()["request_headers_to_remove"]);
    let mut expected: BTreeSet<&str> = HINTS.into_iter().chain(PRIVILEGED).collect();
    expected.insert("x-pilotfish-identity");
    assert_eq!(late, expected);
    let receiving =
        &settings.filter("envoy.filters.http.ext_proc")["metadata_options"]["receiving_namespaces"];
    assert_eq!(names(&receiving["untyped"]), BTreeSet::from(["envoy.lb", "pilotfish"]));
}

/// More than Envoy's own limits, and more than one connection to the picker carries.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn more_requests_are_open_at_once_than_one_connection_carries(
    #[values(Setup::StaticFailOpen, Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
) {
    let open = 1_200;
    // The one engine runs fewer at once: in its own queue they keep their streams open.
    let stand = Stand::with(setup, 1, &pool(), |picker| picker.flag("--queue", "off")).await;
    let engine = &stand.engines[0].state;
    engine.set_fault(Fault::StallInStream(1));
    let request = json!({
        "model": "tiny", "max_tokens": 4, "stream": true, "messages": [{"role": "user", "content": "hello"}],
    });
    let ask = async || {
        let answer = stand.client.stream(&request).await;
        let answer = answer.rest().await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    };
    let held = async {
        stand.picker.until("all are booked", "pilotfish_reserved_requests", &[], f64::from(open)).await;
        let connections = stand.gateway.statistic("cluster.pilotfish.upstream_cx_active").await;
        assert!(connections >= Some(2), "{connections:?}");
        engine.clear_faults();
    };
    tokio::join!(join_all((0..open).map(|_| ask())), held);
    stand.picker.until_idle("all are answered").await;
}
