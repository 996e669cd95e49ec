//! The plugin registry: every filter, scorer and picker, one file each, listed once.
//!
//! The configuration reader, `docs/plugins.md`, the JSON schema and `pilotfish check` are derived from [`PLUGINS`].

pub mod decide_always;
pub mod decide_break_even;
pub mod decide_prefix_based;
pub mod filter_health;
pub mod filter_lora_affinity;
pub mod filter_role;
pub mod filter_session_affinity;
pub mod filter_subset;
pub mod least_request;
pub mod pick_least_connections;
pub mod pick_max_score;
pub mod pick_random;
pub mod pick_round_robin;
pub mod pick_two_choices;
pub mod pick_weighted_random;
pub mod pick_weighted_round_robin;
mod ranking;
mod rendezvous;
pub mod report_attribute;
pub mod score_bounded_load_hash;
pub mod score_gauges;
pub mod score_gpu_usage;
pub mod score_kvcache_aware;
pub mod score_least_latency;
pub mod score_lora_affinity;
pub mod score_marginal_cost;
pub mod score_no_hit_lru;
pub mod score_outstanding_tokens;
pub mod score_precise_prefix;
pub mod score_prefix_cache;
pub mod score_prefix_match;
pub mod score_prefix_or_two_choices;
pub mod score_random;
pub mod score_session_affinity;
mod session_affinity;

use std::sync::Arc;

use serde_json::Value;

use crate::schedule::pipeline::{NamedFilter, NamedPicker, Part};
use crate::schedule::plugin::{Filter, Kind, PdDecider};

/// Every plugin type, in the order of the manual.
pub const PLUGINS: &[&Kind] = &[
    &filter_subset::KIND,
    &filter_role::KIND,
    &filter_health::KIND,
    &filter_lora_affinity::KIND,
    &filter_session_affinity::KIND,
    &score_marginal_cost::KIND,
    &least_request::KIND,
    &score_prefix_cache::KIND,
    &score_prefix_match::KIND,
    &score_precise_prefix::KIND,
    &score_kvcache_aware::KIND,
    &score_prefix_or_two_choices::KIND,
    &score_bounded_load_hash::KIND,
    &score_no_hit_lru::KIND,
    &score_outstanding_tokens::KIND,
    &score_gpu_usage::KIND,
    &score_least_latency::KIND,
    &score_lora_affinity::KIND,
    &score_session_affinity::KIND,
    &score_gauges::QUEUE,
    &score_gauges::RUNNING,
    &score_gauges::KV_CACHE,
    &score_random::KIND,
    &pick_max_score::KIND,
    &pick_weighted_random::KIND,
    &pick_random::KIND,
    &pick_round_robin::KIND,
    &pick_weighted_round_robin::KIND,
    &pick_two_choices::KIND,
    &pick_least_connections::KIND,
    &decide_break_even::KIND,
    &decide_prefix_based::KIND,
    &decide_always::KIND,
    &report_attribute::KIND,
];

/// The plugin type of that name, among `extra` first, which is how a binary of your own adds one.
pub fn find<'a>(name: &str, extra: &[&'a Kind]) -> Option<&'a Kind> {
    extra.iter().chain(PLUGINS).find(|kind| kind.name == name).copied()
}

/// The filters that run before every profile, listed or not; a listed one is left to its place in the list.
pub fn standing_filters(listed: &[Part]) -> Vec<NamedFilter> {
    let listed = |name| listed.iter().any(|part| part.kind == name);
    let mut standing = Vec::new();
    let mut stand = |name: &'static str, filter: Arc<dyn Filter>| {
        if !listed(name) {
            standing.push(NamedFilter { name: name.into(), filter });
        }
    };
    stand(filter_subset::KIND.name, Arc::new(filter_subset::Subset));
    stand(filter_role::KIND.name, Arc::new(filter_role::ByRole));
    stand(filter_health::KIND.name, Arc::new(filter_health::Health));
    standing
}

