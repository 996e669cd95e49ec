//! From a pool and a request to one reserved endpoint: candidates -> filter -> score -> pick and reserve, in one step.
//!
//! The whole cycle runs under the pool's short lock, so that of 800 requests arriving on the same stale metrics each
//! sees the bookings of those before it. Nothing in a cycle waits, does IO or allocates per endpoint.

pub mod cost;
pub mod cycle;
mod pair;
pub mod pipeline;
pub mod plugin;
pub mod record;
pub mod subset;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use smallvec::{SmallVec, smallvec};

pub use cycle::{Candidate, Cycle, Dropped, Workspace};
pub use pair::{PrefillPick, Split};
pub use pipeline::{Pipeline, Profile, Scored};
pub use record::{CandidateRow, LegRecord};
pub use subset::Subset;

use crate::index::knowledge::capacity_in;
use crate::index::{Held, TokenIndexes};
use crate::prompt::Prepared;
use crate::refusal::{Reason, Refusal};
use crate::session::{Outcome, Session};
use crate::state::cache::Rung;
use crate::state::rates::{self, Forecast};
use crate::state::reservation::{Leg, Role, Work};
use crate::state::signals::Millis;
use crate::state::{Endpoint, Pool};

/// Blocks remembered for an endpoint that does not say how many it has: what llm-d assumes.
const UNKNOWN_CACHE: usize = 31_250;

/// What the scheduler needs to know of one request.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The model name the engine will see.
    pub model: &'a str,
    /// The prompt.
    pub prompt: &'a Prepared,
    /// Output tokens the client allows.
    pub max_tokens: Option<u64>,
    /// Answers wanted, each with its own output.
    pub answers: u32,
    /// What it says of its session, one for each affinity of the profile.
    pub sessions: &'a [Session],
    /// Restriction that came with the request.
    pub subset: Option<&'a Subset>,
    /// Endpoints to rank: the choice and the alternatives for retries.
    pub wanted: usize,
    /// Whether its prompt may be computed elsewhere than its output.
    pub may_be_split: bool,
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
    /// What `/debug/decisions` will show: the choice of the destination, and that of who computes its prompt.
    pub records: SmallVec<[LegRecord; 1]>,
    /// What the choice is believed to hold of the prompt already.
    pub held: Held,
    /// Output tokens expected.
    pub output: u64,
    /// How long it was expected to take.
    pub forecast: Forecast,
    /// What became of its session; `None` where no plugin asks.
    pub session: Option<Outcome>,
    /// Who computes its prompt, if that is another endpoint.
    pub prefill: Option<PrefillPick>,
    /// What was decided about that, in pools with roles.
    pub split: Option<Split>,
}

/// An endpoint that would be chosen.
#[derive(Debug)]
pub struct Explained {
    /// The decision tables: that of the destination, and that of the prompt if it is computed elsewhere.
    pub records: SmallVec<[LegRecord; 1]>,
    /// What the choice is believed to hold of the prompt already.
    pub held: Held,
    /// What would become of the request's session; `None` where no plugin asks.
    pub session: Option<Outcome>,
    /// What would be decided about its prompt, in pools with roles.
    pub split: Option<Split>,
}

/// Runs the current pipeline.
#[derive(Debug)]
pub struct Scheduler {
    pipeline: ArcSwap<Pipeline>,
    /// Who holds which tokens.
    pub tokens: Arc<TokenIndexes>,
    staleness: Duration,
    shared_answers: AtomicBool,
    mismatch_told: AtomicBool,
}

impl Scheduler {
    /// A scheduler that treats signals older than `staleness` as unknown.
    pub fn new(pipeline: Pipeline, tokens: Arc<TokenIndexes>, staleness: Duration) -> Self {
        Self {
            pipeline: ArcSwap::from_pointee(pipeline),
            tokens,
            staleness,
            shared_answers: AtomicBool::new(false),
            mismatch_told: AtomicBool::new(false),
        }
    }

    /// The pipeline of this moment.
    pub fn pipeline(&self) -> Arc<Pipeline> {
        self.pipeline.load_full()
    }

    /// Notes whether the shared index answered when it was last asked.
    pub fn note_shared(&self, answers: bool) {
        self.shared_answers.store(answers, Ordering::Relaxed);
    }

    /// Notes that engines have blocks of another size than the profile asks the shared index for; true once a profile.
    pub fn note_mismatch(&self) -> bool {
        !self.mismatch_told.swap(true, Ordering::Relaxed)
    }

    /// Replaces the pipeline; cycles under way finish with the old one.
    pub fn replace(&self, pipeline: Pipeline) {
        self.note_shared(false);
        self.mismatch_told.store(false, Ordering::Relaxed);
        self.pipeline.store(Arc::new(pipeline));
    }

