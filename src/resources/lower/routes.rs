//! ModelRoutes.

use std::sync::Arc;

use regex::{Regex, RegexBuilder};

use super::{Located, Origin, Reader, limits};
use crate::document::{About, Place, Problems, nearest};
use crate::resources::ModelRouteSpec;
use crate::resources::model_route::{ModelMatch, Rule as RuleSpec, StringMatch};
use crate::route::{HeaderMatch, RequestMatch, Route, Rule, Target, TextMatch};
use crate::state::ObjectName;
use crate::state::pool::{PoolKind, PoolName};

/// Memory that one compiled pattern may take.
const REGEX_BYTES: usize = 256 << 10;

impl Reader {
    pub(super) fn routes(&mut self, pools: &[PoolName]) -> Vec<Route> {
        let mut routes = Vec::new();
        let mut limits = Vec::new();
        let known = Known { pools, alone: self.origin == Origin::Review };
        for document in &self.routes {
            let problems = &mut self.problems[document.file];
            let spec = &document.spec;
            let model = spec.model_name.as_deref().filter(|name| !name.is_empty()).map(Arc::from);
            if model.is_none() && spec.lora_adapters.is_empty() {
                let advice = Some("give `modelName`, `loraAdapters` or both".to_owned());
                problems.error(document.place(&["spec"]), "a ModelRoute that serves no model", advice);
            }
            if spec.rules.is_empty() {
                let advice = Some("give at least one rule with a target".to_owned());
                problems.error(
                    document.place(&["spec", "rules"]),
                    "a ModelRoute without rules serves nothing",
                    advice,
                );
            }
            for at in (0..spec.lora_adapters.len()).filter(|at| spec.lora_adapters[*at].is_empty()) {
                let place = document.place(&["spec", "loraAdapters", &at.to_string()]);
                problems.error(place, "an adapter without a name", Some("remove it".to_owned()));
            }
            warn_ineffective(problems, document);
            let (limit, store) = limits::limit(problems, document, model.as_ref());
            limits.push(limit);
            self.limit_stores.extend(store);
            let rules = (0..spec.rules.len()).filter_map(|at| rule(problems, document, at, &known)).collect();
            routes.push(Route {
                label: document.name.to_string().into(),
                name: document.name.clone(),
                created: document.metadata.created(),
                model,
                adapters: spec
                    .lora_adapters
                    .iter()
                    .filter(|name| !name.is_empty())
                    .map(|n| n.as_str().into())
                    .collect(),
                rules,
                limit: None,
            });
        }
        Self::tell_limits_apart(&mut routes, limits);
        self.report_hidden(&routes);
        routes
    }

    /// Names served by several routes: the older answers, and a base name hides an equal adapter name.
    fn report_hidden(&mut self, routes: &[Route]) {
        for (document, route) in self.routes.iter().zip(routes) {
            let others = || routes.iter().filter(|other| other.name != route.name);
            for (at, adapter) in route.adapters.iter().enumerate() {
                if let Some(other) = others().find(|other| other.model.as_ref() == Some(adapter)) {
                    let place = document.place(&["spec", "loraAdapters", &at.to_string()]);
                    let why = format!(
                        "adapter `{adapter}` is hidden by the modelName of ModelRoute {}",
                        other.label
                    );
                    self.problems[document.file].warning(place, why, None);
                    self.problems[document.file].newest_is_about(About::Conflict);
                }
            }
            let older = |other: &&Route| (other.created, &other.name) < (route.created, &route.name);
            if let Some(model) = &route.model
                && let Some(other) = others().filter(older).find(|other| other.model.as_ref() == Some(model))
            {
                let place = document.place(&["spec", "modelName"]);
                let why = format!("ModelRoute {} serves `{model}` too and is tried first", other.label);
                self.problems[document.file].warning(place, why, None);
                self.problems[document.file].newest_is_about(About::Conflict);
            }
        }
    }
}

/// What a target may name.
struct Known<'a> {
    pools: &'a [PoolName],
    /// Whether the rest of the cluster may change before the object counts.
    alone: bool,
}

impl Known<'_> {
    fn look_for(&self, server: &ObjectName, problems: &mut Problems, place: Place) {
        if self.pools.iter().any(|pool| pool.kind == PoolKind::ModelServer && pool.object == *server) {
            return;
        }
        let near = self.pools.iter().filter(|pool| pool.object.namespace == server.namespace);
        let near = nearest(&server.name, near.map(|pool| &*pool.object.name));
        let advice = near.map(|name| format!("did you mean `{name}`?"));
        if self.alone {
            problems.warning(place, format!("ModelServer {server} is not known here yet"), advice);
        } else {
            problems.error(place, format!("ModelServer {server} does not exist"), advice);
        }
        problems.newest_is_about(About::Reference);
    }
}

fn warn_ineffective(problems: &mut Problems, document: &Located<ModelRouteSpec>) {
    let spec = &document.spec;
    if !spec.parent_refs.is_empty() {
        let place = document.place(&["spec", "parentRefs"]);
        problems.warning(
            place,
            "parentRefs has no effect: the route serves every listener that asks this picker",
            None,
        );
    }
}

