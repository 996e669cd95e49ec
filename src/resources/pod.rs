//! A Pod, as far as it is read: who it is, whether it serves, and where.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Deserialize;

use crate::state::ObjectName;

/// Which of a pool's ports engines of this pod listen on; llm-d's name and its former one.
pub const ACTIVE_PORTS: [&str; 2] = ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"];
/// Which engine a pod runs; llm-d's label and its former one.
pub const ENGINE_TYPE: [&str; 2] = ["llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"];

/// A Pod as the API server writes it, without what nobody here reads.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct PodObject {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Spec {
    #[serde(default)]
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Container {
    #[serde(default)]
    ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerPort {
    container_port: u16,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    #[serde(default)]
    phase: String,
    #[serde(rename = "podIP", default)]
    pod_ip: String,
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Clone, Debug, Deserialize)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

impl Resource for PodObject {
    type DynamicType = ();
    type Scope = kube::core::NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Pod".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "pods".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// What is kept of a Pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    /// Identity as people know it.
    pub name: ObjectName,
    /// Identity for all time.
    pub uid: Arc<str>,
    /// Seconds since the epoch.
    pub created: i64,
    /// Labels that pools select by.
    pub labels: BTreeMap<String, String>,
    /// Annotations that are read.
    pub annotations: BTreeMap<String, String>,
    /// Where it is in its life.
    pub stage: Stage,
    /// Ports that its containers declare; none where a container declares none, which may listen on any.
    pub declared_ports: Option<Vec<u16>>,
}

/// Where a pod is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is not ready, or was not given an address.
    Unready,
    /// It is running and ready at this address.
    Ready(IpAddr),
    /// It terminates or is over: it will not be ready again.
    Ended,
}

impl From<PodObject> for Pod {
    fn from(object: PodObject) -> Self {
        let stage = stage(&object);
        let ObjectMeta { name, namespace, uid, labels, annotations, creation_timestamp, .. } =
            object.metadata;
        let mut annotations = annotations.unwrap_or_default();
        annotations
            .retain(|name, _| name.starts_with("pilotfish.dev/") || ACTIVE_PORTS.contains(&name.as_str()));
        Self {
            name: ObjectName::new(namespace.unwrap_or_default(), name.unwrap_or_default()),
            uid: uid.unwrap_or_default().into(),
            created: creation_timestamp.map_or(0, |time| time.0.as_second()),
            labels: labels.unwrap_or_default(),
            annotations,
            stage,
            declared_ports: declared_ports(&object.spec.containers),
        }
    }
}

fn stage(object: &PodObject) -> Stage {
    let Status { phase, pod_ip, conditions } = &object.status;
    if object.metadata.deletion_timestamp.is_some() || phase == "Failed" || phase == "Succeeded" {
        return Stage::Ended;
    }
    let ready = conditions.iter().any(|condition| condition.kind == "Ready" && condition.status == "True");
    match pod_ip.parse() {
        Ok(address) if ready && phase == "Running" => Stage::Ready(address),
        _ => Stage::Unready,
    }
}

/// Declaring ports is a custom and no duty: a container without any may be the engine. So only pods that declare ports in
/// every container are known not to listen on others.
fn declared_ports(containers: &[Container]) -> Option<Vec<u16>> {
    let all_declare = containers.iter().all(|container| !container.ports.is_empty());
    let declared = containers.iter().flat_map(|c| &c.ports).map(|port| port.container_port);
    (all_declare && !containers.is_empty()).then(|| declared.collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::{Value, json};

    /// The pod that an object describes.
    pub(crate) fn pod(object: Value) -> Pod {
        Pod::from(serde_json::from_value::<PodObject>(object).unwrap())
    }

    fn at(phase: &str, address: &str, ready: &str, deleted: Option<&str>) -> Pod {
        pod(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "1", "deletionTimestamp": deleted},
            "status": {"phase": phase, "podIP": address, "conditions": [
                {"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": ready},
            ]},
        }))
    }

    #[rstest]
    #[case("Running", "10.0.0.1", "True", None, Stage::Ready("10.0.0.1".parse().unwrap()))]
    #[case("Running", "fd00::1", "True", None, Stage::Ready("fd00::1".parse().unwrap()))]
    #[case("Running", "10.0.0.1", "False", None, Stage::Unready)]
    #[case("Running", "10.0.0.1", "Unknown", None, Stage::Unready)]
    #[case("Running", "", "True", None, Stage::Unready)]
    #[case("Pending", "10.0.0.1", "True", None, Stage::Unready)]
    #[case("Failed", "", "True", None, Stage::Ended)]
    #[case("Succeeded", "10.0.0.1", "True", None, Stage::Ended)]
    #[case("Running", "10.0.0.1", "True", Some("2026-09-01T00:00:00Z"), Stage::Ended)]
    fn only_ready_running_addressed_pods_that_stay_serve(
        #[case] phase: &str,
        #[case] address: &str,
        #[case] ready: &str,
        #[case] deleted: Option<&str>,
        #[case] expected: Stage,
    ) {
        assert_eq!(at(phase, address, ready, deleted).stage, expected);
    }

    #[rstest]
    #[case(json!([{"ports": [{"containerPort": 8300}]}]), Some(vec![8300]))]
    #[case(json!([{"ports": [{"containerPort": 8300}]}, {}]), None)]
    #[case(json!([{}]), None)]
    #[case(json!([{"ports": [{"containerPort": 1}, {"containerPort": 2}]}]), Some(vec![1, 2]))]
    fn ports_are_known_where_every_container_declares_some(
        #[case] containers: Value,
        #[case] expected: Option<Vec<u16>>,
    ) {
        let pod = pod(json!({"metadata": {}, "spec": {"containers": containers}}));
        assert_eq!(pod.declared_ports, expected);
    }

    #[test]
    fn a_bare_object_is_a_pod_that_does_not_serve() {
        assert_eq!(pod(json!({})).stage, Stage::Unready);
    }
}