    /// The best source of knowledge about an endpoint's cache that the present profile asks for and picks may go by.
    pub fn best_rung(&self, endpoint: &Endpoint) -> Rung {
        let pipeline = self.pipeline();
        let asked = |rung: &Rung| match rung {
            Rung::Precise => pipeline.tokens,
            Rung::Shared => self.shared_answers.load(Ordering::Relaxed),
            Rung::Approximate => pipeline.tokens || pipeline.text.is_some(),
            _ => false,
        };
        endpoint.cache.trusted().find(asked).unwrap_or_default()
    }

    /// Drops what is known of an endpoint's cache: its process started anew.
    pub fn forget(&self, endpoint: &Endpoint) {
        if let Some(text) = &self.pipeline().text {
            text.routed.forget(endpoint.slot);
        }
        self.tokens.forget(endpoint);
        endpoint.cache.forget();
    }

    /// Drops what is known of every cache but those of endpoints whose slot is `live`.
    pub fn retain(&self, live: &dyn Fn(u64) -> bool) {
        if let Some(text) = &self.pipeline().text {
            text.routed.retain(live);
        }
        self.tokens.retain(live);
    }

    /// Picks an endpoint of `pool` and books the request on it; in pools with roles perhaps two, one for each half.
    pub fn pick(&self, pipeline: &Pipeline, pool: &Arc<Pool>, ask: &Ask<'_>) -> Result<Picked, Refusal> {
        let mut space = Workspace::of_this_thread();
        let cycle = pool.memory.cycle.lock();
        let cx = Cycle::new(pool, ask, self.staleness);
        self.look_up(pipeline, &mut space, &cx);
        let mut split = None;
        if let Some(roles) = &pool.disaggregation {
            match pair::plan(pipeline, &mut space, &cx, roles)? {
                pair::Plan::Pair(pair) => return self.book_pair(pipeline, pool, ask, &cx, *pair),
                pair::Plan::Whole(why) => split = Some(why),
            }
        } else {
            narrow(&mut space, &cx, &pipeline.profile)?;
        }
        choose(&mut space, &cx, &pipeline.profile, ask.wanted);
        let chosen = space.candidates[space.ranked[0] as usize];
        let held = chosen.held;
        refuse_uncached(ask, held)?;
        let uncached = ask.prompt.tokens - u64::from(held.tokens);
        let output = cx.output_tokens;
        let member = Arc::clone(&pool.members[chosen.member as usize]);
        let own = rates::prefill(uncached as f64, f64::from(held.tokens));
        let work = Work { prefill_tokens: uncached, decode_tokens: output, prefill_seconds: own };
        let leg = Leg::book(Role::Serve, Arc::clone(pool), member, work);
        let forecast = forecast(&chosen, own, ask);
        if held.tokens == 0 {
            leg.member.endpoint.cache.note_cold();
        }
        let session = keep_sessions(pool, ask, &outcomes(&space, pool, ask), leg.member.endpoint.slot);
        drop(cycle);
        let record = record(&mut space, &pipeline.profile, &cx, Some(work));
        let ranked = space.ranked.iter().map(|&at| Arc::clone(space.endpoint(pool, at))).collect();
        self.remember(pipeline, ask.prompt, &leg.member.endpoint, cx.now);
        Ok(Picked {
            ranked,
            leg,
            records: smallvec![record],
            held,
            output,
            forecast,
            session,
            prefill: None,
            split,
        })
    }

    /// What was sent to `endpoint` is there from now on, as far as its cache reaches.
    fn remember(&self, pipeline: &Pipeline, prompt: &Prepared, endpoint: &Endpoint, now: Millis) {
        let cache = endpoint.cache_tokens();
        if let Some(text) = &pipeline.text {
            let followed = cache.filter(|_| text.needs.follows_engine);
            let capacity = capacity_in(&prompt.text, followed).unwrap_or(text.needs.capacity);
            let remembered =
                text.routed.routed(&prompt.text, endpoint.holder(), endpoint.cache.remembered(capacity), now);
            endpoint.cache.set_blocks(remembered);
        }
        if !prompt.ids.is_empty() {
            let capacity = capacity_in(&prompt.ids, cache).unwrap_or(UNKNOWN_CACHE);
            self.tokens.routed.routed(
                &prompt.ids,
                endpoint.holder(),
                endpoint.cache.remembered(capacity),
                now,
            );
        }
    }

    /// The decision for a request that is not booked.
    pub fn explain(
        &self,
        pipeline: &Pipeline,
        pool: &Arc<Pool>,
        ask: &Ask<'_>,
    ) -> Result<Explained, Refusal> {
        let mut space = Workspace::of_this_thread();
        let _cycle = pool.memory.cycle.lock();
        let cx = Cycle::new(pool, ask, self.staleness);
        self.look_up(pipeline, &mut space, &cx);
        let mut split = None;
        if let Some(roles) = &pool.disaggregation {
            match pair::plan(pipeline, &mut space, &cx, roles)? {
                pair::Plan::Pair(pair) => return Ok(pair.explained()),
                pair::Plan::Whole(why) => split = Some(why),
            }
        } else {
            narrow(&mut space, &cx, &pipeline.profile)?;
        }
        choose(&mut space, &cx, &pipeline.profile, ask.wanted);
        let held = space.candidates[space.ranked[0] as usize].held;
        let session = outcomes(&space, pool, ask).first().copied();
        let record = record(&mut space, &pipeline.profile, &cx, None);
        Ok(Explained { records: smallvec![record], held, session, split })
    }

