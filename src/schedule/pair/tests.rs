use std::collections::BTreeMap;
use std::time::Duration;

use super::*;
use crate::index::TokenIndexes;
use crate::plugins::testing::ask;
use crate::prompt::Prepared;
use crate::refusal::Reason;
use crate::schedule::pipeline::Draft;
use crate::schedule::plugin::PdDecider;
use crate::state::ObjectName;
use crate::state::disaggregation::{DisaggregationSpec, KvConnector, RoleLabels, TransferSpec};
use crate::state::endpoint::{EndpointSpec, EngineKind, EventPorts};
use crate::state::pool::{PoolKind, PoolMemory, PoolName, TrafficPolicy};
use proptest::prelude::*;

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

/// A pool of endpoints `ROLE@GROUP`, in that order; `-` is no role or no group.
fn pool_with(connector: KvConnector, endpoints: &[&str]) -> Arc<Pool> {
    let member = |(at, text): (usize, &&str)| {
        let (role, group) = text.split_once('@').unwrap();
        let given = [("role", role), ("group", group)];
        let given: Vec<_> = given.into_iter().filter(|(_, value)| *value != "-").collect();
        let endpoint = Endpoint::new(EndpointSpec {
            name: ObjectName::new("default", format!("e{at}")),
            address: format!("10.0.0.{}:8000", at + 1).parse().unwrap(),
            weight: 1.0,
            gpu: rates::Speed::default(),
            labels: labels(&given),
            engine: EngineKind::Vllm,
            event_ports: EventPorts::default(),
            transfer: TransferSpec::default(),
            drain: false,
            pod: None,
        });
        endpoint.health.accepted();
        Arc::new(Member::new(Arc::new(endpoint)))
    };
    let members: Vec<_> = endpoints.iter().enumerate().map(member).collect();
    let rule = RoleLabels::Group {
        key: "group".to_owned(),
        prefill: labels(&[("role", "p")]),
        decode: labels(&[("role", "d")]),
    };
    let roles = Disaggregation::of(&DisaggregationSpec { labels: rule, connector }, &members);
    let name = PoolName { kind: PoolKind::ModelServer, object: ObjectName::new("default", "pool") };
    let pool = Pool::new(name, None, members, TrafficPolicy::default(), Arc::new(PoolMemory::default()));
    Arc::new(pool.with_disaggregation(roles))
}

fn pool(endpoints: &[&str]) -> Arc<Pool> {
    pool_with(KvConnector::Nixl, endpoints)
}

fn pipeline(decider: Option<&'static str>) -> Pipeline {
    let parts = crate::plugins::default_parts();
    let pipeline = Pipeline::assemble("default", parts, None).unwrap();
    match decider {
        Some(name) => pipeline.with_decider(decider_of(name)),
        None => pipeline,
    }
}

fn decider_of(name: &str) -> Arc<dyn PdDecider> {
    let kind = crate::plugins::find(name, &[]).unwrap();
    (kind.build)(serde_json::Value::Null).unwrap().decider.unwrap()
}

/// Picks for a prompt of so many tokens.
fn pick(pool: &Arc<Pool>, pipeline: &Pipeline, tokens: u64, seed: u64) -> Result<Picked, Refusal> {
    let scheduler =
        Scheduler::new(pipeline.clone(), Arc::new(TokenIndexes::default()), Duration::from_secs(2));
    let prompt = Prepared { tokens, ..Prepared::default() };
    let ask = Ask { may_be_split: true, seed, ..ask(&prompt, "m") };
    scheduler.pick(pipeline, pool, &ask)
}

fn always() -> Pipeline {
    pipeline(Some("always-disagg-pd-decider"))
}

/// Positions of the destination and of who prefills.
fn places(pool: &Pool, picked: &Picked) -> (usize, Option<usize>) {
    let at = |member: &Arc<Member>| pool.members.iter().position(|m| Arc::ptr_eq(m, member)).unwrap();
    (at(&picked.leg.member), picked.prefill.as_ref().map(|prefill| at(&prefill.leg.member)))
}

/// Requests, prefill tokens and decode tokens booked on each endpoint.
fn booked(pool: &Pool) -> Vec<(u64, u64, u64)> {
    pool.members.iter().map(|member| member.booked.read()).collect()
}

#[test]
fn each_half_is_booked_where_it_is_done_and_released_by_itself() {
    let pool = pool(&["p@a", "d@a"]);
    let mut picked = pick(&pool, &always(), 1_000, 1).unwrap();
    assert_eq!((places(&pool, &picked), picked.split), ((1, Some(0)), Some(Split::Pair)));
    assert_eq!(booked(&pool), [(1, 1_000, 0), (1, 0, 1_256)]);
    assert_eq!(picked.prefill.as_ref().unwrap().alone.prefill_tokens, 1_000);
    drop(picked.prefill.take());
    assert_eq!(booked(&pool), [(0, 0, 0), (1, 0, 1_256)]);
    drop(picked);
    assert_eq!(booked(&pool), [(0, 0, 0); 2]);
}

