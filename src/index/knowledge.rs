//! Everything believed about who holds what, and which of it a pick goes by.

use std::sync::Arc;
use std::time::Duration;

use super::{ApproximateIndex, DepthSink, EventIndex, Tier};
use crate::prompt::{BlockNeeds, Blocks, Prepared};
use crate::state::Endpoint;
use crate::state::cache::Rung;
use crate::state::endpoint::Holder;
use crate::state::signals::Millis;

/// What an endpoint is believed to hold of one prompt. Depths count leading blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Held {
    /// Blocks of text that were sent there.
    pub text: u32,
    /// Blocks of tokens that were sent there.
    pub routed: u32,
    /// Blocks of tokens that its events announced, in any tier, or that it computes for prompts sent just now; none where its
    /// events are not followed.
    pub precise: Option<u32>,
    /// As `precise`, in device memory alone.
    pub device: Option<u32>,
    /// Blocks that it owns in the shared index, the shorter last one counted; none if that did not answer.
    pub shared: Option<u32>,
    /// Tokens, by the best rung that is trusted.
    pub tokens: u32,
    /// That rung.
    pub rung: Rung,
}

impl Held {
    /// Tokens that `rung` says are held; none where it does not know.
    pub fn tokens_by(&self, rung: Rung, prompt: &Prepared) -> Option<u64> {
        match rung {
            Rung::Precise => {
                self.precise.filter(|_| !prompt.ids.is_empty()).map(|depth| prompt.ids.tokens(depth))
            }
            Rung::Shared => {
                self.shared.zip(prompt.shared.as_ref()).map(|(depth, owners)| owners.tokens(depth))
            }
            Rung::Approximate if !prompt.ids.is_empty() => Some(prompt.ids.tokens(self.routed)),
            Rung::Approximate if !prompt.text.is_empty() => {
                // The engine computes the last token always, and keeps no block that is not full.
                let held = prompt.text.tokens(self.text).min(prompt.tokens.saturating_sub(1));
                Some(held - held % prompt.engine_block.unwrap_or(1) as u64)
            }
            _ => None,
        }
    }

    /// Settles which rung counts.
    fn judge(&mut self, prompt: &Prepared, endpoint: &Endpoint) {
        let mut trusted = endpoint.cache.trusted();
        let best = trusted.find_map(|rung| Some((rung, self.tokens_by(rung, prompt)?)));
        let fallback = if prompt.text.is_empty() && prompt.ids.is_empty() { Rung::Load } else { Rung::Hash };
        let (rung, tokens) = best.unwrap_or((fallback, 0));
        self.rung = rung;
        self.tokens = tokens.min(prompt.tokens) as u32;
    }
}

/// Indexes over token ids. They outlive every configuration.
#[derive(Debug)]
pub struct TokenIndexes {
    /// What engines announce.
    pub events: EventIndex,
    /// What was sent.
    pub routed: ApproximateIndex,
}

/// Blocks in each index, all endpoints together: at 64 bytes each, 8 GB at the very most.
const MOST_BLOCKS: usize = 128 << 20;

impl Default for TokenIndexes {
    fn default() -> Self {
        Self::new(MOST_BLOCKS)
    }
}

impl TokenIndexes {
    /// Empty indexes of at most so many blocks each.
    pub fn new(most_blocks: usize) -> Self {
        Self { events: EventIndex::new(most_blocks), routed: ApproximateIndex::new(most_blocks) }
    }

    /// Drops what is known of every endpoint but those whose slot is `live`.
    pub fn retain(&self, live: &dyn Fn(u64) -> bool) {
        self.events.retain(live);
        self.routed.retain(live);
    }

    /// Drops what was sent to an endpoint: its process started anew. What it announces is its follower's to drop, which knows
    /// what of it came from the new process already.
    pub fn forget(&self, endpoint: &Endpoint) {
        self.routed.forget(endpoint.slot);
    }
}

