use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pilotfish::engine::EngineConfig;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::kit::engine::SimulatedEngine;
use crate::kit::envoy::{Gateway, Setup};
use crate::kit::eventually::eventually;
use crate::kit::http::Client;
use crate::kit::kube::Cluster;
use crate::kit::picker::Picker;

/// Clients that chat without a pause.
const CLIENTS: usize = 4;
/// Answers that are looked at after each change.
const LOOKED_AT: usize = 40;

/// A namespace, its picker, an Envoy before it, and traffic.
pub struct Stand {
    /// The namespace.
    pub cluster: Cluster,
    /// Its picker.
    pub picker: Picker,
    engines: BTreeMap<String, SimulatedEngine>,
    traffic: Traffic,
    _gateway: Gateway,
    slowest: Duration,
}

impl Stand {
    /// Over these objects, and ready pods `p0`, `p1`, ... of label `app: w`, each with an engine on port 8000.
    pub async fn over(objects: &str, pods: u8) -> Self {
        Self::of(Cluster::namespace().await, objects, pods).await
    }

    /// The same in a namespace that is there.
    pub async fn of(cluster: Cluster, objects: &str, pods: u8) -> Self {
        cluster.apply(objects).await;
        let picker = Picker::of_cluster(&cluster).start().await;
        picker.until_ready().await;
        let gateway = Gateway::start(Setup::FullDuplex, &[picker.app.bound.grpc], &[]).await;
        let traffic = Traffic::new(gateway.client.clone());
        let engines = BTreeMap::new();
        let mut stand =
            Self { cluster, picker, engines, traffic, _gateway: gateway, slowest: Duration::ZERO };
        for host in 0..pods {
            stand.add(host).await;
        }
        let all: Vec<u8> = (0..pods).collect();
        stand.until_only("the first pods serve", &all).await;
        stand.traffic.start();
        stand
    }

    /// The address of the engine of pod `host` on this port.
    pub fn at(&self, host: u8, port: u16) -> String {
        format!("{}:{port}", self.cluster.address(host + 1))
    }

    /// Starts an engine on this port of pod `host`.
    pub async fn engine(&mut self, host: u8, port: u16) {
        let address = self.at(host, port);
        let config = EngineConfig {
            listen: address.parse().unwrap(),
            name: Some(address.clone()),
            speed: 100.0,
            blocks: 4096,
            ..EngineConfig::default()
        };
        self.engines.insert(address, SimulatedEngine::start(config).await);
    }

    /// Ends the engine there at once: its connections break.
    pub async fn kill_engine(&mut self, host: u8, port: u16) {
        let engine = self.engines.remove(&self.at(host, port)).unwrap();
        engine.close().await;
    }

    /// A new ready pod `pHOST` with its engine.
    pub async fn add(&mut self, host: u8) {
        self.engine(host, 8000).await;
        let (name, address) = (format!("p{host}"), self.cluster.address(host + 1));
        self.cluster.pod(&name, &json!({"app": "w"}), &address).await;
    }

    /// A pod ends as in a rollout: it terminates, finishes what it has, and is gone.
    pub async fn roll_away(&mut self, host: u8) {
        let name = format!("p{host}");
        self.cluster.terminate(&name).await;
        let address = self.at(host, 8000);
        let picker = &self.picker;
        eventually("no more picks there", async || {
            (!picker.addresses().await.contains(&address)).then_some(())
        })
        .await;
        let engine = self.engines.remove(&address).unwrap();
        eventually("its last request ends", async || (engine.state.in_flight() == 0).then_some(())).await;
        engine.close().await;
        self.cluster.end(&name).await;
    }

    /// Waits until these pods serve on port 8000, and checks that from then on they alone do.
    pub async fn until_only(&mut self, what: &str, hosts: &[u8]) {
        let addresses: Vec<String> = hosts.iter().map(|host| self.at(*host, 8000)).collect();
        self.until_exactly(what, &addresses).await;
    }

