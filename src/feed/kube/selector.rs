//! Which pods of a namespace could matter: a label selector that the API server applies, so that no others are sent.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::resources::name;
use crate::topology::PoolSpec;

/// Longest selector, in bytes: it is sent in a URL, and servers take 8 KiB of those.
const LONGEST: usize = 4096;

/// The pods that the pools of a namespace could select.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSelector {
    /// What the API server is asked for; none is every pod. It may let pods pass that no pool selects.
    pub server_side: Option<String>,
    /// The selectors themselves: pods of a new one must be listed although the question is the same.
    wanted: BTreeSet<BTreeMap<String, String>>,
}

impl PodSelector {
    /// Whether a pool selects what carries these labels.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.wanted.iter().any(|selector| selector.iter().all(|(key, value)| labels.get(key) == Some(value)))
    }
}

/// The selectors of each namespace that has pools.
pub(super) fn selectors(pools: &[PoolSpec]) -> BTreeMap<Arc<str>, PodSelector> {
    let mut wanted: BTreeMap<Arc<str>, BTreeSet<BTreeMap<String, String>>> = BTreeMap::new();
    for pool in pools.iter().filter(|pool| can_match(&pool.selector)) {
        let namespace = Arc::clone(&pool.name.object.namespace);
        wanted.entry(namespace).or_default().insert(pool.selector.clone());
    }
    let selector = |wanted| PodSelector { server_side: server_side(&wanted), wanted };
    wanted.into_iter().map(|(namespace, wanted)| (namespace, selector(wanted))).collect()
}

/// Whether a pod can carry these labels. What is no label must not reach the API server, which would refuse the question for
/// every pool of the namespace, or read it as another.
fn can_match(selector: &BTreeMap<String, String>) -> bool {
    let is_label = |(key, value): (&String, &String)| name::is_label_key(key) && name::is_label_value(value);
    !selector.is_empty() && selector.iter().all(is_label)
}

/// A selector that lets everything pass that one of `wanted` selects: all conditions of a lone one, else the values of a
/// key that all have.
fn server_side(wanted: &BTreeSet<BTreeMap<String, String>>) -> Option<String> {
    let fits = |selector: &String| selector.len() <= LONGEST;
    if let (Some(only), 1) = (wanted.first(), wanted.len()) {
        let conditions: Vec<String> = only.iter().map(|(key, value)| format!("{key}={value}")).collect();
        return Some(conditions.join(",")).filter(fits);
    }
    let shared =
        wanted.first()?.keys().filter(|key| wanted.iter().all(|selector| selector.contains_key(*key)));
    let of_key = |key: &String| {
        let values: BTreeSet<&str> = wanted.iter().map(|selector| selector[key].as_str()).collect();
        let values: Vec<&str> = values.into_iter().collect();
        // The `in` form knows no empty value.
        if values.contains(&"") { key.clone() } else { format!("{key} in ({})", values.join(",")) }
    };
    shared.map(of_key).filter(fits).min_by_key(String::len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn labels(text: &str) -> BTreeMap<String, String> {
        let pair = |pair: &str| pair.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
        text.split(',').filter_map(pair).collect()
    }

    fn wanted<'a>(selectors: impl IntoIterator<Item = &'a str>) -> BTreeSet<BTreeMap<String, String>> {
        selectors.into_iter().map(labels).collect()
    }

    #[rstest]
    #[case("app=a,tier=x", Some("app=a,tier=x"))]
    #[case("app=a,tier=x app=b", Some("app in (a,b)"))]
    #[case("app=a,tier=x app=b,tier=x", Some("tier in (x)"))]
    #[case("app=a name=b", None)]
    #[case("app= app=b", Some("app"))]
    fn the_server_is_asked_for_no_less_than_is_wanted(
        #[case] selectors: &str,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(server_side(&wanted(selectors.split(' '))).as_deref(), expected);
    }

    #[test]
    fn a_selector_that_no_url_holds_is_not_sent() {
        let selectors: Vec<String> = (0..500).map(|at| format!("app=a-rather-long-name-{at}")).collect();
        assert_eq!(server_side(&wanted(selectors.iter().map(String::as_str))), None);
    }

    #[rstest]
    #[case("app=a", true)]
    #[case("example.com/app=", true)]
    #[case("app=my app", false)]
    #[case("app=a),x in (b", false)]
    #[case("App/x/y=a", false)]
    #[case("", false)]
    fn what_no_pod_can_carry_is_not_asked_for(#[case] selector: &str, #[case] expected: bool) {
        assert_eq!(can_match(&labels(selector)), expected);
    }

    #[test]
    fn what_passed_the_server_is_looked_at_again() {
        let selector = PodSelector { server_side: None, wanted: wanted(["app=a,tier=x", "app=b"]) };
        assert!(selector.selects(&labels("app=b,tier=y")));
        assert!(!selector.selects(&labels("app=a,tier=y")));
    }
}
