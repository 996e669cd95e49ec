//! The prefill leg: a call to the engine that computes a prompt, while Envoy holds the request.
//!
//! Dropping the future of [`Prefiller::run`] ends the call, and the engine sees its client go: whoever owns the request owns it.

mod client;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout, timeout_at};

pub use client::Protocol;
use client::{Answer, Client, Failure};

use crate::disagg::{Fallback, Fields, Handoff, Order, Prefilled, Report, Useless, bootstrap_port};
use crate::state::Member;
use crate::state::rates::{Forecast, Pace, Speed};
use crate::state::signals::Millis;
use crate::usage::{Scanner, Usage};

/// How prefill legs are called.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Time for one attempt.
    pub timeout: Duration,
    /// Attempts, each at the next best endpoint.
    pub attempts: u32,
    /// What engines are spoken to.
    pub protocol: Protocol,
}

impl Default for Settings {
    fn default() -> Self {
        Self { timeout: Duration::from_mins(1), attempts: 2, protocol: Protocol::Http1 }
    }
}

/// How much longer than its answer an engine's bootstrap server may take.
const BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(1);
/// A leg beside its decode leg ends when the blocks were fetched: it waits for the decode engine's queue, too.
const TOGETHER_TIMES: u32 = 5;

/// Calls prefill engines.
#[derive(Debug)]
pub struct Prefiller {
    client: Client,
    settings: Settings,
}

/// What to do with the request.
pub enum Outcome {
    /// The decode leg goes out with these fields.
    HandedOver(Fields, Report),
    /// It goes out with these fields, while the prefill leg goes on: it ends with the future, or with its stream.
    Together(Fields, Pin<Box<dyn Future<Output = End> + Send>>),
    /// The engine does not take the request, and says so to the client.
    Answered(Relayed, Report),
    /// The output's endpoint must do it alone.
    Failed(Fallback, Report),
}

/// How a prefill leg beside a decode leg ended.
#[derive(Debug)]
pub struct End {
    /// What became of it.
    pub report: Report,
    /// What the engine says to the client, if it does not take the request.
    pub relayed: Option<Relayed>,
}

/// An engine's answer for the client.
#[derive(Debug)]
pub struct Relayed {
    /// HTTP status, 400 to 499.
    pub status: u16,
    /// Its content type.
    pub content_type: Option<Box<str>>,
    /// Its body.
    pub body: Bytes,
}

/// One attempt that was answered well.
struct Success {
    answer: Bytes,
    bootstrap: Option<Bytes>,
}

/// One attempt that was not.
enum Miss {
    /// Another endpoint may do better.
    Next(Fallback),
    /// No endpoint will.
    Relay(Relayed),
}

impl Default for Prefiller {
    fn default() -> Self {
        Self::new(Settings::default())
    }
}

impl Prefiller {
    /// A prefiller without connections.
    pub fn new(settings: Settings) -> Self {
        Self { client: Client::new(settings.protocol), settings }
    }

    /// Longest that [`Prefiller::run`] takes.
    pub fn longest(&self) -> Duration {
        self.settings.timeout.saturating_mul(self.settings.attempts.max(1))
    }

    /// Makes the call.
    pub async fn run(self: Arc<Self>, handoff: Handoff) -> Outcome {
        if handoff.order() == Order::Together {
            self.together(handoff).await
        } else {
            self.first(handoff).await
        }
    }

    /// Prefill, then decode.
    async fn first(self: Arc<Self>, mut handoff: Handoff) -> Outcome {
        let mut run = Run::begin();
        let members = self.members(&handoff);
        for member in &members {
            run.attempt(&mut handoff, member);
            let deadline = Instant::now() + self.settings.timeout;
            let forecast = handoff.pick.forecast;
            match self.attempt(&handoff, member, deadline).await {
                Ok(success) => {
                    let prefilled =
                        Prefilled { answer: &success.answer, bootstrap: success.bootstrap.as_deref() };
                    let usage = learn(&success.answer, member, &handoff, forecast, run.attempt.elapsed());
                    return match handoff.decode_fields(member, prefilled) {
                        Ok(fields) => Outcome::HandedOver(fields, run.report(member, usage, None)),
                        Err(useless) => {
                            let reason = Fallback::from(useless);
                            Outcome::Failed(reason, run.report(member, usage, Some(reason)))
                        }
                    };
                }
                Err(Miss::Relay(relayed)) => {
                    return Outcome::Answered(relayed, run.report(member, None, None));
                }
                Err(Miss::Next(reason)) => run.failed(reason, member),
            }
        }
        run.exhausted(&members[members.len() - 1])
    }

