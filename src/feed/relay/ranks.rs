//! The sockets of an engine's ranks: found, kept connected, read.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::{Instant, interval_at, sleep, timeout};

use super::Relay;
use super::apply::{Applier, State};
use crate::feed::client::{Bounds, Client};
use crate::feed::kv_events::replay::{Answer as Replayed, Replay};
use crate::feed::kv_events::sequence::Sequence;
use crate::feed::kv_events::source::{self, Answer};
use crate::state::endpoint::EventPort;
use crate::zmtp::{Error, Kind, Message, Socket};

/// Pause before the first new attempt to connect, and the longest.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(800));
/// A connection that lasted so long was none of a series that fails.
const STEADY: Duration = Duration::from_secs(1);
/// Time until a history that did not come is asked for again.
const RETRY: Duration = Duration::from_secs(30);
/// Time until an engine is asked again where its events are: one that answered, and one that did not.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_mins(1), Duration::from_secs(2));
/// Time to resolve a name.
const RESOLVE: Duration = Duration::from_secs(2);
/// What a question is bounded by.
const ASKING: Bounds = Bounds { timeout: Duration::from_secs(1), max_body: 1 << 20, connections: 1 };

/// Where one rank publishes, `HOST:PORT` each.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sockets {
    events: String,
    replay: Option<String>,
}

impl Relay {
    /// Follows the engine until dropped.
    pub(super) async fn follow(&self) {
        let client = Client::new(&self.config.engine.to_string(), ASKING);
        let mut known: Option<Vec<Sockets>> = None;
        loop {
            let answer = self.ask(&client).await;
            let pause = if answer.is_some() { ASK_AGAIN.0 } else { ASK_AGAIN.1 };
            let found = self.sockets(answer.as_ref());
            // An engine that is away for a while is the same as before.
            if found.is_some() && (known.is_none() || answer.is_some()) && found != known {
                let ranks = found.iter().flatten();
                let can_replay: Vec<bool> = ranks.map(|sockets| sockets.replay.is_some()).collect();
                self.state.lock().begin(&can_replay);
                tracing::info!(sockets = ?found, "follows the engine's KV events");
                known = found;
            }
            let ranks = known.iter().flatten().enumerate();
            let following = join_all(ranks.map(|(rank, sockets)| self.follow_rank(rank, sockets)));
            let changed = async {
                loop {
                    sleep(pause).await;
                    let answer = self.ask(&client).await;
                    let found = self.sockets(answer.as_ref());
                    if answer.is_some() && found.is_some() && found != known || known.is_none() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = async { following.await; std::future::pending().await } => {}
                () = changed => {}
            }
        }
    }

    /// What the engine says of its events; none if it does not answer.
    async fn ask(&self, client: &Client) -> Option<Answer> {
        let page = source::page_of(self.config.kind)?;
        let answer = client.get(page).await.ok()?;
        match answer.status {
            200 if answer.whole => source::read(self.config.kind, &answer.body).or(Some(Answer::Nothing)),
            400..500 => Some(Answer::Nothing),
            _ => None,
        }
    }

    /// By rank: what the flags say, else the engine. Rank r is found r ports further.
    fn sockets(&self, answer: Option<&Answer>) -> Option<Vec<Sockets>> {
        let answered: &[_] = match answer {
            Some(Answer::Ranks(ranks)) => ranks,
            _ => &[],
        };
        let at = |port: u16| SocketAddr::new(self.config.engine.ip(), port).to_string();
        let dialled = |port: EventPort| match port {
            EventPort::Dial(port) => Some(at(port)),
            EventPort::Listen(_) => None,
        };
        let ranks = if self.config.events.is_some() { answered.len().max(1) } else { answered.len() };
        let sockets = (0..ranks).map(|rank| {
            let events = match &self.config.events {
                Some(events) => further(events, rank),
                None => dialled(answered[rank].events),
            };
            let replay = match &self.config.replay {
                Some(replay) => further(replay, rank),
                None => answered.get(rank).and_then(|ports| ports.replay).map(at),
            };
            Some(Sockets { events: events?, replay })
        });
        sockets.collect::<Option<Vec<_>>>().filter(|sockets| !sockets.is_empty())
    }

    fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        let done = act(&mut self.state.lock());
        self.changed.notify_one();
        done
    }

