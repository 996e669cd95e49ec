//! What is said of each object: whether it is accepted, whether what it names is there, whether its endpoints are.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::events::{LONGEST, cut};
use crate::document::{About, Problem, Severity};
use crate::feed::kube::{Objects, Version};
use crate::resources::lower::Unroutable;
use crate::resources::status::{ACCEPTED, READY, RESOLVED_REFS};
use crate::snapshot::Snapshot;
use crate::state::{ObjectName, PoolKind, PoolName};

/// Problems that one condition names; more are counted.
const NAMED: usize = 4;

/// What is said of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Plural of its kind, as the API server calls it, with the group where two have it.
    pub kind: Arc<str>,
    /// Identity.
    pub name: ObjectName,
    /// The version that this is about; none for pods.
    pub version: Option<Version>,
    /// Its conditions; none for kinds whose status is others' to write.
    pub conditions: Vec<Condition>,
    /// Endpoints, of a ModelServer.
    pub endpoints: Option<usize>,
    /// What is wrong, for objects whose conditions nobody keeps.
    pub notes: Vec<Note>,
}

/// One condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// Its type.
    pub kind: &'static str,
    /// Whether it holds.
    pub holds: bool,
    /// Why, for programs.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
}

/// Something to tell of an object once.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    /// Why, for programs.
    pub reason: &'static str,
    /// Why, for people.
    pub message: String,
}

/// Everything that is to be said.
pub fn reports(objects: &Objects, snapshot: &Snapshot, unroutable: &[Unroutable]) -> Vec<Report> {
    let read = &objects.read;
    let mut problems: BTreeMap<&Path, Vec<&Problem>> = BTreeMap::new();
    for problem in &read.problems {
        problems.entry(&problem.file).or_default().push(problem);
    }
    let of_objects = read.dump.iter().filter_map(|object| {
        let kind = plural(&object.kind)?;
        let path = [kind, &object.name.namespace, &object.name.name].iter().collect::<PathBuf>();
        let problems = problems.get(&*path).map_or(&[][..], Vec::as_slice);
        let version = objects.versions.get(&path).cloned();
        Some(Report { version, ..report(kind, &object.name, problems, snapshot) })
    });
    let of_pods = unroutable.iter().map(|pod| Report {
        kind: "pods".into(),
        name: pod.pod.clone(),
        version: None,
        conditions: Vec::new(),
        endpoints: None,
        notes: vec![Note { reason: "Unroutable", message: format!("gets no requests: {}", pod.why) }],
    });
    of_objects.chain(of_pods).collect()
}

/// Kinds whose objects can be told something. Of the kinds that two groups have, objects of the former are not.
fn plural(kind: &str) -> Option<&'static str> {
    match kind {
        "ModelRoute" => Some("modelroutes"),
        "ModelServer" => Some("modelservers"),
        "InferencePool" => Some("inferencepools"),
        "InferenceObjective" => Some("inferenceobjectives"),
        "InferenceModelRewrite" => Some("inferencemodelrewrites"),
        _ => None,
    }
}

fn report(kind: &'static str, name: &ObjectName, problems: &[&Problem], snapshot: &Snapshot) -> Report {
    let is_ours = matches!(kind, "modelroutes" | "modelservers");
    let mut conditions = if is_ours { vec![accepted(problems), resolved(problems)] } else { Vec::new() };
    let mut endpoints = None;
    if kind == "modelservers" {
        let pool = PoolName { kind: PoolKind::ModelServer, object: name.clone() };
        let found = snapshot.pool(&pool).map_or(0, |pool| pool.members.len());
        conditions.push(ready(found > 0));
        endpoints = Some(found);
    }
    let note = |problem: &&Problem| Note { reason: reason(problem), message: problem.message.clone() };
    Report {
        kind: kind.into(),
        name: name.clone(),
        version: None,
        conditions,
        endpoints,
        notes: problems.iter().map(note).collect(),
    }
}

fn reason(problem: &Problem) -> &'static str {
    match (problem.about, problem.severity) {
        (About::Reference, _) => "TargetNotFound",
        (About::Conflict, _) => "Conflicted",
        (About::Content, Severity::Error) => "Invalid",
        (About::Content, Severity::Warning) => "PartlyWithoutEffect",
    }
}

