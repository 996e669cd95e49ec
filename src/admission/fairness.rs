//! Whose turn it is: requests of one pool wait in flows, and flows are served by what they have cost.
//!
//! Bands of priority go strictly one before the other. Inside a band every flow has a virtual time, the cost of what it was
//! given divided by its weight; the flow that has the least is next, and its head advances it by the cost predicted. What
//! the request really cost corrects that when it ends. A flow that comes back begins no earlier than the flow that is
//! next, so that being idle earns nothing and a stranger waits for at most one request of each flow ahead of it. (Start-time
//! fair queuing: Goyal, Vin, Cheng, SIGCOMM 1996; with counters of tokens: Sheng et al., "Fairness in Serving Large
//! Language Models", OSDI 2024.)
//!
//! Nothing here waits or reads a clock.

mod band;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeMap;

pub use band::USUAL_WEIGHT;

use super::Identity;
use band::{Band, Left};

/// Most that may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Requests.
    pub requests: usize,
    /// Bytes of their bodies.
    pub bytes: u64,
}

impl Bound {
    /// Any number.
    pub const NONE: Self = Self { requests: usize::MAX, bytes: u64::MAX };

    fn holds(self, waiting: Waiting, bytes: u64) -> bool {
        waiting.requests < self.requests && waiting.bytes.saturating_add(bytes) <= self.bytes
    }
}

/// How much waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Requests.
    pub requests: usize,
    /// Bytes of their bodies.
    pub bytes: u64,
}

impl Waiting {
    fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }

    fn take(&mut self, bytes: u64) {
        self.requests -= 1;
        self.bytes -= bytes;
    }
}

/// One request that wants to wait.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Higher is strictly earlier.
    pub priority: i32,
    /// Whose request it is.
    pub flow: Identity,
    /// The flow's share beside others of its band, in thousandths of the usual; at least 1.
    pub weight: u32,
    /// Order within its flow; equal ranks go in order of arrival.
    pub rank: u64,
    /// What it is predicted to cost.
    pub cost: u64,
    /// Bytes of its body.
    pub bytes: u64,
}

/// Where a request waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    priority: i32,
    flow: Identity,
    rank: u64,
    turn: u64,
}

/// What a request that left was charged, to be corrected once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a flow remembers what it was charged until it is settled"]
pub struct Charged {
    priority: i32,
    flow: Identity,
    weight: u32,
    cost: u64,
    lifts: u32,
}

impl Charged {
    /// The cost it was charged.
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

/// The requests of one pool that wait.
#[derive(Debug)]
pub struct FairQueue<T> {
    bands: BTreeMap<Reverse<i32>, Band<T>>,
    waiting: Waiting,
    turns: u64,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self { bands: BTreeMap::new(), waiting: Waiting::default(), turns: 0 }
    }
}

impl<T> FairQueue<T> {
    /// How much waits.
    pub fn waiting(&self) -> Waiting {
        self.waiting
    }

    /// The bands that anything waits in, highest first, with how much.
    pub fn bands(&self) -> impl Iterator<Item = (i32, Waiting)> {
        let busy = self.bands.iter().filter(|(_, band)| band.waiting().requests > 0);
        busy.map(|(priority, band)| (priority.0, band.waiting()))
    }

    /// The highest priority that waits.
    pub fn highest(&self) -> Option<i32> {
        self.bands().next().map(|(priority, _)| priority)
    }

    /// Flows that something is known of, waiting or not.
    pub fn flows(&self) -> usize {
        self.bands.values().map(Band::flows).sum()
    }

    /// Lets a request wait, if it fits under both bounds; gives it back if it does not.
    pub fn push(&mut self, arrival: Arrival, all: Bound, band: Bound, item: T) -> Result<Place, T> {
        let Arrival { priority, bytes, .. } = arrival;
        let in_band = self.bands.get(&Reverse(priority)).map(Band::waiting).unwrap_or_default();
        if !all.holds(self.waiting, bytes) || !band.holds(in_band, bytes) {
            return Err(item);
        }
        let turn = self.turns;
        self.turns += 1;
        let place = Place { priority, flow: arrival.flow.clone(), rank: arrival.rank, turn };
        self.waiting.add(bytes);
        self.bands.entry(Reverse(priority)).or_default().push(arrival, turn, item);
        Ok(place)
    }

    /// The next request, with what its flow was charged for it.
    pub fn pop(&mut self) -> Option<(T, Charged)> {
        let (priority, band) = self.bands.iter_mut().find(|(_, band)| band.waiting().requests > 0)?;
        let left = band.pop()?;
        self.waiting.take(left.bytes);
        let Left { flow, weight, cost, lifts, item, .. } = left;
        let charged = Charged { priority: priority.0, flow, weight, cost, lifts };
        Some((item, charged))
    }

    /// Takes a request out that waits no longer; none if it has left already.
    pub fn remove(&mut self, place: &Place) -> Option<T> {
        let band = self.bands.get_mut(&Reverse(place.priority))?;
        let (item, bytes) = band.remove(&place.flow, (place.rank, place.turn))?;
        self.waiting.take(bytes);
        self.tidy(place.priority);
        Some(item)
    }

    /// A request that left has cost this much.
    #[allow(clippy::needless_pass_by_value, reason = "what was charged is settled once")]
    pub fn settle(&mut self, charged: Charged, cost: u64) {
        if let Some(band) = self.bands.get_mut(&Reverse(charged.priority)) {
            band.settle(&charged, cost);
        }
        self.tidy(charged.priority);
    }

    /// Takes out whatever is unwanted.
    pub fn take(&mut self, unwanted: &dyn Fn(&T) -> bool) -> Vec<T> {
        let found: Vec<Place> = self
            .bands
            .iter()
            .flat_map(|(priority, band)| {
                let place = |(flow, (rank, turn))| Place { priority: priority.0, flow, rank, turn };
                band.find(unwanted).map(place)
            })
            .collect();
        found.iter().filter_map(|place| self.remove(place)).collect()
    }

    /// Takes everything out: nobody will serve it.
    pub fn drain(&mut self) -> Vec<T> {
        self.waiting = Waiting::default();
        let items = self.bands.values_mut().flat_map(Band::drain).collect();
        self.bands.retain(|_, band| band.flows() > 0);
        items
    }

    fn tidy(&mut self, priority: i32) {
        if self.bands.get(&Reverse(priority)).is_some_and(|band| band.flows() == 0) {
            self.bands.remove(&Reverse(priority));
        }
    }
}
