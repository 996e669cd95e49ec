//! One list-and-watch: its events as updates of the index, started anew after every failure.
//!
//! After a failure everything is listed again. The library's own resumption says nothing until the next event, so that nobody
//! could tell a watch that is current from one that is not.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;
use kube::api::{Api, DynamicObject, Resource, ResourceExt};
use kube::runtime::watcher::{self, Event, watcher};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::Source;
use super::selector::PodSelector;
use super::trouble::{BackOff, Trouble};
use super::watches::{WatchId, Watches};
use crate::resources::pod::{Pod, PodObject};
use crate::state::ObjectName;

/// Seconds after which the API server ends a watch, and five more until a silent connection counts as dead.
const WATCH_SECONDS: u32 = 60;
/// How long a deletion waits for the API server to say whether the whole kind is being removed. Its discovery learns of that
/// from a watch of its own.
const DELETION_WAIT: Duration = Duration::from_millis(150);

/// How long objects of a kind that was removed and came back may take to be written again. Until then those stay that were
/// known before: a restored definition is empty at first, and its objects come one by one.
const RESTORATION: Duration = Duration::from_secs(30);

/// What the index is told.
#[derive(Debug)]
pub(super) enum Update {
    Apply(Arc<Source>, Value),
    Delete(Arc<Source>, ObjectName),
    Reset(Arc<Source>, Vec<Value>),
    ApplyPod(WatchId, Pod),
    DeletePod(WatchId, Pod),
    ResetPods(WatchId, Arc<str>, Vec<Pod>),
    /// What was told before is all that stands.
    Current(WatchId),
    /// What was told before may not be what stands.
    Behind(WatchId, Trouble),
}

/// What a watch is about.
trait Subject {
    type Object: Resource<DynamicType: Debug> + Clone + DeserializeOwned + Debug + Send + 'static;

    fn api(&self, client: &Client) -> Api<Self::Object>;
    fn config(&self) -> watcher::Config;
    fn apply(&self, object: Self::Object) -> Option<Update>;
    fn delete(&self, object: Self::Object) -> Update;
    fn reset(&self, objects: Vec<Self::Object>) -> Update;
    /// How long deletions wait before they are believed.
    fn deletion_wait(&self) -> Duration;
    /// Whether the kind is there to stay.
    fn stands(&self, client: &Client) -> impl Future<Output = Result<(), Trouble>> + Send;
}

/// Objects of a kind that somebody must have installed.
struct Objects(Arc<Source>);

impl Subject for Objects {
    type Object = DynamicObject;

    fn api(&self, client: &Client) -> Api<DynamicObject> {
        match &self.0.namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.0.resource),
            None => Api::all_with(client.clone(), &self.0.resource),
        }
    }

    fn config(&self) -> watcher::Config {
        let config = watcher::Config::default().timeout(WATCH_SECONDS);
        match &self.0.name {
            Some(name) => config.fields(&format!("metadata.name={name}")),
            None => config,
        }
    }

    fn apply(&self, object: DynamicObject) -> Option<Update> {
        Some(Update::Apply(Arc::clone(&self.0), json(object)))
    }

    fn delete(&self, object: DynamicObject) -> Update {
        let name = ObjectName::new(object.namespace().unwrap_or_default(), object.name_any());
        Update::Delete(Arc::clone(&self.0), name)
    }

    fn reset(&self, objects: Vec<DynamicObject>) -> Update {
        Update::Reset(Arc::clone(&self.0), objects.into_iter().map(json).collect())
    }

    fn deletion_wait(&self) -> Duration {
        DELETION_WAIT
    }

    /// A definition that is being removed takes its objects with it, and is served until they are gone, but for creation.
    async fn stands(&self, client: &Client) -> Result<(), Trouble> {
        let resource = &self.0.resource;
        let served = match client.list_api_group_resources(&resource.api_version).await {
            Ok(served) => served,
            Err(kube::Error::Api(status)) if status.is_forbidden() => return Ok(()),
            Err(error) => return Err((&error).into()),
        };
        let ours = served.resources.iter().find(|served| served.name == resource.plural);
        let is_kept = ours.is_some_and(|ours| ours.verbs.iter().any(|verb| verb == "create"));
        if is_kept { Ok(()) } else { Err(Trouble::Absent) }
    }
}

fn json(object: DynamicObject) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}

/// The pods of a namespace that its pools could select.
struct Pods {
    id: WatchId,
    namespace: Arc<str>,
    selector: PodSelector,
}

impl Subject for Pods {
    type Object = PodObject;

    fn api(&self, client: &Client) -> Api<PodObject> {
        Api::namespaced(client.clone(), &self.namespace)
    }

    fn config(&self) -> watcher::Config {
        let config = watcher::Config::default().timeout(WATCH_SECONDS);
        match &self.selector.server_side {
            Some(selector) => config.labels(selector),
            None => config,
        }
    }

