//! One sequence in the virtual engine: its tokens, its blocks and its times.

use std::ops::Range;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::cache::{Block, BlockHash, chain, chain_start};
use super::{Event, Work};

pub(super) struct Sequence {
    pub work: Work,
    pub choice: u32,
    pub events: mpsc::UnboundedSender<Event>,
    pub arrived: Instant,
    pub started: Option<Instant>,
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    /// Generated tokens, computed again after a preemption.
    pub output: Vec<u32>,
    /// Chain hashes of the leading full blocks, as far as they were needed.
    pub hashes: Vec<BlockHash>,
    pub blocks: Vec<Block>,
    /// Tokens whose KV exists.
    pub computed: usize,
    /// Tokens that the step under way adds to `computed`.
    pub scheduled: usize,
    /// Prompt tokens found in the cache when the sequence first ran.
    pub cached: Option<u32>,
    /// Prompt tokens that another engine computed.
    pub arrived_tokens: u32,
    pub preemptions: u32,
}

impl Sequence {
    pub fn new(work: Work, choice: u32, events: mpsc::UnboundedSender<Event>, now: Instant) -> Self {
        Self {
            work,
            choice,
            events,
            arrived: now,
            started: None,
            first_token: None,
            last_token: None,
            output: Vec::new(),
            hashes: Vec::new(),
            blocks: Vec::new(),
            computed: 0,
            scheduled: 0,
            cached: None,
            arrived_tokens: 0,
            preemptions: 0,
        }
    }

    /// Prompt and generated tokens.
    pub fn len(&self) -> usize {
        self.work.tokens.len() + self.output.len()
    }

    /// True until the whole known text is computed but for the newest token.
    pub fn in_prefill(&self) -> bool {
        self.output.is_empty() || self.len() - self.computed > 1
    }

    /// True while the KV of the prompt is on its way.
    pub fn awaits_arrival(&self) -> bool {
        self.work.arrival.as_ref().is_some_and(|arrival| arrival.awaited())
    }

    /// True when the prompt need not be computed. What a preemption drops is computed here all the same.
    pub fn has_arrived(&self) -> bool {
        self.cached.is_none() && self.work.arrival.as_ref().is_some_and(|arrival| arrival.here())
    }

    pub fn cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// Makes sure that the hashes of the first `blocks` blocks are known.
    pub fn hash_blocks(&mut self, blocks: usize, block_size: usize, scratch: &mut Vec<u8>) {
        let prompt = self.work.tokens.len();
        let mut joined = Vec::new();
        while self.hashes.len() < blocks {
            let start = self.hashes.len() * block_size;
            let end = start + block_size;
            let parent = self
                .hashes
                .last()
                .copied()
                .unwrap_or_else(|| chain_start(&self.work.adapter, &self.work.salt));
            let hash = if end <= prompt {
                chain(parent, &self.work.tokens[start..end], scratch)
            } else {
                joined.clear();
                joined.extend_from_slice(&self.work.tokens[start.min(prompt)..]);
                joined.extend_from_slice(&self.output[start.saturating_sub(prompt)..end - prompt]);
                chain(parent, &joined, scratch)
            };
            self.hashes.push(hash);
        }
    }

    /// Tokens of the prompt and of what was generated.
    pub fn tokens(&self, range: Range<usize>) -> Vec<u32> {
        self.work.tokens.iter().chain(&self.output).copied().skip(range.start).take(range.len()).collect()
    }

    pub fn send(&self, token: Option<u32>, finish: Option<super::Finish>) {
        // A closed channel is a cancelled request, which the next step drops.
        let _ =
            self.events.send(Event { choice: self.choice, token, cached: self.cached.unwrap_or(0), finish });
    }
}