/// The picker of a profile that lists none.
pub fn default_picker() -> NamedPicker {
    NamedPicker {
        name: pick_max_score::KIND.name.into(),
        picker: Arc::new(pick_max_score::MaxScore { max_num_of_endpoints: None }),
    }
}

/// The decider on disaggregation where a configuration names none.
pub fn default_decider() -> Arc<dyn PdDecider> {
    Arc::new(decide_break_even::BreakEven::default())
}

/// The decider that splits nothing.
pub fn never_split() -> Arc<dyn PdDecider> {
    Arc::new(decide_prefix_based::PrefixBased::default())
}

/// The built-in profile: `marginal-cost` alone, which weighs caches, queues and speed in one unit.
pub fn default_parts() -> Vec<Part> {
    let kind = &score_marginal_cost::KIND;
    vec![Part {
        name: kind.name.into(),
        kind: kind.name,
        weight: 1.0,
        instance: (kind.build)(Value::Null).unwrap_or_default(),
        filters: false,
        scores: true,
    }]
}

#[cfg(test)]
pub(crate) mod testing {
    //! What the tests of plugins share: a pool to run one cycle over.

    use super::*;
    use crate::index::Held;
    use crate::prompt::Prepared;
    use crate::schedule::plugin::{Picker, Scorer};
    use crate::schedule::{Ask, Candidate, Cycle};
    use crate::state::endpoint::tests::endpoint;
    use crate::state::reservation::tests::pool_of;
    use crate::state::signals::Millis;
    use crate::state::{Pool, SignalKind};
    use rand::SeedableRng;
    use rand::rngs::SmallRng;
    use std::time::Duration;

    /// `n` endpoints 10.0.0.1:8000 and on, healthy, with nothing known.
    pub fn pool(n: usize) -> Arc<Pool> {
        let endpoints: Vec<_> =
            (1..=n).map(|i| endpoint(&format!("e{i}"), &format!("10.0.0.{i}:8000"))).collect();
        for endpoint in &endpoints {
            endpoint.health.accepted();
        }
        pool_of(&endpoints)
    }

    /// Sets a fresh signal of member `at`.
    pub fn signal(pool: &Pool, at: usize, kind: SignalKind, value: f64) {
        pool.members[at].endpoint.signals.set(kind, value, Millis::now());
    }

    /// An ask without a prompt.
    pub fn ask<'a>(prompt: &'a Prepared, model: &'a str) -> Ask<'a> {
        Ask {
            model,
            prompt,
            max_tokens: None,
            answers: 1,
            sessions: &[],
            subset: None,
            only_if_cached: false,
            may_be_split: false,
            wanted: 3,
            seed: 7,
            detail: 64,
        }
    }