/// The index over text, as one profile cuts it.
#[derive(Clone, Debug)]
pub struct TextIndex {
    /// How text is cut.
    pub needs: BlockNeeds,
    /// What was sent.
    pub routed: Arc<ApproximateIndex>,
}

/// Scratch space of one cycle's lookups.
#[derive(Debug, Default)]
pub struct Lookups {
    text: DepthSink,
    routed: DepthSink,
    /// Depth of the deepest in `routed`, and how many of those may still be asked for the answer behind it.
    deepest: u32,
    may_ask: u32,
    /// From when on a prompt that was sent may still be in computation, and how many endpoints may still be asked for such.
    in_flight_since: Millis,
    may_ask_in_flight: u32,
    tiers: [DepthSink; Tier::ALL.len()],
}

/// Blocks are announced when they are computed. Until then others with the same beginning are better sent after them than
/// made to compute it elsewhere; what was not announced within this time was not computed.
const IN_FLIGHT: Duration = Duration::from_secs(2);

/// Endpoints that are asked whether they hold the answer to the turn before: a conversation was at few.
const MOST_ASKED: u32 = 16;

impl Lookups {
    /// Looks a prompt up everywhere.
    pub fn run(&mut self, prompt: &Prepared, text: Option<&TextIndex>, tokens: &TokenIndexes, now: Millis) {
        self.text.begin();
        self.routed.begin();
        self.tiers.iter_mut().for_each(DepthSink::begin);
        if let Some(text) = text {
            text.routed.score_into(&prompt.text, &mut self.text);
        }
        if !prompt.ids.is_empty() {
            tokens.routed.score_into(&prompt.ids, &mut self.routed);
            self.deepest = self.routed.deepest();
            self.may_ask = MOST_ASKED;
            self.in_flight_since = Millis(now.0.saturating_sub(IN_FLIGHT.as_millis() as u64));
            self.may_ask_in_flight = MOST_ASKED;
            for tier in Tier::ALL {
                tokens.events.score_into(tier, prompt.ids.contents(), &mut self.tiers[tier as usize]);
            }
        }
    }

    /// Blocks that an endpoint announced in one tier, whether or not its events are followed.
    pub fn in_tier(&self, endpoint: &Endpoint, tier: Tier) -> u32 {
        self.tiers[tier as usize].depth(endpoint.holder())
    }

    /// Blocks that were sent there, and the answer behind them where the prompt is the next turn.
    fn routed(&mut self, prompt: &Prepared, holder: Holder, tokens: &TokenIndexes) -> u32 {
        let depth = self.routed.depth(holder);
        let Some(ids) = prompt.token_ids.as_ref().filter(|_| depth > 0 && depth == self.deepest) else {
            return depth;
        };
        if self.may_ask == 0 {
            return depth;
        }
        self.may_ask -= 1;
        depth + tokens.routed.answer_blocks(holder.slot, &prompt.ids, ids, depth)
    }

    /// Blocks that an endpoint holds with those that it computes for prompts sent just now; 0 where it computes none.
    fn in_flight(
        &mut self,
        announced: u32,
        prompt: &Prepared,
        endpoint: &Endpoint,
        tokens: &TokenIndexes,
    ) -> u32 {
        let holder = endpoint.holder();
        let computes = || endpoint.booked.phases().1 > 0.0;
        if self.may_ask_in_flight == 0 || self.routed.depth(holder) <= announced || !computes() {
            return 0;
        }
        self.may_ask_in_flight -= 1;
        let since = self.in_flight_since.max(endpoint.cache.emptied());
        tokens.routed.sent_since(holder.slot, &prompt.ids, announced, since)
    }

