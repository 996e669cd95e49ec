//! The kinds of objects that are watched, and which of them.

use kube::core::{ApiResource, GroupVersionKind};

use super::Scope;
use crate::resources::lower::OBJECTIVE_GROUPS;

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Kthena's.
    ModelRoute,
    /// Kthena's.
    ModelServer,
    /// Of the Gateway API Inference Extension.
    InferencePool,
    /// Of llm-d, formerly of the Gateway API Inference Extension.
    InferenceObjective,
    /// As InferenceObjective.
    InferenceModelRewrite,
    /// Core.
    Pod,
}

/// What one watch reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Source {
    /// The kind.
    pub kind: Kind,
    /// How the API server calls it.
    pub resource: ApiResource,
    /// The namespace; none means all.
    pub namespace: Option<String>,
    /// The only object of interest.
    pub name: Option<String>,
}

impl Source {
    /// The pods of a namespace.
    pub fn pods(namespace: &str) -> Self {
        Self::new(Kind::Pod, "", "v1", "pods", Some(namespace.to_owned()))
    }

    /// InferencePools, wherever they are.
    pub fn pools() -> Self {
        Self::new(Kind::InferencePool, "inference.networking.k8s.io", "v1", "inferencepools", None)
    }

    fn new(kind: Kind, group: &str, version: &str, plural: &str, namespace: Option<String>) -> Self {
        let kind_name = format!("{kind:?}");
        let gvk = GroupVersionKind::gvk(group, version, &kind_name);
        let resource = ApiResource::from_gvk_with_plural(&gvk, plural);
        Self { kind, resource, namespace, name: None }
    }

    /// The kind as `kubectl` writes it, a label of metrics: with its group where two groups have it.
    pub fn label(&self) -> String {
        let ApiResource { plural, group, .. } = &self.resource;
        if group == OBJECTIVE_GROUPS[1] { format!("{plural}.{group}") } else { plural.clone() }
    }

    /// Whether nothing can be served without it.
    pub fn is_required(&self) -> bool {
        self.kind == Kind::Pod || self.name.is_some()
    }
}

/// How the API server calls the kind of that [label](Source::label).
pub fn resource(label: &str) -> Option<ApiResource> {
    let everything = sources(&Scope::default()).into_iter().chain([Source::pods("")]);
    everything.into_iter().find(|source| source.label() == label).map(|source| source.resource)
}

/// What is watched beside pods.
pub(super) fn sources(scope: &Scope) -> Vec<Source> {
    const SERVING: &str = "networking.serving.volcano.sh";
    let mut found = Vec::new();
    let of_one_pool = scope.pool.as_ref().or(scope.unnamed.as_ref().map(|unnamed| &unnamed.name));
    let namespaces: Vec<Option<String>> = match of_one_pool {
        Some(pool) => vec![Some(pool.namespace.to_string())],
        None if scope.namespaces.is_empty() => vec![None],
        None => scope.namespaces.iter().cloned().map(Some).collect(),
    };
    for namespace in namespaces {
        let mut add = |kind, group: &str, version: &str, plural: &str| {
            found.push(Source::new(kind, group, version, plural, namespace.clone()));
        };
        if of_one_pool.is_none() {
            add(Kind::ModelRoute, SERVING, "v1alpha1", "modelroutes");
            add(Kind::ModelServer, SERVING, "v1alpha1", "modelservers");
        }
        if scope.unnamed.is_none() {
            add(Kind::InferencePool, "inference.networking.k8s.io", "v1", "inferencepools");
        }
        for group in OBJECTIVE_GROUPS {
            add(Kind::InferenceObjective, group, "v1alpha2", "inferenceobjectives");
            add(Kind::InferenceModelRewrite, group, "v1alpha2", "inferencemodelrewrites");
        }
    }
    if let Some(pool) = &scope.pool {
        let pools = found.iter_mut().filter(|source| source.kind == Kind::InferencePool);
        pools.for_each(|source| source.name = Some(pool.name.to_string()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::ObjectName;

    fn shown(scope: &Scope) -> Vec<String> {
        let line = |source: Source| {
            let namespace = source.namespace.as_deref().unwrap_or("*");
            format!(
                "{namespace}/{}{}",
                source.label(),
                source.name.map_or_else(String::new, |n| format!("/{n}"))
            )
        };
        sources(scope).into_iter().map(line).collect()
    }

    const OBJECTIVES: [&str; 4] = [
        "inferenceobjectives",
        "inferencemodelrewrites",
        "inferenceobjectives.inference.networking.x-k8s.io",
        "inferencemodelrewrites.inference.networking.x-k8s.io",
    ];

    #[test]
    fn everything_is_read_unless_a_pool_is_named() {
        let all = ["modelroutes", "modelservers", "inferencepools"];
        let expected: Vec<String> = all.iter().chain(&OBJECTIVES).map(|kind| format!("*/{kind}")).collect();
        assert_eq!(shown(&Scope::default()), expected);
        let two = Scope { namespaces: ["a".to_owned(), "b".to_owned()].into(), ..Scope::default() };
        assert_eq!(shown(&two).len(), 14);
        let one = Scope { pool: Some(ObjectName::new("n", "p")), ..Scope::default() };
        let mut expected = vec!["n/inferencepools/p".to_owned()];
        expected.extend(OBJECTIVES.iter().map(|kind| format!("n/{kind}")));
        assert_eq!(shown(&one), expected);
    }
}
