//! What stands on the API server, without IO: objects as documents, pods as far as they matter, and the world they make.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::{Value, json};

use super::selector::{self, PodSelector};
use super::{Source, Unnamed};
use crate::document::Problem;
use crate::feed::file::{Loaded, Resources};
use crate::resources::lower::{Lowered, Unroutable, pod_endpoints};
use crate::resources::object;
use crate::resources::pod::{Pod, Stage};
use crate::state::ObjectName;
use crate::topology::World;

/// Objects and pods, kept by `apply`, `delete` and `reset` in whatever order watches bring them.
#[derive(Debug)]
pub struct Index {
    documents: BTreeMap<(String, ObjectName), Document>,
    pods: HashMap<ObjectName, Pod>,
    ended: Vec<Arc<str>>,
    resources: Resources,
    lowered: Lowered,
    /// Documents changed since they were lowered.
    documents_changed: bool,
    /// Something changed since the last standing.
    changed: bool,
    /// What was read of documents is not yet in a standing.
    unread: bool,
}

/// An object as it is read.
#[derive(Debug, PartialEq)]
struct Document {
    path: PathBuf,
    text: Arc<str>,
    version: Version,
}

/// Which of the objects that had a name an object is, and which version of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    /// Unique for all time.
    pub uid: Arc<str>,
    /// Grows with every change of what is wanted.
    pub generation: Option<i64>,
}

/// What was read of objects.
#[derive(Debug)]
pub struct Objects {
    /// Problems and documents; its `world` is empty.
    pub read: Lowered,
    /// Versions, by the path that problems name.
    pub versions: HashMap<PathBuf, Version>,
}

impl Default for Index {
    fn default() -> Self {
        Self {
            documents: BTreeMap::new(),
            pods: HashMap::new(),
            ended: Vec::new(),
            resources: Resources::of_objects(),
            lowered: Lowered::default(),
            documents_changed: true,
            changed: true,
            unread: true,
        }
    }
}

/// What an index says of the world.
#[derive(Debug)]
pub struct Standing {
    /// The world.
    pub world: World,
    /// What was read of objects, if any changed.
    pub objects: Option<Objects>,
    /// What is wrong with annotations of pods.
    pub pod_problems: Vec<Problem>,
    /// Ready pods that a pool selects and cannot use.
    pub unroutable: Vec<Unroutable>,
}

impl Index {
    /// Takes an object that is new or changed.
    pub fn apply(&mut self, source: &Source, object: &Value) {
        let (path, text) = object::document(&source.resource, object);
        let path = renamed(source, path);
        let metadata = &object["metadata"];
        let uid = metadata["uid"].as_str().unwrap_or_default().into();
        let version = Version { uid, generation: metadata["generation"].as_i64() };
        let document = Document { path, text, version };
        let known = self.documents.get(&key(source, name(object)));
        // Status, managed fields and resource versions change more often than what is read.
        if known != Some(&document) {
            self.documents_changed = true;
            self.documents.insert(key(source, name(object)), document);
        }
    }

    /// Forgets an object.
    pub fn delete(&mut self, source: &Source, name: &ObjectName) {
        self.documents_changed |= self.documents.remove(&key(source, name.clone())).is_some();
    }

    /// Takes all objects of a source: others of it are no more.
    pub fn reset(&mut self, source: &Source, objects: &[Value]) {
        let label = source.label();
        let listed: Vec<ObjectName> = objects.iter().map(name).collect();
        let before = self.documents.len();
        self.documents.retain(|(kind, name), _| {
            let of_source =
                *kind == label && source.namespace.as_ref().is_none_or(|ns| **ns == *name.namespace);
            !of_source || listed.contains(name)
        });
        self.documents_changed |= self.documents.len() != before;
        for object in objects {
            self.apply(source, object);
        }
    }

