//! InferenceObjectives and InferenceModelRewrites, of the group they are in now and of the one they came from.

use std::collections::HashSet;

use super::{Located, OBJECTIVE_GROUPS, Reader};
use crate::document::{Node, Problems, nearest};
use crate::resources::inference_model_rewrite::RewriteRule;
use crate::resources::{InferenceModelRewriteSpec, PoolRef};
use crate::route::rewrite::{Rewrite, Rule, Target};
use crate::snapshot::Objective;
use crate::state::pool::PoolName;
use crate::state::{ObjectName, PoolKind};

const POOL_GROUP: &str = "inference.networking.k8s.io";
const POOL_KIND: &str = "InferencePool";

impl Reader {
    /// An object that is there in both groups counts in the new one.
    pub(super) fn leave_out_old_groups(&mut self) {
        leave_out_old(&mut self.problems, "InferenceObjective", &mut self.objectives);
        leave_out_old(&mut self.problems, "InferenceModelRewrite", &mut self.rewrites);
    }

    /// The objectives.
    pub(super) fn objectives(&mut self, pools: &[PoolName]) -> Vec<(ObjectName, Objective)> {
        let mut objectives = Vec::new();
        for document in &self.objectives {
            let problems = &mut self.problems[document.file];
            let pool = pool(problems, document, &document.spec.pool_ref, pools);
            let priority = document.spec.priority.unwrap_or(0);
            objectives.extend(pool.map(|pool| (document.name.clone(), Objective { pool, priority })));
        }
        objectives
    }

    /// The rewrites, each with the InferencePool it is for.
    pub(super) fn rewrites(&mut self, pools: &[PoolName]) -> Vec<(ObjectName, Rewrite)> {
        let mut rewrites = Vec::new();
        for document in &self.rewrites {
            let problems = &mut self.problems[document.file];
            let pool = pool(problems, document, &document.spec.pool_ref, pools);
            let rules = document.spec.rules.iter().enumerate();
            let rules = rules.filter_map(|(at, spec)| rule(problems, document, at, spec)).collect();
            let rewrite = Rewrite {
                label: format!("rewrite {}", document.name).into(),
                created: document.metadata.created(),
                rules,
            };
            rewrites.extend(pool.map(|pool| (pool, rewrite)));
        }
        rewrites
    }
}

fn leave_out_old<T>(problems: &mut [Problems], kind: &str, documents: &mut Vec<Located<T>>) {
    let [_, old] = OBJECTIVE_GROUPS;
    let is_old = |document: &Located<T>| {
        let version = document.node.get("apiVersion").and_then(Node::as_str);
        version.is_some_and(|version| version.split_once('/').is_some_and(|(group, _)| group == old))
    };
    let new: HashSet<ObjectName> =
        documents.iter().filter(|one| !is_old(one)).map(|one| one.name.clone()).collect();
    documents.retain(|document| {
        let counts = !is_old(document) || !new.contains(&document.name);
        if !counts {
            let why =
                format!("{kind} {} has no effect: it is there in {} too", document.name, OBJECTIVE_GROUPS[0]);
            let advice = Some(format!("remove the one in {old}"));
            problems[document.file].warning(document.place(&["apiVersion"]), why, advice);
        }
        counts
    });
}

/// The InferencePool that is meant, if there is one.
fn pool<T>(
    problems: &mut Problems,
    document: &Located<T>,
    reference: &PoolRef,
    pools: &[PoolName],
) -> Option<ObjectName> {
    let group = reference.group.as_deref().unwrap_or(POOL_GROUP);
    let kind = reference.kind.as_deref().unwrap_or(POOL_KIND);
    if (group, kind) != (POOL_GROUP, POOL_KIND) {
        let why = format!("{kind} of `{group}` is not a pool here, so this has no effect");
        let advice = Some(format!("refer to an {POOL_KIND} of {POOL_GROUP}"));
        problems.warning(document.place(&["spec", "poolRef"]), why, advice);
        return None;
    }
    let name = ObjectName::new(document.name.namespace.clone(), reference.name.as_str());
    let known = || pools.iter().filter(|pool| pool.kind == PoolKind::InferencePool);
    if known().any(|pool| pool.object == name) {
        return Some(name);
    }
    let near = known().filter(|pool| pool.object.namespace == name.namespace);
    let advice = nearest(&reference.name, near.map(|pool| &*pool.object.name))
        .map(|name| format!("did you mean `{name}`?"));
    let place = document.place(&["spec", "poolRef", "name"]);
    problems.warning(place, format!("InferencePool {name} does not exist, so this has no effect"), advice);
    None
}

