//! What the chart renders: for every mode and many values, accepted by Helm, the API server, our command line and Envoy.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::Parser;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use pilotfish::args::{Args, Command as Ours, ServeArgs};
use pilotfish::check::{Options, check};
use pilotfish::document::Node;
use pilotfish::resources::crd;
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::kit::envoy;
use crate::kit::gateways;
use crate::kit::helm::{CHART, Installation, helm, strings};
use crate::kit::kube::{Cluster, create};

/// Values that a picker of one pool can have.
pub const POOL: &str = "
inferencePool:
  {create: true, name: pool, matchLabels: {app: w}, targetPorts: [8000, 8001], appProtocol: http, failureMode: FailClose}
tls: {secretName: cert, clientCA: {secretName: ca}, minVersion: VersionTLS13}
trustedClients: [10.0.0.0/8, 'fd00::/8']
istio: {destinationRule: {enabled: true}}
";
/// Pods without custom resources.
pub const STANDALONE: &str = "
mode: standalone-envoy
endpoints: {selector: {app: w, tier: gold}, targetPorts: [8000, 8001]}
";
/// Values of every mode.
const EVERYTHING: &str = "
fullnameOverride: picker
replicas: 3
image: {repository: example.org/pilotfish, tag: v9, pullPolicy: Always}
imagePullSecrets: [{name: pull}]
scheduler:
  config: |
    apiVersion: pilotfish.dev/v1alpha1
    kind: EndpointPickerConfig
    plugins:
    - type: least-request
    schedulingProfiles:
    - name: default
      plugins:
      - pluginRef: least-request
redis: {secretName: redis}
sessionKey: {secretName: session}
tokenizers: {volume: {persistentVolumeClaim: {claimName: tokenizers}}}
bodies: {maxBytes: 134217728, maxBufferedBytes: 2147483648}
drain: {delaySeconds: 0, graceSeconds: 7, timeoutSeconds: 900}
log: {format: text, level: 'info,pilotfish::access=off'}
extraArgs: [--scrape-interval=100ms]
extraEnv: [{name: RUST_BACKTRACE, value: '1'}]
envoy: {listenAddress: '::', port: 8080, concurrency: 4, streamIdleTimeout: 900s, requestTimeout: 60s}
service: {type: LoadBalancer, port: 8000, annotations: {example.org/internal: 'true'}}
serviceAccount: {name: account, annotations: {example.org/role: picker}}
podAnnotations: {example.org/note: seen}
podLabels: {example.org/team: serving}
nodeSelector: {example.org/pool: cpu}
tolerations: [{key: example.org/cpu, operator: Exists}]
affinity: {nodeAffinity: {}}
topologySpreadConstraints: [{topologyKey: example.org/rack, maxSkew: 1, whenUnsatisfiable: DoNotSchedule}]
priorityClassName: system-cluster-critical
podDisruptionBudget: {maxUnavailable: 25%}
autoscaling: {enabled: true}
networkPolicy:
  enabled: true
  clients: [{namespaceSelector: {matchLabels: {clients: 'yes'}}}]
  gateways: [{podSelector: {matchLabels: {gateway: 'yes'}}}]
  apiServer: [{ipBlock: {cidr: 10.1.2.3/32}}]
  extraEgress: [{ports: [{port: 6379}]}]
serviceMonitor: {enabled: true, interval: 30s, labels: {release: prometheus}}
prometheusRule: {enabled: true, labels: {release: prometheus}}
";
/// Nearly everything off.
const BARE: &str = "
replicas: 1
podSecurityContext: {runAsUser: null}
serviceAccount: {create: false, name: theirs}
rbac: {create: false}
podDisruptionBudget: {enabled: false}
networkPolicy: {enabled: true, prometheus: [], engines: []}
scheduler: {configMap: {name: theirs, key: k}}
tls: {enabled: false}
istio: {destinationRule: {enabled: true}}
";
const KTHENA: &str = "mode: kthena\n";

/// Sets of values, each a name and its parts.
fn values(set: &str, namespaces: &[&Cluster; 2]) -> String {
    let [one, two] = namespaces.map(|cluster| &cluster.namespace);
    let read =
        format!("mode: kthena\ndefaultPool: {one}/p\nnamespaces: [{one}, {two}]\ncrds: {{install: true}}\n");
    match set {
        "defaults" => String::new(),
        "pool" => POOL.to_owned(),
        "pool, everything" => POOL.to_owned() + EVERYTHING,
        "pool, bare" => BARE.to_owned(),
        "standalone" => STANDALONE.to_owned(),
        "standalone, everything" => STANDALONE.to_owned() + EVERYTHING,
        "standalone, bare" => STANDALONE.to_owned() + BARE,
        "kthena" => KTHENA.to_owned(),
        "kthena, everything" => read + EVERYTHING,
        "kthena, bare" => KTHENA.to_owned() + BARE,
        other => panic!("{other}"),
    }
}

