//! From documents to a world: every problem that a document alone, or all of them together, can show.

mod disaggregation;
mod events;
mod limits;
mod pods;
mod pools;
mod rewrites;
mod routes;
mod speed;
#[cfg(test)]
mod tests;

pub use pods::{PodEndpoints, Unroutable, pod_endpoints};

use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::{Document, EndpointSpec, InferenceModelRewriteSpec, InferenceObjectiveSpec, Metadata};
use crate::document::{Node, Place, Problem, Problems, Severity, nearest, typed, typed_without_unknown};
use crate::state::ObjectName;
use crate::state::endpoint::{self, EngineKind};
use crate::state::pool::PoolName;
use crate::topology::World;

const SERVING: &str = "networking.serving.volcano.sh/v1alpha1";
const INFERENCE: &str = "inference.networking.k8s.io/v1";
const OWN: &str = "pilotfish.dev/v1alpha1";
const OBJECTIVES: [&str; 2] = ["llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"];
/// The group that objectives and rewrites moved to, and the one they came from.
pub const OBJECTIVE_GROUPS: [&str; 2] = ["llm-d.ai", "inference.networking.x-k8s.io"];

/// Kinds that are read, with their group and version; the first is advised.
const KINDS: [(&str, &[&str]); 6] = [
    ("Endpoint", &[OWN]),
    ("ModelRoute", &[SERVING]),
    ("ModelServer", &[SERVING]),
    ("InferencePool", &[INFERENCE]),
    ("InferenceObjective", &OBJECTIVES),
    ("InferenceModelRewrite", &OBJECTIVES),
];
/// Kinds that are known and have no effect yet.
const LATER: [&str; 1] = ["ExternalModelProvider"];
/// Kinds of Kthena, the Gateway API and llm-d that others read, some of them named much like ours.
const OTHERS: [&str; 8] = [
    "ModelServing",
    "ModelBooster",
    "AutoscalingPolicy",
    "AutoscalingPolicyBinding",
    "InferencePoolImport",
    "InferenceModel",
    "Gateway",
    "HTTPRoute",
];

/// The annotation that says what `drain` says.
const DRAIN: &str = "pilotfish.dev/drain";
/// Annotations of our own that are read.
const READ_ANNOTATIONS: [&str; 8] = [
    DRAIN,
    events::EVENTS,
    events::REPLAY,
    speed::WEIGHT,
    speed::GPU,
    disaggregation::BOOTSTRAP_PORT,
    disaggregation::RANKS,
    disaggregation::RANK,
];

/// What a set of files means, and what is wrong with it.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// The world, without what is wrong.
    pub world: World,
    /// Problems in the order of files and lines.
    pub problems: Vec<Problem>,
    /// The documents as written, for the debug dump.
    pub dump: Vec<Dumped>,
    /// URLs of tokenizers that documents name, each with the error it is unless the configuration lists it.
    pub tokenizer_urls: Vec<(Arc<str>, Problem)>,
    /// Addresses of stores that limits name, each with the warning it is unless the flags allow it.
    pub limit_stores: Vec<(Arc<str>, Problem)>,
}

/// A document as written.
#[derive(Clone, Debug)]
pub struct Dumped {
    /// Kind.
    pub kind: String,
    /// Identity.
    pub name: ObjectName,
    /// `spec` as JSON.
    pub spec: serde_json::Value,
}

impl Lowered {
    /// All but the world.
    #[must_use]
    pub fn without_world(&self) -> Self {
        Self {
            world: World::default(),
            problems: self.problems.clone(),
            dump: self.dump.clone(),
            tokenizer_urls: self.tokenizer_urls.clone(),
            limit_stores: self.limit_stores.clone(),
        }
    }

    /// Warns of the stores of limits that are not allowed.
    pub fn judge_stores(&mut self, allowed: impl Fn(&str) -> bool) {
        let named = std::mem::take(&mut self.limit_stores);
        self.problems.extend(named.into_iter().filter(|(at, _)| !allowed(at)).map(|(_, problem)| problem));
        self.problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
    }

