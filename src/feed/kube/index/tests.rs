use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::feed::kube::kind;
use crate::feed::kube::{Kind, Scope};
use crate::resources::pod::tests::pod;

fn source(kind: Kind) -> Source {
    kind::sources(&Scope::default()).into_iter().find(|source| source.kind == kind).unwrap()
}

fn pool(name: &str, app: &str, ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "metadata": {"namespace": "n", "name": name},
        "spec": {"selector": {"matchLabels": {"app": app}}, "targetPorts": ports},
    })
}

fn ready(name: &str, uid: &str, app: &str, ip: &str) -> Pod {
    pod(json!({
        "metadata": {"namespace": "n", "name": name, "uid": uid, "labels": {"app": app}},
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
    }))
}

fn ended(mut pod: Pod) -> Pod {
    pod.stage = Stage::Ended;
    pod
}

fn addresses(index: &mut Index) -> Vec<String> {
    index.changed = true;
    let standing = index.standing().unwrap();
    standing.world.endpoints.iter().map(|endpoint| endpoint.address.to_string()).collect()
}

fn with_pool() -> Index {
    let mut index = Index::default();
    index.apply(&source(Kind::InferencePool), &pool("p", "w", &[8000]));
    index
}

#[test]
fn k8s_01_an_evicted_pod_leaves_at_once_and_its_address_changes_with_it() {
    let mut index = with_pool();
    let mut first = ready("p0", "1", "w", "10.0.0.10");
    index.apply_pod(first.clone());
    index.apply_pod(ready("p1", "2", "w", "10.0.0.11"));
    assert_eq!(addresses(&mut index), ["10.0.0.10:8000", "10.0.0.11:8000"]);
    first.stage = Stage::Ready("10.0.0.20".parse().unwrap());
    index.apply_pod(first.clone());
    assert_eq!(addresses(&mut index), ["10.0.0.20:8000", "10.0.0.11:8000"]);
    index.apply_pod(ended(first));
    let standing = index.standing().unwrap();
    assert_eq!(standing.world.endpoints.len(), 1);
    assert_eq!(standing.world.ended, [Arc::from("1")]);
    assert!(index.standing().is_none(), "nothing changed since");
}

#[test]
fn k8s_01_a_pod_that_vanished_between_two_lists_is_gone() {
    let mut index = with_pool();
    index.reset_pods("n", vec![ready("p0", "1", "w", "10.0.0.10"), ready("p1", "2", "w", "10.0.0.11")]);
    index.reset_pods("elsewhere", Vec::new());
    assert_eq!(addresses(&mut index).len(), 2);
    index.reset_pods("n", vec![ready("p1", "2", "w", "10.0.0.11")]);
    assert_eq!(addresses(&mut index), ["10.0.0.11:8000"]);
}

#[test]
fn the_end_of_a_pod_says_nothing_of_the_one_created_after_it() {
    let mut index = with_pool();
    index.apply_pod(ready("p0", "1", "w", "10.0.0.10"));
    index.apply_pod(ready("p0", "2", "w", "10.0.0.11"));
    index.delete_pod(&ended(ready("p0", "1", "w", "10.0.0.10")));
    let standing = index.standing().unwrap();
    assert_eq!(standing.world.endpoints[0].address.to_string(), "10.0.0.11:8000");
    assert!(standing.world.ended.iter().all(|uid| &**uid == "1"), "{:?}", standing.world.ended);
}

#[test]
fn a_pod_that_changed_its_labels_has_not_ended() {
    let mut index = with_pool();
    let pod = ready("p0", "1", "w", "10.0.0.10");
    index.apply_pod(pod.clone());
    index.standing();
    index.delete_pod(&pod);
    let standing = index.standing().unwrap();
    assert!(standing.world.endpoints.is_empty() && standing.world.ended.is_empty());
}

#[test]
fn what_nobody_reads_changes_nothing() {
    let mut index = with_pool();
    assert!(index.standing().unwrap().objects.is_some());
    let mut same = pool("p", "w", &[8000]);
    same["metadata"]["resourceVersion"] = json!("2");
    same["status"] = json!({"parents": []});
    index.apply(&source(Kind::InferencePool), &same);
    assert!(index.standing().is_none());
    index.apply_pod(ready("p0", "1", "w", "10.0.0.10"));
    assert!(index.standing().unwrap().objects.is_none(), "documents were not read again");
}

#[test]
fn a_wrong_object_keeps_its_last_good_version() {
    let mut index = with_pool();
    index.apply_pod(ready("p0", "1", "w", "10.0.0.10"));
    assert_eq!(addresses(&mut index), ["10.0.0.10:8000"]);
    let mut wrong = pool("p", "w", &[]);
    wrong["spec"]["targetPorts"] = json!([{"number": "http"}]);
    index.apply(&source(Kind::InferencePool), &wrong);
    assert_eq!(addresses(&mut index), ["10.0.0.10:8000"]);
}