    /// Runs `body` in a cycle over the pool's members.
    pub fn cycle<R>(
        pool: &Pool,
        ask: &Ask<'_>,
        body: impl FnOnce(&Cycle<'_>, &mut Vec<Candidate>) -> R,
    ) -> R {
        let cx = Cycle::new(pool, ask, Duration::from_secs(2));
        let mut candidates = (0..pool.members.len())
            .map(|at| Candidate {
                member: at as u32,
                held: Held::default(),
                load: pool.members[at].endpoint.load(cx.now, cx.staleness),
            })
            .collect();
        body(&cx, &mut candidates)
    }

    /// The scores a scorer gives the pool's members.
    pub fn scores(scorer: &dyn Scorer, pool: &Pool) -> Vec<f32> {
        cycle(pool, &ask(&Prepared::default(), "m"), |cx, candidates| {
            let mut out = vec![f32::NAN; candidates.len()];
            scorer.score(cx, candidates, &mut out);
            out
        })
    }

    /// The reasons a filter gives.
    pub fn verdicts(filter: &dyn Filter, pool: &Pool, ask: &Ask<'_>) -> Vec<Option<&'static str>> {
        cycle(pool, ask, |cx, candidates| {
            let mut out = vec![None; candidates.len()];
            filter.filter(cx, candidates, &mut out);
            out
        })
    }

    /// How often each member came first in `n` picks, one seed each.
    pub fn first_choices(picker: &dyn Picker, pool: &Pool, totals: &[f32], n: u64) -> Vec<usize> {
        let mut counts = vec![0; pool.members.len()];
        for seed in 0..n {
            let mut rng = SmallRng::seed_from_u64(seed);
            let mut ranked = Vec::new();
            cycle(pool, &ask(&Prepared::default(), "m"), |cx, candidates| {
                picker.pick(cx, candidates, totals, 3, &mut rng, &mut ranked);
            });
            let mut unique = ranked.clone();
            unique.sort_unstable();
            unique.dedup();
            assert_eq!(unique.len(), ranked.len(), "nobody is ranked twice");
            assert!(ranked.len() <= 3.min(pool.members.len()));
            counts[ranked[0] as usize] += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{ask, cycle, pool, signal};
    use super::*;
    use crate::prompt::Prepared;
    use crate::state::SignalKind;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn every_file_of_the_folder_is_listed_and_every_plugin_has_a_manual() {
        let listed: HashSet<&str> = PLUGINS.iter().map(|kind| kind.name).collect();
        assert_eq!(listed.len(), PLUGINS.len(), "two plugins share a name");
        for kind in PLUGINS {
            let schema = (kind.schema)();
            let manual = schema.get("description").and_then(|d| d.as_str()).unwrap_or_default();
            assert!(manual.len() > 40, "{} has no manual", kind.name);
            (kind.build)(Value::Null).unwrap_or_else(|e| panic!("{} has no defaults: {e}", kind.name));
            let unknown = serde_json::json!({"noSuchParameter": 1});
            assert!((kind.build)(unknown).is_err(), "{} takes any parameter", kind.name);
        }
        let source = include_str!("plugins.rs");
        for entry in std::fs::read_dir("src/plugins").unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let module = name.trim_end_matches(".rs");
            assert!(
                ["ranking", "rendezvous", "session_affinity"].contains(&module)
                    || source.contains(&format!("&{module}::")),
                "{name} is not in PLUGINS"
            );
        }
    }

    proptest! {
        /// Scores lie in [0, 1] or abstain, and follow the endpoint when the order of the pool changes.
        #[test]
        fn scores_are_in_range_and_do_not_depend_on_order(
            values in prop::collection::vec((0.0f64..500.0, 0.0f64..1.5, prop::option::of(0.0f64..900.0), 0u32..40), 1..12)
        ) {
            let n = values.len();
            let pool = pool(n);
            for (at, (running, kv, waiting, _)) in values.iter().enumerate() {
                signal(&pool, at, SignalKind::Running, *running);
                signal(&pool, at, SignalKind::KvUsage, *kv);
                signal(&pool, at, SignalKind::TimeToFirstToken, *kv + 0.1);
                signal(&pool, at, SignalKind::TimePerOutputToken, *running + 0.1);
                if let Some(waiting) = waiting {
                    signal(&pool, at, SignalKind::Waiting, *waiting);
                }
            }
            let prompt = Prepared::default();
            for kind in PLUGINS {
                let Some(scorer) = (kind.build)(Value::Null).unwrap().scorer else { continue };
                cycle(&pool, &ask(&prompt, "m"), |cx, candidates| {
                    for (candidate, (.., own)) in candidates.iter_mut().zip(&values) {
                        candidate.load.own = *own as f32;
                        candidate.load.prefill_tokens = *own as f32 * 10.0;
                    }
                    let mut straight = vec![f32::NAN; n];
                    scorer.score(cx, candidates, &mut straight);
                    candidates.reverse();
                    let mut reversed = vec![f32::NAN; n];
                    scorer.score(cx, candidates, &mut reversed);
                    reversed.reverse();
                    for (a, b) in straight.iter().zip(&reversed) {
                        assert!(a.is_nan() || (0.0..=1.0).contains(a), "{} gave {a}", kind.name);
                        assert!((a.is_nan() && b.is_nan()) || (a - b).abs() < 1e-6, "{} depends on order", kind.name);
                    }
                });
            }
        }
    }
}