    /// Fills `space` with every member of the pool, its load and what it holds of the prompt.
    fn look_up(&self, pipeline: &Pipeline, space: &mut Workspace, cx: &Cycle<'_>) {
        space.begin(cx);
        let Workspace { lookups, candidates, .. } = space;
        let prompt = cx.ask.prompt;
        lookups.run(prompt, pipeline.text.as_ref(), &self.tokens, cx.now);
        for candidate in candidates {
            candidate.held = lookups.held(prompt, cx.endpoint(candidate), &self.tokens);
        }
    }
}

/// Leaves the candidates that pass the profile's filters, at least one, with their scores.
fn narrow(space: &mut Workspace, cx: &Cycle<'_>, profile: &Profile) -> Result<(), Refusal> {
    for (at, filter) in profile.filters.iter().enumerate() {
        space.filter(cx, at, filter)?;
    }
    if space.candidates.is_empty() {
        let why = format!("pool {} has no endpoint for this request", cx.pool.label);
        return Err(Refusal::new(Reason::NoEndpoints, why).retry_after(Duration::from_secs(1)));
    }
    space.score(cx, &profile.scorers);
    Ok(())
}

/// Fills `space.ranked` with at least one of its candidates.
fn choose(space: &mut Workspace, cx: &Cycle<'_>, profile: &Profile, wanted: usize) {
    let mut rng = SmallRng::seed_from_u64(cx.ask.seed);
    let Workspace { candidates, totals, ranked, .. } = space;
    ranked.clear();
    profile.picker.picker.pick(cx, candidates, totals, wanted.max(1), &mut rng, ranked);
    debug_assert!(!ranked.is_empty(), "a picker ranks at least one of a non-empty set");
    if ranked.is_empty() {
        ranked.push(0);
    }
}

fn refuse_uncached(ask: &Ask<'_>, held: Held) -> Result<(), Refusal> {
    if ask.only_if_cached && held.tokens == 0 {
        let why = "no endpoint that could take the request holds any of its prompt";
        return Err(Refusal::new(Reason::NotCached, why));
    }
    Ok(())
}

/// What to expect of a candidate that will prefill for `own` seconds at unit speed.
fn forecast(chosen: &Candidate, own: f64, ask: &Ask<'_>) -> Forecast {
    Forecast {
        ahead: f64::from(chosen.load.prefill_seconds),
        own,
        sequences: f64::from(chosen.load.requests()) + 1.0,
        context: f64::from(chosen.load.decode_tokens) + ask.prompt.tokens as f64,
    }
}

/// What becomes of each of the request's sessions with the choice.
fn outcomes(space: &Workspace, pool: &Pool, ask: &Ask<'_>) -> SmallVec<[Outcome; 1]> {
    let slot = |at: usize| space.endpoint(pool, at as u32).slot;
    let is_candidate = |bound| (0..space.candidates.len()).any(|at| slot(at) == bound);
    let (picked, now) = (slot(space.ranked[0] as usize), Millis::now());
    ask.sessions.iter().map(|session| session.outcome(picked, is_candidate, now)).collect()
}

/// Binds the request's sessions to the choice; what became of the first.
fn keep_sessions(pool: &Pool, ask: &Ask<'_>, outcomes: &[Outcome], picked: u64) -> Option<Outcome> {
    for (session, outcome) in ask.sessions.iter().zip(outcomes) {
        session.bind(*outcome, picked, Millis::now());
    }
    let first = outcomes.first().copied();
    if let Some(outcome) = first {
        pool.memory.metrics.sessions[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
    first
}

/// Keeps the picked and the best candidates of a cycle.
fn record(
    space: &mut Workspace,
    profile: &Arc<Profile>,
    cx: &Cycle<'_>,
    reserved: Option<Work>,
) -> LegRecord {
    let (pool, detail) = (cx.pool, cx.ask.detail);
    let mut rows: Vec<CandidateRow> = Vec::with_capacity(detail.min(pool.members.len()));
    space.rows(pool, profile, detail, &mut rows);
    let mut record = LegRecord {
        role: cx.role,
        profile: Arc::clone(profile),
        candidates_total: pool.members.len() as u32,
        complete: rows.len() == pool.members.len(),
        rows,
        picked: space.ranked.iter().map(|&at| Arc::clone(&space.endpoint(pool, at).destination)).collect(),
        reserved_requests: 0,
        reserved_prefill: 0,
        reserved_decode: 0,
    };
    if let Some(work) = reserved {
        record.reserve(work);
    }
    record
}
