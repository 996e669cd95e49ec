//! The manifests of the guide to gateways: accepted by the API server with the gateways' own definitions, and of one mind with the chart.

use std::path::Path;

use pilotfish::check::{Options, check};
use pilotfish::document::Node;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::kit::envoy;
use crate::kit::extproc::{chat, run};
use crate::kit::gateways;
use crate::kit::helm::{CHART, Installation, helm, strings};
use crate::kit::kube::Cluster;
use crate::kit::picker::{Picker, Setup};
use crate::kit::resources::{endpoint, pool};

const FOLDER: &str = "docs/gateways";
const NAMESPACE: &str = "models";
/// Kinds of GKE alone, whose definitions are published with no module.
const UNDEFINED: [&str; 2] = ["HealthCheckPolicy", "GCPBackendPolicy"];

/// What one section of the guide installs: the chart with these values, and a file of manifests.
struct Guide {
    installation: Installation,
    manifests: Vec<Value>,
}

impl Guide {
    fn of(name: &str) -> Self {
        let (values, manifests): (&[&str], &str) = match name {
            "envoy-gateway" => (&["envoy-gateway-values"], "envoy-gateway"),
            "envoy-gateway with limits" => {
                (&["envoy-gateway-values", "envoy-gateway-limits-values"], "envoy-gateway-limits")
            }
            "envoy-ai-gateway" => (&["envoy-ai-gateway-values"], "envoy-ai-gateway"),
            "istio" => (&["istio-values"], "istio"),
            "istio, verified" => (&["istio-verified-values"], "istio"),
            "istio waypoint" => (&[], "istio-waypoint"),
            "agentgateway" => (&[], "agentgateway"),
            "gke" => (&[], "gke"),
            other => panic!("{other}"),
        };
        let files: Vec<String> =
            ["values"].iter().chain(values).map(|file| format!("{FOLDER}/{file}.yaml")).collect();
        let given: Vec<&str> = files.iter().flat_map(|file| ["--values", file]).collect();
        let run = |command: &[&str]| {
            let line: Vec<&str> = command.iter().chain(&given).copied().collect();
            helm(&line, "{}").unwrap_or_else(|error| panic!("{error}"))
        };
        run(&["lint", "--strict", CHART]);
        let text = run(&["template", "pilotfish", CHART, "--namespace", NAMESPACE]);
        Self { installation: Installation::of(&text), manifests: read(&format!("{FOLDER}/{manifests}.yaml")) }
    }

    fn all(&self, kind: &'static str) -> impl Iterator<Item = &Value> {
        self.manifests.iter().filter(move |object| object["kind"] == kind)
    }

    fn only(&self, kind: &'static str) -> &Value {
        let found: Vec<&Value> = self.all(kind).collect();
        assert_eq!(found.len(), 1, "objects of kind {kind}");
        found[0]
    }

    fn pool(&self) -> &Value {
        self.installation.only("InferencePool")
    }

    /// The object of this kind and name, be it of the file or of the chart.
    fn named(&self, kind: &Value, name: &Value) -> &Value {
        let mut everything = self.manifests.iter().chain(&self.installation.0);
        let found = everything.find(|object| object["kind"] == *kind && object["metadata"]["name"] == *name);
        found.unwrap_or_else(|| panic!("nothing is {kind} {name}"))
    }

    /// The Service of pickers, reached as a reference says.
    fn picker_service(&self, name: &Value, port: &Value) -> &Value {
        let service = self.named(&json!("Service"), name);
        let ports = service["spec"]["ports"].as_array().unwrap();
        assert!(ports.iter().any(|offered| offered["port"] == *port && offered["name"] == "grpc-ext-proc"));
        service
    }
}

