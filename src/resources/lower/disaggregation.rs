//! Who prefills and who decodes, as documents say: roles by labels, the connector, and where its bootstrap servers are.

use std::collections::BTreeMap;

use super::{Located, Report};
use crate::document::Problems;
use crate::resources::{InferencePoolSpec, ModelServerSpec};
use crate::state::disaggregation::{
    DataParallel, DisaggregationSpec, EngineRole, KvConnector, RoleLabels, TransferSpec,
};
use crate::state::endpoint::{EndpointSpec, EngineKind};
use crate::topology::PoolSpec;

/// The annotation of a pool that names its connector; it wins over `kvConnector.type`.
pub const CONNECTOR: &str = "pilotfish.dev/kv-connector";
/// The annotation that names the port of prefill engines' bootstrap servers.
pub const BOOTSTRAP_PORT: &str = "pilotfish.dev/bootstrap-port";
/// The annotation that says how many data-parallel ranks an engine has.
pub const RANKS: &str = "pilotfish.dev/data-parallel-size";
/// The annotation that says which of them is behind the port.
pub const RANK: &str = "pilotfish.dev/data-parallel-rank";

/// What a ModelServer says.
pub(super) fn of_server(
    problems: &mut Problems,
    document: &Located<ModelServerSpec>,
    engine: Option<EngineKind>,
) -> DisaggregationSpec {
    let spec = &document.spec;
    let written = spec.kv_connector.as_ref().and_then(|connector| connector.kind.as_deref());
    let named = written.and_then(|name| {
        let found = named(name);
        if found.is_none() {
            unknown(problems, document, &["spec", "kvConnector", "type"], name);
        }
        found
    });
    let connector = match (annotated(problems, document), named, engine) {
        (Some(annotated), ..) => annotated,
        // The API server writes `http` where nothing is written, and engines of SGLang that share nothing need a room.
        (None, None | Some(KvConnector::Http), Some(EngineKind::Sglang)) => KvConnector::Sglang,
        (None, Some(named), _) => named,
        (None, None, _) => KvConnector::Http,
    };
    let labels = match &spec.workload_selector.pd_group {
        None => RoleLabels::Role,
        Some(group) => {
            if group.prefill_labels == group.decode_labels {
                let place = document.place(&["spec", "workloadSelector", "pdGroup", "decodeLabels"]);
                let why = "prefill and decode engines carry the same labels, so each of them counts as both";
                problems.warning(place, why, Some("label them differently".to_owned()));
            }
            RoleLabels::Group {
                key: group.group_key.clone(),
                prefill: group.prefill_labels.clone(),
                decode: group.decode_labels.clone(),
            }
        }
    };
    DisaggregationSpec { labels, connector }
}

/// Warns where endpoints of one role are missing, and of endpoints that have no role or no group.
pub(super) fn report_roles(
    problems: &mut Problems,
    document: &Located<ModelServerSpec>,
    pool: &PoolSpec,
    endpoints: &[EndpointSpec],
) {
    let Some(DisaggregationSpec { labels: labels @ RoleLabels::Group { .. }, .. }) = &pool.disaggregation
    else {
        return;
    };
    let place = document.place(&["spec", "workloadSelector", "pdGroup"]);
    let selected: Vec<&EndpointSpec> = endpoints.iter().filter(|endpoint| pool.selects(endpoint)).collect();
    let roles: Vec<_> = selected.iter().map(|endpoint| labels.read(&endpoint.labels)).collect();
    if selected.is_empty() {
        return;
    }
    for (missing, has) in
        [("prefills", EngineRole::prefills as fn(EngineRole) -> bool), ("decodes", EngineRole::decodes)]
    {
        if !roles.iter().flatten().any(|(role, _)| has(*role)) {
            let advice = Some("label one so, and with the group's key".to_owned());
            problems.warning(place, format!("no endpoint {missing}"), advice);
        }
    }
    for (endpoint, _) in selected.iter().zip(&roles).filter(|(_, role)| role.is_none()) {
        let why = format!("Endpoint {} has no role or no group, and takes no request", endpoint.name);
        problems.warning(place, why, None);
    }
}

/// What an InferencePool says: llm-d's role labels, and its sidecar unless another connector is annotated.
pub(super) fn of_pool(problems: &mut Problems, document: &Located<InferencePoolSpec>) -> DisaggregationSpec {
    let connector = annotated(problems, document).unwrap_or(KvConnector::Sidecar);
    DisaggregationSpec { labels: RoleLabels::Role, connector }
}

/// The name in documents, in any letter case.
fn named(name: &str) -> Option<KvConnector> {
    KvConnector::named(&name.to_ascii_lowercase())
}

fn annotated<T>(problems: &mut Problems, document: &Located<T>) -> Option<KvConnector> {
    let name = document.metadata.annotations.get(CONNECTOR)?;
    let found = named(name);
    if found.is_none() {
        unknown(problems, document, &["metadata", "annotations", CONNECTOR], name);
    }
    found
}

fn unknown<T>(problems: &mut Problems, document: &Located<T>, path: &[&str], name: &str) {
    let known = KvConnector::ALL.map(KvConnector::name).join(", ");
    problems.error(
        document.place(path),
        format!("unknown connector `{name}`"),
        Some(format!("known are {known}")),
    );
}

/// What an endpoint's annotations say. `position` is that of its port, where its pod has several: they are its ranks.
pub(super) fn transfer(
    annotations: &BTreeMap<String, String>,
    position: Option<u16>,
    report: &mut Report<'_>,
) -> TransferSpec {
    let mut number = |name: &'static str, least: u16| {
        let text = annotations.get(name)?;
        let number = text.parse::<u16>().ok().filter(|number| *number >= least);
        if number.is_none() {
            let why = format!("{name} must be a number from {least} to 65535, not `{text}`");
            report.error(&["metadata", "annotations", name], why, None);
        }
        number
    };
    let bootstrap_port = number(BOOTSTRAP_PORT, 1);
    let (size, rank) = (number(RANKS, 1), number(RANK, 0));
    let data_parallel = match (size, rank) {
        (Some(size), Some(rank)) if rank >= size => {
            let why = format!("rank {rank} is none of {size}: ranks count from 0");
            report.error(&["metadata", "annotations", RANK], why, None);
            None
        }
        (Some(size), rank) => {
            let by_port = position.filter(|position| *position < size);
            Some(DataParallel { rank: rank.or(by_port), told: rank.is_some(), size })
        }
        (None, Some(_)) => {
            let why = format!("{RANK} says nothing without {RANKS}");
            report.error(&["metadata", "annotations", RANK], why, None);
            None
        }
        (None, None) => None,
    };
    TransferSpec { bootstrap_port, data_parallel }
}