    /// Takes a pool that no object describes.
    pub fn add_unnamed(&mut self, pool: &Unnamed) {
        let object = json!({
            "metadata": {"namespace": &*pool.name.namespace, "name": &*pool.name.name},
            "spec": {
                "selector": {"matchLabels": pool.selector},
                "targetPorts": pool.ports.iter().map(|port| json!({"number": port})).collect::<Vec<_>>(),
            },
        });
        self.apply(&Source::pools(), &object);
    }

    /// Takes a pod that is new or changed.
    pub fn apply_pod(&mut self, pod: Pod) {
        if let Some(before) = self.pods.get(&pod.name) {
            if *before == pod {
                return;
            }
            if before.uid != pod.uid {
                self.ended.push(Arc::clone(&before.uid));
            }
        }
        if pod.stage == Stage::Ended {
            self.ended.push(Arc::clone(&pod.uid));
        }
        self.changed = true;
        self.pods.insert(pod.name.clone(), pod);
    }

    /// Forgets a pod. One that was not seen to terminate may only have changed its labels: it may come back.
    pub fn delete_pod(&mut self, pod: &Pod) {
        // Of a pod created anew under the same name, the end of the former one says nothing.
        if self.pods.get(&pod.name).is_some_and(|known| known.uid == pod.uid) {
            self.pods.remove(&pod.name);
            self.changed = true;
        }
        if pod.stage == Stage::Ended {
            self.changed = true;
            self.ended.push(Arc::clone(&pod.uid));
        }
    }

    /// Takes all pods of a namespace: others of it are no more.
    pub fn reset_pods(&mut self, namespace: &str, pods: Vec<Pod>) {
        let before = self.pods.len();
        let listed: HashMap<&ObjectName, &Pod> = pods.iter().map(|pod| (&pod.name, pod)).collect();
        self.pods.retain(|name, _| *name.namespace != *namespace || listed.contains_key(name));
        self.changed |= self.pods.len() != before;
        for pod in pods {
            self.apply_pod(pod);
        }
    }

    /// The pods that could matter, by namespace.
    pub fn selectors(&mut self) -> BTreeMap<Arc<str>, PodSelector> {
        self.lower();
        selector::selectors(&self.lowered.world.pools)
    }

    fn lower(&mut self) {
        if std::mem::take(&mut self.documents_changed) {
            let files = self.documents.values().map(|d| (d.path.clone(), Arc::clone(&d.text))).collect();
            self.lowered = self.resources.reload(Loaded { files, problems: Vec::new() });
            self.changed = true;
            self.unread = true;
        }
    }

    /// The world as it is now, unless nothing has changed since this was last asked.
    pub fn standing(&mut self) -> Option<Standing> {
        self.lower();
        if !std::mem::take(&mut self.changed) {
            return None;
        }
        let world = &self.lowered.world;
        let found = pod_endpoints(self.pods.values(), &world.pools);
        let world = World {
            endpoints: found.endpoints,
            pools: world.pools.clone(),
            routes: world.routes.clone(),
            rewrites: world.rewrites.clone(),
            objectives: world.objectives.clone(),
            ended: std::mem::take(&mut self.ended),
        };
        let objects = std::mem::take(&mut self.unread).then(|| Objects {
            read: self.lowered.without_world(),
            versions: self.documents.values().map(|d| (d.path.clone(), d.version.clone())).collect(),
        });
        Some(Standing { world, objects, pod_problems: found.problems, unroutable: found.unroutable })
    }
}

fn key(source: &Source, name: ObjectName) -> (String, ObjectName) {
    (source.label(), name)
}

fn name(object: &Value) -> ObjectName {
    let word = |member: &str| object["metadata"][member].as_str().unwrap_or_default();
    ObjectName::new(word("namespace"), word("name"))
}

/// Objects of the former group are told from those of the new one that have their name.
fn renamed(source: &Source, path: PathBuf) -> PathBuf {
    match path.strip_prefix(&source.resource.plural) {
        Ok(rest) => PathBuf::from(source.label()).join(rest),
        Err(_) => path,
    }
}

#[cfg(test)]
mod tests;