/// A kind of somebody else, with any content.
fn foreign(group: &str, version: &str, kind: &str) -> CustomResourceDefinition {
    let plural = format!("{}s", kind.to_lowercase());
    let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
    let version = json!({"name": version, "served": true, "storage": true, "schema": schema});
    let definition = json!({
        "metadata": {"name": format!("{plural}.{group}")},
        "spec": {
            "group": group, "scope": "Namespaced", "versions": [version],
            "names": {"kind": kind, "plural": plural, "singular": kind.to_lowercase()},
        },
    });
    serde_json::from_value(definition).unwrap()
}

async fn define_foreign_kinds(cluster: &Cluster) {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    let kinds = [
        foreign("monitoring.coreos.com", "v1", "ServiceMonitor"),
        foreign("monitoring.coreos.com", "v1", "PrometheusRule"),
    ];
    DEFINED.get_or_init(|| create(&cluster.client, &kinds)).await;
    gateways::define(cluster).await;
}

fn serve_args(installation: &Installation) -> ServeArgs {
    let line = std::iter::once("pilotfish".to_owned()).chain(installation.args());
    let parsed = Args::try_parse_from(line).unwrap_or_else(|error| panic!("{error}"));
    let Ours::Serve(args) = parsed.command else { panic!("not serve") };
    *args
}

#[rstest]
#[case("defaults")]
#[case("pool")]
#[case("pool, everything")]
#[case("pool, bare")]
#[case("standalone")]
#[case("standalone, everything")]
#[case("standalone, bare")]
#[case("kthena")]
#[case("kthena, everything")]
#[case("kthena, bare")]
#[tokio::test(flavor = "multi_thread")]
async fn every_set_of_values_is_accepted_by_all_that_read_it(#[case] set: &str) {
    let (cluster, other) = (Cluster::namespace().await, Cluster::namespace().await);
    define_foreign_kinds(&cluster).await;
    let values = values(set, &[&cluster, &other]);
    helm(&["lint", "--strict", CHART], &values).unwrap_or_else(|error| panic!("{error}"));
    let installation = Installation::render(&cluster.namespace, &values).unwrap();
    for object in &installation.0 {
        let answer = cluster.try_apply(object, true).await;
        answer.unwrap_or_else(|error| panic!("{error}: {object:#}"));
    }
    admitted_where_pods_are_restricted(&cluster, &installation).await;
    arguments_fit_the_pod(&installation);
    scheduler_configuration_is_right(&installation);
    envoy_accepts_its_configuration(&installation);
    monitors_leave_our_labels_alone(&installation);
    selectors_meet_the_pods(&installation);
}

/// The API server's own admission, by the strictest of the pod security standards.
async fn admitted_where_pods_are_restricted(cluster: &Cluster, installation: &Installation) {
    let restricted = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {
            "name": cluster.namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
        },
    });
    cluster.try_apply(&restricted, false).await.unwrap();
    let mut pod = installation.pod().clone();
    pod["apiVersion"] = "v1".into();
    pod["kind"] = "Pod".into();
    pod["metadata"]["name"] = "picker".into();
    // Of a class that is not there.
    pod["spec"].as_object_mut().unwrap().remove("priorityClassName");
    cluster.try_apply(&pod, true).await.unwrap();
    for container in std::iter::once(installation.picker()).chain(installation.envoy()) {
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    }
    // The variables of Services have the names of ours.
    assert_eq!(pod["spec"]["enableServiceLinks"], false);
}