    /// Whether anything is an error.
    pub fn has_errors(&self) -> bool {
        self.problems.iter().any(|problem| problem.severity == Severity::Error)
    }
}

/// Where a document was found, to report what only shows when all are known.
#[derive(Debug)]
struct Located<T> {
    file: usize,
    node: Node,
    name: ObjectName,
    metadata: Metadata,
    spec: T,
}

impl<T> Located<T> {
    fn place(&self, path: &[&str]) -> Place {
        self.node.at(path).place
    }
}

/// Where what is wrong with one document is told.
struct Report<'a> {
    problems: &'a mut Problems,
    place: &'a dyn Fn(&[&str]) -> Place,
}

impl Report<'_> {
    fn error(&mut self, path: &[&str], message: String, advice: Option<String>) {
        self.problems.error((self.place)(path), message, advice);
    }

    fn warning(&mut self, path: &[&str], message: String, advice: Option<String>) {
        self.problems.warning((self.place)(path), message, advice);
    }
}

/// Reads files (path and text) together.
pub fn lower<P: AsRef<Path>>(files: &[(P, Arc<str>)]) -> Lowered {
    lower_with(files, Origin::File)
}

/// Reads objects of an API server together, each as [`object::document`](super::object::document) writes it. A member that
/// is unknown here stands in a newer definition than ours: the object serves without it.
pub fn lower_objects<P: AsRef<Path>>(objects: &[(P, Arc<str>)]) -> Lowered {
    lower_with(objects, Origin::Cluster)
}

/// Reads one object that is about to be stored beside pools that are there. What it names and is not there is a warning:
/// the next object may bring it.
pub fn lower_alone<P: AsRef<Path>>(object: (P, Arc<str>), pools: Vec<PoolName>) -> Lowered {
    read_all(&[object], Reader { origin: Origin::Review, others: pools, ..Reader::default() })
}

/// Whether objects of that version and kind are read.
pub fn is_read(api_version: &str, kind: &str) -> bool {
    KINDS.iter().any(|(known, versions)| *known == kind && versions.contains(&api_version))
}

fn lower_with(files: &[(impl AsRef<Path>, Arc<str>)], origin: Origin) -> Lowered {
    read_all(files, Reader { origin, ..Reader::default() })
}

fn read_all(files: &[(impl AsRef<Path>, Arc<str>)], reader: Reader) -> Lowered {
    let mut reader = Reader {
        problems: files.iter().map(|(file, text)| Problems::new(file.as_ref(), Arc::clone(text))).collect(),
        ..reader
    };
    for (at, (_, text)) in files.iter().enumerate() {
        match Node::parse(text) {
            Ok(nodes) => nodes.into_iter().for_each(|node| reader.document(at, node)),
            Err(error) => reader.problems[at].error(error.place, error.message, None),
        }
    }
    reader.finish()
}

/// Where documents come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Origin {
    /// A file: a member that no type knows is a slip of the pen, and Endpoints are all there are.
    #[default]
    File,
    /// An API server: a member that no type knows is something newer, and pods come and go.
    Cluster,
    /// An API server, before it stores it: the rest of the cluster is known by name only.
    Review,
}

#[derive(Debug, Default)]
struct Reader {
    origin: Origin,
    /// Pools that are there beside those of the documents.
    others: Vec<PoolName>,
    problems: Vec<Problems>,
    endpoints: Vec<Located<EndpointSpec>>,
    routes: Vec<Located<super::ModelRouteSpec>>,
    servers: Vec<Located<super::ModelServerSpec>>,
    inference_pools: Vec<Located<super::InferencePoolSpec>>,
    objectives: Vec<Located<InferenceObjectiveSpec>>,
    rewrites: Vec<Located<InferenceModelRewriteSpec>>,
    dump: Vec<Dumped>,
    tokenizer_urls: Vec<(Arc<str>, Problem)>,
    limit_stores: Vec<(Arc<str>, Problem)>,
}

