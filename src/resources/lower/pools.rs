//! ModelServers and InferencePools.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Located, Origin, READ_ANNOTATIONS, Reader, disaggregation};
use crate::document::{Problem, Problems};
use crate::resources::model_server::DEFAULT_RETRY_INTERVAL;
use crate::resources::{ModelServerSpec, duration, name, tokenizer};
use crate::state::TokenizerSource;
use crate::state::endpoint::{EndpointSpec, EngineKind};
use crate::state::pool::{PoolKind, PoolName, TrafficPolicy};
use crate::topology::PoolSpec;

impl Reader {
    pub(super) fn pools(&mut self, endpoints: &[EndpointSpec]) -> Vec<PoolSpec> {
        let files = self.origin == Origin::File;
        let mut pools = Vec::new();
        for document in &self.servers {
            let problems = &mut self.problems[document.file];
            let tokenizer = tokenizer(problems, document);
            self.tokenizer_urls.extend(unlisted(problems, document, tokenizer.as_ref()));
            let selector = &document.spec.workload_selector;
            let engine = engine(problems, document);
            let disaggregation = Some(disaggregation::of_server(problems, document, engine));
            let pool = PoolSpec {
                name: PoolName { kind: PoolKind::ModelServer, object: document.name.clone() },
                model: document.spec.model.clone().filter(|model| !model.is_empty()),
                selector: selector.match_labels.clone(),
                annotations: own_annotations(document),
                ports: document.spec.workload_port.iter().map(|port| port.port).collect(),
                traffic: traffic_policy(problems, document),
                engine,
                tokenizer,
                disaggregation,
            };
            warn_ineffective(problems, document);
            report_selection(
                problems,
                document,
                &pool,
                &["spec", "workloadSelector"],
                files.then_some(endpoints),
            );
            if files {
                disaggregation::report_roles(problems, document, &pool, endpoints);
            }
            pools.push(pool);
        }
        for document in &self.inference_pools {
            let problems = &mut self.problems[document.file];
            let disaggregation = Some(disaggregation::of_pool(problems, document));
            let pool = PoolSpec {
                name: PoolName { kind: PoolKind::InferencePool, object: document.name.clone() },
                model: None,
                selector: document.spec.selector.match_labels.clone(),
                annotations: own_annotations(document),
                ports: document.spec.target_ports.iter().map(|port| port.number).collect(),
                traffic: TrafficPolicy::default(),
                engine: None,
                tokenizer: None,
                disaggregation,
            };
            report_selection(problems, document, &pool, &["spec", "selector"], files.then_some(endpoints));
            pools.push(pool);
        }
        pools
    }
}