fn arguments_fit_the_pod(installation: &Installation) {
    let args = serve_args(installation);
    let pod = &installation.pod()["spec"];
    let limits = &args.limits;
    let grace = Duration::from_secs(pod["terminationGracePeriodSeconds"].as_u64().unwrap());
    let delay = &installation.picker()["lifecycle"]["preStop"]["sleep"]["seconds"];
    let delay = Duration::from_secs(delay.as_u64().unwrap_or(0));
    assert!(grace > delay + limits.drain_grace + limits.drain_timeout, "{grace:?}");
    assert_eq!(args.ports.grpc_health_port, 9003);
    for (probe, service) in [("livenessProbe", "liveness"), ("readinessProbe", "readiness")] {
        assert_eq!(installation.picker()[probe]["grpc"], json!({"port": 9003, "service": service}));
    }
    // With Envoy beside it nothing else speaks to the picker.
    if installation.envoy().is_some() {
        assert_eq!(args.tls.secure_serving, Some(false));
    }
    let mounts = installation.picker()["volumeMounts"].as_array().cloned().unwrap_or_default();
    let mounted: BTreeSet<&str> = mounts.iter().map(|mount| mount["mountPath"].as_str().unwrap()).collect();
    let line = installation.args();
    let files: Vec<&str> = line.iter().filter_map(|arg| Some(arg.split_once("=/")?.1)).collect();
    for file in &files {
        let file = format!("/{file}");
        assert!(mounted.iter().any(|path| file.starts_with(path)), "{file} is not mounted");
    }
    assert_eq!(mounted.len(), files.len(), "mounted and not used: {mounted:?}");
    let volumes = pod["volumes"].as_array().cloned().unwrap_or_default();
    let envoy = usize::from(installation.envoy().is_some());
    assert_eq!(volumes.len(), mounted.len() + envoy, "{volumes:?}");
}

fn scheduler_configuration_is_right(installation: &Installation) {
    let Some(map) = installation.all("ConfigMap").find(|map| map["data"].get("config.yaml").is_some()) else {
        return;
    };
    let text = map["data"]["config.yaml"].as_str().unwrap();
    assert!(text.starts_with("apiVersion:") && text.ends_with("least-request\n"), "as it was given: {text}");
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, text).unwrap();
    let report = check(None, Some(&file), &Options::default());
    assert!(report.problems.is_empty(), "{report}");
}