#[test]
fn a_queue_of_prompts_in_one_group_sends_the_pair_to_another() {
    let pool = pool(&["p@a", "d@a", "p@b", "d@b"]);
    let work = Work { prefill_tokens: 50_000, decode_tokens: 0, prefill_seconds: 5.0 };
    let _busy = Leg::book(Role::Prefill, Arc::clone(&pool), Arc::clone(&pool.members[0]), work);
    for seed in 0..20 {
        assert_eq!(places(&pool, &pick(&pool, &always(), 4_000, seed).unwrap()), (3, Some(2)));
    }
}

#[test]
fn a_decode_batch_weighs_against_a_queue_of_prompts() {
    let pool = pool(&["p@a", "d@a", "p@b", "d@b"]);
    let decoding = Work { prefill_tokens: 0, decode_tokens: 3_000, prefill_seconds: 0.0 };
    let queued = Work { prefill_tokens: 200, decode_tokens: 0, prefill_seconds: 0.02 };
    let mut legs: Vec<Leg> = (0..100)
        .map(|_| Leg::book(Role::Decode, Arc::clone(&pool), Arc::clone(&pool.members[1]), decoding))
        .collect();
    legs.iter_mut().for_each(Leg::prefill_done);
    legs.push(Leg::book(Role::Prefill, Arc::clone(&pool), Arc::clone(&pool.members[2]), queued));
    assert_eq!(
        places(&pool, &pick(&pool, &always(), 4_000, 1).unwrap()),
        (3, Some(2)),
        "20 ms against a full batch"
    );
}

#[test]
fn short_prompts_are_not_split_by_default_and_long_ones_are_where_many_decode() {
    let pool = pool(&["p@a", "d@a"]);
    let split = |tokens| pick(&pool, &pipeline(None), tokens, 1).unwrap().split;
    assert_eq!(split(255), Some(Split::Short));
    assert_eq!(
        split(300),
        Some(Split::Cheaper),
        "an idle endpoint prefills 300 tokens faster than they are moved"
    );
    let decoding = Work { prefill_tokens: 0, decode_tokens: 1_000, prefill_seconds: 0.0 };
    let mut legs: Vec<Leg> = (0..50)
        .map(|_| Leg::book(Role::Decode, Arc::clone(&pool), Arc::clone(&pool.members[1]), decoding))
        .collect();
    legs.iter_mut().for_each(Leg::prefill_done);
    assert_eq!(split(4_000), Some(Split::Pair));
    assert_eq!(split(255), Some(Split::Short), "however busy it is");
}

#[test]
fn without_a_pair_one_endpoint_serves_where_one_can() {
    let split = |pool: &Arc<Pool>| {
        pick(pool, &always(), 1_000, 1).map(|picked| (places(pool, &picked), picked.split))
    };
    let refused = |pool: &Arc<Pool>| split(pool).unwrap_err().reason;
    assert_eq!(split(&pool(&["d@a"])).unwrap(), ((0, None), Some(Split::NoPrefill)));
    assert_eq!(split(&pool(&["d@a", "p@b"])).unwrap(), ((0, None), Some(Split::NoDecode)));
    assert_eq!(refused(&pool(&["p@a", "p@b"])), Reason::NoEndpoints);
    assert_eq!(refused(&pool(&["-@a", "d@-"])), Reason::NoEndpoints);
    assert_eq!(refused(&pool_with(KvConnector::Sglang, &["d@a", "p@b"])), Reason::NoEndpoints);
    let sglang = pool_with(KvConnector::Sglang, &["d@a", "p@a"]);
    assert_eq!(split(&sglang).unwrap(), ((0, Some(1)), Some(Split::Pair)));
}

#[test]
fn a_prefill_endpoint_that_is_down_is_not_paired() {
    let pool = pool(&["p@a", "p@a", "d@a"]);
    for _ in 0..2 {
        pool.members[0].endpoint.health.refused();
    }
    for seed in 0..20 {
        assert_eq!(places(&pool, &pick(&pool, &always(), 1_000, seed).unwrap()), (2, Some(1)));
    }
}

#[test]
fn where_nobody_serves_alone_an_ill_prefill_endpoint_is_better_than_none() {
    let pool = pool_with(KvConnector::Sglang, &["p@a", "d@a"]);
    for _ in 0..2 {
        pool.members[0].endpoint.health.refused();
    }
    assert_eq!(places(&pool, &pick(&pool, &always(), 1_000, 1).unwrap()), (1, Some(0)));
}

