//! The command line of `serve`, in a process of its own.

use std::process::{Command, Output};

use rstest::rstest;

use crate::kit::health::{plain, serves};
use crate::kit::process::Process;
use crate::kit::resources::pool;

fn serve(flags: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pilotfish"));
    command.arg("serve").args(flags.split_whitespace()).output().unwrap()
}

#[rstest]
#[case("--pool-nam p", "--pool-name")]
#[case("--zap-encodr=json", "--zap-encoder")]
#[case("--model-server-metrics-port 1", "--m")]
#[case("--pool-name p --pool-group inference.networking.x-k8s.io", "inference.networking.k8s.io")]
#[case("--endpoint-selector app=a", "--endpoint-target-ports")]
#[case("--secure-serving=perhaps", "perhaps")]
#[case("--resources r --secure-serving=false --client-ca-file f", "--secure-serving=false")]
#[case("", "--resources")]
fn what_cannot_be_meant_exits_2_and_says_what_can(#[case] flags: &str, #[case] told: &str) {
    let output = serve(flags);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(told), "{said}");
}

#[test]
fn a_certificate_that_is_not_there_ends_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let ports = "--grpc-port 0 --grpc-health-port 0 --metrics-port 0";
    let output = serve(&format!("--resources {dir} --cert-path {dir} {ports}"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("tls.crt: cannot be read"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flags_without_effect_are_named_once_and_others_act() {
    let flags = "--tracing --metrics-endpoint-auth=false --enable-pprof=true --health-checking -v=4 \
                 --zap-encoder json -refresh-metrics-interval=50ms --secure-serving=false \
                 --refresh-prometheus-metrics-interval=5s --ha-enable-leader-election=false --drain-timeout 30s";
    let picker = Process::start(&pool(), flags).await;
    assert_eq!(serves(plain(picker.grpc).await, "inference-extension").await, Some(true));
    let log = picker.log();
    let without_effect: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
        .filter(|line: &serde_json::Value| line["level"] == "WARN")
        .collect();
    let named: Vec<&str> = without_effect.iter().filter_map(|line| line["flag"].as_str()).collect();
    assert_eq!(named, ["--tracing", "--enable-pprof", "--refresh-prometheus-metrics-interval"], "{log}");
}
