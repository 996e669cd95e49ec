use std::collections::HashMap;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rstest::rstest;

use super::*;

fn arrival(flow: &str, cost: u64) -> Arrival {
    Arrival { priority: 0, flow: Identity::named(flow), weight: USUAL_WEIGHT, rank: 0, cost, bytes: 1 }
}

fn push<T>(queue: &mut FairQueue<T>, arrival: Arrival, item: T) -> Place {
    queue.push(arrival, Bound::NONE, Bound::NONE, item).ok().unwrap()
}

fn pop<T>(queue: &mut FairQueue<T>) -> Option<T> {
    let (item, charged) = queue.pop()?;
    let cost = charged.cost();
    queue.settle(charged, cost);
    Some(item)
}

#[test]
fn bands_are_strict_at_the_ends_of_their_type_too() {
    let mut queue = FairQueue::default();
    for priority in [0, i32::MIN, i32::MAX, -1] {
        push(&mut queue, Arrival { priority, ..arrival("a", 1) }, priority);
    }
    let order: Vec<i32> = std::iter::from_fn(|| pop(&mut queue)).collect();
    assert_eq!(order, [i32::MAX, 0, -1, i32::MIN]);
}

#[test]
fn both_bounds_hold_and_what_does_not_fit_comes_back() {
    let mut queue = FairQueue::default();
    let (all, band) = (Bound { requests: 3, bytes: 100 }, Bound { requests: 2, bytes: 60 });
    let mut offer = |priority, bytes| {
        queue.push(Arrival { priority, bytes, ..arrival("a", 1) }, all, band, bytes).map(drop)
    };
    assert_eq!(offer(0, 61), Err(61), "more than its band holds");
    assert_eq!((offer(0, 50), offer(0, 11), offer(0, 10), offer(0, 0)), (Ok(()), Err(11), Ok(()), Err(0)));
    assert_eq!((offer(1, 41), offer(1, 40), offer(2, 0)), (Err(41), Ok(()), Err(0)));
    assert_eq!(queue.waiting(), Waiting { requests: 3, bytes: 100 });
}

/// Serves two backlogged flows, `width` at once, until one is through; tokens that each was given by then.
fn shares(weights: [u32; 2], sizes: [u64; 2], predicted: [u64; 2], width: usize) -> [u64; 2] {
    let mut queue = FairQueue::default();
    let mut rng = SmallRng::seed_from_u64(3);
    for at in 0..2 {
        for _ in 0..2_000 {
            let size = sizes[at] * rng.random_range(50..=150) / 100;
            let arrival =
                Arrival { weight: weights[at], ..arrival(["a", "b"][at], predicted[at].min(size.max(1))) };
            push(&mut queue, arrival, (at, size));
        }
    }
    let mut served = [0; 2];
    let mut open = Vec::new();
    for _ in 0..1_000 {
        let ((at, size), charged) = queue.pop().unwrap();
        served[at] += size;
        open.push((charged, size));
        if open.len() == width {
            let (charged, size) = open.swap_remove(rng.random_range(0..width));
            queue.settle(charged, size);
        }
    }
    served
}

#[rstest]
#[case::equal_weights([1_000, 1_000], [100, 100])]
#[case::one_has_prompts_ten_times_as_long([1_000, 1_000], [1_000, 100])]
#[case::three_to_one([3_000, 1_000], [100, 100])]
#[case::three_to_one_with_longer_prompts([3_000, 1_000], [100, 1_000])]
#[case::three_to_one_with_shorter_prompts([3_000, 1_000], [1_000, 100])]
fn shares_of_tokens_are_those_of_the_weights(#[case] weights: [u32; 2], #[case] sizes: [u64; 2]) {
    // Known from the start, and known only in the end with a prediction of next to nothing.
    for (predicted, width) in [([u64::MAX; 2], 8), ([1; 2], 8)] {
        let [a, b] = shares(weights, sizes, predicted, width);
        let share = a as f64 / (a + b) as f64;
        let wanted = f64::from(weights[0]) / f64::from(weights[0] + weights[1]);
        assert!((share - wanted).abs() < 0.05, "{share} of {wanted}: {a} and {b}, predicted {predicted:?}");
    }
}

