//! Resources from a Kubernetes API server: watches keep an index of objects and pods, the index says what the world is.
//!
//! ```text
//!   API server --> watch/   one list-and-watch a kind, one for the pods of each namespace that has pools
//!                    | Update: apply, delete, reset
//!                  index.rs  what stands, without IO; selector.rs: which pods could matter
//!                    | World
//!                  the sink: topology, and with it the next snapshot
//! ```
//!
//! While the API server cannot be reached the last state stays, and [`Watches`] says how old it is. Kinds that are not
//! installed, or that may not be read, are left out and tried again.

mod index;
mod kind;
mod selector;
mod trouble;
mod watch;
mod watches;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use index::{Index, Objects, Standing, Version};
pub use kind::{Kind, Source, resource};
pub use selector::PodSelector;
pub use watches::{KindState, State, WatchId, Watches};

use watch::{Update, Wiring};

use crate::state::ObjectName;

/// Shortest pause between two worlds. A lone change is seen at once; in a flood each world holds many.
const PAUSE: Duration = Duration::from_millis(50);
/// Updates that wait for the index; watches wait when it is full.
const BACKLOG: usize = 1024;

/// Which objects are read.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// Only these namespaces; none means all.
    pub namespaces: BTreeSet<String>,
    /// Only this InferencePool, and nothing is served before it is there.
    pub pool: Option<ObjectName>,
    /// A pool without an object.
    pub unnamed: Option<Unnamed>,
}

/// A pool that flags describe.
#[derive(Clone, Debug)]
pub struct Unnamed {
    /// Its name in metrics and logs.
    pub name: ObjectName,
    /// Labels of its pods.
    pub selector: BTreeMap<String, String>,
    /// Ports of its pods.
    pub ports: Vec<u16>,
}

/// Follows the API server until `stop`; `sink` is given every new standing of the index. Whatever
/// fails is retried and told by `watches`.
pub async fn follow(
    client: Client,
    scope: Scope,
    watches: Arc<Watches>,
    stop: CancellationToken,
    mut sink: impl FnMut(Standing) + Send,
) {
    let tasks = TaskTracker::new();
    let (send, mut updates) = mpsc::channel(BACKLOG);
    let mut feed =
        Feed { client, index: Index::default(), watches, send, tasks, pods: BTreeMap::new(), stop };
    feed.start(&scope);
    let mut next = Instant::now();
    loop {
        let stop = feed.stop.clone();
        let update = tokio::select! {
            () = stop.cancelled() => break,
            update = updates.recv() => update,
        };
        let Some(update) = update else { break };
        feed.take(update);
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep_until(next) => {}
        }
        while let Ok(update) = updates.try_recv() {
            feed.take(update);
        }
        feed.follow_pods();
        if feed.watches.have_settled()
            && let Some(standing) = feed.index.standing()
        {
            sink(standing);
            next = Instant::now() + PAUSE;
        }
    }
    feed.tasks.close();
}

struct Feed {
    client: Client,
    index: Index,
    watches: Arc<Watches>,
    send: mpsc::Sender<Update>,
    tasks: TaskTracker,
    pods: BTreeMap<Arc<str>, PodWatch>,
    stop: CancellationToken,
}

/// The watch of one namespace's pods.
struct PodWatch {
    id: WatchId,
    selector: PodSelector,
    stop: CancellationToken,
}

impl Feed {
    fn start(&mut self, scope: &Scope) {
        if let Some(unnamed) = &scope.unnamed {
            self.index.add_unnamed(unnamed);
        }
        for source in kind::sources(scope) {
            let id = self.watches.add(&source);
            let stop = self.stop.clone();
            let watch = watch::objects(self.wiring(id), source);
            self.tasks.spawn(async move { stop.run_until_cancelled(watch).await });
        }
        self.follow_pods();
    }

    fn take(&mut self, update: Update) {
        match update {
            Update::Apply(source, object) => self.index.apply(&source, &object),
            Update::Delete(source, name) => self.index.delete(&source, &name),
            Update::Reset(source, objects) => self.index.reset(&source, &objects),
            Update::ApplyPod(id, pod) if self.is_current(id, &pod.name.namespace) => {
                self.index.apply_pod(pod);
            }
            Update::DeletePod(id, pod) if self.is_current(id, &pod.name.namespace) => {
                self.index.delete_pod(&pod);
            }
            Update::ResetPods(id, namespace, pods) if self.is_current(id, &namespace) => {
                self.index.reset_pods(&namespace, pods);
            }
            Update::ApplyPod(..) | Update::DeletePod(..) | Update::ResetPods(..) => {}
            // In the order of the updates: a watch is current when the index is.
            Update::Current(id) => self.watches.current(id),
            Update::Behind(id, trouble) => self.watches.behind(id, &trouble),
        }
    }

    /// Whether a watch of pods is that of its namespace, and not one that has been replaced.
    fn is_current(&self, id: WatchId, namespace: &str) -> bool {
        self.pods.get(namespace).is_some_and(|watch| watch.id == id)
    }

    /// Watches the pods that the pools of this moment could select.
    fn follow_pods(&mut self) {
        let wanted = self.index.selectors();
        let gone: Vec<Arc<str>> =
            self.pods.keys().filter(|namespace| !wanted.contains_key(*namespace)).cloned().collect();
        for namespace in gone {
            self.end(&namespace);
            self.index.reset_pods(&namespace, Vec::new());
        }
        for (namespace, selector) in wanted {
            if self.pods.get(&namespace).is_some_and(|watch| watch.selector == selector) {
                continue;
            }
            self.end(&namespace);
            let id = self.watches.add(&Source::pods(&namespace));
            let stop = self.stop.child_token();
            let watch = watch::pods(self.wiring(id), Arc::clone(&namespace), selector.clone());
            let stopped = stop.clone();
            self.tasks.spawn(async move { stopped.run_until_cancelled(watch).await });
            self.pods.insert(namespace, PodWatch { id, selector, stop });
        }
    }

    fn wiring(&self, id: WatchId) -> Wiring {
        let (client, send) = (self.client.clone(), self.send.clone());
        Wiring { client, id, watches: Arc::clone(&self.watches), send }
    }

    fn end(&mut self, namespace: &str) {
        if let Some(watch) = self.pods.remove(namespace) {
            watch.stop.cancel();
            self.watches.remove(watch.id);
        }
    }
}
