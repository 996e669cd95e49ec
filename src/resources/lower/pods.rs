//! The endpoints that pods are: one for each port of a pool on which an engine of the pod may listen.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use super::{DRAIN, Report, disaggregation, events, speed};
use crate::document::{Place, Problem, Problems};
use crate::resources::pod::{ACTIVE_PORTS, ENGINE_TYPE, Pod, Stage};
use crate::state::ObjectName;
use crate::state::endpoint::{EndpointSpec, EngineKind, EventPort, EventPorts, PodIdentity};
use crate::state::rates::Speed;
use crate::topology::PoolSpec;

/// What a set of pods means to a set of pools.
#[derive(Debug, Default)]
pub struct PodEndpoints {
    /// Endpoints, in the order of their keys.
    pub endpoints: Vec<EndpointSpec>,
    /// Ready pods that a pool selects and cannot use.
    pub unroutable: Vec<Unroutable>,
    /// What is wrong with annotations of pods.
    pub problems: Vec<Problem>,
}

/// A ready pod that a pool selects and cannot use.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Unroutable {
    /// The pod.
    pub pod: ObjectName,
    /// Which kind of reason, a label of metrics: `port` or `address`.
    pub reason: &'static str,
    /// What an operator should know.
    pub why: String,
}

/// The endpoints of those of `pods` that serve, for `pools`.
pub fn pod_endpoints<'a>(pods: impl Iterator<Item = &'a Pod>, pools: &[PoolSpec]) -> PodEndpoints {
    let mut by_namespace: HashMap<&str, Vec<&PoolSpec>> = HashMap::new();
    for pool in pools {
        by_namespace.entry(&pool.name.object.namespace).or_default().push(pool);
    }
    let mut found = PodEndpoints::default();
    let mut serving: Vec<(&Pod, IpAddr)> = pods
        .filter_map(|pod| if let Stage::Ready(address) = pod.stage { Some((pod, address)) } else { None })
        .collect();
    // An address goes to the youngest: pods that are over may be seen to end after their address was given to another.
    serving.sort_by(|(a, _), (b, _)| (b.created, &b.name).cmp(&(a.created, &a.name)));
    let mut taken: HashMap<SocketAddr, &ObjectName> = HashMap::new();
    for (pod, ip) in serving {
        let pools = by_namespace.get(&*pod.name.namespace).into_iter().flatten();
        let mut ports = Ports::default();
        for pool in pools.filter(|pool| pool.selects_labels(&pod.name.namespace, &pod.labels)) {
            ports.extend(pod, pool, &mut found.unroutable);
        }
        let several = ports.listened.len() > 1;
        let engines = Engines { pod, annotations: merged(pod, &ports.pools), several };
        for (port, rank) in ports.listened {
            let address = SocketAddr::new(ip, port);
            if let Some(younger) = taken.get(&address) {
                let why = format!("{address} is also the address of the younger pod {younger}");
                found.unroutable.push(Unroutable { pod: pod.name.clone(), reason: "address", why });
                continue;
            }
            taken.insert(address, &pod.name);
            found.endpoints.push(engines.endpoint(address, rank, &mut found.problems));
        }
    }
    found.endpoints.sort_by(|a, b| a.key().cmp(&b.key()));
    found
}

/// Ports of a pod on which engines listen, each with its rank, and the pools that want them.
#[derive(Debug, Default)]
struct Ports<'a> {
    listened: BTreeMap<u16, u16>,
    pools: Vec<&'a PoolSpec>,
}

impl<'a> Ports<'a> {
    fn extend(&mut self, pod: &Pod, pool: &'a PoolSpec, unroutable: &mut Vec<Unroutable>) {
        if let Some(declared) = &pod.declared_ports
            && !pool.ports.iter().any(|port| declared.contains(port))
        {
            let why = format!(
                "{} wants ports {:?} and the pod declares {declared:?} only: correct the one or the other",
                pool.name, pool.ports
            );
            return unroutable.push(Unroutable { pod: pod.name.clone(), reason: "port", why });
        }
        self.pools.push(pool);
        let active = active_ports(pod);
        for (rank, port) in pool.ports.iter().enumerate() {
            if active.as_ref().is_none_or(|active| active.contains(port)) {
                self.listened.entry(*port).or_insert(rank as u16);
            }
        }
    }
}

/// The ports that the pod says are in use; none if it does not say. What is no port is none of them.
fn active_ports(pod: &Pod) -> Option<HashSet<u16>> {
    let text = ACTIVE_PORTS.iter().find_map(|name| pod.annotations.get(*name))?;
    Some(text.split(',').filter_map(|port| port.trim().parse().ok()).collect())
}