    /// Decode as soon as prefill has a connection.
    async fn together(self: Arc<Self>, mut handoff: Handoff) -> Outcome {
        let mut run = Run::begin();
        let members = self.members(&handoff);
        for member in &members {
            run.attempt(&mut handoff, member);
            let deadline = Instant::now() + self.settings.timeout;
            let headers = headers(&handoff, member);
            let body = handoff.body(member);
            let destination = &member.endpoint.destination;
            let Some((response, mut connection)) =
                self.client.post(destination, &handoff.path, &headers, body)
            else {
                run.failed(Fallback::Broken, member);
                continue;
            };
            let mut call = Box::pin(client::answer(response));
            let early = tokio::select! {
                biased;
                answer = &mut call => Some(judged(answer, member)),
                _ = connection.wait_for_connection_metadata() => None,
                () = tokio::time::sleep_until(deadline) => Some(Err(Miss::Next(Fallback::Timeout))),
            };
            match early {
                Some(Err(Miss::Next(reason))) => run.failed(reason, member),
                Some(Err(Miss::Relay(relayed))) => {
                    return Outcome::Answered(relayed, run.report(member, None, None));
                }
                ready => {
                    let Ok(fields) = handoff.decode_fields(member, Prefilled::default()) else {
                        run.failed(Fallback::NoFields, member);
                        continue;
                    };
                    let member = Arc::clone(member);
                    let last = run.attempt + self.settings.timeout.saturating_mul(TOGETHER_TIMES);
                    let rest = async move {
                        let answer = match ready {
                            Some(answer) => answer,
                            None => timed(call, &member, last).await,
                        };
                        // Its time is that of two queues, and teaches nothing.
                        let (usage, failure, relayed) = match answer {
                            Ok(answer) => (counted(&answer, &member, &handoff), None, None),
                            Err(Miss::Next(reason)) => (None, Some(reason), None),
                            Err(Miss::Relay(relayed)) => (None, None, Some(relayed)),
                        };
                        End { report: run.report(&member, usage, failure), relayed }
                    };
                    return Outcome::Together(fields, Box::pin(rest));
                }
            }
        }
        run.exhausted(&members[members.len() - 1])
    }

    /// Endpoints to try, in order; the only one twice.
    fn members(&self, handoff: &Handoff) -> Vec<Arc<Member>> {
        let ranked = handoff.pick.ranked.iter();
        ranked.cycle().take(self.settings.attempts.max(1) as usize).map(Arc::clone).collect()
    }

    async fn attempt(
        &self,
        handoff: &Handoff,
        member: &Arc<Member>,
        deadline: Instant,
    ) -> Result<Success, Miss> {
        let (destination, headers) = (&member.endpoint.destination, headers(handoff, member));
        let call = self.client.post(destination, &handoff.path, &headers, handoff.body(member));
        let (response, _) = call.ok_or(Miss::Next(Fallback::Broken))?;
        let bootstrap = async {
            let address =
                std::net::SocketAddr::new(member.endpoint.address.ip(), bootstrap_port(&member.endpoint));
            self.client.get(&address.to_string(), handoff.bootstrap_path()?).await
        };
        let mut call = pin!(timed(client::answer(response), member, deadline));
        let mut bootstrap = pin!(bootstrap);
        let mut known = None;
        let answer = tokio::select! {
            answer = &mut call => answer?,
            found = &mut bootstrap => {
                known = Some(found);
                call.await?
            }
        };
        // Engines that say all in their answer have no such server: only where it is missed, it gets time of its own.
        let alone = Prefilled { answer: &answer, bootstrap: None };
        if known.is_none() && handoff.decode_fields(member, alone) == Err(Useless::Bootstrap) {
            known = timeout(BOOTSTRAP_TIMEOUT, bootstrap).await.ok();
        }
        Ok(Success { answer, bootstrap: known.flatten() })
    }
}

/// The engine's rank stands in a header where its document names it.
fn headers(handoff: &Handoff, member: &Member) -> Vec<(String, String)> {
    let mut headers = handoff.headers.clone();
    if let Some(rank) = member.endpoint.rank_header() {
        headers.push(("x-data-parallel-rank".to_owned(), rank.to_string()));
    }
    headers
}

async fn timed(
    call: impl Future<Output = Result<Answer, Failure>>,
    member: &Member,
    deadline: Instant,
) -> Result<Bytes, Miss> {
    match timeout_at(deadline, call).await {
        Ok(answer) => judged(answer, member),
        Err(_) => Err(Miss::Next(Fallback::Timeout)),
    }
}