impl Reader {
    fn document(&mut self, file: usize, node: Node) {
        let Some(kind) = node.get("kind").and_then(Node::as_str).map(str::to_owned) else {
            return self.problems[file].error(node.place, "a document without `kind`", None);
        };
        let place = node.at(&["kind"]).place;
        let Some((_, expected)) = KINDS.iter().find(|(known, _)| *known == kind) else {
            return self.unknown_kind(file, place, &kind);
        };
        let version = node.get("apiVersion").and_then(Node::as_str);
        if !version.is_some_and(|version| expected.contains(&version)) {
            let place = node.get("apiVersion").map_or(place, |version| version.place);
            let advice = Some(format!("write `apiVersion: {}`", expected[0]));
            let why = format!("{kind} is read as {} only", expected.join(" or "));
            return self.problems[file].error(place, why, advice);
        }
        match kind.as_str() {
            "Endpoint" => {
                let document = self.read(file, node);
                self.endpoints.extend(document);
            }
            "ModelRoute" => {
                let document = self.read(file, node);
                self.routes.extend(document);
            }
            "ModelServer" => {
                let document = self.read(file, node);
                self.servers.extend(document);
            }
            "InferenceObjective" => {
                let document = self.read(file, node);
                self.objectives.extend(document);
            }
            "InferenceModelRewrite" => {
                let document = self.read(file, node);
                self.rewrites.extend(document);
            }
            _ => {
                let document = self.read(file, node);
                self.inference_pools.extend(document);
            }
        }
    }

    /// Reads one document into its type, with its name.
    fn read<T: DeserializeOwned>(&mut self, file: usize, mut node: Node) -> Option<Located<T>> {
        let problems = &mut self.problems[file];
        let read = match self.origin {
            Origin::File => typed::<Document<T>>(&node).map(|document| (document, Vec::new())),
            Origin::Cluster | Origin::Review => typed_without_unknown(&mut node),
        };
        let (document, unknown) = match read {
            Ok(read) => read,
            Err((place, message, advice)) => {
                problems.error(place, message, advice);
                return None;
            }
        };
        for (place, name) in unknown {
            problems.warning(place, format!("`{name}` is not known to this version and has no effect"), None);
        }
        let Metadata { name, namespace, .. } = &document.metadata;
        if name.is_empty() {
            problems.error(node.at(&["metadata"]).place, "a document without `metadata.name`", None);
            return None;
        }
        let name = ObjectName::new(namespace.as_deref().unwrap_or("default"), name.as_str());
        let spec = node.get("spec").map(Node::to_json).unwrap_or_default();
        self.dump.push(Dumped { kind: document.kind, name: name.clone(), spec });
        Some(Located { file, node, name, metadata: document.metadata, spec: document.spec })
    }

    fn unknown_kind(&mut self, file: usize, place: Place, kind: &str) {
        if LATER.contains(&kind) {
            self.problems[file].warning(place, format!("{kind} has no effect in this version"), None);
            return;
        }
        let advice = nearest(kind, KINDS.iter().map(|(known, _)| *known))
            .map(|name| format!("did you mean `{name}`?"));
        match advice.filter(|_| !OTHERS.contains(&kind)) {
            Some(advice) => {
                self.problems[file].error(place, format!("unknown kind `{kind}`"), Some(advice));
            }
            None => self.problems[file].warning(place, format!("kind `{kind}` is not read"), None),
        }
    }

    fn finish(mut self) -> Lowered {
        self.leave_out_old_groups();
        self.report_duplicates();
        self.leave_out_namesakes();
        let endpoints = self.endpoints();
        let pools = self.pools(&endpoints);
        let mut known: Vec<PoolName> = pools.iter().map(|pool| pool.name.clone()).collect();
        known.append(&mut self.others);
        let routes = self.routes(&known);
        let rewrites = self.rewrites(&known);
        let objectives = self.objectives(&known);
        let mut problems: Vec<Problem> = self.problems.into_iter().flat_map(|p| p.found).collect();
        problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
        Lowered {
            world: World { endpoints, pools, routes, rewrites, objectives, ended: Vec::new() },
            problems,
            dump: self.dump,
            tokenizer_urls: self.tokenizer_urls,
            limit_stores: self.limit_stores,
        }
    }

