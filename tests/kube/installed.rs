//! Pickers as the chart installs them: with its arguments and its roles, and the Envoy of its pods before them.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use k8s_openapi::api::apps::v1::Deployment;
use kube::Api;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::changes::{POOL, SERVER};
use super::chart::STANDALONE;
use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup};
use crate::kit::eventually::eventually;
use crate::kit::health::{plain, serves};
use crate::kit::helm::{CHART, Installation, helm, strings};
use crate::kit::kube::{Cluster, Server};
use crate::kit::picker::Picker;

/// What roles allow, a line each: namespace, group/resource, name if only that one, verb.
fn grants(installation: &Installation) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let roles = installation.all("Role").chain(installation.all("ClusterRole"));
    for role in roles {
        let namespace = role["metadata"]["namespace"].as_str().unwrap_or("*");
        for rule in role["rules"].as_array().unwrap() {
            let names = rule.get("resourceNames").map_or_else(|| vec![String::new()], strings);
            for group in strings(&rule["apiGroups"]) {
                for resource in strings(&rule["resources"]) {
                    for (name, verb) in names.iter().flat_map(|name| {
                        strings(&rule["verbs"]).into_iter().map(move |verb| (name.clone(), verb))
                    }) {
                        lines.insert(format!("{namespace} {group}/{resource} {name} {verb}"));
                    }
                }
            }
        }
    }
    lines
}

/// The same for what a picker asks of the API server in each of these namespaces.
fn asked(namespaces: &[&str], resources: &[&str], pool: &str) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let objectives = ["llm-d.ai", "inference.networking.x-k8s.io"].into_iter().flat_map(|group| {
        ["inferenceobjectives", "inferencemodelrewrites"].map(|resource| format!("{group}/{resource}"))
    });
    let resources: Vec<String> =
        resources.iter().map(|resource| (*resource).to_owned()).chain(objectives).collect();
    for namespace in namespaces {
        for resource in &resources {
            let name = if resource.ends_with("/inferencepools") { pool } else { "" };
            for verb in ["get", "list", "watch"] {
                lines.insert(format!("{namespace} {resource} {name} {verb}"));
            }
        }
        lines.insert(format!("{namespace} events.k8s.io/events  create"));
    }
    lines
}

/// The conditions that it writes.
fn written(namespaces: &[&str]) -> BTreeSet<String> {
    let of = |namespace: &&str| [ROUTES, SERVERS].map(|kind| format!("{namespace} {kind}/status  patch"));
    namespaces.iter().flat_map(of).collect()
}

const POOLS: &str = "inference.networking.k8s.io/inferencepools";
const ROUTES: &str = "networking.serving.volcano.sh/modelroutes";
const SERVERS: &str = "networking.serving.volcano.sh/modelservers";

/// Applies what allows something, to the user `picker` in place of the service account.
async fn allow(cluster: &Cluster, installation: &Installation) {
    let account = installation.only("ServiceAccount")["metadata"]["name"].clone();
    for kind in ["Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"] {
        for object in installation.all(kind) {
            let mut object = object.clone();
            if kind.ends_with("Binding") {
                let subject = &object["subjects"][0];
                assert_eq!(subject["name"], account);
                assert_eq!(subject["namespace"], cluster.namespace);
                object["subjects"] =
                    json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "picker"}]);
            }
            cluster.try_apply(&object, false).await.unwrap();
        }
    }
    assert_eq!(installation.pod()["spec"]["serviceAccountName"], account);
}

/// Starts the picker of an installation with what its roles allow.
async fn install(server: &Server, cluster: &Cluster, installation: &Installation) -> Picker {
    allow(cluster, installation).await;
    let args = installation.args();
    assert_eq!(args[0], "serve");
    let setup = Picker::with("").with_kubeconfig(server.kubeconfig_of_picker());
    let picker = args[1..].iter().fold(setup, |setup, arg| setup.switch(arg)).start().await;
    picker.until_ready().await;
    let probe = |name: &str| installation.picker()[name]["grpc"]["service"].as_str().unwrap().to_owned();
    for name in ["livenessProbe", "readinessProbe"] {
        assert_eq!(serves(plain(picker.app.bound.health).await, &probe(name)).await, Some(true));
    }
    picker
}

async fn until_it_has(picker: &Picker, addresses: &[String]) {
    let have = async || (picker.addresses().await == addresses).then_some(());
    eventually(format!("{addresses:?}"), have).await;
}

/// Whether nothing that this picker asked for was forbidden.
async fn reads_everything(picker: &Picker) {
    let missed = picker.metric("pilotfish_crd_unavailable", &[]).await;
    assert_eq!(missed.to_bits(), 0.0_f64.to_bits(), "a kind may not be read");
}