#[test]
fn a_stranger_waits_for_one_request_of_each_flow_at_most() {
    let mut queue = FairQueue::default();
    let mut rng = SmallRng::seed_from_u64(5);
    for round in 0..200 {
        let mut places = Vec::new();
        for flow in 0..5 {
            for _ in 0..10 {
                places.push(push(&mut queue, arrival(&format!("old{flow}"), rng.random_range(1..500)), flow));
            }
        }
        for _ in 0..rng.random_range(0..20) {
            let (_, charged) = queue.pop().unwrap();
            queue.settle(charged, rng.random_range(0..1_000));
        }
        push(&mut queue, arrival(&format!("stranger{round}"), 1), 9);
        let mut ahead = [0; 5];
        loop {
            match pop(&mut queue).unwrap() {
                9 => break,
                flow => ahead[flow] += 1,
            }
        }
        assert!(ahead.iter().all(|n| *n <= 1), "{ahead:?}");
        queue.drain();
    }
}

#[test]
fn idleness_earns_nothing_and_debt_is_remembered_while_others_wait() {
    let mut queue = FairQueue::default();
    for _ in 0..20 {
        push(&mut queue, arrival("busy", 100), "busy");
    }
    for _ in 0..10 {
        pop(&mut queue);
    }
    for _ in 0..5 {
        push(&mut queue, arrival("idle", 100), "idle");
    }
    let next: Vec<_> = (0..4).filter_map(|_| pop(&mut queue)).collect();
    assert_eq!(next, ["busy", "idle", "busy", "idle"], "no credit for having been away");

    // One request at a time, each ten times as large: it waits for its turn although it is never in the queue meanwhile.
    push(&mut queue, arrival("large", 1_000), "large");
    let mut given = HashMap::<&str, u32>::new();
    for _ in 0..6 {
        let next = pop(&mut queue).unwrap();
        *given.entry(next).or_default() += 1;
        if next == "large" {
            push(&mut queue, arrival("large", 1_000), "large");
        }
    }
    assert_eq!(given["large"], 1, "{given:?}");
}

/// A client that claims much and uses nothing, again and again: what it was forgiven on coming back is not paid out.
#[test]
fn what_was_forgiven_comes_back_to_nobody() {
    let mut queue = FairQueue::default();
    for _ in 0..100 {
        push(&mut queue, arrival("honest", 10), "honest");
    }
    let mut claims = Vec::new();
    for _ in 0..5 {
        push(&mut queue, arrival("claims", 100), "claims");
        // Its turn comes, and by the time it asks again the others have had as much.
        let mut left = 0;
        loop {
            match queue.pop().unwrap() {
                ("claims", charged) => claims.push(charged),
                (_, charged) => queue.settle(charged, 10),
            }
            left += 1;
            if left == 13 {
                break;
            }
        }
    }
    assert_eq!(claims.len(), 5);
    for charged in claims {
        queue.settle(charged, 0);
    }
    for _ in 0..20 {
        push(&mut queue, arrival("claims", 10), "claims");
    }
    let next: Vec<&str> = (0..10).filter_map(|_| pop(&mut queue)).collect();
    assert!(next.iter().filter(|name| **name == "honest").count() >= 4, "{next:?}");
}

#[test]
fn nothing_is_remembered_once_nobody_waits() {
    let mut queue = FairQueue::default();
    let mut open = Vec::new();
    for flow in 0..1_000 {
        push(&mut queue, arrival(&flow.to_string(), 10), flow);
    }
    while let Some((_, charged)) = queue.pop() {
        open.push(charged);
    }
    assert_eq!(queue.flows(), 1_000, "still on their way");
    for charged in open {
        queue.settle(charged, 50);
    }
    assert_eq!((queue.flows(), queue.bands.len()), (0, 0));
}