/// What an answer says of the request and of the engine.
fn judged(answer: Result<Answer, Failure>, member: &Member) -> Result<Bytes, Miss> {
    let health = &member.endpoint.health;
    match answer {
        Ok(Answer { status, content_type, body }) => {
            health.answered(status, Millis::now());
            match status {
                200..=299 => Ok(body),
                400..=499 => Err(Miss::Relay(Relayed { status, content_type, body })),
                _ => Err(Miss::Next(Fallback::Engine)),
            }
        }
        Err(Failure::Refused) => {
            // One refusal proves nothing, but the next request need not wait for a second one.
            health.turned_away(Millis::now());
            Err(Miss::Next(Fallback::Refused))
        }
        Err(Failure::Broken) => Err(Miss::Next(Fallback::Broken)),
    }
}

/// Learns how fast the engine is; what it counted.
fn learn(
    answer: &[u8],
    member: &Member,
    handoff: &Handoff,
    forecast: Forecast,
    took: Duration,
) -> Option<Usage> {
    let usage = counted(answer, member, handoff);
    let chosen = Arc::ptr_eq(&handoff.pick.ranked[0].endpoint, &member.endpoint);
    if let Some(usage) = usage.filter(|usage| chosen && usage.prompt > 0) {
        let learned = &handoff.pick.leg.pool.memory.learned;
        let uncached = usage.prompt.saturating_sub(usage.cached.unwrap_or(0));
        learned.uncached_tokens.learn(uncached as f64);
        let forecast = usage.cached.map_or(forecast, |cached| forecast.knowing(usage.prompt, cached));
        let pace = Pace { first_token: Some(took.as_secs_f64()), token: None };
        let endpoint = &member.endpoint;
        for (rates, speed) in [(&endpoint.rates, Speed::default()), (&learned.rates, endpoint.speed())] {
            rates.learn(&forecast, &pace, speed, Millis::now());
        }
    }
    usage
}

/// What the engine counted of a prompt.
fn counted(answer: &[u8], member: &Member, handoff: &Handoff) -> Option<Usage> {
    let mut scanner = Scanner::new(Some("application/json"), None, false);
    scanner.push(answer);
    scanner.finish();
    let usage = scanner.usage();
    let endpoint = &member.endpoint;
    let predicted = u64::from(handoff.pick.held.tokens);
    endpoint.predicted_cached_tokens.fetch_add(predicted, Ordering::Relaxed);
    if let Some(cached) = usage.and_then(|usage| usage.cached) {
        endpoint.reported_cached_tokens.fetch_add(cached, Ordering::Relaxed);
    }
    usage
}

/// The course of one leg.
struct Run {
    began: Instant,
    attempt: Instant,
    attempts: u32,
    last: Option<Fallback>,
}

impl Run {
    fn begin() -> Self {
        let now = Instant::now();
        Self { began: now, attempt: now, attempts: 0, last: None }
    }

    /// Moves the booking to the endpoint that is tried next.
    fn attempt(&mut self, handoff: &mut Handoff, member: &Arc<Member>) {
        self.attempts += 1;
        self.attempt = Instant::now();
        handoff.pick.leg.served_by(member);
    }

    fn failed(&mut self, reason: Fallback, member: &Member) {
        tracing::debug!(
            endpoint = &*member.endpoint.destination,
            reason = reason.name(),
            "a prefill leg failed"
        );
        self.last = Some(reason);
    }

    fn report(&self, member: &Member, usage: Option<Usage>, failure: Option<Fallback>) -> Report {
        Report {
            endpoint: Arc::clone(&member.endpoint.destination),
            attempts: self.attempts,
            took: self.began.elapsed(),
            usage,
            failure,
        }
    }

    fn exhausted(self, member: &Member) -> Outcome {
        let reason = self.last.unwrap_or(Fallback::Broken);
        Outcome::Failed(reason, self.report(member, None, Some(reason)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::pool;
    use crate::state::health::State;

    #[test]
    fn an_endpoint_that_refuses_is_avoided_before_it_counts_as_down() {
        let pool = pool(1);
        let member = &pool.members[0];
        member.endpoint.health.accepted();
        let judged = judged(Err(Failure::Refused), member);
        assert!(matches!(judged, Err(Miss::Next(Fallback::Refused))));
        assert_eq!(member.endpoint.health.state(), State::Up);
        assert!(member.endpoint.health.is_full(Millis::now()));
    }
}