    fn drive(&self, rank: usize, event: impl FnOnce(&mut Sequence, &mut Applier<'_>)) {
        self.with(|state| state.drive(rank, event));
    }

    /// Keeps the sockets of one rank connected.
    async fn follow_rank(&self, rank: usize, sockets: &Sockets) {
        let mut pause = PAUSE.0;
        loop {
            let began = Instant::now();
            let error = match open(&sockets.events).await {
                Ok(socket) => {
                    self.drive(rank, |sequence, sink| sequence.connected(sink));
                    self.read(rank, sockets, socket).await
                }
                Err(error) => error,
            };
            self.drive(rank, |sequence, _| sequence.disconnected());
            tracing::debug!(rank, %error, "no connection for KV events");
            pause = if began.elapsed() >= STEADY { PAUSE.0 } else { pause };
            sleep(pause.mul_f64(rand::random_range(0.8..1.2))).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    /// Hands on what comes until the live socket ends.
    async fn read(&self, rank: usize, sockets: &Sockets, mut live: Socket) -> Error {
        let mut again = interval_at(Instant::now() + RETRY, RETRY);
        let permits = Arc::new(Semaphore::new(1));
        let mut replay: Option<Replay> = None;
        loop {
            let (ask, takes_more) = self.with(|state| {
                let sequence = state.sequence(rank);
                (sequence.ask(), sequence.takes_more())
            });
            if replay.as_ref().map(|replay| replay.ask) != ask {
                replay = None;
                if let Some((ask, address)) = ask.zip(sockets.replay.as_ref()) {
                    match resolve(address).await {
                        Ok(address) => replay = Some(Replay::new(ask, address, Arc::clone(&permits))),
                        Err(error) => {
                            tracing::debug!(%error, "the replay socket cannot be found");
                            self.drive(rank, |sequence, sink| sequence.replay_ended(sink, ask.id, false));
                            continue;
                        }
                    }
                }
            }
            let answered = async {
                match &mut replay {
                    Some(replay) => (replay.ask.id, replay.next().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = live.recv(), if takes_more => match message {
                    Ok(message) => self.came(rank, &message),
                    Err(error) => return error,
                },
                (id, answer) = answered => self.drive(rank, |sequence, sink| match answer {
                    Replayed::Batch(seq, payload) => sequence.replayed(sink, id, seq, &payload),
                    Replayed::End(whole) => sequence.replay_ended(sink, id, whole),
                }),
                _ = again.tick() => self.drive(rank, |sequence, sink| sequence.retry(sink)),
            }
        }
    }

    /// `[topic, number, payload]`
    fn came(&self, rank: usize, message: &Message) {
        self.with(|state| {
            let [_, number, payload] = &message[..] else {
                state.counts.skipped += 1;
                return;
            };
            match <[u8; 8]>::try_from(&number[..]) {
                Ok(number) => state.live(rank, u64::from_be_bytes(number), payload.clone()),
                Err(_) => state.counts.skipped += 1,
            }
        });
    }
}

/// The same host, `rank` ports further.
fn further(address: &str, rank: usize) -> Option<String> {
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?.checked_add(u16::try_from(rank).ok()?)?;
    Some(format!("{host}:{port}"))
}

async fn resolve(address: &str) -> io::Result<SocketAddr> {
    let found = timeout(RESOLVE, tokio::net::lookup_host(address)).await;
    let mut found = found.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    found.next().ok_or_else(|| io::ErrorKind::NotFound.into())
}

async fn open(address: &str) -> Result<Socket, Error> {
    let mut socket = Socket::connect(resolve(address).await?, Kind::Sub).await?;
    // An empty prefix: every topic.
    socket.send(&[b"\x01"]).await?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_ranks_are_found_further_on() {
        assert_eq!(further("h:5557", 2).as_deref(), Some("h:5559"));
        assert_eq!(further("[::1]:5557", 0).as_deref(), Some("[::1]:5557"));
        assert_eq!(further("h:65535", 1), None);
        assert_eq!(further("h", 0), None);
    }
}
