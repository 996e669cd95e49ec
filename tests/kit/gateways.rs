//! The kinds of gateways, as their owners define them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use pilotfish::document::Node;
use tokio::sync::OnceCell;

use super::kube::{Cluster, create};

const ISTIO: &str = "customresourcedefinitions.gen.yaml";

/// Defines those of the Gateway API, Istio and Envoy Gateway that somebody uses here, once for the whole run.
pub async fn define(cluster: &Cluster) {
    static DEFINED: OnceCell<()> = OnceCell::const_new();
    DEFINED.get_or_init(|| async { create(&cluster.client, &definitions()).await }).await;
}

fn definitions() -> Vec<CustomResourceDefinition> {
    let [api, istio, envoy_gateway] = folders();
    let mut definitions = Vec::new();
    for plural in ["backendtlspolicies", "gatewayclasses", "gateways", "httproutes"] {
        definitions.push(read(&api.join(format!("gateway.networking.k8s.io_{plural}.yaml"))));
    }
    for plural in ["backendtrafficpolicies", "clienttrafficpolicies", "envoyextensionpolicies"] {
        definitions.push(read(&envoy_gateway.join(format!("gateway.envoyproxy.io_{plural}.yaml"))));
    }
    let all = std::fs::read_to_string(istio.join(ISTIO)).unwrap();
    let rule = "name: destinationrules.networking.istio.io";
    definitions.push(definition(all.split("\n---\n").find(|text| text.contains(rule)).unwrap()));
    definitions
}

fn read(file: &Path) -> CustomResourceDefinition {
    let text = std::fs::read_to_string(file).unwrap();
    // Some are templates of a chart, with a condition around the whole.
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("{{")).collect();
    definition(&lines.join("\n"))
}

fn definition(text: &str) -> CustomResourceDefinition {
    let documents = Node::parse(text).unwrap();
    let mut objects = documents.iter().map(Node::to_json).filter(|object| !object.is_null());
    serde_json::from_value(objects.next().unwrap()).unwrap()
}

/// Of the Gateway API, Istio and Envoy Gateway: named by `make test`, else fetched by the script.
fn folders() -> [PathBuf; 3] {
    let named = std::env::var("PILOTFISH_GATEWAY_CRDS").ok().filter(|folders| !folders.is_empty());
    let folders = named.unwrap_or_else(|| {
        let done = Command::new("scripts/gateway-crds.sh").stderr(Stdio::inherit()).output().unwrap();
        assert!(done.status.success(), "scripts/gateway-crds.sh failed");
        String::from_utf8(done.stdout).unwrap()
    });
    let folders: Vec<PathBuf> = folders.split_whitespace().map(PathBuf::from).collect();
    folders.try_into().unwrap()
}