fn rule(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    at: usize,
    known: &Known<'_>,
) -> Option<Rule> {
    let index = at.to_string();
    let Some(spec) = &document.spec.rules[at] else {
        problems.error(document.place(&["spec", "rules", &index]), "a rule that is null", None);
        return None;
    };
    let label = spec.name.clone().filter(|name| !name.is_empty()).unwrap_or_else(|| format!("#{}", at + 1));
    let matches = spec.model_match.as_ref().map_or_else(RequestMatch::default, |given| {
        request_match(problems, document, given, &["spec", "rules", &index, "modelMatch"])
    });
    let (targets, broken) = targets(problems, document, spec, &index, known);
    Some(Rule { label: label.into(), matches, targets, broken: broken.map(Arc::from) })
}

fn request_match(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    given: &ModelMatch,
    path: &[&str],
) -> RequestMatch {
    let mut headers = Vec::new();
    for (name, test) in &given.headers {
        let path = [path, &["headers", name]].concat();
        if test.is_none() {
            problems.warning(
                document.place(&path),
                format!("header {name} has no test: any value matches"),
                None,
            );
        }
        let value = test.as_ref().map_or(TextMatch::Any, |test| text_match(problems, document, test, &path));
        headers.push(HeaderMatch { name: name.to_ascii_lowercase().into(), value });
    }
    let uri = given.uri.as_ref();
    RequestMatch {
        model: given
            .body
            .as_ref()
            .and_then(|body| body.model.as_deref())
            .filter(|m| !m.is_empty())
            .map(Into::into),
        headers,
        uri: uri
            .map_or(TextMatch::Any, |test| text_match(problems, document, test, &[path, &["uri"]].concat())),
    }
}

fn text_match(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    test: &StringMatch,
    path: &[&str],
) -> TextMatch {
    let set = [test.exact.is_some(), test.prefix.is_some(), test.regex.is_some()];
    if set.iter().filter(|is_set| **is_set).count() > 1 {
        let advice = Some("only the first of exact, prefix, regex counts: remove the others".to_owned());
        problems.warning(document.place(path), "several of exact, prefix and regex are given", advice);
    }
    match test {
        StringMatch { exact: Some(exact), .. } => TextMatch::Exact(exact.as_str().into()),
        StringMatch { prefix: Some(prefix), .. } => TextMatch::Prefix(prefix.as_str().into()),
        StringMatch { regex: Some(pattern), .. } => bounded_regex(pattern).map_or_else(
            |error| {
                let why = error.to_string();
                let why = why.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
                let place = document.place(&[path, &["regex"]].concat());
                problems.error(place, format!("`{pattern}` is not a regular expression: {why}"), None);
                TextMatch::Never
            },
            TextMatch::Regex,
        ),
        _ => TextMatch::Any,
    }
}

/// Anybody who may write a route may write patterns: each has a bound on the memory it takes, far above what paths and header
/// values need.
fn bounded_regex(pattern: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(pattern).size_limit(REGEX_BYTES).dfa_size_limit(REGEX_BYTES).build()
}

/// The targets of a rule, or why it has none that could be chosen.
fn targets(
    problems: &mut Problems,
    document: &Located<ModelRouteSpec>,
    rule: &RuleSpec,
    index: &str,
    known: &Known<'_>,
) -> (Vec<Target>, Option<&'static str>) {
    let path = ["spec", "rules", index, "targetModels"];
    let place = document.place(&path);
    let given: Vec<_> = rule.target_models.iter().flatten().collect();
    if given.len() < rule.target_models.len() {
        problems.error(place, "a target that is null", Some("remove it".to_owned()));
    }
    if given.is_empty() {
        problems.error(
            place,
            "a rule without targets",
            Some("give at least one `modelServerName`".to_owned()),
        );
        return (Vec::new(), Some("it has no target"));
    }
    let weighted = given.iter().filter(|target| target.weight.is_some()).count();
    if weighted != 0 && weighted != given.len() {
        let advice = Some("give every target of a rule a weight, or none".to_owned());
        problems.error(place, "some targets have a weight and some have none", advice);
        return (Vec::new(), Some("some of its targets have a weight and some have none"));
    }
    let mut targets = Vec::new();
    let mut broken = None;
    for (at, target) in rule.target_models.iter().enumerate() {
        let Some(target) = target else { continue };
        let at = at.to_string();
        let place = |member: &str| document.place(&[&path[..], &[&*at, member]].concat());
        if target.external_model_provider_name.as_deref().is_some_and(|name| !name.is_empty()) {
            let advice = Some("route external providers in Envoy".to_owned());
            problems.error(
                place("externalModelProviderName"),
                "external providers are not served here",
                advice,
            );
            broken = Some("it targets an external provider");
            continue;
        }
        let Some(name) = target.model_server_name.as_deref().filter(|name| !name.is_empty()) else {
            problems.error(place("modelServerName"), "a target without `modelServerName`", None);
            broken = Some("a target names no ModelServer");
            continue;
        };
        let server = ObjectName::new(Arc::clone(&document.name.namespace), name);
        known.look_for(&server, problems, place("modelServerName"));
        targets.push(Target { server, weight: target.weight.unwrap_or(1) });
    }
    if !targets.is_empty() && targets.iter().all(|target| target.weight == 0) {
        let advice = Some("give one target a weight above 0".to_owned());
        problems.error(place, "every target has weight 0", advice);
    }
    (targets, broken)
}
