//! One run over the candidates of a pool, in scratch space that is used again by the next run.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Ask;
use super::pipeline::{NamedFilter, Profile, Scored};
use super::plugin::WhenEmpty;
use super::record::{CandidateRow, FilteredBy};
use crate::index::Held;
use crate::index::knowledge::Lookups;
use crate::refusal::{Reason, Refusal};
use crate::state::cache::Rung;
use crate::state::endpoint::Load;
use crate::state::reservation::Role;
use crate::state::signals::Millis;
use crate::state::{Endpoint, Pool, SignalKind};

/// What every plugin of a cycle may look at.
#[derive(Clone, Copy, Debug)]
pub struct Cycle<'a> {
    /// The pool.
    pub pool: &'a Pool,
    /// The request.
    pub ask: &'a Ask<'a>,
    /// The moment of the cycle.
    pub now: Millis,
    /// Age from which a signal is unknown.
    pub staleness: Duration,
    /// Output tokens to expect.
    pub output_tokens: u64,
    /// What the endpoint is to do for the request.
    pub role: Role,
    /// Groups that it may be of, by their numbers; any if none are given.
    pub groups: Option<&'a [bool]>,
    /// The member that does the other half.
    pub peer: Option<u32>,
}

impl<'a> Cycle<'a> {
    /// A cycle of this moment, for the whole request.
    pub fn new(pool: &'a Pool, ask: &'a Ask<'a>, staleness: Duration) -> Self {
        let each = pool.memory.learned.expected_output(ask.max_tokens);
        Self {
            pool,
            ask,
            now: Millis::now(),
            staleness,
            output_tokens: each.saturating_mul(u64::from(ask.answers)),
            role: Role::Serve,
            groups: None,
            peer: None,
        }
    }

    /// The same for one half of the request, at an endpoint of those groups.
    pub fn half(&self, role: Role, groups: Option<&'a [bool]>) -> Self {
        let output_tokens = if role == Role::Prefill { 0 } else { self.output_tokens };
        Self { output_tokens, role, groups, ..*self }
    }
}

impl Cycle<'_> {
    /// The endpoint behind a candidate.
    pub fn endpoint(&self, candidate: &Candidate) -> &Endpoint {
        &self.pool.members[candidate.member as usize].endpoint
    }

    /// A signal of a candidate's endpoint, `None` if unknown or stale.
    pub fn signal(&self, candidate: &Candidate, kind: SignalKind) -> Option<f32> {
        self.endpoint(candidate).signals.fresh(kind, self.now, self.staleness).map(|value| value as f32)
    }
}

/// An endpoint still eligible, with the numbers most plugins read.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Index into the pool's members.
    pub member: u32,
    /// What it is believed to hold of the prompt.
    pub held: Held,
    /// Its load.
    pub load: Load,
}

/// A candidate that a filter dropped.
#[derive(Clone, Copy, Debug)]
pub struct Dropped {
    /// Index into the pool's members.
    pub member: u32,
    /// Index of the filter in the profile.
    pub filter: u16,
    /// Why.
    pub why: &'static str,
}

/// Scratch space of a cycle.
#[derive(Debug, Default)]
pub struct Workspace {
    /// Candidates left.
    pub candidates: Vec<Candidate>,
    /// Weighted sums, one a candidate.
    pub totals: Vec<f32>,
    /// The pick, indices into `candidates`.
    pub ranked: Vec<u32>,
    /// Candidates beside the pick, while the record is written.
    others: Vec<u32>,
    /// Scratch space of the lookups of caches.
    pub lookups: Lookups,
    /// Candidates of a pool that is asked for several halves.
    all: Vec<Candidate>,
    dropped: Vec<Dropped>,
    verdicts: Vec<Option<&'static str>>,
    /// Raw scores, scorer by scorer.
    raw: Vec<f32>,
    /// Scores as they were used, scorer by scorer.
    used: Vec<f32>,
}

thread_local! {
    static KEPT: Cell<Option<Box<Workspace>>> = const { Cell::new(None) };
}

/// A thread's workspace, put back when it is dropped.
#[derive(Debug)]
pub struct Borrowed(Option<Box<Workspace>>);

impl Deref for Borrowed {
    type Target = Workspace;

    #[allow(clippy::expect_used, reason = "taken by drop only")]
    fn deref(&self) -> &Workspace {
        self.0.as_ref().expect("held until drop")
    }
}

impl DerefMut for Borrowed {
    #[allow(clippy::expect_used, reason = "taken by drop only")]
    fn deref_mut(&mut self) -> &mut Workspace {
        self.0.as_mut().expect("held until drop")
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        KEPT.set(self.0.take());
    }
}

impl Workspace {
    /// The workspace that this thread's last cycle left, with its capacity.
    pub fn of_this_thread() -> Borrowed {
        Borrowed(Some(KEPT.take().unwrap_or_default()))
    }

    /// Starts with every member of the pool.
    pub fn begin(&mut self, cx: &Cycle<'_>) {
        self.dropped.clear();
        self.candidates.clear();
        self.candidates.extend(cx.pool.members.iter().enumerate().map(|(at, member)| Candidate {
            member: at as u32,
            held: Held::default(),
            load: member.endpoint.load(cx.now, cx.staleness),
        }));
    }

    /// Starts again with the candidates of [`Workspace::begin`], as they were kept.
    pub fn begin_again(&mut self) {
        self.dropped.clear();
        self.candidates.clear();
        self.candidates.extend_from_slice(&self.all);
    }

    /// Keeps the candidates to begin again with.
    pub fn keep_all(&mut self) {
        self.all.clear();
        self.all.extend_from_slice(&self.candidates);
    }

