//! Which adapters an engine works on, from the labels of its adapter series, and which it lists as models.
//!
//! vLLM keeps a series for every set of adapters that ever was at work and writes the present time into the one that is.
//! So the newest value tells the present set, unless several processes report into one page: then values are sums of
//! times and their order means nothing, but a value that changed since the last page still belongs to a set that was at
//! work in between. There the present set is the union of those that changed.

use ahash::AHashMap;
use serde::Deserialize;

use crate::state::endpoint::{ActiveAdapters, Adapters};

use super::text::label;

/// A Unix time of two processes added up; one alone reaches this in 2065.
const SUM_OF_TIMES: f64 = 3e9;
/// Sets of adapters that are followed; the engine never drops one.
const MAX_SETS: usize = 4096;

/// Follows the adapter series of one engine.
#[derive(Debug, Default)]
pub struct AdapterSets {
    values: AHashMap<u64, f64>,
    newest: Option<u64>,
}

impl AdapterSets {
    /// The adapters at work if that is news. `series` are keys, labels and values of the page; `ranks` says how many
    /// engine processes report there, and `idle` that they have no request.
    pub fn advance(
        &mut self,
        series: &[(u64, &[u8], f64)],
        ranks: usize,
        idle: bool,
    ) -> Option<ActiveAdapters> {
        let newest = series.iter().filter(|s| s.2.is_finite()).max_by(|a, b| a.2.total_cmp(&b.2))?;
        if ranks <= 1 && newest.2 < SUM_OF_TIMES {
            self.values.clear();
            let news = self.newest.replace(newest.0) != Some(newest.0);
            return news.then(|| union(std::iter::once(newest.1)));
        }
        self.newest = None;
        let first = self.values.is_empty();
        let mut changed: Vec<&[u8]> = Vec::new();
        for &(key, labels, value) in series {
            let known = self.values.get(&key).copied();
            if known.is_none() && self.values.len() >= MAX_SETS {
                continue;
            }
            self.values.insert(key, value);
            if known != Some(value) {
                changed.push(labels);
            }
        }
        match (first, changed.is_empty()) {
            // The first page holds every set there ever was.
            (true, _) | (false, true) => idle.then(ActiveAdapters::default),
            (false, false) => Some(union(changed.into_iter())),
        }
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

fn union<'a>(sets: impl Iterator<Item = &'a [u8]>) -> ActiveAdapters {
    let mut active = ActiveAdapters::default();
    for labels in sets {
        add(&mut active.running, labels, "running_lora_adapters");
        add(&mut active.waiting, labels, "waiting_lora_adapters");
    }
    let ActiveAdapters { running, waiting } = &mut active;
    waiting.retain(|name| !running.contains(name));
    active
}

fn add(names: &mut Vec<Box<str>>, labels: &[u8], from: &str) {
    let Some(list) = label(labels, from) else { return };
    for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if !names.iter().any(|known| &**known == name) {
            names.push(name.into());
        }
    }
}

/// How many adapters the engine can hold at once.
pub fn max_lora(labels: &[u8]) -> Option<f64> {
    label(labels, "max_lora")?.parse().ok()
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: Box<str>,
    /// The base model of an adapter.
    #[serde(default)]
    parent: Option<Box<str>>,
}

/// The names in an answer to `GET /v1/models`; `None` if it is not such a list or an empty one, which no engine that
/// serves has.
pub fn parse_models(body: &[u8]) -> Option<Adapters> {
    let list: ModelList = serde_json::from_slice(body).ok()?;
    let adapters =
        list.data.iter().filter(|model| model.parent.is_some()).map(|model| model.id.clone()).collect();
    let served: Vec<Box<str>> = list.data.into_iter().map(|model| model.id).collect();
    (!served.is_empty()).then_some(Adapters { served, adapters })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn set(running: &str, waiting: &str) -> String {
        format!(r#"max_lora="2",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}""#)
    }

    fn names(active: &ActiveAdapters) -> (Vec<&str>, Vec<&str>) {
        (active.running.iter().map(|n| &**n).collect(), active.waiting.iter().map(|n| &**n).collect())
    }

    #[test]
    fn the_newest_set_is_at_work_and_is_news_once() {
        let (idle, a, ab) = (set("", ""), set("a", "a,c"), set("a,b", ""));
        let page = |times: [f64; 3]| {
            [(0, idle.as_bytes(), times[0]), (1, a.as_bytes(), times[1]), (2, ab.as_bytes(), times[2])]
        };
        let mut sets = AdapterSets::default();
        let active = sets.advance(&page([1.7e9, 1.8e9, 1.75e9]), 1, false).unwrap();
        assert_eq!(
            names(&active),
            (vec!["a"], vec!["c"]),
            "waiting adapters are those with no request running"
        );
        assert_eq!(sets.advance(&page([1.7e9, 1.81e9, 1.75e9]), 1, false), None);
        let active = sets.advance(&page([1.7e9, 1.81e9, 1.82e9]), 1, false).unwrap();
        assert_eq!(names(&active), (vec!["a", "b"], vec![]));
        assert_eq!(sets.advance(&page([1.9e9, 1.81e9, 1.82e9]), 1, false), Some(ActiveAdapters::default()));
        assert_eq!(sets.advance(&[], 1, true), None);
    }

    #[rstest]
    #[case::two_ranks(2, 1.0)]
    #[case::several_processes(1, 2.0)]
    fn summed_times_are_not_ordered_but_compared_with_the_last_page(
        #[case] ranks: usize,
        #[case] times: f64,
    ) {
        let (a, b, c) = (set("a", ""), set("b,a", ""), set("", "c"));
        let page = |at: [f64; 3]| {
            [(0, a.as_bytes(), times * at[0]), (1, b.as_bytes(), at[1]), (2, c.as_bytes(), times * at[2])]
        };
        let mut sets = AdapterSets::default();
        assert_eq!(sets.advance(&page([1.8e9, 1.7e9, 1.7e9]), ranks, false), None, "nothing to compare with");
        let active = sets.advance(&page([1.8e9, 1.75e9, 1.71e9]), ranks, false).unwrap();
        assert_eq!(names(&active), (vec!["b", "a"], vec!["c"]));
        assert_eq!(sets.advance(&page([1.8e9, 1.75e9, 1.71e9]), ranks, false), None);
        let idle = sets.advance(&page([1.8e9, 1.75e9, 1.71e9]), ranks, true);
        assert_eq!(idle, Some(ActiveAdapters::default()));
    }

    #[rstest]
    #[case::list(r#"{"object":"list","data":[{"id":"m","parent":null},{"id":"lora\"1"}]}"#, Some(vec!["m", "lora\"1"]))]
    #[case::empty(r#"{"data":[]}"#, None)]
    #[case::error(r#"{"error":{"message":"no"}}"#, None)]
    #[case::html("<html>", None)]
    fn model_lists(#[case] body: &str, #[case] expected: Option<Vec<&str>>) {
        let served = parse_models(body.as_bytes()).map(|adapters| adapters.served);
        assert_eq!(served, expected.map(|names| names.into_iter().map(Box::from).collect::<Vec<_>>()));
    }
}
