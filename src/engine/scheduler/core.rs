//! The steps of the virtual engine: who runs, with which blocks, and what each step yields.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::super::cache::{Block, BlockHash, BlockPool};
use super::super::events::{Announcement, Stored};
use super::super::metrics::Metrics;
use super::super::tokenizer::generated;
use super::handover::Returned;
use super::sequence::Sequence;
use super::{Event, Finish, Limits, Timing, Work};

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    pub prefill_tokens: u32,
    pub running: u32,
}

impl Step {
    pub fn length(self, timing: &Timing) -> Duration {
        timing.step + timing.sequence * self.running + timing.prefill_token * self.prefill_tokens
    }
}

pub(super) struct Core {
    limits: Limits,
    waiting: VecDeque<Sequence>,
    running: Vec<Sequence>,
    pool: BlockPool,
    scratch: Vec<u8>,
    deferred: u64,
    /// A new list with every restart, so that what was kept before is not given back to another pool.
    pub returned: Returned,
    pub metrics: Metrics,
}

impl Core {
    pub fn new(limits: Limits) -> Self {
        Self {
            waiting: VecDeque::new(),
            running: Vec::new(),
            pool: BlockPool::new(limits.blocks),
            scratch: Vec::new(),
            deferred: 0,
            returned: Returned::default(),
            metrics: Metrics::default(),
            limits,
        }
    }

    pub fn in_flight(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    pub fn enqueue(&mut self, work: Work, choice: u32, events: mpsc::UnboundedSender<Event>, now: Instant) {
        self.waiting.push_back(Sequence::new(work, choice, events, now));
    }

    pub fn clear_cache(&mut self) {
        self.pool.clear_idle();
    }

    /// Another process in place of this one: nothing runs, nothing is cached, nothing was counted.
    pub fn restart(&mut self) {
        self.fail_all();
        *self = Self::new(self.limits.clone());
    }

    /// Number of leading hashes that are cached.
    pub fn cached_prefix(&self, hashes: impl Iterator<Item = BlockHash>) -> usize {
        self.pool.cached_prefix(hashes)
    }

    /// What happened to the cache since the last call.
    pub fn take_announcements(&mut self) -> Vec<Announcement> {
        self.pool.take_announcements()
    }

    pub fn fail_all(&mut self) {
        for sequence in self.running.drain(..) {
            self.pool.release(&sequence.blocks);
            sequence.send(None, Some(Finish::Error));
        }
        for sequence in self.waiting.drain(..) {
            sequence.send(None, Some(Finish::Error));
        }
        self.update_gauges();
    }

    /// Plans the next step, or nothing when there is no work.
    pub fn schedule(&mut self, now: Instant) -> Option<Step> {
        self.drop_cancelled();
        self.take_back();
        let mut budget = self.limits.max_batched_tokens as usize;
        let preempted = self.schedule_running(&mut budget);
        self.deferred = 0;
        if !preempted {
            self.admit(&mut budget, now);
        }
        self.update_gauges();
        let scheduled: usize = self.running.iter().map(|sequence| sequence.scheduled).sum();
        if scheduled == 0 {
            return None;
        }
        self.metrics.iteration_tokens.observe(scheduled as f64);
        let prefill: usize = self.running.iter().filter(|s| s.in_prefill()).map(|s| s.scheduled).sum();
        Some(Step { prefill_tokens: prefill as u32, running: self.running.len() as u32 })
    }

    /// Ends the step: every sequence whose text is computed gains a token.
    pub fn complete(&mut self, now: Instant) {
        self.drop_cancelled();
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.computed < sequence.len() {
                index += 1;
                continue;
            }
            let finish = Self::advance(sequence, &mut self.metrics, now);
            if finish.is_some() {
                // The order of the batch is the order of admission: preemption takes the youngest.
                let mut sequence = self.running.remove(index);
                match &sequence.work.kept {
                    Some(kept) if finish == Some(Finish::Length) => {
                        kept.keep(std::mem::take(&mut sequence.blocks));
                    }
                    _ => self.pool.release(&sequence.blocks),
                }
                Self::account(&sequence, finish, &mut self.metrics, now);
            } else {
                index += 1;
            }
        }
        self.update_gauges();
    }

    fn take_back(&mut self) {
        let blocks = std::mem::take(&mut *self.returned.lock());
        self.pool.release(&blocks);
    }

    fn drop_cancelled(&mut self) {
        self.waiting.retain(|sequence| !sequence.cancelled());
        if self.running.iter().any(Sequence::cancelled) {
            let pool = &mut self.pool;
            self.running.retain(|sequence| {
                let cancelled = sequence.cancelled();
                if cancelled {
                    pool.release(&sequence.blocks);
                }
                !cancelled
            });
        }
    }