#[test]
fn a_list_of_one_namespace_leaves_the_others() {
    let mut index = with_pool();
    let mut of_another = source(Kind::InferencePool);
    of_another.namespace = Some("another".to_owned());
    index.reset(&of_another, &[]);
    index.standing().unwrap();
    assert_eq!(index.lowered.world.pools.len(), 1);
    index.reset(&source(Kind::InferencePool), &[]);
    index.lower();
    assert_eq!(index.lowered.world.pools.len(), 0);
}

/// Something that happens on the API server, and how a watch tells of it.
#[derive(Clone, Debug)]
enum Change {
    Pool {
        name: u8,
        app: u8,
        ports: Vec<u16>,
    },
    NoPool {
        name: u8,
    },
    Pod {
        name: u8,
        uid: u8,
        app: u8,
        ip: u8,
        is_ready: bool,
    },
    NoPod {
        name: u8,
        seen_to_end: bool,
    },
    /// A pod is gone without anybody telling.
    Unseen {
        name: u8,
    },
    /// Everything is listed again.
    Relist,
}

fn change() -> impl Strategy<Value = Change> {
    let ports = prop::collection::vec(8000_u16..8003, 0..3);
    prop_oneof![
        2 => (0..2_u8, 0..2_u8, ports).prop_map(|(name, app, mut ports)| {
            ports.sort_unstable();
            ports.dedup();
            Change::Pool { name, app, ports }
        }),
        1 => (0..2_u8).prop_map(|name| Change::NoPool { name }),
        6 => (0..4_u8, 0..2_u8, 0..3_u8, 0..4_u8, any::<bool>())
            .prop_map(|(name, uid, app, ip, is_ready)| Change::Pod { name, uid, app, ip, is_ready }),
        2 => (0..4_u8, any::<bool>()).prop_map(|(name, seen_to_end)| Change::NoPod { name, seen_to_end }),
        1 => (0..4_u8).prop_map(|name| Change::Unseen { name }),
        1 => Just(Change::Relist),
    ]
}

/// What stands, told to an index as watches would.
#[derive(Default)]
struct Server {
    pools: BTreeMap<u8, Value>,
    pods: BTreeMap<u8, Pod>,
}

impl Server {
    fn relist(&self, index: &mut Index) {
        index.reset(&source(Kind::InferencePool), &self.pools.values().cloned().collect::<Vec<_>>());
        index.reset_pods("n", self.pods.values().cloned().collect());
    }

    fn happen(&mut self, change: Change, index: &mut Index) {
        let pools = source(Kind::InferencePool);
        match change {
            Change::Pool { name, app, ports } => {
                let object = pool(&name.to_string(), &format!("app-{app}"), &ports);
                index.apply(&pools, &object);
                self.pools.insert(name, object);
            }
            Change::NoPool { name } => {
                self.pools.remove(&name);
                index.delete(&pools, &ObjectName::new("n", name.to_string()));
            }
            Change::Pod { name, uid, app, ip, is_ready } => {
                let uid = format!("{name}-{uid}");
                let mut pod = ready(&name.to_string(), &uid, &format!("app-{app}"), &format!("10.0.0.{ip}"));
                if !is_ready {
                    pod.stage = Stage::Unready;
                }
                index.apply_pod(pod.clone());
                self.pods.insert(name, pod);
            }
            Change::NoPod { name, seen_to_end } => {
                if let Some(pod) = self.pods.remove(&name) {
                    index.delete_pod(&if seen_to_end { ended(pod) } else { pod });
                }
            }
            Change::Unseen { name } => {
                self.pods.remove(&name);
            }
            Change::Relist => self.relist(index),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn whatever_happened_in_whatever_order_the_index_says_what_stands(
        changes in prop::collection::vec(change(), 0..40),
    ) {
        let (mut server, mut index) = (Server::default(), Index::default());
        for change in changes {
            server.happen(change, &mut index);
        }
        server.relist(&mut index);
        let mut fresh = Index::default();
        server.relist(&mut fresh);
        prop_assert_eq!(addresses(&mut index), addresses(&mut fresh));
        prop_assert_eq!(index.selectors(), fresh.selectors());
    }

    /// Without lost events nothing needs to be listed again.
    #[test]
    fn events_alone_suffice_when_none_is_lost(changes in prop::collection::vec(change(), 0..40)) {
        let (mut server, mut index) = (Server::default(), Index::default());
        for change in changes {
            if !matches!(change, Change::Unseen { .. } | Change::Relist) {
                server.happen(change, &mut index);
            }
        }
        let mut fresh = Index::default();
        server.relist(&mut fresh);
        prop_assert_eq!(addresses(&mut index), addresses(&mut fresh));
    }
}