    /// The candidate with the highest total.
    pub fn best(&self) -> Option<usize> {
        (0..self.candidates.len()).max_by(|&a, &b| self.totals[a].total_cmp(&self.totals[b]).then(b.cmp(&a)))
    }

    /// The endpoint behind candidate `at`.
    pub fn endpoint<'a>(&self, pool: &'a Pool, at: u32) -> &'a Arc<Endpoint> {
        &pool.members[self.candidates[at as usize].member as usize].endpoint
    }

    /// Runs one filter.
    pub fn filter(&mut self, cx: &Cycle<'_>, at: usize, filter: &NamedFilter) -> Result<(), Refusal> {
        if self.candidates.is_empty() {
            return Ok(());
        }
        self.verdicts.clear();
        self.verdicts.resize(self.candidates.len(), None);
        filter.filter.filter(cx, &self.candidates, &mut self.verdicts);
        if self.verdicts.iter().all(Option::is_some) {
            let why = self.verdicts[0].unwrap_or("dropped");
            return all_dropped(cx, filter, why);
        }
        let mut verdicts = self.verdicts.iter();
        let dropped = &mut self.dropped;
        self.candidates.retain(|candidate| match verdicts.next() {
            Some(Some(why)) => {
                dropped.push(Dropped { member: candidate.member, filter: at as u16, why });
                false
            }
            _ => true,
        });
        Ok(())
    }

    /// Runs all scorers and sums them up.
    pub fn score(&mut self, cx: &Cycle<'_>, scorers: &[Scored]) {
        let n = self.candidates.len();
        self.raw.clear();
        self.raw.resize(n * scorers.len(), f32::NAN);
        self.used.clear();
        self.used.resize(n * scorers.len(), 0.0);
        self.totals.clear();
        self.totals.resize(n, 0.0);
        for (at, scorer) in scorers.iter().enumerate() {
            let row = at * n..(at + 1) * n;
            let raw = &mut self.raw[row.clone()];
            scorer.scorer.score(cx, &self.candidates, raw);
            let stand_in = mean_of_known(raw);
            for ((raw, used), total) in raw.iter().zip(&mut self.used[row]).zip(&mut self.totals) {
                *used = if raw.is_nan() { stand_in } else { raw.clamp(0.0, 1.0) };
                *total += *used * scorer.weight;
            }
        }
    }

    /// The record's rows: the picked first, then by total, then the dropped; at most `most`, all if they are at most 64.
    pub fn rows(&mut self, pool: &Pool, profile: &Profile, most: usize, rows: &mut Vec<CandidateRow>) {
        let mut others = std::mem::take(&mut self.others);
        let n = self.candidates.len();
        let whole = pool.members.len() <= most;
        let mut push = |at: usize| {
            let candidate = &self.candidates[at];
            rows.push(CandidateRow {
                endpoint: Arc::clone(&pool.members[candidate.member as usize].endpoint.destination),
                filtered_by: None,
                raw: (0..profile.scorers.len()).map(|s| self.raw[s * n + at]).collect(),
                used: (0..profile.scorers.len()).map(|s| self.used[s * n + at]).collect(),
                total: self.totals[at],
                cached_tokens: candidate.held.tokens,
                rung: candidate.held.rung,
            });
        };
        self.ranked.iter().for_each(|&at| push(at as usize));
        others.clear();
        others.extend((0..n as u32).filter(|at| !self.ranked.contains(at)));
        let keep =
            if whole { others.len() } else { most.saturating_sub(self.ranked.len()).min(others.len()) };
        if keep < others.len() {
            others.select_nth_unstable_by(keep, |&a, &b| {
                self.totals[b as usize].total_cmp(&self.totals[a as usize])
            });
            others.truncate(keep);
        }
        for &at in &others {
            push(at as usize);
        }
        if whole {
            rows.extend(self.dropped.iter().map(|dropped| CandidateRow {
                endpoint: Arc::clone(&pool.members[dropped.member as usize].endpoint.destination),
                filtered_by: Some(FilteredBy { filter: dropped.filter, why: dropped.why }),
                raw: smallvec::SmallVec::new(),
                used: smallvec::SmallVec::new(),
                total: 0.0,
                cached_tokens: 0,
                rung: Rung::Load,
            }));
        }
        self.others = others;
    }
}

/// What follows when a filter would leave nobody.
fn all_dropped(cx: &Cycle<'_>, filter: &NamedFilter, why: &'static str) -> Result<(), Refusal> {
    let refuse = |reason| {
        Err(Refusal::new(
            reason,
            format!("no endpoint of pool {} passes the filter {}: {why}", cx.pool.label, filter.name),
        )
        .retry_after(Duration::from_secs(1)))
    };
    match filter.filter.when_all_are_dropped(cx) {
        WhenEmpty::Refuse => refuse(Reason::Filtered),
        WhenEmpty::RefuseNoEndpoints => refuse(Reason::NoEndpoints),
        WhenEmpty::Ignore => {
            cx.pool.memory.metrics.filters_ignored.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    }
}

/// What an abstaining candidate is worth: the mean of what the scorer gave the others, nothing if it gave none.
fn mean_of_known(scores: &[f32]) -> f32 {
    let (sum, known) = scores
        .iter()
        .filter(|score| !score.is_nan())
        .fold((0.0, 0u32), |(sum, known), score| (sum + score.clamp(0.0, 1.0), known + 1));
    if known == 0 { 0.0 } else { sum / known as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abstaining_candidate_counts_as_the_mean_of_the_others() {
        assert_eq!(mean_of_known(&[f32::NAN, 0.2, 0.4]), 0.3);
        assert_eq!(mean_of_known(&[f32::NAN, f32::NAN]), 0.0);
        assert_eq!(mean_of_known(&[2.0, f32::NAN]), 1.0, "a score out of range counts as its bound");
    }
}
