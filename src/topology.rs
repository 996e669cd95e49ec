//! Turns what feeds describe into the snapshot that requests read, keeping every endpoint and pool that is still itself.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use tokio::time::Instant;

use crate::route::rewrite::Rewrite;
use crate::route::{Route, RouteTable};
use crate::snapshot::{Objective, Snapshot};
use crate::state::disaggregation::{Disaggregation, DisaggregationSpec};
use crate::state::endpoint::{EndpointSpec, EngineKind};
use crate::state::pool::{PoolMemory, TrafficPolicy};
use crate::state::{Endpoint, Member, ObjectName, Pool, PoolName, TokenizerSource};

/// How long an endpoint that vanished keeps its identity, and with it what is known of its cache.
pub const GRACE: Duration = Duration::from_mins(1);

/// Everything a feed describes.
#[derive(Clone, Debug, Default)]
pub struct World {
    /// Endpoints.
    pub endpoints: Vec<EndpointSpec>,
    /// Pools.
    pub pools: Vec<PoolSpec>,
    /// Routes.
    pub routes: Vec<Route>,
    /// Rewrites, each with the InferencePool it is for.
    pub rewrites: Vec<(ObjectName, Rewrite)>,
    /// Objectives by name.
    pub objectives: Vec<(ObjectName, Objective)>,
    /// Uids of pods that ended since the last world: what is known of their caches is void at once.
    pub ended: Vec<Arc<str>>,
}

/// A pool as described.
#[derive(Clone, Debug)]
pub struct PoolSpec {
    /// Identity.
    pub name: PoolName,
    /// The model name its engines expect.
    pub model: Option<String>,
    /// Labels an endpoint of its namespace must carry; none selects none.
    pub selector: BTreeMap<String, String>,
    /// Ports of pods, each an endpoint of its own.
    pub ports: Vec<u16>,
    /// Annotations that speak for those of its pods that do not say it themselves.
    pub annotations: BTreeMap<String, String>,
    /// Timeout and retries.
    pub traffic: TrafficPolicy,
    /// The engine its endpoints run, if said.
    pub engine: Option<EngineKind>,
    /// Where its model's tokenizer is, if said.
    pub tokenizer: Option<TokenizerSource>,
    /// How prompts and outputs are shared among its endpoints, if they may be.
    pub disaggregation: Option<DisaggregationSpec>,
}

impl PoolSpec {
    /// Whether it selects that endpoint. The address that a document gives wins over the pool's ports.
    pub fn selects(&self, endpoint: &EndpointSpec) -> bool {
        self.selects_labels(&endpoint.name.namespace, &endpoint.labels)
            && (endpoint.pod.is_none() || self.ports.contains(&endpoint.address.port()))
    }

