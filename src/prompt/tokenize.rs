//! The service that gives a request its token ids within a budget, or says why it has none.
//!
//! ```text
//!   ids in the body ------------------------------------------------------------> Tokens (body)
//!   File      library: loaded ahead  ->  cache by body  ->  queue -> worker threads  -> Tokens (local)
//!   Url, Engine                          cache by body  ->  Remote, one call a body  -> Tokens (remote)
//! ```
//!
//! What is not there in time goes on and warms the cache: the next request with that prompt, or the next turn, finds it.

mod ask;
mod library;
mod local;
mod queue;

#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared as SharedFuture};
use parking_lot::Mutex;
use tokio::time::timeout;

pub use ask::Ask;
use library::Library;
pub use local::prompt_ids;
use queue::{Job, Queue, Work};

use super::skipped::{Skipped, SkippedCounts};
use super::token_cache::{Key, TokenCache};
use super::tokens::{Origin, Tokens};
use crate::request::Api;
use crate::state::TokenizerSource;
use crate::state::endpoint::EngineKind;

/// Sizes of the service.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder below which tokenizers lie.
    pub dir: Option<PathBuf>,
    /// Worker threads.
    pub threads: usize,
    /// Most requests that wait or are worked on.
    pub queue_requests: usize,
    /// Most bytes of bodies that wait or are worked on.
    pub queue_bytes: usize,
    /// Bytes of token ids that are remembered.
    pub cache_bytes: u64,
}

impl Default for Options {
    /// Half of the cores, since the others decide: 256 MiB remember 67 million tokens.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            dir: None,
            threads: (cores / 2).max(1),
            queue_requests: 1_024,
            queue_bytes: 64 << 20,
            cache_bytes: 256 << 20,
        }
    }
}

/// Ids, or why there are none.
pub type Outcome = Result<Arc<[u32]>, Skipped>;

/// Who tokenizes elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A service that an operator named.
    Url(Arc<str>),
    /// An endpoint of the request's own pool.
    Engine(SocketAddr, EngineKind),
}

/// A prompt for somebody else to tokenize.
#[derive(Clone)]
pub struct RemoteAsk {
    /// Who.
    pub target: Target,
    /// The API of the request.
    pub api: Api,
    /// Its path, without the query.
    pub path: Box<str>,
    /// Its body, with the model's name as the target knows it.
    pub body: Bytes,
    /// That name.
    pub model: Box<str>,
    /// The time that requests wait for an answer: what takes longer than that is too much.
    pub budget: Duration,
}

/// Shows sizes: the body is the client's.
impl fmt::Debug for RemoteAsk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteAsk")
            .field("target", &self.target)
            .field("path", &self.path)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// The way to tokenizers elsewhere. An implementation bounds its own time and concurrency.
pub trait Remote: fmt::Debug + Send + Sync {
    /// Asks for the ids of a prompt.
    fn ids(&self, ask: RemoteAsk) -> BoxFuture<'static, Outcome>;

    /// How long a target has been taking, if it was asked before.
    fn expected(&self, target: &Target) -> Option<Duration>;
}

/// The service. Clones are the same one; its threads end with the last.
#[derive(Clone, Debug)]
pub struct Tokenizers {
    shared: Arc<Shared>,
    _stop: Arc<Stop>,
}

#[derive(Debug)]
struct Shared {
    cache: TokenCache,
    queue: Queue,
    library: Library,
    counts: SkippedCounts,
    remote: Option<Arc<dyn Remote>>,
    flights: Mutex<AHashMap<Key, Flight>>,
}

type Flight = SharedFuture<BoxFuture<'static, Outcome>>;

#[derive(Debug)]
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.queue.close();
    }
}

/// What the service is busy with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Requests that wait or are worked on.
    pub requests: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Bytes a second that one thread gets through, by what it did last.
    pub bytes_per_second: f64,
    /// Bytes of token ids remembered.
    pub cache_bytes: u64,
}