    /// A pod that no pool selects any more is deleted, which it is for us.
    fn apply(&self, object: PodObject) -> Option<Update> {
        let pod = Pod::from(object);
        let selected = self.selector.selects(&pod.labels);
        Some(if selected { Update::ApplyPod(self.id, pod) } else { Update::DeletePod(self.id, pod) })
    }

    fn delete(&self, object: PodObject) -> Update {
        Update::DeletePod(self.id, object.into())
    }

    fn reset(&self, objects: Vec<PodObject>) -> Update {
        let pods = objects.into_iter().map(Pod::from).filter(|pod| self.selector.selects(&pod.labels));
        Update::ResetPods(self.id, Arc::clone(&self.namespace), pods.collect())
    }

    fn deletion_wait(&self) -> Duration {
        Duration::ZERO
    }

    async fn stands(&self, _: &Client) -> Result<(), Trouble> {
        Ok(())
    }
}

/// What every watch has.
pub(super) struct Wiring {
    pub client: Client,
    pub id: WatchId,
    pub watches: Arc<Watches>,
    pub send: mpsc::Sender<Update>,
}

/// Watches the objects of a source for ever.
pub(super) async fn objects(wiring: Wiring, source: Source) {
    wiring.watch(Objects(Arc::new(source))).await;
}

/// Watches pods of a namespace for ever.
pub(super) async fn pods(wiring: Wiring, namespace: Arc<str>, selector: PodSelector) {
    let id = wiring.id;
    wiring.watch(Pods { id, namespace, selector }).await;
}

/// The index is gone: there is nobody to watch for.
struct Unheard;

/// Why a watch ended.
enum End {
    Trouble(Trouble),
    /// Everything known must be held against a list.
    Relist,
}

impl From<Trouble> for End {
    fn from(trouble: Trouble) -> Self {
        End::Trouble(trouble)
    }
}

impl Wiring {
    async fn watch(self, subject: impl Subject) {
        let mut back_off = BackOff::default();
        let mut restoring = false;
        while let Ok(end) = self.watch_until_trouble(&subject, &mut back_off, restoring).await {
            let End::Trouble(trouble) = end else {
                restoring = false;
                continue;
            };
            restoring |= trouble == Trouble::Absent && self.watches.was_current(self.id);
            if self.tell(Update::Behind(self.id, trouble.clone())).await.is_err() {
                return;
            }
            sleep(back_off.next(&trouble, rand::random())).await;
        }
    }

    async fn watch_until_trouble<S: Subject>(
        &self,
        subject: &S,
        back_off: &mut BackOff,
        restoring: bool,
    ) -> Result<End, Unheard> {
        let mut events = pin!(watcher(subject.api(&self.client), subject.config()));
        let mut listed = Vec::new();
        let mut deleted: Vec<S::Object> = Vec::new();
        let mut believed = Instant::now();
        let restored = Instant::now() + RESTORATION;
        loop {
            let event = tokio::select! {
                biased;
                () = sleep_until(restored), if restoring => return Ok(End::Relist),
                () = sleep_until(believed), if !deleted.is_empty() => {
                    if let Err(trouble) = subject.stands(&self.client).await {
                        return Ok(trouble.into());
                    }
                    for object in deleted.drain(..) {
                        self.tell(subject.delete(object)).await?;
                    }
                    continue;
                }
                event = events.next() => event,
            };
            let event = match event {
                Some(Ok(event)) => event,
                Some(Err(error)) => return Ok(Trouble::from(&error).into()),
                None => return Ok(Trouble::Unreachable("the watch ended".to_owned()).into()),
            };
            match event {
                Event::Init => listed.clear(),
                Event::InitApply(object) => listed.push(object),
                Event::InitDone => {
                    if let Err(trouble) = subject.stands(&self.client).await {
                        return Ok(trouble.into());
                    }
                    deleted.clear();
                    let listed = std::mem::take(&mut listed);
                    if restoring {
                        for update in listed.into_iter().filter_map(|object| subject.apply(object)) {
                            self.tell(update).await?;
                        }
                    } else {
                        self.tell(subject.reset(listed)).await?;
                    }
                    back_off.reset();
                    self.tell(Update::Current(self.id)).await?;
                }
                Event::Apply(object) => {
                    deleted.retain(|other| !same(other, &object));
                    if let Some(update) = subject.apply(object) {
                        self.tell(update).await?;
                    }
                }
                Event::Delete(object) => {
                    if deleted.is_empty() {
                        believed = Instant::now() + subject.deletion_wait();
                    }
                    deleted.push(object);
                }
            }
        }
    }

    async fn tell(&self, update: Update) -> Result<(), Unheard> {
        self.send.send(update).await.map_err(|_| Unheard)
    }
}

fn same<K: Resource>(a: &K, b: &K) -> bool {
    (&a.meta().namespace, &a.meta().name) == (&b.meta().namespace, &b.meta().name)
}

#[cfg(test)]
mod tests;