#[test]
fn all_alternatives_of_the_group_are_found_behind_those_of_others() {
    let pool = pool(&["p@a", "d@a", "d@b", "d@b", "d@a", "p@b"]);
    // The second of each group is the last that anybody would choose.
    let work = Work { prefill_tokens: 0, decode_tokens: 90_000, prefill_seconds: 0.0 };
    let busy = |at: usize| Leg::book(Role::Decode, Arc::clone(&pool), Arc::clone(&pool.members[at]), work);
    let _legs = [busy(3), busy(4)];
    for seed in 0..20 {
        let picked = pick(&pool, &always(), 1_000, seed).unwrap();
        let group = if places(&pool, &picked).0 == 1 { [1, 4] } else { [2, 3] };
        let expected = group.map(|at| pool.members[at].endpoint.slot);
        assert_eq!(picked.ranked.iter().map(|endpoint| endpoint.slot).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn what_is_missing_is_named() {
    let message = |connector, endpoints: &[&str]| {
        pick(&pool_with(connector, endpoints), &always(), 1_000, 1).unwrap_err().message.to_string()
    };
    let sglang = |endpoints| message(KvConnector::Sglang, endpoints);
    assert_eq!(
        sglang(&["d@a"]),
        "pool default/pool has no prefill endpoint that takes this request, and sglang needs both"
    );
    assert!(sglang(&["d@a", "p@b"]).contains("no decode endpoint in a group with a prefill endpoint"));
    assert_eq!(message(KvConnector::Nixl, &["p@a"]), "pool default/pool has no decode endpoint");
    assert_eq!(
        message(KvConnector::Nixl, &["-@a"]),
        "no endpoint of pool default/pool has a role and a group"
    );
}

#[test]
fn profiles_without_costs_are_summed_as_shares() {
    let part = |kind: &'static str, weight: f32| {
        let built = crate::plugins::find(kind, &[]).unwrap();
        crate::schedule::pipeline::Part {
            name: kind.into(),
            kind,
            weight,
            instance: (built.build)(serde_json::Value::Null).unwrap(),
            filters: true,
            scores: true,
        }
    };
    let draft =
        |name: &str, weight| Draft { name: name.into(), parts: vec![part("outstanding-tokens", weight)] };
    let pipeline = Pipeline::assemble_pair(draft("decode", 7.0), Some(draft("prefill", 1.0)), None)
        .unwrap()
        .with_decider(decider_of("always-disagg-pd-decider"));
    let pool = pool(&["p@a", "d@a", "p@b", "d@b"]);
    let work = Work { prefill_tokens: 9_000, decode_tokens: 0, prefill_seconds: 0.9 };
    let _busy = Leg::book(Role::Prefill, Arc::clone(&pool), Arc::clone(&pool.members[0]), work);
    let picked = pick(&pool, &pipeline, 1_000, 1).unwrap();
    assert_eq!(places(&pool, &picked), (3, Some(2)));
    let names: Vec<&str> = picked.records.iter().map(|record| &*record.profile.name).collect();
    assert_eq!(names, ["decode", "prefill"]);
}

proptest! {
    /// Whatever the pool and its load: halves share a group, do what their role is, and give back what they booked.
    #[test]
    fn halves_always_belong_together(
        members in prop::collection::vec((0usize..4, 0usize..4), 1..12),
        prompts in prop::collection::vec((1u64..20_000, any::<u64>()), 1..20),
    ) {
        let names: Vec<String> =
            members.iter().map(|(role, group)| format!("{}@{}", ["p", "d", "-", "p"][*role], ["a", "b", "c", "-"][*group])).collect();
        let pool = pool(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let mut open = Vec::new();
        for (tokens, seed) in prompts {
            let Ok(picked) = pick(&pool, &always(), tokens, seed) else { continue };
            let (destination, prefill) = places(&pool, &picked);
            let group = |at: usize| names[at].split_once('@').unwrap().1;
            prop_assert!(names[destination].starts_with('d') && group(destination) != "-");
            if let Some(prefill) = prefill {
                prop_assert!(names[prefill].starts_with('p') && group(prefill) == group(destination));
            }
            for alternative in &picked.ranked {
                let at = pool.members.iter().position(|m| m.endpoint.slot == alternative.slot).unwrap();
                prop_assert!(prefill.is_none() || group(at) == group(destination));
            }
            open.push(picked);
        }
        drop(open);
        prop_assert!(booked(&pool).iter().all(|booked| *booked == (0, 0, 0)));
    }
}