/// The pod's annotations, with those of its pools where it has none of that name.
fn merged<'a>(pod: &'a Pod, pools: &[&PoolSpec]) -> Cow<'a, BTreeMap<String, String>> {
    let mut annotations = Cow::Borrowed(&pod.annotations);
    for (name, value) in pools.iter().flat_map(|pool| &pool.annotations) {
        if !annotations.contains_key(name) {
            annotations.to_mut().insert(name.clone(), value.clone());
        }
    }
    annotations
}

/// The engines of one pod.
struct Engines<'a> {
    pod: &'a Pod,
    annotations: Cow<'a, BTreeMap<String, String>>,
    /// Whether it runs more than one.
    several: bool,
}

impl Engines<'_> {
    fn endpoint(&self, address: SocketAddr, rank: u16, problems: &mut Vec<Problem>) -> EndpointSpec {
        let Pod { name, uid, labels, .. } = self.pod;
        let file = ["pods", &*name.namespace, &*name.name].iter().collect::<PathBuf>();
        let mut found = Problems::new(&file, "".into());
        let mut report = Report { problems: &mut found, place: &|_| Place::START };
        let (weight, gpu) =
            speed::speed(None, &self.annotations, &mut report).unwrap_or((1.0, Speed::default()));
        let written = events::Written::default();
        let ports = events::ports(written, &self.annotations, address, &mut report);
        let transfer = disaggregation::transfer(&self.annotations, self.several.then_some(rank), &mut report);
        if rank == 0 {
            problems.append(&mut found.found);
        }
        EndpointSpec {
            name: name.clone(),
            address,
            weight,
            gpu,
            labels: labels.clone(),
            engine: engine(labels),
            event_ports: of_rank(ports, rank),
            transfer,
            drain: self.annotations.get(DRAIN).is_some_and(|value| value == "true"),
            pod: Some(PodIdentity { uid: Arc::clone(uid), rank }),
        }
    }
}

/// The engine that the labels name. ModelServers say it too, and win.
fn engine(labels: &BTreeMap<String, String>) -> EngineKind {
    let name = ENGINE_TYPE.iter().find_map(|label| labels.get(*label));
    name.and_then(|name| EngineKind::named(name)).unwrap_or_default()
}

