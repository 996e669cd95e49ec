//! Two endpoints for one request: who computes its prompt and who generates its output, chosen together.
//!
//! ```text
//! whole request: filter, score           short, or nobody to pair with  ->  whole
//! prompt:        filter, score           the best of each group
//! output:        filter, score + the best prompt score of its group     ->  pick
//! prompt:        filter by the pick's group, score                      ->  pick
//! ```
//!
//! Where the scores of both profiles are costs, seconds are added; else scores, each as a share of what its profile can give.

use std::sync::Arc;
use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::cost::CostModel;
use super::{
    Ask, Candidate, Cycle, Explained, LegRecord, Picked, Pipeline, Profile, Scheduler, Workspace, choose,
    forecast, keep_sessions, narrow, outcomes, record, refuse_uncached,
};
use crate::index::Held;
use crate::refusal::{Reason, Refusal};
use crate::session::Outcome;
use crate::state::disaggregation::Disaggregation;
use crate::state::rates::{self, Forecast};
use crate::state::reservation::{Leg, Role, Work};
use crate::state::{Endpoint, Member, Pool};

/// What was decided about computing a prompt elsewhere than its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// It is.
    Pair,
    /// What is uncached of it is too short.
    Short,
    /// One endpoint costs everybody less.
    Cheaper,
    /// No prefill endpoint takes it.
    NoPrefill,
    /// No decode endpoint of a group with a prefill endpoint takes it.
    NoDecode,
    /// Its API or what it asks for does not allow it.
    Unfit,
}

impl Split {
    /// Every decision.
    pub const ALL: [Split; 6] =
        [Split::Pair, Split::Short, Split::Cheaper, Split::NoPrefill, Split::NoDecode, Split::Unfit];

    /// The name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Split::Pair => "pair",
            Split::Short => "short",
            Split::Cheaper => "cheaper",
            Split::NoPrefill => "no-prefill",
            Split::NoDecode => "no-decode",
            Split::Unfit => "unfit",
        }
    }
}

/// The endpoint that computes a prompt, booked.
#[derive(Debug)]
pub struct PrefillPick {
    /// The choice and its alternatives, best first.
    pub ranked: SmallVec<[Arc<Member>; 3]>,
    /// The booking.
    pub leg: Leg,
    /// What the choice is believed to hold of the prompt already.
    pub held: Held,
    /// How long it was expected to take.
    pub forecast: Forecast,
    /// What the destination has to do if it must compute the prompt after all.
    pub alone: Work,
}

/// How a request is served in a pool with roles.
pub(super) enum Plan {
    /// By one endpoint, of the candidates that are left.
    Whole(Split),
    /// By two.
    Pair(Box<Pair>),
}

/// A choice for both halves of a request.
pub(super) struct Pair {
    decode: Half,
    prefill: Half,
    /// What becomes of each of its sessions.
    sessions: SmallVec<[Outcome; 1]>,
}

/// The choice for one of them.
struct Half {
    ranked: SmallVec<[Arc<Member>; 3]>,
    chosen: Candidate,
    record: LegRecord,
}

/// What the best prefill endpoint of a group has to offer.
#[derive(Clone, Copy)]
struct Offer {
    /// Its share of the most that a candidate can score.
    share: f32,
    /// What the prompt costs everybody there.
    seconds: f64,
}