/// The real Envoy reads the configuration, by the container's own command line.
fn envoy_accepts_its_configuration(installation: &Installation) {
    let (Some(container), Some(config)) = (installation.envoy(), installation.envoy_config()) else {
        assert!(installation.envoy().is_none() && installation.envoy_config().is_none());
        return;
    };
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("envoy.yaml");
    std::fs::write(&file, config).unwrap();
    let line = strings(&container["command"]);
    let in_pod = "/etc/envoy/envoy.yaml";
    assert!(line.iter().any(|word| word == in_pod));
    let words = line[1..].iter().map(|word| if word == in_pod { file.to_str().unwrap() } else { word });
    let done = Command::new(envoy::binary()).args(words).args(["--mode", "validate"]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let port = container["ports"][0]["containerPort"].as_u64().unwrap();
    assert!(config.contains(&format!("port_value: {port}")), "it listens where the pod says");
    let limit = serve_args(installation).limits.max_body_bytes;
    assert!(config.contains(&format!("request_body_buffer_limit: {limit}\n")));
}

/// `endpoint` and `namespace` are labels of metrics of ours, and of every target that the Prometheus operator makes.
fn monitors_leave_our_labels_alone(installation: &Installation) {
    for monitor in installation.all("ServiceMonitor") {
        for endpoint in monitor["spec"]["endpoints"].as_array().unwrap() {
            assert_eq!(endpoint["honorLabels"], true);
            assert_eq!(endpoint["port"], "metrics");
            assert!(endpoint.get("metricRelabelings").is_none());
        }
    }
}

/// All of `wanted` are in `labels`.
fn selects(wanted: &Value, labels: &Value) -> bool {
    let wanted = wanted.as_object().unwrap();
    !wanted.is_empty() && wanted.iter().all(|(label, value)| &labels[label] == value)
}

fn selectors_meet_the_pods(installation: &Installation) {
    let pod = &installation.pod()["metadata"]["labels"];
    let services: Vec<&Value> = installation.all("Service").collect();
    for service in &services {
        assert!(selects(&service["spec"]["selector"], pod));
    }
    let of = |kind, pointer| installation.all(kind).map(move |object| object.pointer(pointer).unwrap());
    let matched = of("Deployment", "/spec/selector/matchLabels")
        .chain(of("PodDisruptionBudget", "/spec/selector/matchLabels"))
        .chain(of("NetworkPolicy", "/spec/podSelector/matchLabels"));
    for labels in matched {
        assert!(selects(labels, pod));
    }
    for labels in of("ServiceMonitor", "/spec/selector/matchLabels") {
        let found = services.iter().filter(|service| selects(labels, &service["metadata"]["labels"]));
        let names: Vec<&Value> = found.map(|service| &service["spec"]["ports"][0]["name"]).collect();
        assert_eq!(names, ["metrics"]);
    }
    for pool in installation.all("InferencePool") {
        let picker = &pool["spec"]["endpointPickerRef"];
        let found = services.iter().find(|service| service["metadata"]["name"] == picker["name"]).unwrap();
        assert_eq!(found["spec"]["ports"][0]["port"], picker["port"]["number"]);
    }
}

#[rstest]
#[case("modes: kthena", "modes")]
#[case("mode: sidecar", "/mode")]
#[case("mode: standalone-envoy", "selector")]
#[case("inferencePool: {create: true}", "matchLabels")]
#[case("inferencePool: {failureMode: Open}", "failureMode")]
#[case("inferencePool: {targetPorts: [0]}", "targetPorts")]
#[case("inferencePool: {targetPorts: [1, 2, 3, 4, 5, 6, 7, 8, 9]}", "targetPorts")]
#[case("inferencePool: {matchLabels: {a: 1}}", "matchLabels")]
#[case("replicas: two", "replicas")]
#[case("image: {repo: x}", "repo")]
#[case("namespaces: ['']", "namespaces")]
#[case("namespaces: a", "namespaces")]
#[case("defaultPool: pool", "defaultPool")]
#[case("drain: {graceSeconds: 3s}", "graceSeconds")]
#[case("scheduler: {config: x, configMap: {name: y}}", "scheduler")]
#[case("tls: {minVersion: VersionTLS11}", "minVersion")]
#[case("tls: {clientCA: ca}", "clientCA")]
#[case("bodies: {maxBytes: 64Mi}", "maxBytes")]
#[case("extraArgs: [serve]", "extraArgs")]
#[case("envoy: {streamIdleTimeout: infinite}", "streamIdleTimeout")]
#[case("service: {type: ExternalName}", "service/type")]
#[case("networkPolicy: {from: []}", "from")]
#[case("serviceMonitor: {honorLabels: false}", "honorLabels")]
fn wrong_values_are_refused(#[case] values: &str, #[case] told: &str) {
    let error = Installation::render("n", values).unwrap_err();
    assert!(error.contains("values.schema.json") || error.contains("schema"), "by the schema: {error}");
    assert!(error.contains(told), "{error}");
}

fn read(path: &str) -> Value {
    Node::parse(&std::fs::read_to_string(Path::new(CHART).join(path)).unwrap()).unwrap()[0].to_json()
}

/// Every member that the schema knows has a default, and nothing else has: no value is without explanation or check.
fn same_members(path: &str, schema: &Value, defaults: &Value) {
    let Some(known) = schema.get("properties").and_then(Value::as_object) else { return };
    assert_eq!(schema["additionalProperties"], false, "{path}");
    let known = known.iter().filter(|(name, _)| *name != "global");
    let defaults = defaults.as_object().unwrap();
    let names: BTreeSet<&String> = known.clone().map(|(name, _)| name).collect();
    assert_eq!(names, defaults.keys().collect(), "{path}");
    known.for_each(|(name, schema)| same_members(&format!("{path}/{name}"), schema, &defaults[name]));
}

#[test]
fn schema_and_defaults_have_the_same_members() {
    same_members("", &read("values.schema.json"), &read("values.yaml"));
}

#[test]
fn what_the_chart_brings_along_is_what_stands_outside_of_it() {
    let ours = crd::documents().unwrap();
    let mut paths: BTreeSet<String> = ours.into_iter().map(|(path, _)| path.to_owned()).collect();
    paths.insert("envoy/full-duplex.yaml".to_owned());
    let files = Path::new(CHART).join("files");
    let found = std::fs::read_dir(&files).unwrap().flat_map(|folder| {
        let folder = folder.unwrap().path();
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path())
    });
    let found = found.map(|path| path.strip_prefix(&files).unwrap().to_str().unwrap().to_owned());
    assert_eq!(found.collect::<BTreeSet<String>>(), paths);
    for path in paths {
        let text = |path: &Path| std::fs::read_to_string(path).unwrap();
        assert!(text(Path::new(&path)) == text(&files.join(&path)), "{path}: run `make generate`");
    }
}

#[test]
fn definitions_are_installed_when_asked_for_alone_and_stay() {
    let none = |values| Installation::render("n", values).unwrap().all("CustomResourceDefinition").count();
    assert_eq!(none(KTHENA), 0);
    assert_eq!(none("crds: {install: true}"), 0, "a picker of one pool reads none of them");
    let asked = Installation::render("n", "mode: kthena\ncrds: {install: true}").unwrap();
    let kept = asked.all("CustomResourceDefinition");
    let kept = kept.filter(|crd| crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep");
    assert_eq!(kept.count(), crd::documents().unwrap().len());
}
