//! The task of one endpoint: finds its sockets, keeps them connected, and hands what comes to the follower.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, watch};
use tokio::time::{Instant, sleep};
use tracing::{debug, info};

use super::follower::{Follower, names_another};
use super::replay::{Answer as Replayed, Replay};
use super::source::{self, Answer, RankPorts};
use super::status::Skip;
use crate::feed::client::{Bounds, Client, Failure};
use crate::index::TokenIndexes;
use crate::state::Endpoint;
use crate::state::endpoint::EventPort;
use crate::zmtp::{Error, Kind, Message, Socket};

/// Pause before the first new attempt to connect, and the longest, give or take a fifth.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(800));
/// A connection that lasted so long was none of a series that fails.
const STEADY: Duration = Duration::from_secs(1);
/// Time between two looks at what changes without frames, and between two tries of what failed.
const LOOK: Duration = Duration::from_millis(500);
const RETRY: Duration = Duration::from_secs(30);
/// Time until an engine is asked again where its events are: one that answers and has none, and one that did not answer.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_mins(1), Duration::from_secs(2));
/// Bytes of its answer that are read. SGLang's holds its whole configuration.
const MOST_ANSWER: usize = 1 << 20;

/// What a worker shares with the feed. It outlives the worker: an endpoint that leaves and comes back goes on.
#[derive(Debug)]
pub struct Shared {
    /// The follower, once it is known what to follow.
    pub following: Mutex<Option<Following>>,
    /// Asks the engine again where its events are.
    pub ask_again: Notify,
    /// Wakes those who wait at sockets: the follower may want something else.
    pub woken: watch::Sender<()>,
}

/// A follower and the sockets it follows.
#[derive(Debug)]
pub struct Following {
    /// By rank.
    pub ports: Vec<RankPorts>,
    /// What came.
    pub follower: Follower,
}

impl Default for Shared {
    fn default() -> Self {
        Self { following: Mutex::default(), ask_again: Notify::new(), woken: watch::Sender::new(()) }
    }
}

/// What was found out about an engine's sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    NotYet,
    Nothing,
    Ports(Vec<RankPorts>),
}

/// Everything a task needs.
pub struct Worker {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    /// The index to write to.
    pub index: Arc<TokenIndexes>,
    /// Limits the replays under way over all endpoints.
    pub replays: Arc<Semaphore>,
    /// Shared with the feed.
    pub shared: Arc<Shared>,
}

impl Worker {
    /// Works until it is dropped.
    pub async fn run(self) {
        let (found, mut now) = watch::channel(Found::NotYet);
        tokio::join!(self.find(found), async {
            loop {
                let found = now.borrow_and_update().clone();
                let followed = async {
                    match found {
                        Found::NotYet => {}
                        Found::Nothing => self.let_go(),
                        Found::Ports(ports) => self.follow(ports).await,
                    }
                    std::future::pending::<()>().await;
                };
                tokio::select! {
                    () = followed => {}
                    changed = now.changed() => if changed.is_err() { return },
                }
            }
        });
    }

    /// Finds the sockets, and finds them again when the engine started anew.
    async fn find(&self, found: watch::Sender<Found>) {
        let bounds = Bounds { timeout: Duration::from_secs(1), max_body: MOST_ANSWER, connections: 1 };
        let client = Client::new(&self.endpoint.destination, bounds);
        let mut last = None;
        loop {
            let asked = self.ask(&client).await;
            if let Ok(answer) = &asked {
                if *answer == Answer::Dials
                    && last.as_ref() != Some(answer)
                    && self.endpoint.event_ports.events.is_none()
                {
                    info!(
                        endpoint = %self.endpoint.name,
                        address = &*self.endpoint.destination,
                        "KV events: the engine dials somebody instead of binding a port; have it dial this host and \
                         set `kvEvents: listen:PORT`, or give it an endpoint like tcp://*:5557"
                    );
                }
                last = Some(answer.clone());
            }
            let now = match source::combine(&self.endpoint, last.as_ref()) {
                Some(ports) => Found::Ports(ports),
                None if last.is_some() => Found::Nothing,
                None => Found::NotYet,
            };
            found.send_if_modified(|known| std::mem::replace(known, now.clone()) != now);
            let pause = if asked.is_ok() { ASK_AGAIN.0 } else { ASK_AGAIN.1 };
            tokio::select! {
                () = sleep(jittered(pause)) => {}
                () = self.shared.ask_again.notified() => {}
            }
        }
    }

    async fn ask(&self, client: &Client) -> Result<Answer, Failure> {
        let Some(page) = source::page_of(self.endpoint.engine) else { return Ok(Answer::Nothing) };
        let answer = client.get(page).await?;
        let read =
            (answer.status == 200 && answer.whole).then(|| source::read(self.endpoint.engine, &answer.body));
        match read.flatten() {
            Some(answer) => Ok(answer),
            // It knows no such page, or its answer says nothing: that is an answer, too.
            None if answer.status < 500 => Ok(Answer::Nothing),
            None => Err(Failure::Silent),
        }
    }

    async fn follow(&self, ports: Vec<RankPorts>) {
        {
            let mut following = self.shared.following.lock();
            if following.as_ref().is_none_or(|following| following.ports != ports) {
                let can_replay = ports.iter().all(|ports| ports.replay.is_some());
                let (endpoint, index) = (Arc::clone(&self.endpoint), Arc::clone(&self.index));
                let mut follower = Follower::new(endpoint, index, ports.len(), can_replay);
                if let Some(before) = &*following {
                    follower = follower.counting_from(*before.follower.counts());
                }
                *following = Some(Following { ports: ports.clone(), follower });
            }
        }
        let ranks = join_all(ports.iter().enumerate().map(|(rank, ports)| self.follow_rank(rank, *ports)));
        tokio::join!(ranks, self.look());
    }