fn accepted(problems: &[&Problem]) -> Condition {
    let of = |about, severity| -> Vec<&str> {
        let those = problems.iter().filter(|problem| (problem.about, problem.severity) == (about, severity));
        those.map(|problem| problem.message.as_str()).collect()
    };
    let invalid = of(About::Content, Severity::Error);
    let conflicts = of(About::Conflict, Severity::Warning);
    let ignored = of(About::Content, Severity::Warning);
    let (holds, reason, message) = if !invalid.is_empty() {
        (false, "Invalid", named(&invalid))
    } else if !conflicts.is_empty() {
        (true, "Conflicted", named(&conflicts))
    } else if !ignored.is_empty() {
        (true, "PartlyWithoutEffect", named(&ignored))
    } else {
        (true, "Accepted", "it is in effect".to_owned())
    };
    Condition { kind: ACCEPTED, holds, reason, message }
}

fn resolved(problems: &[&Problem]) -> Condition {
    let missing: Vec<&str> = problems
        .iter()
        .filter(|problem| problem.about == About::Reference)
        .map(|problem| problem.message.as_str())
        .collect();
    let (reason, message) = if missing.is_empty() {
        ("ResolvedRefs", "everything it names is there".to_owned())
    } else {
        ("TargetNotFound", named(&missing))
    };
    Condition { kind: RESOLVED_REFS, holds: missing.is_empty(), reason, message }
}

fn ready(has_endpoints: bool) -> Condition {
    let (reason, message) = if has_endpoints {
        ("EndpointsFound", "pods that it selects are ready")
    } else {
        ("NoEndpoints", "no pod that it selects is ready on its port")
    };
    Condition { kind: READY, holds: has_endpoints, reason, message: message.to_owned() }
}

fn named(messages: &[&str]) -> String {
    let text = messages.iter().take(NAMED).copied().collect::<Vec<_>>().join("; ");
    let text = cut(&text, LONGEST);
    match messages.len().saturating_sub(NAMED) {
        0 => text,
        more => format!("{text}; and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    use crate::resources::lower::lower_objects;

    const OBJECTS: [(&str, &str); 6] = [
        ("modelroutes/chat/good", "{modelName: a, rules: [{targetModels: [{modelServerName: s}]}]}"),
        ("modelroutes/chat/younger", "{modelName: a, rules: [{targetModels: [{modelServerName: s}]}]}"),
        ("modelroutes/chat/dangling", "{modelName: b, rules: [{targetModels: [{modelServerName: none}]}]}"),
        (
            "modelroutes/chat/wrong",
            "{modelName: c, rules: [{modelMatch: {headers: {h: {regex: '('}}}, targetModels: [{modelServerName: s}]}]}",
        ),
        (
            "modelroutes/chat/limited",
            "{modelName: d, rules: [{targetModels: [{modelServerName: s}]}], rateLimit: {unit: minute}}",
        ),
        (
            "modelservers/chat/s",
            "{inferenceEngine: vLLM, workloadSelector: {matchLabels: {app: x}}, workloadPort: {port: 8000}}",
        ),
    ];

    fn said() -> BTreeMap<String, Vec<(&'static str, bool, &'static str)>> {
        let objects: Vec<(&str, Arc<str>)> = OBJECTS
            .iter()
            .map(|(path, spec)| {
                let kind = if path.starts_with("modelroutes") { "ModelRoute" } else { "ModelServer" };
                let name = path.rsplit('/').next().unwrap();
                let text = format!(
                    "apiVersion: networking.serving.volcano.sh/v1alpha1\nkind: {kind}\n\
                     metadata: {{namespace: chat, name: {name}}}\nspec: {spec}\n"
                );
                (*path, text.into())
            })
            .collect();
        let objects = Objects { read: lower_objects(&objects), versions: HashMap::new() };
        let all = reports(&objects, &Snapshot::default(), &[]);
        let shown = |report: Report| {
            let conditions = report.conditions.iter().map(|c| (c.kind, c.holds, c.reason)).collect();
            (report.name.name.to_string(), conditions)
        };
        all.into_iter().map(shown).collect()
    }

    #[test]
    fn every_object_is_told_what_is_wrong_with_it() {
        let said = said();
        let refs = (RESOLVED_REFS, true, "ResolvedRefs");
        assert_eq!(said["good"], [(ACCEPTED, true, "Accepted"), refs]);
        assert_eq!(said["younger"], [(ACCEPTED, true, "Conflicted"), refs]);
        assert_eq!(
            said["dangling"],
            [(ACCEPTED, true, "Accepted"), (RESOLVED_REFS, false, "TargetNotFound")]
        );
        assert_eq!(said["wrong"], [(ACCEPTED, false, "Invalid"), refs]);
        assert_eq!(said["limited"], [(ACCEPTED, true, "PartlyWithoutEffect"), refs]);
        assert_eq!(said["s"], [(ACCEPTED, true, "Accepted"), refs, (READY, false, "NoEndpoints")]);
    }

    #[test]
    fn long_lists_are_cut() {
        assert_eq!(named(&["a"; 6]), "a; a; a; a; and 2 more");
    }
}
