//! Who is believed to hold a prompt, source by source, for people who ask.

use std::sync::Arc;

use super::{Arrived, Decider};
use crate::decision::Record;
use crate::index::Tier;
use crate::index::knowledge::Lookups;
use crate::refusal::Refusal;
use crate::state::Endpoint;
use crate::state::cache::Rung;
use crate::state::signals::Millis;

/// The answer.
#[derive(Debug)]
pub struct Holders {
    /// Full blocks of the prompt's tokens; of its text where its tokens are unknown.
    pub blocks: usize,
    /// Tokens in such a block; of text, a quarter of its bytes.
    pub block_tokens: u64,
    /// Whether the tokens were counted.
    pub counted: bool,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Who holds how much, in the order of the pool.
    pub holders: Vec<Holding>,
}

/// What one source believes of one endpoint.
#[derive(Debug)]
pub struct Holding {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    /// Leading blocks it holds.
    pub depth: u32,
    /// In which memory, where the source knows.
    pub tier: Option<Tier>,
    /// The source.
    pub source: Rung,
    /// Whether the blocks are of text.
    pub text: bool,
    /// Tokens in those blocks.
    pub cached_tokens: u64,
}

impl Decider {
    /// Who holds the prompt of a request that is not made.
    pub async fn holders(&self, arrived: &Arrived) -> Result<Holders, Refusal> {
        let mut record = Record::begin(self.decision_id(), "");
        let (request, text) = self.parse(&mut record, &arrived.head, &arrived.body)?;
        let (routed, _) = self.route(&mut record, arrived, &request)?;
        let pipeline = self.scheduler.pipeline();
        let path = arrived.head.path();
        let prompt = self.prepare(&mut record, &pipeline, &routed, &request, path, text.bytes()).await;
        let mut lookups = Lookups::default();
        lookups.run(&prompt, pipeline.text.as_ref(), &self.scheduler.tokens, Millis::now());

        let mut holders = Vec::new();
        for member in &routed.pool.members {
            let endpoint = &member.endpoint;
            let held = lookups.held(&prompt, endpoint, &self.scheduler.tokens);
            let mut add = |source, tier, text: bool, depth| {
                if depth > 0 {
                    let blocks = if text { &prompt.text } else { &prompt.ids };
                    let cached_tokens = blocks.tokens(depth);
                    let endpoint = Arc::clone(endpoint);
                    holders.push(Holding { endpoint, depth, tier, source, text, cached_tokens });
                }
            };
            for tier in Tier::ALL {
                add(Rung::Precise, Some(tier), false, lookups.in_tier(endpoint, tier));
            }
            if let Some((depth, owners)) = held.shared.zip(prompt.shared.as_ref()) {
                add(Rung::Shared, None, false, owners.whole(depth));
            }
            add(Rung::Approximate, None, false, held.routed);
            add(Rung::Approximate, None, true, held.text);
        }
        let blocks = if prompt.counted { &prompt.ids } else { &prompt.text };
        Ok(Holders {
            blocks: blocks.len(),
            block_tokens: blocks.block_tokens(),
            counted: prompt.counted,
            prompt_tokens: prompt.tokens,
            holders,
        })
    }
}
