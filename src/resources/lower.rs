//! From documents to a world: every problem that a document alone, or all of them together, can show.

mod events;
mod pools;
mod routes;
mod speed;

use std::path::Path;
use std::sync::Arc;

use serde::de::DeserializeOwned;

use super::{Document, EndpointSpec, InferenceModelRewriteSpec, InferenceObjectiveSpec, Metadata};
use crate::document::{Node, Place, Problem, Problems, Severity, nearest, typed, typed_without_unknown};
use crate::state::ObjectName;
use crate::state::endpoint::{self, EngineKind};
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

/// Annotations of our own that are read.
const READ_ANNOTATIONS: [&str; 5] =
    ["pilotfish.dev/drain", events::EVENTS, events::REPLAY, speed::WEIGHT, speed::GPU];

/// What a set of files means, and what is wrong with it.
#[derive(Debug, Default)]
pub struct Lowered {
    /// The world, without what is wrong.
    pub world: World,
    /// Problems in the order of files and lines.
    pub problems: Vec<Problem>,
    /// The documents as written, for the debug dump.
    pub dump: Vec<Dumped>,
    /// URLs of tokenizers that documents name, each with the error it is unless the configuration lists it.
    pub tokenizer_urls: Vec<(Arc<str>, Problem)>,
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

/// Reads files (path and text) together.
pub fn lower(files: &[(impl AsRef<Path>, Arc<str>)]) -> Lowered {
    lower_with(files, Unknown::Error)
}

/// Reads objects of an API server together, each as [`object::document`](super::object::document) writes it. A member that
/// is unknown here stands in a newer definition than ours: the object serves without it.
pub fn lower_objects(objects: &[(impl AsRef<Path>, Arc<str>)]) -> Lowered {
    lower_with(objects, Unknown::Warning)
}

fn lower_with(files: &[(impl AsRef<Path>, Arc<str>)], unknown: Unknown) -> Lowered {
    let mut reader = Reader {
        unknown,
        problems: files.iter().map(|(file, text)| Problems::new(file.as_ref(), Arc::clone(text))).collect(),
        ..Reader::default()
    };
    for (at, (_, text)) in files.iter().enumerate() {
        match Node::parse(text) {
            Ok(nodes) => nodes.into_iter().for_each(|node| reader.document(at, node)),
            Err(error) => reader.problems[at].error(error.place, error.message, None),
        }
    }
    reader.finish()
}

/// What a member is that no type knows.
#[derive(Clone, Copy, Debug, Default)]
enum Unknown {
    /// A slip of the pen.
    #[default]
    Error,
    /// Something newer.
    Warning,
}

#[derive(Debug, Default)]
struct Reader {
    unknown: Unknown,
    problems: Vec<Problems>,
    endpoints: Vec<Located<EndpointSpec>>,
    routes: Vec<Located<super::ModelRouteSpec>>,
    servers: Vec<Located<super::ModelServerSpec>>,
    inference_pools: Vec<Located<super::InferencePoolSpec>>,
    dump: Vec<Dumped>,
    tokenizer_urls: Vec<(Arc<str>, Problem)>,
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
            "InferenceObjective" => self.without_effect::<InferenceObjectiveSpec>(file, node),
            "InferenceModelRewrite" => self.without_effect::<InferenceModelRewriteSpec>(file, node),
            _ => {
                let document = self.read(file, node);
                self.inference_pools.extend(document);
            }
        }
    }

    /// Reads a document only for what is wrong with it.
    fn without_effect<T: DeserializeOwned>(&mut self, file: usize, node: Node) {
        if let Some(document) = self.read::<T>(file, node) {
            let kind = document.node.at(&["kind"]);
            let why = format!("{} has no effect in this version", kind.as_str().unwrap_or_default());
            self.problems[file].warning(kind.place, why, None);
        }
    }

    /// Reads one document into its type, with its name.
    fn read<T: DeserializeOwned>(&mut self, file: usize, mut node: Node) -> Option<Located<T>> {
        let problems = &mut self.problems[file];
        let read = match self.unknown {
            Unknown::Error => typed::<Document<T>>(&node).map(|document| (document, Vec::new())),
            Unknown::Warning => typed_without_unknown(&mut node),
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
        match advice {
            Some(_) => self.problems[file].error(place, format!("unknown kind `{kind}`"), advice),
            None => self.problems[file].warning(place, format!("kind `{kind}` is not read"), None),
        }
    }

    fn finish(mut self) -> Lowered {
        self.report_duplicates();
        let endpoints = self.endpoints();
        let pools = self.pools(&endpoints);
        let routes = self.routes(&pools);
        let mut problems: Vec<Problem> = self.problems.into_iter().flat_map(|p| p.found).collect();
        problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
        Lowered {
            world: World { endpoints, pools, routes },
            problems,
            dump: self.dump,
            tokenizer_urls: self.tokenizer_urls,
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
        ];
        for server in &self.servers {
            if let Some(pool) = self.inference_pools.iter().find(|pool| pool.name == server.name) {
                let place = pool.place(&["metadata", "name"]);
                let advice = Some(
                    "rename one: both are pools, and metrics name pools by namespace and name".to_owned(),
                );
                let why = format!("InferencePool {} has the name of a ModelServer", pool.name);
                self.problems[pool.file].error(place, why, advice);
            }
        }
        let mut seen = std::collections::HashSet::new();
        for (kind, name, file, place) in all.into_iter().flatten() {
            if !seen.insert((kind, name.clone())) {
                let advice = Some("rename or remove one; the last is used".to_owned());
                self.problems[file].error(place, format!("{kind} {name} is described twice"), advice);
            }
        }
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
            let Some((weight, gpu)) = speed::speed(document, problems) else { continue };
            let event_ports = events::ports(document, address, problems);
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
            let drain = document.metadata.annotations.get("pilotfish.dev/drain").is_some_and(|v| v == "true");
            specs.retain(|other| other.name != document.name);
            specs.push(endpoint::EndpointSpec {
                name: document.name.clone(),
                address,
                weight,
                gpu,
                labels: document.metadata.labels.clone(),
                engine: EngineKind::Vllm,
                event_ports,
                drain: drain || document.spec.drain,
            });
        }
        specs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn one(text: &str) -> Lowered {
        lower(&[("a.yaml", Arc::from(text))])
    }

    fn shown(lowered: &Lowered) -> Vec<String> {
        let line = |p: &Problem| format!("{}:{} {:?} {}", p.line, p.column, p.severity, p.message);
        lowered.problems.iter().map(line).collect()
    }

    const SERVER: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: ms}