#[tokio::test(flavor = "multi_thread")]
async fn roles_suffice_and_allow_nothing_more() {
    let server = Server::start().await;

    let cluster = Cluster::of(&server).await;
    let namespace = cluster.namespace.as_str();
    let values = "inferencePool: {name: pool}";
    let installation = Installation::render(namespace, values).unwrap();
    assert_eq!(grants(&installation), asked(&[namespace], &["/pods", POOLS], "pool"));
    cluster.apply(POOL).await;
    let picker = install(&server, &cluster, &installation).await;
    cluster.pod("p", &json!({"app": "w"}), &cluster.address(1)).await;
    until_it_has(&picker, &[format!("{}:8000", cluster.address(1))]).await;
    reads_everything(&picker).await;

    let cluster = Cluster::of(&server).await;
    let namespace = cluster.namespace.as_str();
    let installation = Installation::render(namespace, STANDALONE).unwrap();
    assert_eq!(grants(&installation), asked(&[namespace], &["/pods"], ""));
    let picker = install(&server, &cluster, &installation).await;
    cluster.pod("p", &json!({"app": "w", "tier": "gold"}), &cluster.address(1)).await;
    let both = [8000, 8001].map(|port| format!("{}:{port}", cluster.address(1)));
    until_it_has(&picker, &both).await;
    reads_everything(&picker).await;

    // Kthena's objects of two namespaces, and then of all.
    let (cluster, other) = (Cluster::of(&server).await, Cluster::of(&server).await);
    let namespaces = [cluster.namespace.as_str(), other.namespace.as_str()];
    let values = format!("mode: kthena\nnamespaces: {namespaces:?}");
    let installation = Installation::render(namespaces[0], &values).unwrap();
    let resources = ["/pods", POOLS, ROUTES, SERVERS];
    assert_eq!(grants(&installation), &asked(&namespaces, &resources, "") | &written(&namespaces));
    other.apply(SERVER).await;
    other.pod("p", &json!({"app": "w"}), &other.address(1)).await;
    let picker = install(&server, &cluster, &installation).await;
    until_it_has(&picker, &[format!("{}:8000", other.address(1))]).await;
    reads_everything(&picker).await;

    let everywhere = Installation::render(namespaces[0], "mode: kthena").unwrap();
    assert_eq!(grants(&everywhere), &asked(&["*"], &resources, "") | &written(&["*"]));
    let picker = install(&server, &cluster, &everywhere).await;
    reads_everything(&picker).await;
    server.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_installs_and_upgrades_and_takes_no_definition_over() {
    let server = Server::start().await;
    let cluster = Cluster::of(&server).await;
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("kubeconfig");
    std::fs::write(&file, serde_json::to_string(&cluster.kubeconfig).unwrap()).unwrap();
    let to = ["--namespace", &cluster.namespace, "--kubeconfig", file.to_str().unwrap()];
    let run = |command: &[&str], values: &str| helm(&[command, &to].concat(), values);
    let ours = "mode: kthena\ncrds: {install: true}";
    let refused = run(&["install", "r", CHART], ours).unwrap_err();
    assert!(refused.contains("modelroutes.networking.serving.volcano.sh"), "{refused}");
    assert!(refused.contains("ownership"), "{refused}");

    run(&["install", "r", CHART], STANDALONE).unwrap();
    run(&["upgrade", "r", CHART], &format!("{STANDALONE}replicas: 5")).unwrap();
    let deployments: Api<Deployment> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let replicas = deployments.get("r-pilotfish").await.unwrap().spec.unwrap().replicas;
    assert_eq!(replicas, Some(5));
    server.kill().await;
}

/// Runs the command by which the pod's end tells Envoy to drain.
fn begin_to_end(envoy: &Value, gateway: &Gateway) {
    let command = strings(&envoy["lifecycle"]["preStop"]["exec"]["command"]);
    let admin = gateway.admin();
    let script = command[2].replace("127.0.0.1/9901", &format!("{}/{}", admin.ip(), admin.port()));
    assert_ne!(script, command[2]);
    let mut hook = Command::new(&command[0]);
    let status = hook.arg(&command[1]).arg(script).stdin(Stdio::null()).status().unwrap();
    assert!(status.success(), "the hook failed: {status}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_envoy_of_a_pod_serves_and_drains_without_a_failure() {
    let cluster = Cluster::namespace().await;
    let values =
        format!("mode: kthena\nnamespaces: [{}]\nenvoy: {{listenAddress: 127.0.0.1}}", cluster.namespace);
    let installation = Installation::render(&cluster.namespace, &values).unwrap();
    cluster.apply(SERVER).await;
    let engine = SimulatedEngine::start(pilotfish::engine::EngineConfig {
        listen: format!("{}:8000", cluster.address(1)).parse().unwrap(),
        speed: 100.0,
        ..Default::default()
    })
    .await;
    cluster.pod("p", &json!({"app": "w"}), &cluster.address(1)).await;
    let setup = Picker::with("").with_kubeconfig(cluster.kubeconfig.clone());
    let args = installation.args();
    let picker = args[1..].iter().fold(setup, |setup, arg| setup.switch(arg)).start().await;
    picker.until("the engine is up", "pilotfish_endpoints", &[("state", "up")], 1.0).await;
    let config = installation.envoy_config().unwrap().to_owned();
    let gateway = Gateway::adjusted(Setup::FullDuplex, &[picker.app.bound.grpc], &[], |_| config).await;

    let request =
        json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "a word"}]});
    let answer = gateway.client.chat(&request).await;
    assert_eq!((answer.status, answer.served()), (200, engine.state.name().to_owned()));
    assert!(answer.headers.get("connection").is_none());
    assert!(picker.metric("pilotfish_picks_total", &[]).await >= 1.0, "the picker has decided");

    begin_to_end(installation.envoy().unwrap(), &gateway);
    eventually("clients are asked to connect anew", async || {
        let answer = gateway.client.chat(&request).await;
        assert_eq!(answer.status, 200, "and served meanwhile");
        answer.headers.get("connection").is_some_and(|value| value == "close").then_some(())
    })
    .await;
}