/// vLLM adds the rank to the ports it is given for events and replays (`offset_endpoint_port` in its
/// `distributed/kv_events.py`).
fn of_rank(ports: EventPorts, rank: u16) -> EventPorts {
    let events = ports.events.and_then(|port| match port {
        EventPort::Dial(port) => port.checked_add(rank).map(EventPort::Dial),
        EventPort::Listen(_) => None,
    });
    EventPorts { events, replay: ports.replay.and_then(|port| port.checked_add(rank)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::pod::tests::pod;
    use crate::state::pool::TrafficPolicy;
    use crate::state::{PoolKind, PoolName};
    use rstest::rstest;
    use serde_json::{Value, json};

    fn pool(name: &str, ports: &[u16]) -> PoolSpec {
        PoolSpec {
            name: PoolName { kind: PoolKind::InferencePool, object: ObjectName::new("n", name) },
            model: None,
            selector: BTreeMap::from([("app".to_owned(), "w".to_owned())]),
            ports: ports.to_vec(),
            annotations: BTreeMap::new(),
            traffic: TrafficPolicy::default(),
            engine: None,
            tokenizer: None,
            disaggregation: None,
        }
    }

    /// A ready pod of the pools' label, with what `more` says otherwise.
    fn ready(name: &str, ip: &str, more: &Value) -> Pod {
        let mut object = json!({
            "metadata": {"name": name, "namespace": "n", "uid": name, "labels": {"app": "w"}},
            "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
        });
        merge(&mut object, more);
        pod(object)
    }

    fn merge(into: &mut Value, more: &Value) {
        match (into, more) {
            (Value::Object(into), Value::Object(more)) => {
                more.iter()
                    .for_each(|(name, value)| merge(into.entry(name.as_str()).or_insert(Value::Null), value));
            }
            (into, more) => *into = more.clone(),
        }
    }

    fn addresses(found: &PodEndpoints) -> Vec<String> {
        found.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
    }

    fn of(pods: &[Pod], pools: &[PoolSpec]) -> PodEndpoints {
        pod_endpoints(pods.iter(), pools)
    }

    #[test]
    fn k8s_04_every_port_is_an_endpoint_and_pools_share_them() {
        let pods = [ready("a", "10.0.0.1", &json!({})), ready("b", "fd00::2", &json!({}))];
        let found = of(&pods, &[pool("x", &[8000, 8001]), pool("y", &[8001])]);
        assert_eq!(addresses(&found), ["10.0.0.1:8000", "10.0.0.1:8001", "[fd00::2]:8000", "[fd00::2]:8001"]);
        let ranks: Vec<u16> = found.endpoints.iter().map(|e| e.pod.as_ref().unwrap().rank).collect();
        assert_eq!(ranks, [0, 1, 0, 1]);
        assert_eq!(addresses(&of(&pods, &[pool("x", &[8000])])), ["10.0.0.1:8000", "[fd00::2]:8000"]);
        assert_eq!(addresses(&of(&pods, &[])), Vec::<String>::new());
    }

    #[rstest]
    #[case(json!([{"ports": [{"containerPort": 8300}]}]), &[], &["port"])]
    #[case(json!([{}]), &["10.0.0.1:8000", "10.0.0.1:9000"], &[])]
    #[case(json!([{"ports": [{"containerPort": 8000}]}]), &["10.0.0.1:8000", "10.0.0.1:9000"], &[])]
    fn k8s_04_pods_that_declare_other_ports_are_reported(
        #[case] containers: Value,
        #[case] expected: &[&str],
        #[case] unroutable: &[&str],
    ) {
        let pods = [ready("a", "10.0.0.1", &json!({"spec": {"containers": containers}}))];
        let found = of(&pods, &[pool("x", &[8000, 9000])]);
        assert_eq!(addresses(&found), expected);
        let reasons: Vec<&str> = found.unroutable.iter().map(|u| u.reason).collect();
        assert_eq!(reasons, unroutable);
    }

    #[test]
    fn k8s_04_two_pods_of_one_node_are_told_apart_by_their_ports() {
        let on = |name: &str, port: u16| {
            ready(
                name,
                "10.0.0.1",
                &json!({"metadata": {"annotations": {ACTIVE_PORTS[0]: port.to_string()}}}),
            )
        };
        let found = of(&[on("a", 8000), on("b", 8001)], &[pool("x", &[8000, 8001])]);
        assert_eq!(addresses(&found), ["10.0.0.1:8000", "10.0.0.1:8001"]);
        assert!(found.unroutable.is_empty(), "{:?}", found.unroutable);
    }

    #[rstest]
    #[case("8001", &["10.0.0.1:8001"])]
    #[case(" 8001 , x, 9 ", &["10.0.0.1:8001"])]
    #[case("", &[])]
    fn active_ports_restrict_a_pod(#[case] ports: &str, #[case] expected: &[&str]) {
        for name in ACTIVE_PORTS {
            let pods = [ready("a", "10.0.0.1", &json!({"metadata": {"annotations": {name: ports}}}))];
            assert_eq!(addresses(&of(&pods, &[pool("x", &[8000, 8001])])), expected);
        }
    }

    #[test]
    fn an_address_belongs_to_the_youngest_pod_that_has_it() {
        let born =
            |name: &str, at: &str| ready(name, "10.0.0.1", &json!({"metadata": {"creationTimestamp": at}}));
        let pods = [born("old", "2026-01-01T00:00:00Z"), born("new", "2026-01-02T00:00:00Z")];
        let found = of(&pods, &[pool("x", &[8000])]);
        assert_eq!(&*found.endpoints[0].name.name, "new");
        assert_eq!((found.endpoints.len(), &*found.unroutable[0].pod.name), (1, "old"));
    }

    #[test]
    fn annotations_speak_for_every_rank_and_the_pods_win_over_the_pools() {
        let annotations = json!({
            "pilotfish.dev/kv-events": "5557", "pilotfish.dev/kv-replay": "tcp://10.9.9.9:1",
            "pilotfish.dev/weight": "2",
        });
        let pods = [ready("a", "10.0.0.1", &json!({"metadata": {"annotations": annotations}}))];
        let mut pool = pool("x", &[8000, 8001]);
        pool.annotations.insert("pilotfish.dev/weight".to_owned(), "7".to_owned());
        pool.annotations.insert(DRAIN.to_owned(), "true".to_owned());
        let found = of(&pods, &[pool]);
        let second = &found.endpoints[1];
        assert_eq!(second.event_ports, EventPorts { events: Some(EventPort::Dial(5558)), replay: None });
        assert_eq!((second.weight, second.drain), (2.0, true));
        let problems: Vec<String> =
            found.problems.iter().map(|p| format!("{}: {}", p.file.display(), p.message)).collect();
        assert_eq!(problems, ["pods/n/a: `tcp://10.9.9.9:1` is not a port of this endpoint"]);
    }

    #[test]
    fn labels_name_the_engine() {
        let pods = [ready("a", "10.0.0.1", &json!({"metadata": {"labels": {ENGINE_TYPE[1]: "SGLang"}}}))];
        assert_eq!(of(&pods, &[pool("x", &[1])]).endpoints[0].engine, EngineKind::Sglang);
    }
}