/// A rule that can decide something.
fn rule(
    problems: &mut Problems,
    document: &Located<InferenceModelRewriteSpec>,
    at: usize,
    spec: &RewriteRule,
) -> Option<Rule> {
    let at = at.to_string();
    let path = ["spec", "rules", &at];
    for (at, test) in spec.matches.iter().enumerate() {
        if let Some(kind) = test.model.kind.as_deref().filter(|kind| *kind != "Exact") {
            let place = document.place(&[&path[..], &["matches", &at.to_string(), "model", "type"]].concat());
            problems.error(place, format!("a model is matched by `Exact` only, not by `{kind}`"), None);
            return None;
        }
    }
    if spec.targets.is_empty() {
        let place = document.place(&[&path[..], &["targets"]].concat());
        problems.error(place, "a rule without targets", Some("give at least one `modelRewrite`".to_owned()));
        return None;
    }
    let weighted = spec.targets.iter().filter(|target| target.weight.is_some()).count();
    if weighted != 0 && weighted != spec.targets.len() {
        let place = document.place(&[&path[..], &["targets"]].concat());
        let why = "some targets have a weight and some have none, which are never chosen";
        problems.warning(place, why, Some("give every target of a rule a weight, or none".to_owned()));
    }
    let target = |target: &crate::resources::inference_model_rewrite::RewriteTarget| Target {
        model: target.model_rewrite.as_str().into(),
        weight: target.weight.unwrap_or(0),
    };
    Some(Rule {
        models: spec.matches.iter().map(|test| test.model.value.as_str().into()).collect(),
        targets: spec.targets.iter().map(target).collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::resources::lower::{Lowered, lower};
    use rstest::rstest;

    const POOL: &str = "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: pool}\n\
        spec: {selector: {matchLabels: {app: x}}}\n---\napiVersion: pilotfish.dev/v1alpha1\nkind: Endpoint\n\
        metadata: {name: e, labels: {app: x}}\nspec: {address: '10.0.0.1:8000'}\n";

    /// A document whose spec is line 14 of the text.
    fn with(group: &str, kind: &str, spec: &str) -> String {
        format!("---\napiVersion: {group}/v1alpha2\nkind: {kind}\nmetadata: {{name: r}}\nspec: {spec}\n")
    }

    fn read(documents: &[String]) -> Lowered {
        lower(&[("a.yaml", Arc::from(format!("{POOL}{}", documents.concat())))])
    }

    fn shown(lowered: &Lowered) -> Vec<String> {
        let line = |p: &crate::document::Problem| {
            let advice = p.advice.as_ref().map(|advice| format!(" = {advice}")).unwrap_or_default();
            format!("{}:{} {:?} {}{advice}", p.line, p.column, p.severity, p.message)
        };
        lowered.problems.iter().map(line).collect()
    }

    #[rstest]
    #[case("{poolRef: {name: pool}, rules: [{targets: [{modelRewrite: b}]}]}", "")]
    #[case("{poolRef: {name: pool, group: inference.networking.k8s.io, kind: InferencePool}, rules: []}", "")]
    #[case(
        "{poolRef: {name: pol}, rules: []}",
        "14:24 Warning InferencePool default/pol does not exist, so this has no effect = did you mean `pool`?"
    )]
    #[case(
        "{poolRef: {name: pool, kind: Service, group: ''}, rules: []}",
        "14:17 Warning Service of `` is not a pool here"
    )]
    #[case(
        "{poolRef: {name: pool}, rules: [{targets: [{modelRewrite: a, weight: 3}, {modelRewrite: b}]}]}",
        "14:49 Warning some targets have a weight and some have none, which are never chosen"
    )]
    #[case(
        "{poolRef: {name: pool}, rules: [{matches: [{model: {value: a}}], targets: []}]}",
        "14:81 Error a rule without targets"
    )]
    #[case(
        "{poolRef: {name: pool}, rules: [{matches: [{model: {type: Prefix, value: a}}], targets: [{modelRewrite: b}]}]}",
        "14:65 Error a model is matched by `Exact` only, not by `Prefix`"
    )]
    fn each_problem_of_a_rewrite_has_its_place(#[case] spec: &str, #[case] expected: &str) {
        for group in OBJECTIVE_GROUPS {
            let shown = shown(&read(&[with(group, "InferenceModelRewrite", spec)]));
            assert!(shown.first().map_or("", String::as_str).starts_with(expected), "{shown:#?}");
            assert_eq!(shown.len(), usize::from(!expected.is_empty()), "{shown:#?}");
        }
    }

    #[test]
    fn a_rewrite_is_for_its_pool_and_keeps_weights_and_age() {
        let spec = "{poolRef: {name: pool}, rules: [{matches: [{model: {type: Exact, value: a}}], targets: \
            [{modelRewrite: b, weight: 9}, {modelRewrite: c}]}]}";
        let text = with("llm-d.ai", "InferenceModelRewrite", spec)
            .replace("{name: r}", "{name: r, creationTimestamp: '1970-01-01T00:01:00Z'}");
        let world = read(&[text]).world;
        let (pool, rewrite) = &world.rewrites[0];
        assert_eq!(
            (pool.to_string(), &*rewrite.label, rewrite.created),
            ("default/pool".to_owned(), "rewrite default/r", 60)
        );
        let rule = &rewrite.rules[0];
        assert_eq!(&*rule.models[0], "a");
        let targets: Vec<_> = rule.targets.iter().map(|t| (&*t.model, t.weight)).collect();
        assert_eq!(targets, [("b", 9), ("c", 0)]);
    }

    #[test]
    fn an_object_of_the_old_group_gives_way_to_its_namesake_in_the_new_one() {
        let [new, old] = OBJECTIVE_GROUPS;
        let rewrite =
            |to| format!("{{poolRef: {{name: pool}}, rules: [{{targets: [{{modelRewrite: {to}}}]}}]}}");
        let objective = |priority| format!("{{poolRef: {{name: pool}}, priority: {priority}}}");
        let lowered = read(&[
            with(old, "InferenceModelRewrite", &rewrite("from-old")),
            with(new, "InferenceModelRewrite", &rewrite("from-new")),
            with(old, "InferenceObjective", &objective(1)),
            with(new, "InferenceObjective", &objective(2)),
            with(old, "InferenceObjective", &objective(3)).replace("name: r}", "name: alone}"),
        ]);
        let models: Vec<&str> =
            lowered.world.rewrites.iter().map(|(_, r)| &*r.rules[0].targets[0].model).collect();
        assert_eq!(models, ["from-new"]);
        let objectives: Vec<_> = lowered
            .world
            .objectives
            .iter()
            .map(|(name, it)| (&*name.name, &*it.pool.name, it.priority))
            .collect();
        assert_eq!(objectives, [("r", "pool", 2), ("alone", "pool", 3)]);
        let shown = shown(&lowered);
        assert!(
            shown[0].starts_with(
                "11:13 Warning InferenceModelRewrite default/r has no effect: it is there in llm-d.ai too"
            ),
            "{shown:#?}"
        );
        assert!(
            shown
                .iter()
                .any(|line| line.contains("Warning InferenceObjective default/r has no effect: it is there"))
        );
        assert!(!lowered.has_errors(), "{shown:#?}");
    }
}