#[test]
fn a_request_that_gives_up_is_gone_and_the_next_of_its_flow_keeps_its_turn() {
    let mut queue = FairQueue::default();
    let first = push(&mut queue, arrival("a", 5), 1);
    push(&mut queue, arrival("b", 5), 2);
    push(&mut queue, arrival("a", 5), 3);
    assert_eq!((queue.remove(&first), queue.remove(&first)), (Some(1), None));
    assert_eq!(std::iter::from_fn(|| pop(&mut queue)).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(queue.remove(&first), None);
    assert_eq!(queue.waiting(), Waiting::default());
}

#[test]
fn ranks_go_before_arrival_inside_a_flow_only() {
    let mut queue = FairQueue::default();
    push(&mut queue, Arrival { rank: 9, ..arrival("a", 1) }, "late");
    push(&mut queue, Arrival { rank: 3, ..arrival("a", 1) }, "soon");
    push(&mut queue, Arrival { rank: 5, ..arrival("b", 1) }, "other");
    let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue)).collect();
    assert_eq!(order, ["soon", "other", "late"], "of equal flows the one whose head goes first");
}

#[test]
fn whatever_a_client_claims_costs_no_more_than_time_can_hold() {
    let mut queue = FairQueue::default();
    for _ in 0..3 {
        push(&mut queue, Arrival { weight: 0, ..arrival("a", u64::MAX) }, "a");
        push(&mut queue, arrival("b", 1), "b");
    }
    let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue)).collect();
    assert_eq!(order, ["a", "b", "b", "b", "a", "a"]);
}

/// Random operations against the plainest possible queue: the invariants of one and the contents of the other.
#[test]
fn a_hundred_thousand_operations_keep_every_promise() {
    let mut rng = SmallRng::seed_from_u64(11);
    let mut queue = FairQueue::<u64>::default();
    let mut waiting: HashMap<u64, (Place, u64)> = HashMap::new();
    let mut fifo: HashMap<(i32, Identity), Vec<u64>> = HashMap::new();
    let mut open = Vec::new();
    let mut passed_over: HashMap<(i32, Identity), usize> = HashMap::new();
    for id in 0..100_000u64 {
        match rng.random_range(0..10) {
            0..=3 => {
                let flow = Identity::named(&format!("u{}", rng.random_range(0..20)));
                let (priority, bytes) = (rng.random_range(-1..=1), rng.random_range(0..9));
                let arrival = Arrival {
                    priority,
                    flow: flow.clone(),
                    weight: rng.random_range(500..3_000),
                    rank: 0,
                    cost: rng.random_range(1..100),
                    bytes,
                };
                let bound = Bound { requests: 200, bytes: 900 };
                if let Ok(place) = queue.push(arrival, bound, Bound::NONE, id) {
                    waiting.insert(id, (place, bytes));
                    fifo.entry((priority, flow)).or_default().push(id);
                }
            }
            4..=6 => {
                let Some((item, charged)) = queue.pop() else { continue };
                let of = (charged.priority, charged.flow.clone());
                let highest = fifo.iter().filter(|(_, ids)| !ids.is_empty()).map(|(key, _)| key.0).max();
                assert_eq!(Some(of.0), highest, "a lower band went first");
                let ids = fifo.get_mut(&of).unwrap();
                assert_eq!(ids.remove(0), item, "not in order of arrival");
                waiting.remove(&item).unwrap();
                // Costs and weights differ by a factor of 100 and 6, over 20 flows.
                for (key, ids) in &fifo {
                    let passed = passed_over.entry(key.clone()).or_default();
                    *passed = if *key == of || key.0 != of.0 || ids.is_empty() { 0 } else { *passed + 1 };
                    assert!(*passed < 20 * 100 * 6, "{key:?} is starved");
                }
                open.push(charged);
            }
            7..=8 if !open.is_empty() => {
                let charged = open.swap_remove(rng.random_range(0..open.len()));
                queue.settle(charged, rng.random_range(0..200));
            }
            _ => {
                let Some(&id) = waiting.keys().next() else { continue };
                let (place, _) = waiting.remove(&id).unwrap();
                assert_eq!(queue.remove(&place), Some(id));
                for ids in fifo.values_mut() {
                    ids.retain(|other| *other != id);
                }
            }
        }
        let bytes = waiting.values().map(|(_, bytes)| bytes).sum();
        assert_eq!(queue.waiting(), Waiting { requests: waiting.len(), bytes });
        assert_eq!(queue.bands().map(|(_, band)| band.requests).sum::<usize>(), waiting.len());
    }
    for charged in open {
        queue.settle(charged, 1);
    }
    queue.drain();
    assert_eq!((queue.waiting(), queue.flows()), (Waiting::default(), 0));
}