/// Decides between one endpoint and two. If it is one, its candidates are left in `space`, scored.
pub(super) fn plan(
    pipeline: &Pipeline,
    space: &mut Workspace,
    cx: &Cycle<'_>,
    roles: &Disaggregation,
) -> Result<Plan, Refusal> {
    space.keep_all();
    let (serving, prefill) = (&pipeline.profile, &pipeline.prefill);
    let model = serving.cost_model().unwrap_or_default();
    let serves = (0..cx.pool.members.len()).any(|at| roles.serves(at));
    let whole = serves && narrow(space, cx, serving).is_ok();
    let best = if whole { space.best().map(|at| space.candidates[at]) } else { None };
    let prompt = cx.ask.prompt.tokens;
    let uncached = prompt - best.map_or(0, |best| u64::from(best.held.tokens));
    let too_short = best.is_some() && !pipeline.decider.is_long_enough(uncached, prompt);
    let why_not = if cx.ask.may_be_split { too_short.then_some(Split::Short) } else { Some(Split::Unfit) };
    if let Some(why) = why_not.filter(|_| whole) {
        return Ok(Plan::Whole(why));
    }
    let again = |space: &mut Workspace, why| {
        if !serves {
            return Err(unpaired(cx, roles, why));
        }
        space.begin_again();
        narrow(space, cx, serving).map(|()| Plan::Whole(why))
    };
    if let Some(why) = why_not {
        return again(space, why);
    }
    let whole_seconds = best.map(|best| model.costs(cx).seconds(&best, f64::from(best.held.tokens)));

    space.begin_again();
    let for_prompt = cx.half(Role::Prefill, None);
    if narrow(space, &for_prompt, prefill).is_err() {
        return again(space, Split::NoPrefill);
    }
    let offers = offers(space, &for_prompt, roles, prefill, prefill.cost_model().unwrap_or(model));
    let groups: SmallVec<[bool; 16]> = offers.iter().map(Option::is_some).collect();

    space.begin_again();
    let for_output = cx.half(Role::Decode, Some(&groups));
    if narrow(space, &for_output, serving).is_err() {
        return again(space, Split::NoDecode);
    }
    let pair_seconds = add_offers(space, &for_output, roles, &offers, (serving, prefill), model);
    let worth = |whole| pipeline.decider.prefers_pair(uncached, whole, pair_seconds);
    if !whole_seconds.is_none_or(worth) {
        return again(space, Split::Cheaper);
    }
    // All are ranked, so that alternatives of the choice's group are found behind those of others.
    choose(space, &for_output, serving, space.candidates.len());
    let destination = space.candidates[space.ranked[0] as usize].member;
    keep_alike(space, &for_output, roles);
    let sessions = outcomes(space, cx.pool, cx.ask);
    let decode = half(space, &for_output, serving);

    space.begin_again();
    let group = roles.group(destination as usize);
    let only: SmallVec<[bool; 16]> = (0..roles.groups.len()).map(|at| group == Some(at as u32)).collect();
    let for_prompt = Cycle { peer: Some(destination), ..cx.half(Role::Prefill, Some(&only)) };
    if narrow(space, &for_prompt, prefill).is_err() {
        return again(space, Split::NoPrefill);
    }
    choose(space, &for_prompt, prefill, cx.ask.wanted);
    let prefill = half(space, &for_prompt, prefill);
    Ok(Plan::Pair(Box::new(Pair { decode, prefill, sessions })))
}

impl Scheduler {
    /// Books both halves.
    pub(super) fn book_pair(
        &self,
        pipeline: &Pipeline,
        pool: &Arc<Pool>,
        ask: &Ask<'_>,
        cx: &Cycle<'_>,
        pair: Pair,
    ) -> Result<Picked, Refusal> {
        let Pair { mut decode, mut prefill, sessions } = pair;
        let (here, there) = (decode.chosen.held, prefill.chosen.held);
        refuse_uncached(ask, if here.tokens > 0 { here } else { there })?;
        let prompt = ask.prompt.tokens;
        let uncached = |held: Held| prompt - u64::from(held.tokens);
        let seconds = |held: Held| rates::prefill(uncached(held) as f64, f64::from(held.tokens));
        let output = cx.output_tokens;
        // Its blocks take memory at the destination, however they get there.
        let generating = Work {
            prefill_tokens: 0,
            decode_tokens: output.saturating_add(uncached(here)),
            prefill_seconds: 0.0,
        };
        let computing =
            Work { prefill_tokens: uncached(there), decode_tokens: 0, prefill_seconds: seconds(there) };
        let alone =
            Work { prefill_tokens: uncached(here), decode_tokens: output, prefill_seconds: seconds(here) };
        let book =
            |role, half: &Half, work| Leg::book(role, Arc::clone(pool), Arc::clone(&half.ranked[0]), work);
        let leg = book(Role::Decode, &decode, generating);
        let prefill_leg = book(Role::Prefill, &prefill, computing);
        decode.record.reserve(generating);
        prefill.record.reserve(computing);
        let endpoints: SmallVec<[Arc<Endpoint>; 3]> =
            decode.ranked.iter().map(|member| Arc::clone(&member.endpoint)).collect();
        let session = keep_sessions(pool, ask, &sessions, endpoints[0].slot);
        for (leg, held) in [(&leg, here), (&prefill_leg, there)] {
            if held.tokens == 0 {
                leg.member.endpoint.cache.note_cold();
            }
        }
        // The prompt's blocks end at both.
        for member in [&leg.member, &prefill_leg.member] {
            self.remember(pipeline, ask.prompt, &member.endpoint, cx.now);
        }
        Ok(Picked {
            ranked: endpoints,
            leg,
            records: smallvec![decode.record, prefill.record],
            held: here,
            output,
            forecast: forecast(&decode.chosen, 0.0, ask),
            session,
            prefill: Some(PrefillPick {
                forecast: forecast(&prefill.chosen, seconds(there), ask),
                ranked: prefill.ranked,
                leg: prefill_leg,
                held: there,
                alone,
            }),
            split: Some(Split::Pair),
        })
    }
}