impl Tokenizers {
    /// Starts the worker threads. `remote` serves [`TokenizerSource::Url`] and [`TokenizerSource::Engine`].
    pub fn new(options: Options, remote: Option<Arc<dyn Remote>>) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            cache: TokenCache::new(options.cache_bytes),
            queue: Queue::new(options.threads, options.queue_requests, options.queue_bytes),
            library: Library::new(options.dir),
            counts: SkippedCounts::default(),
            remote,
            flights: Mutex::default(),
        });
        let stop = Arc::new(Stop(Arc::clone(&shared)));
        for number in 0..options.threads {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("tokenize-{number}"));
            thread.spawn(move || while shared.queue.work(&shared.cache) {})?;
        }
        Ok(Self { shared, _stop: stop })
    }

    /// Loads the tokenizers of these sources in the background, anew where files changed, and drops all others. To be
    /// called whenever the topology is replaced.
    pub fn follow<'a>(&self, sources: impl IntoIterator<Item = &'a TokenizerSource>) {
        let files = sources.into_iter().filter_map(|source| match source {
            TokenizerSource::File(file) => Some(Arc::clone(file)),
            TokenizerSource::Url(_) | TokenizerSource::Engine => None,
        });
        self.shared.library.follow(files.collect());
    }

    /// The ids of a prompt; of a batch those of the first. Answers within the budget. Dropping the future loses nothing:
    /// work that began goes on and is remembered.
    pub async fn tokens(&self, ask: Ask<'_>) -> Result<Tokens, Skipped> {
        let found = self.find(&ask).await;
        if let Err(reason) = &found {
            self.shared.counts.count(*reason);
        }
        found
    }

    async fn find(&self, ask: &Ask<'_>) -> Result<Tokens, Skipped> {
        let prompt = &ask.request.prompt;
        if let Some(ids) = prompt.token_ids() {
            return Ok(Tokens::new(ids, Origin::Body));
        }
        if prompt.images() > 0 {
            return Err(Skipped::Media);
        }
        if !prompt.is_known() {
            return Err(Skipped::Unsupported);
        }
        match ask.source {
            None => Err(Skipped::NoTokenizer),
            Some(TokenizerSource::File(file)) => {
                self.local(ask, file).await.map(|ids| Tokens::new(ids, Origin::Local))
            }
            Some(TokenizerSource::Url(url)) => self
                .remote(ask, Target::Url(Arc::clone(url)))
                .await
                .map(|ids| Tokens::new(ids, Origin::Remote)),
            Some(TokenizerSource::Engine) => {
                let (address, kind) = ask.engine.ok_or(Skipped::NoTokenizer)?;
                let target = Target::Engine(address, kind);
                self.remote(ask, target).await.map(|ids| Tokens::new(ids, Origin::Remote))
            }
        }
    }

    async fn local(&self, ask: &Ask<'_>, file: &Arc<str>) -> Outcome {
        let tokenizer = self.shared.library.get(file)?;
        let key = local::body_key(&tokenizer, &self.shared.cache, ask.request.api, ask.body);
        if let Some(ids) = self.shared.cache.get(&key) {
            return Ok(ids);
        }
        let body = Bytes::copy_from_slice(ask.body);
        let work = Work { tokenizer, api: ask.request.api, text: ask.prompt_text()?, body };
        let reply = self.shared.queue.offer(key, Job::new(work), ask.budget)?;
        match timeout(ask.budget, reply).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(Skipped::Failed),
            Err(_) => Err(Skipped::Deadline),
        }
    }

    async fn remote(&self, ask: &Ask<'_>, target: Target) -> Outcome {
        let remote = self.shared.remote.as_ref().ok_or(Skipped::NoTokenizer)?;
        let key = self.shared.cache.key(ask.remote_space(), ask.body);
        if let Some(ids) = self.shared.cache.get(&key) {
            return Ok(ids);
        }
        let flight = {
            let mut flights = self.shared.flights.lock();
            match flights.get(&key) {
                Some(flight) => flight.clone(),
                None => {
                    let flight = self.shared.depart(key, remote.ids(ask.for_remote(target.clone())));
                    flights.insert(key, flight.clone());
                    flight
                }
            }
        };
        // Waiting for what takes too long would only add to the request's own time; the answer is remembered all the same.
        if remote.expected(&target).is_some_and(|expected| expected > ask.budget) {
            return flight.now_or_never().unwrap_or(Err(Skipped::Deadline));
        }
        timeout(ask.budget, flight).await.unwrap_or(Err(Skipped::Deadline))
    }

    /// Counts of skipped requests, by reason.
    pub fn skipped(&self) -> &SkippedCounts {
        &self.shared.counts
    }

    /// What the service is busy with.
    pub fn load(&self) -> Load {
        let (requests, bytes) = self.shared.queue.size();
        Load {
            requests,
            bytes,
            bytes_per_second: self.shared.queue.speed(),
            cache_bytes: self.shared.cache.bytes(),
        }
    }

    /// Tokenizers that cannot be used: file, and what to do about it.
    pub fn problems(&self) -> Vec<(Arc<str>, String)> {
        self.shared.library.problems()
    }

    /// Whether the tokenizer of that file is ready.
    pub fn is_ready(&self, file: &str) -> bool {
        self.shared.library.is_ready(file)
    }
}

impl Shared {
    /// Runs a remote call to its end, whoever still waits for it. Called under the lock of the flights, so that it cannot
    /// end before it is entered there.
    fn depart(self: &Arc<Self>, key: Key, call: impl Future<Output = Outcome> + Send + 'static) -> Flight {
        let shared = Arc::clone(self);
        let task = tokio::spawn(async move {
            let landing = Landing { shared, key };
            let outcome = call.await;
            if let Ok(ids) = &outcome {
                landing.shared.cache.put(key, Arc::clone(ids));
            }
            outcome
        });
        async move { task.await.unwrap_or(Err(Skipped::Failed)) }.boxed().shared()
    }
}

/// Takes a flight off the list, also when its task panics or is aborted.
struct Landing {
    shared: Arc<Shared>,
    key: Key,
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.shared.flights.lock().remove(&self.key);
    }
}
