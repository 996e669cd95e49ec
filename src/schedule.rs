//! From a pool and a request to one reserved endpoint: candidates -> filter -> score -> pick and reserve, in one step.
//!
//! The whole cycle runs under the pool's short lock, so that of 800 requests arriving on the same stale metrics each
//! sees the bookings of those before it. Nothing in a cycle waits, does IO or allocates per endpoint.

pub mod cycle;
pub mod pipeline;
pub mod plugin;
pub mod record;
pub mod subset;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use smallvec::SmallVec;

pub use cycle::{Candidate, Cycle, Dropped, Workspace};
pub use pipeline::{Pipeline, Profile, Scored};
pub use record::{CandidateRow, LegRecord};
pub use subset::Subset;

use crate::prompt::Blocks;
use crate::refusal::{Reason, Refusal};
use crate::state::reservation::{Leg, Role};
use crate::state::signals::Millis;
use crate::state::{Endpoint, Pool};

/// What the scheduler needs to know of one request.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The model name the engine will see.
    pub model: &'a str,
    /// Chained hashes of the prompt; empty if no plugin wants them or the prompt is unknown.
    pub blocks: &'a Blocks,
    /// Prompt tokens, counted or estimated; 0 if unknown.
    pub prompt_tokens: u64,
    /// Output tokens the client allows.
    pub max_tokens: Option<u64>,
    /// Answers wanted, each with its own output.
    pub answers: u32,
    /// Restriction that came with the request.
    pub subset: Option<&'a Subset>,
    /// Endpoints to rank: the choice and the alternatives for retries.
    pub wanted: usize,
    /// Whether to refuse if the choice holds nothing of the prompt.
    pub only_if_cached: bool,
    /// Seed of everything random in this cycle.
    pub seed: u64,
    /// Candidates to keep in the record.
    pub detail: usize,
}

/// An endpoint chosen and booked.
#[derive(Debug)]
pub struct Picked {
    /// The choice and its alternatives, best first.
    pub ranked: SmallVec<[Arc<Endpoint>; 3]>,
    /// The booking.
    pub leg: Leg,
    /// What `/debug/decisions` will show.
    pub record: LegRecord,
    /// Prompt tokens the choice is believed to hold already.
    pub predicted_cached_tokens: u64,
}

/// Runs the current pipeline.
#[derive(Debug)]
pub struct Scheduler {
    pipeline: ArcSwap<Pipeline>,
    staleness: Duration,
}

impl Scheduler {
    /// A scheduler that treats signals older than `staleness` as unknown.
    pub fn new(pipeline: Pipeline, staleness: Duration) -> Self {
        Self { pipeline: ArcSwap::from_pointee(pipeline), staleness }
    }

    /// The pipeline of this moment.
    pub fn pipeline(&self) -> Arc<Pipeline> {
        self.pipeline.load_full()
    }

    /// Replaces the pipeline; cycles under way finish with the old one.
    pub fn replace(&self, pipeline: Pipeline) {
        self.pipeline.store(Arc::new(pipeline));
    }

    /// Picks an endpoint of `pool` and books the request on it.
    pub fn pick(&self, pipeline: &Pipeline, pool: &Arc<Pool>, ask: &Ask<'_>) -> Result<Picked, Refusal> {
        let mut space = Workspace::of_this_thread();
        let cycle = pool.memory.cycle.lock();
        let profile = self.rank(pipeline, &mut space, pool, ask)?;
        let chosen = space.candidates[space.ranked[0] as usize];
        let predicted_cached_tokens = ask.blocks.tokens(chosen.depth).min(ask.prompt_tokens);
        if ask.only_if_cached && chosen.depth == 0 {
            let why = "no endpoint that could take the request holds any of its prompt";
            return Err(Refusal::new(Reason::NotCached, why));
        }
        let uncached = ask.prompt_tokens - predicted_cached_tokens;
        let output =
            pool.memory.learned.expected_output(ask.max_tokens).saturating_mul(u64::from(ask.answers));
        let member = Arc::clone(&pool.members[chosen.member as usize]);
        let leg = Leg::book(Role::Serve, Arc::clone(pool), member, uncached, output);
        drop(cycle);
        let record = record(&space, &profile, pool, ask, Some((uncached, output)));
        let ranked: SmallVec<[Arc<Endpoint>; 3]> =
            space.ranked.iter().map(|&at| Arc::clone(space.endpoint(pool, at))).collect();
        if let Some(index) = &pipeline.index {
            index.routed(ask.blocks, &leg.member.endpoint);
        }
        Ok(Picked { ranked, leg, record, predicted_cached_tokens })
    }