    /// Whether it selects what carries these labels in that namespace.
    pub fn selects_labels(&self, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        !self.selector.is_empty()
            && *self.name.object.namespace == *namespace
            && self.selector.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

/// The feeds' side of the state: remembers endpoints and pools between worlds.
#[derive(Debug, Default)]
pub struct Topology {
    endpoints: AHashMap<Key, Arc<Endpoint>>,
    pools: AHashMap<PoolName, Known>,
    retired: Vec<(Instant, Arc<Endpoint>)>,
}

/// See [`EndpointSpec::key`].
type Key = (ObjectName, u16);

fn key(spec: &EndpointSpec) -> Key {
    let (name, port) = spec.key();
    (name.clone(), port)
}

#[derive(Debug, Default)]
struct Known {
    memory: Arc<PoolMemory>,
    members: AHashMap<u64, Arc<Member>>,
}

impl Topology {
    /// Forgets endpoints whose grace period is over.
    pub fn prune(&mut self, now: Instant) {
        self.retired.retain(|(since, _)| now.duration_since(*since) < GRACE);
    }

    /// Makes the snapshot of `world`. Endpoints that changed identity are new; all others keep bookings, signals and health.
    pub fn apply(&mut self, mut world: World, now: Instant) -> Snapshot {
        self.prune(now);
        for endpoint in &mut world.endpoints {
            if let Some(engine) =
                world.pools.iter().filter(|pool| pool.selects(endpoint)).find_map(|pool| pool.engine)
            {
                endpoint.engine = engine;
            }
        }
        let mut previous = std::mem::take(&mut self.endpoints);
        for spec in &world.endpoints {
            let endpoint = match self.known(&mut previous, spec, now) {
                None => Arc::new(Endpoint::new(spec.clone())),
                Some(known) if known.is_unchanged(spec) => known,
                Some(known) => Arc::new(known.changed(spec.clone())),
            };
            endpoint.health.set_drain(spec.drain);
            self.endpoints.insert(key(spec), endpoint);
        }
        self.retired.extend(previous.into_values().map(|endpoint| (now, endpoint)));
        let ended = |endpoint: &Endpoint| endpoint.pod.as_ref().is_some_and(|p| world.ended.contains(&p.uid));
        self.retired.retain(|(_, endpoint)| !ended(endpoint));

        let live: HashSet<u64> = self.live_slots().collect();
        let mut known = std::mem::take(&mut self.pools);
        let pools = world.pools.iter().map(|spec| {
            let mut before = known.remove(&spec.name).unwrap_or_default();
            let mut selected: Vec<&EndpointSpec> =
                world.endpoints.iter().filter(|e| spec.selects(e)).collect();
            selected.sort_by_key(|endpoint| endpoint.key());
            let members: Vec<Arc<Member>> = selected
                .iter()
                .map(|endpoint| {
                    let endpoint = Arc::clone(&self.endpoints[&key(endpoint)]);
                    match before.members.remove(&endpoint.slot) {
                        None => Arc::new(Member::new(endpoint)),
                        Some(member) if Arc::ptr_eq(&member.endpoint, &endpoint) => member,
                        Some(member) => Arc::new(member.with(endpoint)),
                    }
                })
                .collect();
            // Members that left may come back within their endpoint's grace period, with requests still open.
            before.members.retain(|slot, _| live.contains(slot));
            before.members.extend(members.iter().map(|m| (m.endpoint.slot, Arc::clone(m))));
            let kept = Known { memory: Arc::clone(&before.memory), members: before.members };
            self.pools.insert(spec.name.clone(), kept);
            let model = spec.model.as_deref().map(Arc::from);
            let roles = spec.disaggregation.as_ref().and_then(|spec| Disaggregation::of(spec, &members));
            let pool = Pool::new(spec.name.clone(), model, members, spec.traffic, before.memory);
            Arc::new(pool.with_tokenizer(spec.tokenizer.clone()).with_disaggregation(roles))
        });
        let pools = pools.collect();
        let endpoints = world.endpoints.iter().map(|spec| Arc::clone(&self.endpoints[&key(spec)])).collect();
        let routes = RouteTable::new(world.routes.into_iter().map(Arc::new).collect());
        Snapshot::new(endpoints, pools, routes).with_models(world.rewrites, world.objectives)
    }

    /// Slots whose cache knowledge still counts: endpoints that are there, and those that left a short while ago.
    pub fn live_slots(&self) -> impl Iterator<Item = u64> + '_ {
        self.endpoints
            .values()
            .chain(self.retired.iter().map(|(_, endpoint)| endpoint))
            .map(|endpoint| endpoint.slot)
    }

    /// The endpoint that `spec` describes, if it is there or vanished within its grace period. One of its name that is
    /// another is retired.
    fn known(
        &mut self,
        previous: &mut AHashMap<Key, Arc<Endpoint>>,
        spec: &EndpointSpec,
        now: Instant,
    ) -> Option<Arc<Endpoint>> {
        match previous.remove(&key(spec)) {
            Some(endpoint) if endpoint.is(spec) => return Some(endpoint),
            Some(other) => self.retired.push((now, other)),
            None => {}
        }
        let at = self.retired.iter().position(|(_, endpoint)| endpoint.is(spec))?;
        Some(self.retired.swap_remove(at).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::PoolKind;
    use crate::state::disaggregation::TransferSpec;
    use crate::state::endpoint::PodIdentity;
    use crate::state::reservation::tests::work;
    use crate::state::reservation::{Leg, Role};

    fn endpoint(name: &str, address: &str, app: &str) -> EndpointSpec {
        EndpointSpec {
            name: ObjectName::new("default", name),
            address: address.parse().unwrap(),
            weight: 1.0,
            gpu: crate::state::rates::Speed::default(),
            labels: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            engine: EngineKind::Vllm,
            event_ports: crate::state::endpoint::EventPorts::default(),
            transfer: TransferSpec::default(),
            drain: false,
            pod: None,
        }
    }

    fn pool(name: &str, app: &str) -> PoolSpec {
        PoolSpec {
            name: PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", name) },
            model: None,
            selector: BTreeMap::from([("app".to_owned(), app.to_owned())]),
            ports: vec![80],
            annotations: BTreeMap::new(),
            traffic: TrafficPolicy::default(),
            engine: None,
            tokenizer: None,
            disaggregation: None,
        }
    }

    fn world(endpoints: Vec<EndpointSpec>, pools: Vec<PoolSpec>) -> World {
        World { endpoints, pools, ..World::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn bookings_survive_reloads_and_a_short_absence_but_not_a_new_address() {
        let mut topology = Topology::default();
        let here = || world(vec![endpoint("a", "10.0.0.1:80", "x")], vec![pool("p", "x")]);
        let first = topology.apply(here(), Instant::now());
        let member = Arc::clone(&first.pools[0].members[0]);
        let _leg = Leg::book(Role::Serve, Arc::clone(&first.pools[0]), Arc::clone(&member), work(10, 1));
        let again = topology.apply(here(), Instant::now());
        assert!(Arc::ptr_eq(&again.pools[0].members[0], &member));
        topology.apply(world(vec![], vec![pool("p", "x")]), Instant::now());
        tokio::time::advance(GRACE / 2).await;
        let back = topology.apply(here(), Instant::now());
        assert_eq!(back.endpoints[0].slot, member.endpoint.slot);
        assert_eq!(back.endpoints[0].booked.read().0, 1);
        let moved = topology.apply(world(vec![endpoint("a", "10.0.0.2:80", "x")], vec![]), Instant::now());
        assert_ne!(moved.endpoints[0].slot, member.endpoint.slot);
        assert_eq!(moved.endpoints[0].booked.read().0, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_label_or_weight_forgets_nothing_and_a_move_can_be_taken_back() {
        let mut topology = Topology::default();
        let pools = || vec![pool("p", "x")];
        let first = topology.apply(world(vec![endpoint("a", "10.0.0.1:80", "x")], pools()), Instant::now());
        let member = Arc::clone(&first.pools[0].members[0]);
        let _leg = Leg::book(Role::Serve, Arc::clone(&first.pools[0]), Arc::clone(&member), work(10, 1));
        let mut heavier = endpoint("a", "10.0.0.1:80", "x");
        heavier.weight = 3.0;
        heavier.labels.insert("tier".to_owned(), "gold".to_owned());
        let again = topology.apply(world(vec![heavier.clone()], pools()), Instant::now());
        let same = &again.pools[0].members[0];
        assert_eq!((same.endpoint.slot, same.endpoint.weight), (member.endpoint.slot, 3.0));
        assert_eq!((same.booked.read().0, same.endpoint.booked.read().0), (1, 1));
        topology.apply(world(vec![endpoint("a", "10.0.0.9:80", "x")], pools()), Instant::now());
        let back = topology.apply(world(vec![heavier], pools()), Instant::now());
        assert_eq!(back.endpoints[0].slot, member.endpoint.slot);
        assert_eq!(back.pools[0].members[0].booked.read().0, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_absence_forgets() {
        let mut topology = Topology::default();
        let here = || world(vec![endpoint("a", "10.0.0.1:80", "x")], vec![]);
        let slot = topology.apply(here(), Instant::now()).endpoints[0].slot;
        topology.apply(World::default(), Instant::now());
        assert_eq!(topology.live_slots().collect::<Vec<_>>(), [slot]);
        tokio::time::advance(GRACE).await;
        assert_ne!(topology.apply(here(), Instant::now()).endpoints[0].slot, slot);
    }

    fn in_pod(uid: &str, mut spec: EndpointSpec) -> EndpointSpec {
        spec.pod = Some(PodIdentity { uid: uid.into(), rank: 0 });
        spec
    }

    #[tokio::test(start_paused = true)]
    async fn a_pod_that_ended_leaves_nothing_and_one_created_anew_inherits_nothing() {
        let mut topology = Topology::default();
        let here = |uid| world(vec![in_pod(uid, endpoint("a", "10.0.0.1:80", "x"))], vec![pool("p", "x")]);
        let slot = topology.apply(here("1"), Instant::now()).endpoints[0].slot;
        let ended = World { ended: vec!["1".into()], ..World::default() };
        topology.apply(ended, Instant::now());
        assert_eq!(topology.live_slots().count(), 0);
        let anew = topology.apply(here("2"), Instant::now()).endpoints[0].slot;
        assert_ne!(anew, slot);
        let third = topology.apply(here("3"), Instant::now()).endpoints[0].slot;
        assert_ne!(third, anew, "the same name and address are not the same pod");
    }

    #[test]
    fn a_pool_takes_the_engines_of_a_pod_on_its_own_ports_only() {
        let mut topology = Topology::default();
        let engines = ["10.0.0.1:80", "10.0.0.1:81"].map(|at| in_pod("1", endpoint("a", at, "x")));
        let mut other = pool("other", "x");
        other.ports = vec![81, 82];
        let snapshot = topology.apply(world(engines.to_vec(), vec![pool("p", "x"), other]), Instant::now());
        let of = |at: usize| -> Vec<u16> {
            snapshot.pools[at].members.iter().map(|member| member.endpoint.address.port()).collect()
        };
        assert_eq!((of(0), of(1)), (vec![80], vec![81]));
    }

    #[test]
    fn an_empty_selector_selects_nothing_and_namespaces_do_not_mix() {
        let mut topology = Topology::default();
        let mut none = pool("none", "x");
        none.selector.clear();
        let mut other = endpoint("b", "10.0.0.2:80", "x");
        other.name = ObjectName::new("elsewhere", "b");
        let snapshot = topology.apply(
            world(vec![endpoint("a", "10.0.0.1:80", "x"), other], vec![none, pool("p", "x")]),
            Instant::now(),
        );
        let sizes: Vec<usize> = snapshot.pools.iter().map(|pool| pool.members.len()).collect();
        assert_eq!(sizes, [0, 1]);
    }
}
