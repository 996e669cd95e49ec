//! The flows of one priority.

use std::collections::{BTreeMap, BTreeSet};

use ahash::AHashMap;

use super::{Arrival, Charged, Waiting};
use crate::admission::Identity;

/// The weight of a flow of which nothing else is said.
pub const USUAL_WEIGHT: u32 = 1_000;
/// Flows that wait for nothing and are remembered for what they owe, at most.
const MOST_IDLE: usize = 10_000;
/// Steps of virtual time for a unit of cost at the usual weight.
const STEPS: u128 = 1_000;
/// One request moves its flow no further, whatever its client claims: virtual time stays far from the end of its type.
const MOST_ADVANCE: u128 = 1 << 56;

/// The virtual time of a flow.
type Time = u64;
/// Rank and turn of a request.
pub(super) type Head = (u64, u64);

/// See [`super`].
#[derive(Debug)]
pub(super) struct Band<T> {
    flows: AHashMap<Identity, Flow<T>>,
    /// Flows that wait, by their times; of equals the one whose head goes first.
    order: BTreeSet<(Time, Head, Identity)>,
    /// Flows with nothing here or on its way that are further than the band, by their times.
    idle: BTreeSet<(Time, Identity)>,
    /// The time of the flow that was served last.
    now: Time,
    waiting: Waiting,
}

impl<T> Default for Band<T> {
    fn default() -> Self {
        Self {
            flows: AHashMap::new(),
            order: BTreeSet::new(),
            idle: BTreeSet::new(),
            now: 0,
            waiting: Waiting::default(),
        }
    }
}

#[derive(Debug)]
struct Flow<T> {
    time: Time,
    waiting: BTreeMap<Head, Entry<T>>,
    /// Requests that left and are not settled.
    open: usize,
    /// Times that it came back behind those who wait and was put beside them: what it was charged before is forgiven.
    lifts: u32,
    /// How far it was put ahead then.
    forgiven: Time,
}

impl<T> Flow<T> {
    fn head(&self) -> Option<Head> {
        self.waiting.first_key_value().map(|(head, _)| *head)
    }
}

#[derive(Debug)]
struct Entry<T> {
    weight: u32,
    cost: u64,
    bytes: u64,
    item: T,
}

/// A request on its way.
#[derive(Debug)]
pub(super) struct Left<T> {
    pub flow: Identity,
    pub weight: u32,
    pub cost: u64,
    pub bytes: u64,
    /// See [`Flow::lifts`].
    pub lifts: u32,
    pub item: T,
}

impl<T> Band<T> {
    pub fn waiting(&self) -> Waiting {
        self.waiting
    }

    pub fn flows(&self) -> usize {
        self.flows.len()
    }

    pub fn push(&mut self, arrival: Arrival, turn: u64, item: T) {
        let Arrival { flow: id, weight, rank, cost, bytes, .. } = arrival;
        let begins = self.order.first().map_or(self.now, |(time, ..)| *time);
        let flow = self.flows.entry(id.clone()).or_insert_with(|| Flow {
            time: begins,
            waiting: BTreeMap::new(),
            open: 0,
            lifts: 0,
            forgiven: 0,
        });
        match flow.head() {
            Some(head) => {
                self.order.remove(&(flow.time, head, id.clone()));
            }
            None => {
                self.idle.remove(&(flow.time, id.clone()));
                if begins > flow.time {
                    flow.lifts = flow.lifts.wrapping_add(1);
                    flow.forgiven = begins - flow.time;
                    flow.time = begins;
                }
            }
        }
        flow.waiting.insert((rank, turn), Entry { weight: weight.max(1), cost, bytes, item });
        self.order.insert((flow.time, flow.head().unwrap_or((rank, turn)), id));
        self.waiting.add(bytes);
    }

    pub fn pop(&mut self) -> Option<Left<T>> {
        let (time, _, id) = self.order.pop_first()?;
        let flow = self.flows.get_mut(&id)?;
        let (_, Entry { weight, cost, bytes, item }) = flow.waiting.pop_first()?;
        self.waiting.take(bytes);
        self.now = self.now.max(time);
        flow.time = time.saturating_add(advance(cost, weight));
        flow.open += 1;
        let lifts = flow.lifts;
        self.settle_down(&id);
        self.forget_the_even();
        Some(Left { flow: id, weight, cost, bytes, lifts, item })
    }

    pub fn remove(&mut self, id: &Identity, key: Head) -> Option<(T, u64)> {
        let flow = self.flows.get_mut(id)?;
        let before = flow.head()?;
        let Entry { item, bytes, .. } = flow.waiting.remove(&key)?;
        self.order.remove(&(flow.time, before, id.clone()));
        self.waiting.take(bytes);
        self.settle_down(id);
        self.forget_the_even();
        Some((item, bytes))
    }

    /// Where those wait of which `wanted` is true.
    pub fn find(&self, wanted: impl Fn(&T) -> bool + Copy) -> impl Iterator<Item = (Identity, Head)> {
        self.flows.iter().flat_map(move |(id, flow)| {
            let found = flow.waiting.iter().filter(move |(_, entry)| wanted(&entry.item));
            found.map(move |(head, _)| (id.clone(), *head))
        })
    }

    /// Moves a flow by the difference between what one of its requests was charged and what it cost. What was charged before
    /// the flow was put beside the others is forgiven already: it cannot come back as credit.
    pub fn settle(&mut self, charged: &Charged, cost: u64) {
        let id = &charged.flow;
        let Some(flow) = self.flows.get_mut(id) else { return };
        flow.open -= 1;
        if let Some(head) = flow.head() {
            self.order.remove(&(flow.time, head, id.clone()));
        }
        let (before, after) = (advance(charged.cost, charged.weight), advance(cost, charged.weight));
        flow.time = if charged.lifts == flow.lifts {
            flow.time.saturating_sub(before).saturating_add(after)
        } else {
            flow.time.saturating_add(after.saturating_sub(before).saturating_sub(flow.forgiven))
        };
        self.settle_down(id);
        self.forget_the_even();
    }

    pub fn drain(&mut self) -> Vec<T> {
        self.order.clear();
        self.waiting = Waiting::default();
        let waiting =
            self.flows.values_mut().flat_map(|flow| std::mem::take(&mut flow.waiting).into_values());
        let items = waiting.map(|entry| entry.item).collect();
        self.idle.clear();
        self.flows.retain(|_, flow| flow.open > 0);
        items
    }

    /// Puts a flow, which stands nowhere, where it belongs.
    fn settle_down(&mut self, id: &Identity) {
        let Some(flow) = self.flows.get(id) else { return };
        match flow.head() {
            Some(head) => {
                self.order.insert((flow.time, head, id.clone()));
            }
            None if flow.open == 0 => {
                self.idle.insert((flow.time, id.clone()));
            }
            None => {}
        }
    }

    /// Forgets idle flows that owe nothing: coming back, they would begin where everybody does. While nobody waits nobody is
    /// kept waiting by what a flow was given, so that all debts end.
    fn forget_the_even(&mut self) {
        let even = if self.order.is_empty() { Time::MAX } else { self.now };
        while self.idle.first().is_some_and(|(time, _)| *time <= even || self.idle.len() > MOST_IDLE) {
            if let Some((_, id)) = self.idle.pop_first() {
                self.flows.remove(&id);
            }
        }
    }
}

fn advance(cost: u64, weight: u32) -> Time {
    let scaled = u128::from(cost) * STEPS * u128::from(USUAL_WEIGHT) / u128::from(weight);
    scaled.min(MOST_ADVANCE) as Time
}