    /// The decision table for a request that is not booked, and the prompt tokens the choice is believed to hold.
    pub fn explain(
        &self,
        pipeline: &Pipeline,
        pool: &Arc<Pool>,
        ask: &Ask<'_>,
    ) -> Result<(LegRecord, u64), Refusal> {
        let mut space = Workspace::of_this_thread();
        let _cycle = pool.memory.cycle.lock();
        let profile = self.rank(pipeline, &mut space, pool, ask)?;
        let chosen = space.candidates[space.ranked[0] as usize];
        let predicted_cached_tokens = ask.blocks.tokens(chosen.depth).min(ask.prompt_tokens);
        Ok((record(&space, &profile, pool, ask, None), predicted_cached_tokens))
    }

    /// Fills `space.ranked` with at least one candidate.
    fn rank(
        &self,
        pipeline: &Pipeline,
        space: &mut Workspace,
        pool: &Pool,
        ask: &Ask<'_>,
    ) -> Result<Arc<Profile>, Refusal> {
        let profile = Arc::clone(&pipeline.profile);
        let now = Millis::now();
        let cx = Cycle { pool, ask, now, staleness: self.staleness };
        space.begin(&cx);
        if let Some(index) = &pipeline.index {
            index.depths(ask.blocks, pool, &mut space.candidates);
        }
        for (at, filter) in profile.filters.iter().enumerate() {
            space.filter(&cx, at, filter)?;
        }
        if space.candidates.is_empty() {
            return Err(Refusal::new(
                Reason::NoEndpoints,
                format!("pool {} has no endpoint for this request", pool.label),
            )
            .retry_after(Duration::from_secs(1)));
        }
        space.score(&cx, &profile.scorers);
        let mut rng = SmallRng::seed_from_u64(ask.seed);
        space.ranked.clear();
        profile.picker.picker.pick(
            &cx,
            &space.candidates,
            &space.totals,
            ask.wanted.max(1),
            &mut rng,
            &mut space.ranked,
        );
        debug_assert!(!space.ranked.is_empty(), "a picker ranks at least one of a non-empty set");
        if space.ranked.is_empty() {
            space.ranked.push(0);
        }
        Ok(profile)
    }
}

/// Keeps the picked and the best candidates of a cycle.
fn record(
    space: &Workspace,
    profile: &Arc<Profile>,
    pool: &Pool,
    ask: &Ask<'_>,
    reserved: Option<(u64, u64)>,
) -> LegRecord {
    let mut rows: Vec<CandidateRow> = Vec::with_capacity(ask.detail.min(pool.members.len()));
    space.rows(pool, profile, ask.detail, &mut rows);
    LegRecord {
        role: Role::Serve,
        profile: Arc::clone(profile),
        candidates_total: pool.members.len() as u32,
        complete: rows.len() == pool.members.len(),
        rows,
        picked: space.ranked.iter().map(|&at| Arc::clone(&space.endpoint(pool, at).destination)).collect(),
        reserved_requests: u32::from(reserved.is_some()),
        reserved_prefill: reserved.map_or(0, |(prefill, _)| prefill),
        reserved_decode: reserved.map_or(0, |(_, decode)| decode),
    }
}