    fn report_duplicates(&mut self) {
        fn names<T>(
            kind: &'static str,
            list: &[Located<T>],
        ) -> Vec<(&'static str, ObjectName, usize, Place)> {
            list.iter().map(|d| (kind, d.name.clone(), d.file, d.place(&["metadata", "name"]))).collect()
        }
        let all = [
            names("Endpoint", &self.endpoints),
            names("ModelRoute", &self.routes),
            names("ModelServer", &self.servers),
            names("InferencePool", &self.inference_pools),
            names("InferenceObjective", &self.objectives),
            names("InferenceModelRewrite", &self.rewrites),
        ];
        let mut seen = std::collections::HashSet::new();
        for (kind, name, file, place) in all.into_iter().flatten() {
            if !seen.insert((kind, name.clone())) {
                let advice = Some("rename or remove one; the last is used".to_owned());
                self.problems[file].error(place, format!("{kind} {name} is described twice"), advice);
            }
        }
    }

    /// Metrics, flags and debug pages name a pool by namespace and name alone: of two, the ModelServer is meant.
    fn leave_out_namesakes(&mut self) {
        let Self { inference_pools, servers, problems, .. } = self;
        inference_pools.retain(|pool| {
            let alone = servers.iter().all(|server| server.name != pool.name);
            if !alone {
                let why = format!(
                    "InferencePool {} has no effect: a ModelServer has its name and serves",
                    pool.name
                );
                let advice = Some("rename one if both are meant as pools".to_owned());
                problems[pool.file].warning(pool.place(&["metadata", "name"]), why, advice);
            }
            alone
        });
    }

    fn endpoints(&mut self) -> Vec<endpoint::EndpointSpec> {
        let mut specs: Vec<endpoint::EndpointSpec> = Vec::new();
        for document in &self.endpoints {
            let problems = &mut self.problems[document.file];
            let place = document.place(&["spec", "address"]);
            // A zone id names an interface of this host: Envoy's host knows nothing of it.
            let written = Some(document.spec.address.as_str()).filter(|address| !address.contains('%'));
            let Some(address) = written.and_then(|address| address.parse::<std::net::SocketAddr>().ok())
            else {
                let advice =
                    Some("write an IP address and a port: 10.0.0.7:8000 or [fd00::7]:8000".to_owned());
                problems.error(place, format!("`{}` is not an address", document.spec.address), advice);
                continue;
            };
            if let Some(other) = specs.iter().find(|other| other.address == address) {
                problems.warning(
                    place,
                    format!("{address} is also the address of Endpoint {}", other.name),
                    None,
                );
            }
            let (spec, annotations) = (&document.spec, &document.metadata.annotations);
            let mut report = Report { problems, place: &|path| document.place(path) };
            let Some((weight, gpu)) = speed::speed(spec.weight, annotations, &mut report) else { continue };
            let written =
                events::Written { events: spec.kv_events.as_ref(), replay: spec.kv_replay.as_ref() };
            let event_ports = events::ports(written, annotations, address, &mut report);
            let transfer = disaggregation::transfer(annotations, None, &mut report);
            for key in document.metadata.annotations.keys().filter(|key| key.starts_with("pilotfish.dev/")) {
                if key == super::tokenizer::ANNOTATION {
                    let place = document.place(&["metadata", "annotations", key]);
                    let advice =
                        "annotate the ModelServer: whoever can label an endpoint must not be sent prompts";
                    problems.error(
                        place,
                        format!("{key} is not taken from endpoints"),
                        Some(advice.to_owned()),
                    );
                } else if !READ_ANNOTATIONS.contains(&key.as_str()) {
                    let place = document.place(&["metadata", "annotations", key]);
                    problems.warning(
                        place,
                        format!("the annotation {key} has no effect in this version"),
                        None,
                    );
                }
            }
            let drain = annotations.get(DRAIN).is_some_and(|v| v == "true");
            specs.retain(|other| other.name != document.name);
            specs.push(endpoint::EndpointSpec {
                name: document.name.clone(),
                address,
                weight,
                gpu,
                labels: document.metadata.labels.clone(),
                engine: EngineKind::Vllm,
                event_ports,
                transfer,
                drain: drain || document.spec.drain,
                pod: None,
            });
        }
        specs
    }
}
