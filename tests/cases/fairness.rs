//! Whose turn it is, who is shed, and what those are told that do not get theirs.

use std::collections::BTreeMap;

use pilotfish::admission::Identity;
use pilotfish::admission::fairness::{Arrival, Bound, FairQueue, USUAL_WEIGHT};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

use super::load::{IDLE, all_up, prompt, scraped};
use crate::kit::case::{input, list, number, text};
use crate::kit::engine::{Answer, MetricsPage};
use crate::kit::eventually::eventually;
use crate::kit::extproc::{CHAT, Stream, request_of};
use crate::kit::logs;
use crate::kit::picker::{Picker, Setup};
use crate::kit::process::Process;
use crate::kit::replies::Replies;

const SATURATED: &str = "process_start_time_seconds 1\nvllm:num_requests_running 8\nvllm:num_requests_waiting 50\n\
                         vllm:kv_cache_usage_perc 0.99\n";

fn arrival(user: &str, rank: u64, cost: u64) -> Arrival {
    Arrival { priority: 0, flow: Identity::named(user), weight: USUAL_WEIGHT, rank, cost, bytes: 0 }
}

#[test]
fn fai_01_whatever_changes_meanwhile_every_user_is_served_in_order() {
    let case = input("FAI-01");
    assert_eq!(case["insert_orders"], "all 6 permutations");
    let queued = list(case, "queue");
    assert_eq!(queued.len(), 3);
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let entries = order.map(|at| &queued[at]);
        let mut queue = FairQueue::default();
        for entry in &entries {
            // What Kthena had stored of a user is what a request costs here: it changes with every request.
            let arrival =
                arrival(text(entry, "user"), number(entry, "t") as u64, number(entry, "prio") as u64);
            queue.push(arrival, Bound::NONE, Bound::NONE, text(entry, "id")).unwrap();
        }
        let order: Vec<&str> = std::iter::from_fn(|| queue.pop().map(|(id, _charged)| id)).collect();
        assert_eq!(order, ["a1", "b", "a2"], "the same in whatever order they were entered");
    }

    let then = text(case, "then");
    assert_eq!(then, "10000 random ops (enqueue, refresh, cancel, dequeue) over 20 users, capacity 1");
    let mut rng = SmallRng::seed_from_u64(1);
    let mut queue = FairQueue::default();
    let mut places = BTreeMap::new();
    let mut waiting: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
    let mut passed_over = [0; 20];
    let mut served = None;
    for id in 0..10_000u64 {
        match rng.random_range(0..4) {
            0 | 1 if places.len() < 300 => {
                let user = rng.random_range(0..20);
                let arrival = arrival(&user.to_string(), 0, rng.random_range(1..=10));
                let place = queue.push(arrival, Bound::NONE, Bound::NONE, (user, id)).unwrap();
                places.insert(id, (user, place));
                waiting.entry(user).or_default().push(id);
            }
            2 => {
                let Some(id) = places.keys().nth(rng.random_range(0..=places.len())).copied() else {
                    continue;
                };
                let (user, place) = places.remove(&id).unwrap();
                assert_eq!(queue.remove(&place), Some((user, id)));
                waiting.get_mut(&user).unwrap().retain(|other| *other != id);
            }
            _ => {
                // The one that is served ends, and has cost something else than was thought.
                if let Some(charged) = served.take() {
                    queue.settle(charged, rng.random_range(1..=10));
                }
                let Some(((user, id), charged)) = queue.pop() else { continue };
                served = Some(charged);
                places.remove(&id);
                assert_eq!(waiting.get_mut(&user).unwrap().remove(0), id, "out of the order of arrival");
                for (other, passed) in passed_over.iter_mut().enumerate() {
                    let waits = waiting.get(&other).is_some_and(|ids| !ids.is_empty());
                    *passed = if other == user || !waits { 0 } else { *passed + 1 };
                    // Costs differ by ten, so that ten cheap ones of a user weigh as much as one dear one.
                    assert!(*passed <= 20 * 10, "user {other} is starved");
                }
            }
        }
        assert_eq!(queue.waiting().requests, places.len());
    }
}

/// A picker of pods that let requests wait, once it knows that.
async fn saturated(
    pods: usize,
    setup: impl FnOnce(Setup) -> Setup,
    more: &str,
) -> (Vec<MetricsPage>, Picker) {
    let (servers, resources) = scraped(&vec![Answer::page(SATURATED); pods]).await;
    let picker = setup(Picker::with(&(resources + more))).start().await;
    all_up(&picker, pods).await;
    picker.until("the pool is full", "pilotfish_pool_saturation", &[], 1.0).await;
    (servers, picker)
}

/// What a request is told in the end, however long that takes.
async fn answered(picker: &Picker, steps: &[Value]) -> Replies {
    let mut stream = Stream::of(picker, steps).await;
    stream.until_decided().await;
    std::mem::take(&mut stream.replies)
}