/// What the pool says for those of its pods that do not say it themselves.
fn own_annotations<T>(document: &Located<T>) -> BTreeMap<String, String> {
    let annotations = document.metadata.annotations.iter();
    annotations
        .filter(|(name, _)| READ_ANNOTATIONS.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// `endpoints` is none where they come and go.
fn report_selection<T>(
    problems: &mut Problems,
    document: &Located<T>,
    pool: &PoolSpec,
    path: &[&str],
    endpoints: Option<&[EndpointSpec]>,
) {
    let place = document.place(path);
    if pool.selector.is_empty() {
        let advice = Some("give at least one label under `matchLabels`".to_owned());
        problems.error(place, "an empty selector selects no endpoint", advice);
    } else if let (None, Some((key, value))) = (endpoints, pool.selector.iter().find(no_label)) {
        let why = format!("no pod can carry the label `{key}: {value}`");
        problems.error(
            place,
            why,
            Some("correct it: labels are letters, digits, `-`, `_` and `.`".to_owned()),
        );
    } else if endpoints.is_some_and(|all| !all.iter().any(|endpoint| pool.selects(endpoint))) {
        let advice = Some(format!("label an Endpoint of namespace {} so", pool.name.object.namespace));
        problems.warning(place, "no endpoint carries these labels", advice);
    }
}

fn no_label((key, value): &(&String, &String)) -> bool {
    !(name::is_label_key(key) && name::is_label_value(value))
}

fn engine(problems: &mut Problems, document: &Located<ModelServerSpec>) -> Option<EngineKind> {
    let name = &document.spec.inference_engine;
    let engine = EngineKind::named(name);
    if engine.is_none() {
        let advice = Some("vLLM, SGLang and TGI are known".to_owned());
        let place = document.place(&["spec", "inferenceEngine"]);
        problems.error(place, format!("unknown engine `{}`", name.to_ascii_lowercase()), advice);
    }
    engine
}

/// The annotation's source. A URL is kept and looked up in the configuration later, which a document does not know.
fn tokenizer(problems: &mut Problems, document: &Located<ModelServerSpec>) -> Option<TokenizerSource> {
    let text = document.metadata.annotations.get(tokenizer::ANNOTATION)?;
    match tokenizer::parse(text) {
        Ok(source) => Some(source),
        Err((message, advice)) => {
            let place = document.place(&["metadata", "annotations", tokenizer::ANNOTATION]);
            problems.error(place, message, Some(advice.to_owned()));
            None
        }
    }
}

/// The URL of a source, and the error to report unless the configuration lists it.
fn unlisted(
    problems: &mut Problems,
    document: &Located<ModelServerSpec>,
    source: Option<&TokenizerSource>,
) -> Option<(Arc<str>, Problem)> {
    let Some(TokenizerSource::Url(url)) = source else { return None };
    let place = document.place(&["metadata", "annotations", tokenizer::ANNOTATION]);
    let advice =
        Some(format!("list it in the configuration: tokenizers: [{{model: NAME, source: '{url}'}}]"));
    problems.error(
        place,
        format!("prompts are not sent to `{url}`: the configuration does not list it"),
        advice,
    );
    problems.found.pop().map(|problem| (Arc::clone(url), problem))
}

fn traffic_policy(problems: &mut Problems, document: &Located<ModelServerSpec>) -> TrafficPolicy {
    let Some(policy) = &document.spec.traffic_policy else { return TrafficPolicy::default() };
    let mut duration_at = |path: &[&str], text: &Option<String>| {
        let text = text.as_deref()?;
        let found = duration::parse(text);
        if found.is_none() {
            let advice = Some("write for example 500ms, 30s or 1m30s".to_owned());
            problems.error(document.place(path), format!("`{text}` is not a duration"), advice);
        }
        found
    };
    let timeout = duration_at(&["spec", "trafficPolicy", "timeout"], &policy.timeout);
    let retry = policy.retry.clone().unwrap_or_default();
    duration_at(&["spec", "trafficPolicy", "retry", "retryInterval"], &retry.retry_interval);
    // Watched objects carry the default, which nobody wrote.
    if retry.retry_interval.as_deref().is_some_and(|interval| interval != DEFAULT_RETRY_INTERVAL) {
        let place = document.place(&["spec", "trafficPolicy", "retry", "retryInterval"]);
        let advice = Some("set `retry_back_off` of the route in Envoy's configuration".to_owned());
        problems.warning(place, "retryInterval has no effect: Envoy takes its pause from its route", advice);
    }
    let attempts = retry.attempts.and_then(|attempts| {
        let usable = u32::try_from(attempts).ok();
        if usable.is_none() {
            let place = document.place(&["spec", "trafficPolicy", "retry", "attempts"]);
            problems.error(place, format!("attempts must be 0 or more, not {attempts}"), None);
        }
        usable
    });
    TrafficPolicy { timeout, attempts }
}

fn warn_ineffective(problems: &mut Problems, document: &Located<ModelServerSpec>) {
    let spec = &document.spec;
    let mut ineffective = Vec::new();
    let protocol = spec.workload_port.as_ref().and_then(|port| port.protocol.as_deref());
    if protocol.is_some_and(|protocol| protocol != "http") {
        let path = vec!["spec", "workloadPort", "protocol"];
        ineffective
            .push((path, "protocol has no effect: Envoy's cluster decides how endpoints are spoken to"));
    }
    for (path, why) in ineffective {
        problems.warning(document.place(&path), why, None);
    }
}