impl Pair {
    /// The tables of a decision that is not booked.
    pub(super) fn explained(self) -> Explained {
        Explained {
            held: self.decode.chosen.held,
            records: smallvec![self.decode.record, self.prefill.record],
            session: self.sessions.first().copied(),
            split: Some(Split::Pair),
        }
    }
}

/// Why nobody serves a request in a pool where no endpoint takes whole requests.
fn unpaired(cx: &Cycle<'_>, roles: &Disaggregation, why: Split) -> Refusal {
    let pool = &cx.pool.label;
    let connector = roles.connector.name();
    let placed = || roles.placements.iter().flatten();
    let why = if placed().next().is_none() {
        format!("no endpoint of pool {pool} has a role and a group")
    } else if !placed().any(|placement| placement.role.decodes()) {
        format!("pool {pool} has no decode endpoint")
    } else if why == Split::Unfit {
        format!(
            "this request cannot be split, and decode endpoints of {connector} take no whole ones (pool {pool})"
        )
    } else if why == Split::NoDecode {
        format!(
            "pool {pool} has no decode endpoint in a group with a prefill endpoint, and {connector} needs both"
        )
    } else {
        format!("pool {pool} has no prefill endpoint that takes this request, and {connector} needs both")
    };
    Refusal::new(Reason::NoEndpoints, why).retry_after(Duration::from_secs(1))
}

/// The best that each group has for the prompt.
fn offers(
    space: &Workspace,
    cx: &Cycle<'_>,
    roles: &Disaggregation,
    profile: &Profile,
    model: CostModel,
) -> SmallVec<[Option<Offer>; 16]> {
    let mut offers: SmallVec<[Option<Offer>; 16]> = smallvec![None; roles.groups.len()];
    let costs = model.costs(cx);
    for (candidate, total) in space.candidates.iter().zip(&space.totals) {
        let Some(group) = roles.group(candidate.member as usize) else { continue };
        let share = total / profile.weights().max(f32::MIN_POSITIVE);
        let seconds = costs.seconds(candidate, f64::from(candidate.held.tokens));
        let offer = &mut offers[group as usize];
        let (most, least) = offer.map_or((share, seconds), |o| (o.share.max(share), o.seconds.min(seconds)));
        *offer = Some(Offer { share: most, seconds: least });
    }
    offers
}

/// Adds to every candidate for the output what its group offers for the prompt; the least that a pair costs.
fn add_offers(
    space: &mut Workspace,
    cx: &Cycle<'_>,
    roles: &Disaggregation,
    offers: &[Option<Offer>],
    (serving, prefill): (&Profile, &Profile),
    model: CostModel,
) -> f64 {
    let by_cost = serving.cost_model().is_some() && prefill.cost_model().is_some();
    let costs = model.costs(cx);
    let mut least = f64::INFINITY;
    for (candidate, total) in space.candidates.iter().zip(&mut space.totals) {
        let offer = roles.group(candidate.member as usize).and_then(|group| offers[group as usize]);
        let Some(offer) = offer else { continue };
        let seconds = costs.seconds(candidate, 0.0) + offer.seconds;
        least = least.min(seconds);
        *total = if by_cost {
            seconds as f32
        } else {
            *total / serving.weights().max(f32::MIN_POSITIVE) + offer.share
        };
    }
    if by_cost {
        space.totals.iter_mut().for_each(|total| *total = least as f32 / *total);
    }
    least
}

/// Keeps the alternatives that can fetch the prompt's blocks as well as the choice, and that the one rank header means too.
fn keep_alike(space: &mut Workspace, cx: &Cycle<'_>, roles: &Disaggregation) {
    let Workspace { candidates, ranked, .. } = space;
    let alike = |at: u32| {
        let candidate = &candidates[at as usize];
        (roles.group(candidate.member as usize), cx.endpoint(candidate).rank_header())
    };
    let choice = alike(ranked[0]);
    ranked.retain(|&at| alike(at) == choice);
    ranked.truncate(cx.ask.wanted.max(1));
}

fn half(space: &mut Workspace, cx: &Cycle<'_>, profile: &Arc<Profile>) -> Half {
    let member = |&at: &u32| Arc::clone(&cx.pool.members[space.candidates[at as usize].member as usize]);
    let ranked = space.ranked.iter().map(member).collect();
    let chosen = space.candidates[space.ranked[0] as usize];
    Half { ranked, chosen, record: record(space, profile, cx, None) }
}

#[cfg(test)]
mod tests;
