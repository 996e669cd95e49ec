//! Tokenizers elsewhere: engines and rendering services, asked over HTTP and never more than they can bear.
//!
//! ```text
//!   Renderer: one Target each: client -> wire (render, else tokenize) -> ids
//!                              limit  how many at once, by how long answers take
//! ```
//!
//! `POST <path>/render` gives the exact ids, with tools, template arguments and truncation as the engine applies them. vLLM
//! serves it with `--enable-scale-out` only; a target that does not is asked by `/tokenize` for a minute before it is tried
//! again.

mod limit;
mod wire;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::Uri;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::client::{Answer, Bounds, Client, Failure};
use crate::prompt::Skipped;
use crate::prompt::tokenize::{Outcome, Remote, RemoteAsk, Target};
use crate::state::endpoint::EngineKind;
use limit::{Limit, Verdict};

/// Bounds of every target.
#[derive(Clone, Copy, Debug)]
pub struct RenderConfig {
    /// Time for one answer. Requests wait less; what comes later is remembered.
    pub timeout: Duration,
    /// Bytes of an answer: a million ids take about seven.
    pub max_answer: usize,
    /// Most calls at once to one target, however fast it is.
    pub most_at_once: u32,
    /// Time for which a target that serves no `/render` is asked by `/tokenize`.
    pub without_render: Duration,
}

impl Default for RenderConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(5),
            max_answer: 64 << 20,
            most_at_once: 32,
            without_render: Duration::from_mins(1),
        }
    }
}

/// Targets that are remembered; beyond it those at rest are forgotten.
const MOST_TARGETS: usize = 4_096;

/// The remote side of [`Tokenizers`](crate::prompt::Tokenizers). Clones share everything.
#[derive(Clone, Debug)]
pub struct Renderer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    config: RenderConfig,
    known: Mutex<AHashMap<Target, Arc<Known>>>,
}

/// What is known of a target.
#[derive(Debug)]
struct Known {
    client: Client,
    /// What its URL has before the API's path.
    prefix: String,
    sglang: bool,
    limit: Mutex<Limit>,
    /// Until when `/render` is not tried.
    no_render: Mutex<Option<Instant>>,
}

impl Renderer {
    /// Knows no target yet.
    pub fn new(config: RenderConfig) -> Self {
        Self { inner: Arc::new(Inner { config, known: Mutex::default() }) }
    }

    /// How near the busiest target is to what it can bear: calls under way over calls allowed, from 0 to 1.
    pub fn saturation(&self) -> f64 {
        self.inner.known.lock().values().map(|known| known.limit.lock().saturation()).fold(0.0, f64::max)
    }
}

impl Remote for Renderer {
    fn ids(&self, ask: RemoteAsk) -> BoxFuture<'static, Outcome> {
        let Some(known) = self.inner.known(&ask.target) else {
            return async { Err(Skipped::Unreachable) }.boxed();
        };
        let without_render = self.inner.config.without_render;
        // Taken here, so that the calls that are allowed are those that were asked for first.
        let permit = Permit::take(&known, ask.budget);
        async move {
            let permit = permit.ok_or(Skipped::Saturated)?;
            let outcome = known.ask(&ask, without_render).await;
            permit.ends(&outcome);
            outcome
        }
        .boxed()
    }

    fn expected(&self, target: &Target) -> Option<Duration> {
        self.inner.known.lock().get(target)?.limit.lock().expected()
    }
}

impl Inner {
    fn known(&self, target: &Target) -> Option<Arc<Known>> {
        let mut all = self.known.lock();
        if let Some(known) = all.get(target) {
            return Some(Arc::clone(known));
        }
        if all.len() >= MOST_TARGETS {
            all.retain(|_, known| known.limit.lock().saturation() > 0.0);
        }
        let known = Arc::new(Known::new(target, &self.config)?);
        all.insert(target.clone(), Arc::clone(&known));
        Some(known)
    }
}

impl Known {
    fn new(target: &Target, config: &RenderConfig) -> Option<Self> {
        let (destination, prefix, sglang) = match target {
            Target::Engine(address, kind) => {
                (address.to_string(), String::new(), *kind == EngineKind::Sglang)
            }
            Target::Url(url) => {
                let uri: Uri = url.parse().ok()?;
                (uri.authority()?.to_string(), uri.path().trim_end_matches('/').to_owned(), false)
            }
        };
        let bounds = Bounds {
            timeout: config.timeout,
            max_body: config.max_answer,
            connections: config.most_at_once as usize,
        };
        Some(Self {
            client: Client::new(&destination, bounds),
            prefix,
            sglang,
            limit: Mutex::new(Limit::new(config.most_at_once)),
            no_render: Mutex::default(),
        })
    }

    async fn ask(&self, ask: &RemoteAsk, without_render: Duration) -> Outcome {
        if !self.sglang && self.no_render.lock().is_none_or(|until| Instant::now() >= until) {
            let path = ask.path.strip_suffix("/render").unwrap_or(&ask.path);
            let answer = self.post(&format!("{path}/render"), ask.body.clone()).await?;
            if !wire::is_not_served(&answer) {
                return wire::rendered(&successful(answer)?, &ask.model);
            }
            if self.no_render.lock().replace(Instant::now() + without_render).is_none() {
                tracing::info!(
                    tokenizer = ?ask.target,
                    "the tokenizer serves no /render, /tokenize is used: start vLLM with --enable-scale-out for exact ids"
                );
            }
        }
        let body = wire::tokenize(ask, self.sglang)?;
        wire::tokenized(&successful(self.post("/tokenize", body).await?)?)
    }

    async fn post(&self, path: &str, body: bytes::Bytes) -> Result<Answer, Skipped> {
        self.client.post(&format!("{}{path}", self.prefix), body).await.map_err(|failure| match failure {
            Failure::Refused | Failure::Silent | Failure::Local => Skipped::Unreachable,
        })
    }
}

/// The body of an answer with status 200.
fn successful(answer: Answer) -> Result<Vec<u8>, Skipped> {
    match answer.status {
        200 if answer.whole => Ok(answer.body),
        429 | 503 => Err(Skipped::Saturated),
        400..500 => Err(Skipped::Refused),
        500.. => Err(Skipped::RemoteError),
        _ => Err(Skipped::BadAnswer),
    }
}

/// One call under way. Dropped before its end, it teaches nothing.
struct Permit {
    known: Arc<Known>,
    began: Instant,
    budget: Duration,
    ended: bool,
}

impl Permit {
    fn take(known: &Arc<Known>, budget: Duration) -> Option<Self> {
        let taken = known.limit.lock().begin();
        taken.then(|| Self { known: Arc::clone(known), began: Instant::now(), budget, ended: false })
    }

    fn ends(mut self, outcome: &Outcome) {
        self.ended = true;
        let took = self.began.elapsed();
        let verdict = match outcome {
            // The request is at fault, or what it asks for: says nothing of the load.
            Err(Skipped::Refused | Skipped::Unsupported | Skipped::Failed) => Verdict::Neutral,
            Err(_) => Verdict::Failed,
            Ok(_) if took > self.budget => Verdict::Late(took),
            Ok(_) => Verdict::InTime(took),
        };
        self.known.limit.lock().end(verdict);
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.ended {
            self.known.limit.lock().end(Verdict::Neutral);
        }
    }
}