spec:
  model: org/real
  inferenceEngine: vLLM
  workloadSelector: {matchLabels: {app: x}}
  workloadPort: {port: 8000}
---
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: e, labels: {app: x}}
spec: {address: '10.0.0.1:8000'}
";

    #[test]
    fn a_whole_set_is_read_without_a_problem() {
        let lowered = one(SERVER);
        assert!(lowered.problems.is_empty(), "{:?}", shown(&lowered));
        assert_eq!((lowered.world.endpoints.len(), lowered.world.pools.len()), (1, 1));
        assert_eq!(lowered.world.pools[0].model.as_deref(), Some("org/real"));
        assert_eq!(lowered.dump.len(), 2);
    }

    #[rstest]
    #[case("kind: Endpoit\napiVersion: pilotfish.dev/v1alpha1\n", "1:7 Error unknown kind `Endpoit`")]
    #[case("kind: Secret\n", "1:7 Warning kind `Secret` is not read")]
    #[case("apiVersion: v1\nkind: Endpoint\n", "1:13 Error Endpoint is read as pilotfish.dev/v1alpha1 only")]
    #[case("a: [1\n", "Error")]
    #[case(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: gpu-0}\n",
        "4:17 Error `gpu-0` is not an address"
    )]
    #[case(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: '[fe80::1%2]:80'}\n",
        "4:17 Error `[fe80::1%2]:80` is not an address"
    )]
    #[case(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {name: e}\nspec: {address: '1.1.1.1:1', weight: 0}\n",
        "4:38 Error weight must be above 0, not 0"
    )]
    #[case(
        "apiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\nmetadata: {}\nspec: {address: '1.1.1.1:1'}\n",
        "3:11 Error a document without `metadata.name`"
    )]
    fn each_problem_is_named_at_its_place(#[case] text: &str, #[case] expected: &str) {
        let lowered = one(text);
        let shown = shown(&lowered);
        assert!(shown.iter().any(|line| line.contains(expected)), "{shown:?}");
    }

    #[rstest]
    #[case("InferenceObjective", "{priority: -1, poolRef: {name: p}}", None)]
    #[case("InferenceObjective", "{priority: high, poolRef: {name: p}}", Some("invalid type"))]
    #[case("InferenceObjective", "{priority: 1}", Some("missing field `poolRef`"))]
    #[case(
        "InferenceModelRewrite",
        "{poolRef: {name: p}, rules: [{matches: [{model: {value: a}}], targets: [{modelRewrite: b, weight: 1}]}]}",
        None
    )]
    #[case("InferenceModelRewrite", "{poolRef: {name: p}, rules: [{targets: [{}]}]}", Some("missing field"))]
    fn kinds_without_effect_are_read_in_both_groups(
        #[case] kind: &str,
        #[case] spec: &str,
        #[case] wrong: Option<&str>,
    ) {
        for group in OBJECTIVE_GROUPS {
            let text =
                format!("apiVersion: {group}/v1alpha2\nkind: {kind}\nmetadata: {{name: x}}\nspec: {spec}\n");
            let shown = shown(&one(&text));
            let none = format!("2:7 Warning {kind} has no effect in this version");
            assert_eq!(shown.len(), 1, "{shown:?}");
            assert!(wrong.map_or(shown[0] == none, |wrong| shown[0].contains(wrong)), "{shown:?}");
        }
    }

    /// Every kind of mistake in a rule is reported at its place, and leaves the good rules at work.
    #[test]
    fn rules_that_cannot_work_are_reported_and_kept_apart() {
        let route = "---
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelRoute
metadata: {name: r}
spec:
  modelName: m
  rules:
  - {name: bad-regex, modelMatch: {headers: {x-tier: {regex: '('}}}, targetModels: [{modelServerName: ms}]}
  - {name: zero, targetModels: [{modelServerName: ms, weight: 0}]}
  - {name: noname, targetModels: [{modelServerName: ''}]}
  - {name: ghost, targetModels: [{modelServerName: mss}]}
  - {name: mixed, targetModels: [{modelServerName: ms, weight: 50}, {modelServerName: ms}]}
  - {name: both, modelMatch: {uri: {exact: a, prefix: b}, headers: {x: ~}}, targetModels: [{modelServerName: ms}, ~]}
  - ~
  - {name: ok, targetModels: [{modelServerName: ms}]}
";
        let lowered = one(&format!("{SERVER}{route}"));
        let shown = shown(&lowered);
        let expected = [
            "Error `(` is not a regular expression",
            "Error every target has weight 0",
            "Error a target without `modelServerName`",
            "Error ModelServer default/mss does not exist",
            "Error some targets have a weight and some have none",
            "Warning several of exact, prefix and regex are given",
            "Warning header x has no test",
            "Error a target that is null",
            "Error a rule that is null",
        ];
        for expected in expected {
            assert!(shown.iter().any(|line| line.contains(expected)), "{expected} is missing in {shown:#?}");
        }
        assert_eq!(lowered.world.routes[0].rules.len(), 7);
        let ghost = lowered.problems.iter().find(|p| p.message.contains("mss")).unwrap();
        assert_eq!(ghost.advice.as_deref(), Some("did you mean `ms`?"));
    }
}