    /// What one endpoint holds.
    pub fn held(&mut self, prompt: &Prepared, endpoint: &Endpoint, tokens: &TokenIndexes) -> Held {
        let holder = endpoint.holder();
        let follows = endpoint.cache.follows_events();
        let announced = self.tiers.iter().map(|tier| tier.depth(holder)).max().unwrap_or(0);
        let device = self.tiers[Tier::Gpu as usize].depth(holder);
        let in_flight = if follows { self.in_flight(announced, prompt, endpoint, tokens) } else { 0 };
        let mut held = Held {
            text: self.text.depth(holder),
            routed: self.routed(prompt, holder, tokens),
            precise: follows.then_some(announced.max(in_flight)),
            shared: prompt.shared.as_ref().map(|owners| owners.depth(endpoint.slot)),
            device: follows.then_some(device.max(in_flight)),
            ..Held::default()
        };
        held.judge(prompt, endpoint);
        held
    }
}

/// Blocks of a prompt that an engine's cache can hold, for an LRU that follows it; none if the engine does not say.
pub fn capacity_in(blocks: &Blocks, cache_tokens: Option<u64>) -> Option<usize> {
    let per_block = blocks.block_tokens().max(1);
    cache_tokens.map(|tokens| (tokens / per_block).max(1) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::pool;
    use crate::prompt::Namespace;
    use crate::state::cache::Events;
    use crate::state::reservation::{Leg, Role, Work};

    #[test]
    fn what_an_endpoint_computes_for_others_is_held_before_it_is_announced() {
        let pool = pool(2);
        let (sent, other) = (&pool.members[0].endpoint, &pool.members[1].endpoint);
        for endpoint in [sent, other] {
            endpoint.cache.set_events(Events::Following);
        }
        let cut = |n: u32| Blocks::of_tokens(&(0..n).collect::<Vec<_>>(), 16, Namespace::default());
        let tokens = TokenIndexes::default();
        let now = Millis(10_000);
        tokens.routed.routed(&cut(64), sent.holder(), 1_000, now);
        let work = Work { prefill_tokens: 64, decode_tokens: 1, prefill_seconds: 0.1 };
        let leg = Leg::book(Role::Serve, Arc::clone(&pool), Arc::clone(&pool.members[0]), work);
        let prompt = Prepared { tokens: 97, ids: cut(97), ..Prepared::default() };
        let precise = |endpoint: &Endpoint, now: Millis| {
            let mut lookups = Lookups::default();
            lookups.run(&prompt, None, &tokens, now);
            let held = lookups.held(&prompt, endpoint, &tokens);
            assert_eq!((held.precise, held.rung), (held.device, Rung::Precise));
            held.precise
        };
        assert_eq!((precise(sent, now), precise(other, now)), (Some(4), Some(0)));
        let later = now.plus(IN_FLIGHT + Duration::from_millis(1));
        tokens.routed.routed(&cut(64), sent.holder(), 1_000, later);
        assert_eq!(precise(sent, later), Some(0), "it was not computed, or it would have been announced");
        sent.cache.note_emptied(now.plus(Duration::from_millis(1)));
        assert_eq!(precise(sent, now), Some(0), "it started anew since");
        sent.cache.note_emptied(now);
        assert_eq!(precise(sent, now), Some(4));
        drop(leg);
        assert_eq!(precise(sent, now), Some(0), "nothing is in computation");
    }

    #[test]
    fn a_cache_is_as_large_whatever_prompt_comes() {
        let text =
            |bytes: usize| Blocks::of_text(BlockNeeds::DEFAULT, "m", None, |sink| sink(&vec![b'x'; bytes]));
        let ids = |n: u32| Blocks::of_tokens(&(0..n).collect::<Vec<_>>(), 16, Namespace::default());
        for blocks in [text(1), text(40), text(512), text(9_000)] {
            assert_eq!(capacity_in(&blocks, Some(12_800)), Some(100));
        }
        for blocks in [ids(1), ids(16), ids(17), ids(900)] {
            assert_eq!(capacity_in(&blocks, Some(1_600)), Some(100));
        }
        assert_eq!(capacity_in(&ids(17), None), None);
    }
}