    /// The engine has no events any more.
    fn let_go(&self) {
        if let Some(Following { mut follower, .. }) = self.shared.following.lock().take() {
            follower.stop();
            self.index.events.clear(self.endpoint.holder());
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Follower) -> R) -> Option<R> {
        self.shared.following.lock().as_mut().map(|following| act(&mut following.follower))
    }

    async fn look(&self) {
        let mut retried = Instant::now();
        loop {
            sleep(LOOK).await;
            self.with(Follower::look);
            if retried.elapsed() >= RETRY {
                retried = Instant::now();
                self.with(Follower::retry);
                self.shared.woken.send_replace(());
            }
        }
    }

    /// Keeps the sockets of one rank connected.
    async fn follow_rank(&self, rank: usize, ports: RankPorts) {
        let mut pause = PAUSE.0;
        let mut listener = None;
        loop {
            let began = Instant::now();
            let ended = match self.open(ports.events, &mut listener).await {
                Ok(socket) => {
                    self.with(|follower| follower.connected(rank));
                    self.read(rank, ports, socket, listener.as_ref()).await
                }
                Err(error) => error,
            };
            self.with(|follower| follower.disconnected(rank));
            debug!(endpoint = %self.endpoint.name, rank, error = %ended, "no connection for KV events");
            pause = if began.elapsed() >= STEADY { PAUSE.0 } else { pause };
            sleep(jittered(pause)).await;
            pause = (pause * 2).min(PAUSE.1);
        }
    }

    async fn open(&self, port: EventPort, listener: &mut Option<TcpListener>) -> Result<Socket, Error> {
        let mut socket = match port {
            EventPort::Dial(port) => Socket::connect(self.at(port), Kind::Sub).await?,
            EventPort::Listen(port) => {
                if listener.is_none() {
                    let any: SocketAddr = match self.endpoint.address {
                        SocketAddr::V4(_) => ([0, 0, 0, 0], port).into(),
                        SocketAddr::V6(_) => ([0; 8], port).into(),
                    };
                    *listener = Some(TcpListener::bind(any).await?);
                }
                self.accept(listener.as_ref()).await?
            }
        };
        // An empty prefix: every topic.
        socket.send(&[b"\x01"]).await?;
        Ok(socket)
    }

    /// The next connection of the engine. Others than its host are not let in.
    async fn accept(&self, listener: Option<&TcpListener>) -> Result<Socket, Error> {
        let Some(listener) = listener else { return std::future::pending().await };
        loop {
            let (stream, peer) = listener.accept().await?;
            if peer.ip().to_canonical() == self.endpoint.address.ip().to_canonical() {
                return Socket::accept(stream, Kind::Sub).await;
            }
            self.with(|follower| follower.skipped(Skip::Foreign));
        }
    }

    fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.endpoint.address.ip(), port)
    }

    /// Hands on what comes until the live socket ends.
    async fn read(
        &self,
        rank: usize,
        ports: RankPorts,
        mut live: Socket,
        listener: Option<&TcpListener>,
    ) -> Error {
        let mut woken = self.shared.woken.subscribe();
        let mut replay: Option<Replay> = None;
        loop {
            let Some((ask, takes_more)) =
                self.with(|follower| (follower.ask(rank), follower.takes_more(rank)))
            else {
                return Error::Closed;
            };
            if replay.as_ref().map(|replay| replay.ask) != ask {
                replay = ask
                    .zip(ports.replay)
                    .map(|(ask, port)| Replay::new(ask, self.at(port), Arc::clone(&self.replays)));
            }
            let answered = async {
                match &mut replay {
                    Some(replay) => (replay.ask.id, replay.next().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = live.recv(), if takes_more => match message {
                    Ok(message) => self.came(rank, ports.events, &message),
                    Err(error) => return error,
                },
                (id, answer) = answered => {
                    self.with(|follower| match answer {
                        Replayed::Batch(seq, payload) => follower.replayed(rank, id, seq, &payload),
                        Replayed::End(whole) => follower.replay_ended(rank, id, whole),
                    });
                }
                // The engine dialled anew: the old connection is dead, whatever the system thinks of it.
                next = self.accept(listener) => match next {
                    Ok(mut socket) => {
                        if let Err(error) = socket.send(&[b"\x01"]).await {
                            return error;
                        }
                        live = socket;
                        replay = None;
                        self.with(|follower| {
                            follower.disconnected(rank);
                            follower.connected(rank);
                        });
                    }
                    Err(error) => debug!(%error, "a connection for KV events failed"),
                },
                changed = woken.changed() => if changed.is_err() { return Error::Closed },
            }
        }
    }

    /// `[topic, number, payload]`
    fn came(&self, rank: usize, port: EventPort, message: &Message) {
        self.with(|follower| {
            let [topic, number, payload] = &message[..] else {
                return follower.skipped(Skip::UnreadableFrame);
            };
            let Ok(number) = <[u8; 8]>::try_from(&number[..]) else {
                return follower.skipped(Skip::UnreadableFrame);
            };
            if matches!(port, EventPort::Listen(_)) && names_another(topic, &self.endpoint) {
                return follower.skipped(Skip::Foreign);
            }
            follower.live(rank, topic, u64::from_be_bytes(number), payload.clone());
        });
    }
}

/// A fifth more or less, so that what many endpoints do does not fall together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.8..1.2))
}