    /// Waits until exactly these addresses are endpoints, and checks that from then on they alone serve, and all of them.
    pub async fn until_exactly(&mut self, what: &str, addresses: &[String]) {
        let expected: BTreeSet<String> = addresses.iter().cloned().collect();
        let since = Instant::now();
        let picker = &self.picker;
        eventually(format!("{what}: {expected:?}"), async || {
            let found: BTreeSet<String> = picker.addresses().await.into_iter().collect();
            (found == expected).then_some(())
        })
        .await;
        self.slowest = self.slowest.max(since.elapsed());
        if self.traffic.is_running() && !expected.is_empty() {
            self.traffic.goes_to(what, &expected).await;
        }
    }

    /// Waits until `degraded{source="kubernetes"}` has a value.
    pub async fn until_kubernetes_is(&self, expected: f64) {
        let labels = [("source", "kubernetes")];
        self.picker.until("whether the API server is missed", "pilotfish_degraded", &labels, expected).await;
    }

    /// Ends the traffic: every request must have been served.
    pub async fn end(self) {
        eprintln!("the slowest change took {:?}", self.slowest);
        let (served, failed) = self.traffic.end().await;
        assert!(failed.is_empty(), "of {served} requests {} failed, first {}", failed.len(), failed[0]);
        self.picker.until_idle("after the traffic").await;
    }
}

/// Requests that never stop.
struct Traffic {
    client: Client,
    shared: Arc<Shared>,
    clients: Vec<AbortOnDropHandle<()>>,
}

#[derive(Default)]
struct Shared {
    begun: AtomicU64,
    /// By whom each answer came, in the order in which its request began.
    served: Mutex<BTreeMap<u64, String>>,
    failed: Mutex<Vec<String>>,
    stop: AtomicBool,
}

impl Traffic {
    fn new(client: Client) -> Self {
        Self { client, shared: Arc::default(), clients: Vec::new() }
    }

    fn start(&mut self) {
        for _ in 0..CLIENTS {
            let (client, shared) = (self.client.clone(), Arc::clone(&self.shared));
            self.clients.push(AbortOnDropHandle::new(tokio::spawn(async move { shared.chat(client).await })));
        }
    }

    fn is_running(&self) -> bool {
        !self.clients.is_empty()
    }

    /// Checks that requests which begin from now on are served by these, and by all of them.
    async fn goes_to(&self, what: &str, expected: &BTreeSet<String>) {
        let first = self.shared.begun.load(Ordering::SeqCst);
        let since = || -> Vec<String> {
            let served = self.shared.served.lock();
            served.range(first..).map(|(_, engine)| engine.clone()).collect()
        };
        eventually(format!("{what}: answers of all of {expected:?}"), async || {
            let served = since();
            let by: BTreeSet<String> = served.iter().cloned().collect();
            assert!(by.is_subset(expected), "{what}: {by:?} served, not {expected:?} alone");
            (served.len() >= LOOKED_AT && by == *expected).then_some(())
        })
        .await;
    }

    async fn end(self) -> (usize, Vec<String>) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for client in self.clients {
            client.await.unwrap();
        }
        let failed = std::mem::take(&mut *self.shared.failed.lock());
        (self.shared.served.lock().len(), failed)
    }
}

impl Shared {
    async fn chat(&self, client: Client) {
        while !self.stop.load(Ordering::SeqCst) {
            let at = self.begun.fetch_add(1, Ordering::SeqCst);
            let answer = client.chat(&chat(at)).await;
            let by = answer.header("x-engine-name").map(str::to_owned);
            match by.filter(|_| answer.status == 200) {
                Some(engine) => drop(self.served.lock().insert(at, engine)),
                None => self.failed.lock().push(format!("{at}: {} {:?}", answer.status, answer.body)),
            }
        }
    }
}

/// Prompts that share nothing: no cache decides where they go.
fn chat(at: u64) -> Value {
    json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": format!("{at} tell me")}]})
}