fn objectives(case: &Value) -> String {
    let objective = |(name, priority): (&String, &Value)| {
        format!(
            "---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {{name: {name}}}\n\
             spec: {{priority: {priority}, poolRef: {{name: pool}}}}\n"
        )
    };
    case["objectives"].as_object().unwrap().iter().map(objective).collect()
}

/// A request with an objective.
fn with_objective(name: &str) -> Vec<Value> {
    let objective = [("x-llm-d-inference-objective", name)];
    request_of(CHAT, &objective, "{\"model\":\"m\",\"messages\":[]}").to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_09_what_is_saturated_waits_or_is_refused_with_its_reason() {
    let case = input("SCH-09");
    assert_eq!(case["saturated"], "vllm:num_requests_waiting 50, kv 0.99");
    let rows = &list(case, "rows")[3..];
    assert!(rows.iter().all(|row| row["all_saturated"] == true && row["pods"] == 2));
    let dropped = "x-llm-d-request-dropped-reason";

    // Row 4: below 0, refused at once.
    assert_eq!(rows[0]["priority"], -1);
    let sheddable = "---\napiVersion: llm-d.ai/v1alpha2\nkind: InferenceObjective\nmetadata: {name: low}\n\
                     spec: {priority: -1, poolRef: {name: pool}}\n";
    let (_servers, picker) = saturated(2, |setup| setup.switch("--trust-hints"), sheddable).await;
    let replies = answered(&picker, &with_objective("low")).await;
    let refused = replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (429, "shed"));
    assert_eq!(refused.header("retry-after").as_deref(), Some("1"));
    assert_eq!(refused.header(dropped).as_deref(), Some("rejected-saturated"));
    assert_eq!(refused.json()["error"]["code"], "shed");

    // Row 7: the client goes, and leaves no trace but a count.
    assert_eq!(rows[3]["client_cancels"], true);
    let waiting = Stream::of(&picker, &prompt("hi")).await;
    picker.until("row 7: it waits", "pilotfish_queue_requests", &[], 1.0).await;
    drop(waiting);
    picker.until("row 7: its place is free", "pilotfish_queue_requests", &[], 0.0).await;
    let aborted = [("reason", "aborted"), ("code", "0")];
    picker.until("row 7: counted as such", "pilotfish_requests_total", &aborted, 1.0).await;
    assert_eq!(
        picker.metric("pilotfish_requests_total", &[("pool", "default/pool")]).await,
        1.0,
        "row 4 alone"
    );

    // Row 5: no room in time.
    let ttl = format!("{}ms", number(&rows[1], "queue_ttl_ms"));
    let (_servers, picker) = saturated(2, |setup| setup.flag("--queue-timeout", &ttl), "").await;
    let replies = answered(&picker, &prompt("hi")).await;
    let refused = replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (429, "queue-timeout"));
    assert_eq!(refused.header(dropped).as_deref(), Some("rejected-ttl-expired"));
    assert_eq!(refused.header("retry-after"), None);
    assert!(refused.message().contains("200ms"), "{}", refused.message());

    // Row 6: no room to wait either.
    assert_eq!(rows[2]["queue_full"], true);
    let (_servers, picker) = saturated(2, |setup| setup.flag("--queue-requests", "1"), "").await;
    let waiting = Stream::of(&picker, &prompt("hi")).await;
    picker.until("row 6: one waits", "pilotfish_queue_requests", &[], 1.0).await;
    let replies = answered(&picker, &prompt("hi")).await;
    let refused = replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (429, "queue-full"));
    assert_eq!(refused.header(dropped).as_deref(), Some("rejected-saturated"));
    assert_eq!(refused.header("retry-after").as_deref(), Some("1"));
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn sch_09_who_waits_when_the_process_ends_is_told() {
    let rows = list(input("SCH-09"), "rows");
    assert_eq!((rows[7]["sigterm"].as_bool(), rows[7]["all_saturated"].as_bool()), (Some(true), Some(true)));
    let (_servers, resources) = scraped(&vec![Answer::page(SATURATED); number(&rows[7], "pods")]).await;
    let mut picker = Process::start(&resources, "--drain-grace 100ms --drain-timeout 300ms").await;
    picker.until("pilotfish_pool_saturation", &[], 1.0).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", picker.grpc)).unwrap();
    let mut waiting = Stream::over(channel.connect().await.unwrap()).await;
    waiting.send_all(&prompt("hi"));
    picker.until("pilotfish_queue_requests", &[], 1.0).await;
    picker.terminate();
    waiting.until_decided().await;
    let refused = waiting.replies.refused();
    assert_eq!((refused.status(), &*refused.reason()), (503, "shutting-down"));
    assert_eq!(refused.header("x-llm-d-request-dropped-reason").as_deref(), Some("rejected-shutting-down"));
    assert!(picker.ended().await.success(), "{}", picker.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn fai_04_every_drop_says_why_and_no_client_chooses_its_own_class() {
    logs::capture();
    let case = input("FAI-04");
    let headers: Vec<&str> = list(case, "headers").iter().filter_map(Value::as_str).collect();
    let states: Vec<&str> = list(case, "states").iter().filter_map(Value::as_str).collect();
    assert_eq!(states, ["idle", "saturated", "queue full", "queue TTL 1 s passed"]);
    assert_eq!(headers.len(), 5);
    let name = "x-gateway-inference-objective";
    let request = |values: &[&str]| {
        let pairs: Vec<(&str, &str)> = values.iter().map(|value| (name, *value)).collect();
        request_of(CHAT, &pairs, "{\"model\":\"m\",\"messages\":[]}").to_vec()
    };
    // Header values as the case writes them, and the priority they come to.
    let variants: [(&[&str], i32); 5] = [
        (&["batch"], -10),
        (&["does-not-exist"], 0),
        (&[""], 0),
        (&["batch", "vip"], -10),
        (&["vip"], i32::MAX),
    ];
    let reason = async |picker: &Picker, values: &[&str]| {
        let replies = answered(picker, &request(values)).await;
        replies.immediate().map(|refused| (refused.status(), refused.reason(), refused.header("retry-after")))
    };

    // Idle: all are served.
    let (servers, resources) = scraped(&vec![Answer::page(IDLE); list(case, "pods").len()]).await;
    let idle = Picker::with(&(resources.clone() + &objectives(case))).switch("--trust-hints").start().await;
    all_up(&idle, 2).await;
    for (values, _) in variants {
        assert_eq!(reason(&idle, values).await, None, "{values:?}");
    }
    let told = || logs::lines_with(&["names several objectives"]).len();
    assert_eq!(reason(&idle, &["batch", "vip"]).await, None);
    assert_eq!(told(), 1, "said once, however often it happens");
    // One value named nothing that is there; an empty one names nothing.
    assert_eq!(idle.metric("pilotfish_unknown_objectives_total", &[]).await, 1.0);
    let (_, page) = idle.get("/metrics").await;
    assert!(!page.contains("does-not-exist"));

    // Saturated: batch is refused at once, all others wait, in bands.
    for server in &servers {
        server.answer(Answer::page(SATURATED));
    }
    idle.until("the pool is full", "pilotfish_pool_saturation", &[], 1.0).await;
    let (mut waiting, mut bands) = (Vec::new(), BTreeMap::new());
    for (values, priority) in variants {
        if priority < 0 {
            let refused = reason(&idle, values).await;
            assert_eq!(refused, Some((429, "shed".to_owned(), Some("1".to_owned()))), "{values:?}");
            continue;
        }
        waiting.push(Stream::of(&idle, &request(values)).await);
        let in_band = bands.entry(priority).or_insert(0.0);
        *in_band += 1.0;
        let labels = [("priority", &*priority.to_string())];
        idle.until("it waits in its band", "pilotfish_queue_requests", &labels, *in_band).await;
    }
    // The objective is deleted while a request that named it waits: that stays where it is, and whoever comes is as usual.
    idle.apply(&(resources.clone() + &objectives(case).replace("name: vip", "name: gone"))).await;
    let unknown = "pilotfish_unknown_objectives_total";
    eventually("the objective is gone", async || {
        let before = idle.metric(unknown, &[]).await;
        drop(Stream::of(&idle, &request(&["vip"])).await);
        (idle.metric(unknown, &[]).await > before).then_some(())
    })
    .await;
    assert_eq!(idle.metric("pilotfish_queue_requests", &[("priority", &i32::MAX.to_string())]).await, 1.0);
    for server in &servers {
        server.answer(Answer::page(IDLE));
    }
    for mut stream in waiting {
        stream.until_decided().await;
        assert!(stream.replies.immediate().is_none(), "all that waited are served");
    }

    // Queue full, and its time passed.
    let flags = |setup: Setup| {
        setup.switch("--trust-hints").flag("--queue-requests", "1").flag("--queue-timeout", "1s")
    };
    let (_servers, picker) = saturated(2, flags, &objectives(case)).await;
    let mut first = Stream::of(&picker, &request(&["does-not-exist"])).await;
    picker.until("one waits", "pilotfish_queue_requests", &[], 1.0).await;
    let refused = reason(&picker, &["chat"]).await;
    assert_eq!(refused, Some((429, "queue-full".to_owned(), Some("1".to_owned()))));
    first.until_decided().await;
    let refused = first.replies.refused();
    assert_eq!(
        (refused.status(), &*refused.reason(), refused.header("retry-after")),
        (429, "queue-timeout", None)
    );

    // Without --trust-hints nobody is of any class but the usual.
    let (_servers, picker) =
        saturated(2, |setup| setup.flag("--queue-timeout", "50ms"), &objectives(case)).await;
    let (_, why, _) = reason(&picker, &["batch"]).await.unwrap();
    assert_eq!(why, "queue-timeout", "it waited like all others");
}