    /// Gives the running sequences their tokens. True when one had to be preempted.
    fn schedule_running(&mut self, budget: &mut usize) -> bool {
        let block_size = self.limits.block_size as usize;
        let mut preempted = false;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &self.running[index];
            let tokens = (sequence.len() - sequence.computed).min(*budget);
            let needed = (sequence.computed + tokens).div_ceil(block_size) - sequence.blocks.len();
            if !self.pool.take(&[], needed as u64) {
                preempted = true;
                self.preempt_youngest();
                continue;
            }
            *budget -= tokens;
            let full = sequence.computed / block_size;
            self.extend(index, full, tokens, needed);
            index += 1;
        }
        preempted
    }

    fn preempt_youngest(&mut self) {
        let Some(mut sequence) = self.running.pop() else { return };
        self.pool.release(&sequence.blocks);
        sequence.blocks.clear();
        sequence.computed = 0;
        sequence.scheduled = 0;
        sequence.preemptions += 1;
        self.metrics.num_preemptions += 1;
        self.waiting.push_front(sequence);
    }

    /// Moves waiting sequences into the batch, first come first served. Passed over are those whose adapter has
    /// no slot, and those whose KV is on its way.
    fn admit(&mut self, budget: &mut usize, now: Instant) {
        let block_size = self.limits.block_size as usize;
        let mut position = 0;
        while position < self.waiting.len()
            && self.running.len() < self.limits.max_running as usize
            && *budget > 0
        {
            let next = &self.waiting[position];
            if next.awaits_arrival() || !self.adapter_fits(&next.work.adapter) {
                self.deferred += 1;
                position += 1;
                continue;
            }
            let sequence = &mut self.waiting[position];
            let reusable = sequence.len().saturating_sub(1) / block_size;
            sequence.hash_blocks(reusable, block_size, &mut self.scratch);
            let hits = self.pool.cached_prefix(sequence.hashes[..reusable].iter().copied());
            let arrived = sequence.has_arrived();
            // The last token is computed here, because its output is the first word of the answer.
            let computed = if arrived { sequence.len() - 1 } else { hits * block_size };
            let tokens = (sequence.len() - computed).min(*budget);
            let fresh = (computed + tokens).div_ceil(block_size) - hits;
            if !self.pool.take(&sequence.hashes[..hits], fresh as u64) {
                break;
            }
            let Some(mut sequence) = self.waiting.remove(position) else { break };
            sequence.blocks.extend(sequence.hashes[..hits].iter().map(|hash| Block::Shared(*hash)));
            sequence.computed = computed;
            if sequence.cached.is_none() {
                let (all, cached) = (sequence.len() as u64, (hits * block_size) as u64);
                sequence.cached = Some(cached as u32);
                sequence.arrived_tokens = if arrived { (all - cached) as u32 } else { 0 };
                sequence.started = Some(now);
                self.metrics.prefix_cache_queries += all;
                self.metrics.prefix_cache_hits += cached;
                if self.limits.connected {
                    self.metrics.external_cache_queries += all - cached;
                    self.metrics.external_cache_hits += u64::from(sequence.arrived_tokens);
                }
            }
            *budget -= tokens;
            self.running.push(sequence);
            self.extend(self.running.len() - 1, hits, tokens, fresh);
        }
    }

    fn adapter_fits(&self, adapter: &str) -> bool {
        if adapter.is_empty() || self.running.iter().any(|s| &*s.work.adapter == adapter) {
            return true;
        }
        let mut adapters: Vec<&str> =
            self.running.iter().map(|s| &*s.work.adapter).filter(|name| !name.is_empty()).collect();
        adapters.sort_unstable();
        adapters.dedup();
        adapters.len() < self.limits.max_lora as usize
    }

    /// Schedules tokens on blocks that were taken, the first `first` of which are known to the cache. Full blocks are
    /// cached at once, as vLLM does, so that a request of the same step can already share them.
    fn extend(&mut self, index: usize, first: usize, tokens: usize, fresh: usize) {
        let block_size = self.limits.block_size as usize;
        let sequence = &mut self.running[index];
        sequence.scheduled = tokens;
        sequence.blocks.extend(std::iter::repeat_n(Block::Private, fresh));
        let full = (sequence.computed + tokens) / block_size;
        sequence.hash_blocks(full, block_size, &mut self.scratch);
        let mut fresh = first..first;
        for block in first..full {
            sequence.blocks[block] = self.pool.fill(sequence.hashes[block]);
            match sequence.blocks[block] {
                Block::Shared(_) => fresh.end = block + 1,
                Block::Private => {
                    announce(&mut self.pool, sequence, fresh, block_size);
                    fresh = block + 1..block + 1;
                }
            }
        }
        announce(&mut self.pool, sequence, fresh, block_size);
    }

    /// Adds one token and says whether it was the last.
    fn advance(sequence: &mut Sequence, metrics: &mut Metrics, now: Instant) -> Option<Finish> {
        let seconds = |since: Instant| now.duration_since(since).as_secs_f64();
        if sequence.first_token.is_none() {
            sequence.first_token = Some(now);
            let (prompt, cached) =
                (sequence.work.tokens.len() as u64, u64::from(sequence.cached.unwrap_or(0)));
            metrics.prompt_tokens += prompt;
            metrics.prompt_tokens_cached += cached;
            metrics.prompt_tokens_transferred += u64::from(sequence.arrived_tokens);
            metrics.time_to_first_token.observe(seconds(sequence.arrived));
        }
        if sequence.work.max_tokens == 0 {
            sequence.send(None, Some(Finish::Stop));
            return Some(Finish::Stop);
        }
        if let Some(last) = sequence.last_token.replace(now) {
            metrics.inter_token_latency.observe(seconds(last));
        }
        let token = generated(sequence.work.seed, sequence.output.len() as u32);
        sequence.output.push(token);
        metrics.generation_tokens += 1;
        let length = sequence.output.len() as u32;
        let finish = if sequence.work.stop_after.is_some_and(|stop| length >= stop) {
            Some(Finish::Stop)
        } else {
            (length >= sequence.work.max_tokens).then_some(Finish::Length)
        };
        sequence.send(Some(token), finish);
        finish
    }

    fn account(sequence: &Sequence, finish: Option<Finish>, metrics: &mut Metrics, now: Instant) {
        let started = sequence.started.unwrap_or(sequence.arrived);
        let first = sequence.first_token.unwrap_or(now);
        let between = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64();
        let (prompt, output) = (sequence.work.tokens.len() as f64, sequence.output.len() as f64);
        match finish {
            Some(Finish::Length) => metrics.finished_length += 1,
            _ => metrics.finished_stop += 1,
        }
        metrics.e2e_request_latency.observe(between(sequence.arrived, now));
        metrics.request_queue_time.observe(between(sequence.arrived, started));
        metrics.request_inference_time.observe(between(started, now));
        metrics.request_prefill_time.observe(between(started, first));
        metrics.request_decode_time.observe(between(first, now));
        if output > 1.0 {
            metrics.request_time_per_output_token.observe(between(first, now) / (output - 1.0));
        }
        metrics.request_prompt_tokens.observe(prompt);
        metrics.request_generation_tokens.observe(output);
        metrics.request_max_num_generation_tokens.observe(output);
        metrics.request_params_n.observe(f64::from(sequence.work.choices));
        metrics.request_params_max_tokens.observe(f64::from(sequence.work.max_tokens));
        metrics.request_num_preemptions.observe(f64::from(sequence.preemptions));
        metrics.request_prefill_kv_computed_tokens.observe(prompt - f64::from(sequence.cached.unwrap_or(0)));
    }

    fn update_gauges(&mut self) {
        let waiting = self.waiting.len() as u64;
        self.metrics.num_requests_running = self.running.len() as u64;
        self.metrics.waiting_deferred = self.deferred.min(waiting);
        self.metrics.waiting_capacity = waiting - self.metrics.waiting_deferred;
        self.metrics.kv_cache_usage = self.pool.usage();
        if self.limits.has_loras {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let running = adapters(self.running.iter());
            let waiting = adapters(self.waiting.iter());
            self.metrics.note_adapters(&running, &waiting, now);
        }
    }
}

/// Announces blocks that were not cached before.
fn announce(pool: &mut BlockPool, sequence: &Sequence, blocks: Range<usize>, block_size: usize) {
    if blocks.is_empty() {
        return;
    }
    pool.announce(Stored {
        hashes: sequence.hashes[blocks.clone()].to_vec(),
        parent: blocks.start.checked_sub(1).map(|before| sequence.hashes[before]),
        tokens: sequence.tokens(blocks.start * block_size..blocks.end * block_size),
        adapter: sequence.work.adapter.clone(),
        salt: sequence.work.salt.clone(),
    });
}

/// Distinct adapters in order of appearance, joined by commas.
fn adapters<'a>(sequences: impl Iterator<Item = &'a Sequence>) -> String {
    let mut names: Vec<&str> = Vec::new();
    for sequence in sequences {
        let name = &*sequence.work.adapter;
        if !name.is_empty() && !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(",")
}
