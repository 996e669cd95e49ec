//! What waits to be tokenized: first what somebody waits for, then what only warms the cache.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::skipped::Skipped;
use super::super::token_cache::{Key, TokenCache};
use super::super::tokenizer::LocalTokenizer;
use super::Outcome;
use super::local::prompt_ids;
use crate::request::Api;

/// What a thread gets through before anything was measured, bytes a second: the slower engine on text never seen.
const FIRST_SPEED: f64 = 6e6;
/// Share of the queue that work for nobody may fill.
const WARM_SHARE: usize = 4;

/// A body to tokenize.
pub struct Work {
    pub tokenizer: Arc<LocalTokenizer>,
    pub api: Api,
    /// The prompt, where it is no conversation.
    pub text: Option<String>,
    pub body: Bytes,
}

/// Work, and who waits for it.
pub struct Job {
    /// `None` while a thread has it.
    work: Option<Work>,
    bytes: usize,
    waiters: SmallVec<[oneshot::Sender<Outcome>; 1]>,
}

impl Job {
    pub fn new(work: Work) -> Self {
        let bytes = work.body.len() + work.text.as_ref().map_or(0, String::len);
        Self { work: Some(work), bytes, waiters: SmallVec::new() }
    }

    fn is_awaited(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.is_closed())
    }
}

pub struct Queue {
    state: Mutex<State>,
    ready: Condvar,
    threads: usize,
    most_requests: usize,
    most_bytes: usize,
}

struct State {
    jobs: AHashMap<Key, Job>,
    awaited: VecDeque<Key>,
    warming: VecDeque<Key>,
    /// Bytes of all jobs.
    bytes: usize,
    /// Bytes of those in `warming`.
    warming_bytes: usize,
    /// Bytes and seconds of work done, older work counting less and less.
    done: (f64, f64),
    closed: bool,
}

impl Queue {
    pub fn new(threads: usize, most_requests: usize, most_bytes: usize) -> Self {
        let state = State {
            jobs: AHashMap::new(),
            awaited: VecDeque::new(),
            warming: VecDeque::new(),
            bytes: 0,
            warming_bytes: 0,
            done: (FIRST_SPEED * 1e-3, 1e-3),
            closed: false,
        };
        Self { state: Mutex::new(state), ready: Condvar::new(), threads, most_requests, most_bytes }
    }

    /// Lets a job wait. Where those before it take longer than `budget`, it is kept for warming only: one of a key, and no
    /// more than a share of the queue.
    pub fn offer(
        &self,
        key: Key,
        mut job: Job,
        budget: Duration,
    ) -> Result<oneshot::Receiver<Outcome>, Skipped> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let ahead = (state.bytes - state.warming_bytes) as f64;
        let late = ahead / (state.speed() * self.threads.max(1) as f64) > budget.as_secs_f64();
        let (sender, receiver) = oneshot::channel();
        if let Some(known) = state.jobs.get_mut(&key) {
            if late {
                return Err(Skipped::Deadline);
            }
            known.waiters.push(sender);
            state.hurry(key);
            return Ok(receiver);
        }
        if state.jobs.len() >= self.most_requests || state.bytes + job.bytes > self.most_bytes {
            return Err(Skipped::QueueFull);
        }
        let bytes = job.bytes;
        if late {
            if state.warming_bytes + bytes <= self.most_bytes / WARM_SHARE {
                state.jobs.insert(key, job);
                state.bytes += bytes;
                state.warm(key, bytes);
                self.ready.notify_one();
            }
            return Err(Skipped::Deadline);
        }
        job.waiters.push(sender);
        state.jobs.insert(key, job);
        state.bytes += bytes;
        state.awaited.push_back(key);
        self.ready.notify_one();
        Ok(receiver)
    }

    /// Waits for a job and does it; `false` once the queue is closed.
    pub fn work(&self, cache: &TokenCache) -> bool {
        let mut state = self.state.lock();
        loop {
            if state.closed {
                return false;
            }
            if let Some((key, work)) = state.next() {
                drop(state);
                self.carry_out(key, &work, cache);
                return true;
            }
            self.ready.wait(&mut state);
        }
    }

    /// Does one job, if there is one.
    #[cfg(test)]
    pub fn work_now(&self, cache: &TokenCache) -> bool {
        let next = self.state.lock().next();
        next.is_some_and(|(key, work)| {
            self.carry_out(key, &work, cache);
            true
        })
    }

    fn carry_out(&self, key: Key, work: &Work, cache: &TokenCache) {
        let began = Instant::now();
        // The thread must outlive a bug in a tokenizer; the request is then served without tokens.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            prompt_ids(&work.tokenizer, cache, work.api, &work.body, work.text.as_deref())
        }))
        .unwrap_or(Err(Skipped::Failed));
        let seconds = began.elapsed().as_secs_f64();
        let job = {
            let mut state = self.state.lock();
            let Some(job) = state.jobs.remove(&key) else { return };
            state.bytes -= job.bytes;
            state.done = (state.done.0 * 0.875 + job.bytes as f64, state.done.1 * 0.875 + seconds);
            job
        };
        for waiter in job.waiters {
            // Who left has no use for it.
            let _ = waiter.send(outcome.clone());
        }
    }

    /// Requests and bytes that wait or are worked on.
    pub fn size(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.jobs.len(), state.bytes)
    }

    /// Bytes a second of one thread.
    pub fn speed(&self) -> f64 {
        self.state.lock().speed()
    }

    /// Ends the threads once they are done with what they have.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.ready.notify_all();
    }
}

impl State {
    fn speed(&self) -> f64 {
        self.done.0 / self.done.1.max(1e-9)
    }

    fn warm(&mut self, key: Key, bytes: usize) {
        self.warming.push_back(key);
        self.warming_bytes += bytes;
    }

    /// Somebody waits for it now.
    fn hurry(&mut self, key: Key) {
        if let Some(at) = self.warming.iter().position(|warming| *warming == key) {
            self.warming.remove(at);
            self.warming_bytes -= self.jobs[&key].bytes;
            self.awaited.push_back(key);
        }
    }

    /// The next work. What nobody waits for any more gives way to what somebody does.
    fn next(&mut self) -> Option<(Key, Work)> {
        while let Some(key) = self.awaited.pop_front() {
            let Some(job) = self.jobs.get_mut(&key) else { continue };
            if job.is_awaited() {
                return job.work.take().map(|work| (key, work));
            }
            let bytes = job.bytes;
            self.warm(key, bytes);
        }
        let key = self.warming.pop_front()?;
        let job = self.jobs.get_mut(&key)?;
        self.warming_bytes -= job.bytes;
        job.work.take().map(|work| (key, work))
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (requests, bytes) = self.size();
        f.debug_struct("Queue").field("requests", &requests).field("bytes", &bytes).finish_non_exhaustive()
    }
}