fn read(file: &str) -> Vec<Value> {
    Node::parse(&std::fs::read_to_string(file).unwrap()).unwrap().iter().map(Node::to_json).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

#[rstest]
#[case("envoy-gateway")]
#[case("envoy-gateway with limits")]
#[case("envoy-ai-gateway")]
#[case("istio")]
#[case("istio, verified")]
#[case("istio waypoint")]
#[case("agentgateway")]
#[case("gke")]
#[tokio::test(flavor = "multi_thread")]
async fn the_api_server_accepts_everything(#[case] name: &str) {
    let guide = Guide::of(name);
    let cluster = Cluster::namespace().await;
    gateways::define(&cluster).await;
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
    cluster.try_apply(&namespace, false).await.unwrap();
    let defined = |object: &&Value| !UNDEFINED.iter().any(|kind| object["kind"] == *kind);
    for object in guide.manifests.iter().filter(defined).chain(&guide.installation.0) {
        let answer = cluster.try_apply(object, true).await;
        answer.unwrap_or_else(|error| panic!("{error}: {object:#}"));
    }
}

#[rstest]
#[case("envoy-gateway")]
#[case("envoy-ai-gateway")]
#[case("istio")]
#[case("istio, verified")]
#[case("istio waypoint")]
#[case("agentgateway")]
#[case("gke")]
fn every_reference_leads_to_what_is_there(#[case] name: &str) {
    let guide = Guide::of(name);
    let pool = guide.pool();
    let picker = &pool["spec"]["endpointPickerRef"];
    guide.picker_service(&picker["name"], &picker["port"]["number"]);
    assert!(picker["failureMode"].is_string());
    let namespaces = guide.manifests.iter().filter(|object| object["kind"] != "GatewayClass").chain([pool]);
    for object in namespaces {
        assert_eq!(object["metadata"]["namespace"], NAMESPACE, "{object:#}");
    }
    let route = guide.only("HTTPRoute");
    for parent in list(&route["spec"]["parentRefs"]) {
        let kind = parent.get("kind").cloned().unwrap_or(json!("Gateway"));
        guide.named(&kind, &parent["name"]);
    }
    for rule in list(&route["spec"]["rules"]) {
        let [backend] = list(&rule["backendRefs"]) else { panic!("one backend a rule: {rule:#}") };
        match backend.get("kind") {
            None => assert_eq!(backend["name"], guide.only("Service")["metadata"]["name"]),
            Some(_) => {
                assert_eq!(backend["name"], pool["metadata"]["name"]);
                assert_eq!(format!("{}/v1", backend["group"].as_str().unwrap()), pool["apiVersion"]);
            }
        }
    }
    for policy in &guide.manifests {
        let targets = list(&policy["spec"]["targetRefs"]).iter().chain(policy["spec"].get("targetRef"));
        for target in targets {
            guide.named(&target["kind"], &target["name"]);
        }
    }
}

/// A Service that stands for the pool holds the pool's pods, at the pool's port.
#[rstest]
#[case("envoy-gateway")]
#[case("istio waypoint")]
fn a_service_in_place_of_the_pool_has_its_pods(#[case] name: &str) {
    let guide = Guide::of(name);
    let (service, pool) = (&guide.only("Service")["spec"], &guide.pool()["spec"]);
    assert_eq!(service["selector"], pool["selector"]["matchLabels"]);
    let ports = |list: &Value, member: &str| -> Vec<Value> {
        list.as_array().unwrap().iter().map(|port| port[member].clone()).collect()
    };
    assert_eq!(ports(&service["ports"], "targetPort"), ports(&pool["targetPorts"], "number"));
}

#[test]
fn envoy_gateway_asks_the_picker_as_the_shipped_configuration_does() {
    let guide = Guide::of("envoy-gateway");
    let [processor] = list(&guide.only("EnvoyExtensionPolicy")["spec"]["extProc"]) else { panic!("one") };
    let [backend] = list(&processor["backendRefs"]) else { panic!("one") };
    let service = guide.picker_service(&backend["name"], &backend["port"]);
    // `failOpen` is refused with such bodies.
    assert_eq!(processor["processingMode"]["request"]["body"], "FullDuplexStreamed");
    assert_eq!(processor["processingMode"]["response"]["body"], "FullDuplexStreamed");
    let shipped = envoy::Settings::of(envoy::Setup::GatewayShaped);
    for direction in ["request", "response"] {
        let attributes = &processor["processingMode"][direction]["attributes"];
        assert_eq!(
            attributes,
            &shipped.filter("envoy.filters.http.ext_proc")[format!("{direction}_attributes")]
        );
    }
    let overrides = &guide.only("BackendTrafficPolicy")["spec"]["loadBalancer"]["endpointOverride"];
    assert_eq!(overrides["extractFrom"], json!([{"header": "x-gateway-destination-endpoint"}]));
    let tls = guide.only("BackendTLSPolicy");
    assert_eq!(tls["spec"]["targetRefs"][0]["name"], service["metadata"]["name"]);
    assert_eq!(tls["spec"]["validation"]["hostname"], in_cluster(service));
    assert!(guide.installation.args().contains(&"--cert-path=/etc/pilotfish/tls".to_owned()));
}

/// What clients must not say is removed before any filter sees it.
#[rstest]
#[case("envoy-gateway")]
#[case("envoy-ai-gateway")]
fn clients_control_headers_are_removed_as_by_the_shipped_configuration(#[case] name: &str) {
    let guide = Guide::of(name);
    let early = &guide.only("ClientTrafficPolicy")["spec"]["headers"]["earlyRequestHeaders"];
    let shipped = std::fs::read_to_string("envoy/gateway-shaped.yaml").unwrap();
    let removed: Vec<&str> =
        shipped.lines().filter_map(|line| line.trim().strip_prefix("- remove: ")).collect();
    assert!(removed.len() > 10);
    assert_eq!(strings(&early["remove"]), removed);
    assert_eq!(early["removeOnMatch"], json!([{"type": "Prefix", "value": "x-pilotfish-"}]));
}

#[test]
fn limits_are_the_only_difference_and_know_what_the_picker_reports() {
    let limited = Guide::of("envoy-gateway with limits");
    let open = Guide::of("envoy-gateway");
    let mut policy = limited.only("BackendTrafficPolicy").clone();
    let limit = policy["spec"].as_object_mut().unwrap().remove("rateLimit").unwrap();
    assert_eq!(&policy, open.only("BackendTrafficPolicy"));
    let cost = &limit["global"]["rules"][0]["cost"]["response"]["metadata"];
    let config = Node::parse(&scheduler_config(&limited)).unwrap()[0].to_json();
    let is_reporter = |plugin: &&Value| plugin["type"] == "request-attribute-reporter";
    let reporter = list(&config["plugins"]).iter().find(is_reporter).unwrap();
    let key = &reporter["parameters"]["attributes"][0]["key"];
    assert_eq!((&key["namespace"], &key["name"]), (&cost["namespace"], &cost["key"]));
    let processor = &open.only("EnvoyExtensionPolicy")["spec"]["extProc"][0];
    assert!(list(&processor["metadata"]["writableNamespaces"]).contains(&cost["namespace"]));
}

/// An ORIGINAL_DST cluster has no host for a list.
#[tokio::test(flavor = "multi_thread")]
async fn envoy_ai_gateway_gets_single_addresses() {
    let guide = Guide::of("envoy-ai-gateway");
    let resources = pool() + &endpoint("a", "10.0.0.1:8000") + &endpoint("b", "10.0.0.2:8000");
    let answered =
        async |setup: Setup| run(&setup.start().await, &chat(r#"{"model":"m"}"#)).await.choices().len();
    assert_eq!(answered(Picker::with(&resources)).await, 2);
    assert_eq!(answered(Picker::with(&resources).config(&scheduler_config(&guide))).await, 1);
    assert_eq!(guide.pool()["spec"]["endpointPickerRef"]["failureMode"], "FailClose");
}

#[test]
fn istio_is_told_of_the_pickers_certificate() {
    for (name, insecure) in [("istio", true), ("istio, verified", false)] {
        let guide = Guide::of(name);
        let rule = &guide.installation.only("DestinationRule")["spec"];
        let picker = &guide.pool()["spec"]["endpointPickerRef"];
        let service = guide.picker_service(&picker["name"], &picker["port"]["number"]);
        assert_eq!(rule["host"], format!("{}.cluster.local", in_cluster(service)));
        let tls = &rule["trafficPolicy"]["tls"];
        assert_eq!((&tls["mode"], &tls["insecureSkipVerify"]), (&json!("SIMPLE"), &json!(insecure)));
        let own = guide.installation.args().iter().any(|arg| arg.starts_with("--cert-path"));
        assert_eq!(own, !insecure, "a certificate that can be verified");
        if !insecure {
            assert_eq!(tls["sni"], in_cluster(service));
            assert_eq!(tls["subjectAltNames"], json!([in_cluster(service)]));
            assert!(tls["credentialName"].is_string());
        }
    }
}

#[test]
fn gke_asks_engines_where_they_answer_and_waits_for_long_responses() {
    let guide = Guide::of("gke");
    for kind in UNDEFINED {
        let policy = guide.only(kind);
        assert_eq!(policy["apiVersion"], "networking.gke.io/v1");
        let pool = guide.pool();
        let target = json!({
            "group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool["metadata"]["name"],
        });
        assert_eq!(policy["spec"]["targetRef"], target);
    }
    let health = &guide.only("HealthCheckPolicy")["spec"]["default"]["config"];
    let port = guide.pool()["spec"]["targetPorts"][0]["number"].clone();
    assert_eq!(*health, json!({"type": "HTTP", "httpHealthCheck": {"requestPath": "/health", "port": port}}));
    let default = &guide.only("GCPBackendPolicy")["spec"]["default"];
    assert!(default["timeoutSec"].as_u64().unwrap() >= 600);
}

#[test]
fn the_guide_names_every_file_and_none_that_is_not_there() {
    let guide = std::fs::read_to_string("docs/gateways.md").unwrap();
    let mut linked: Vec<&str> =
        guide.split("](gateways/").skip(1).map(|rest| rest.split(')').next().unwrap()).collect();
    linked.sort_unstable();
    linked.dedup();
    let entries = Path::new(FOLDER).read_dir().unwrap();
    let mut files: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    files.sort_unstable();
    assert_eq!(linked, files);
}

/// The name of a Service that certificates are for.
fn in_cluster(service: &Value) -> String {
    format!("{}.{NAMESPACE}.svc", service["metadata"]["name"].as_str().unwrap())
}

/// The scheduler configuration that the pods get; our own check has nothing to say of it.
fn scheduler_config(guide: &Guide) -> String {
    let text = guide.installation.only("ConfigMap")["data"]["config.yaml"].as_str().unwrap();
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    let report = check(None, Some(&file), &Options::default());
    assert!(report.problems.is_empty(), "{report}");
    text.to_owned()
}
