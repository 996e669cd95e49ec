//! The two sockets: every subscriber gets every batch it keeps up with, and who asks gets what is still there.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinSet;

use super::encoding::{Style, batch};
use super::{Announcement, EventConfig};
use crate::engine::fault::Faults;
use crate::engine::generation::unix_seconds;
use crate::zmtp::{Error, Kind, Socket};

/// Batches a slow subscriber may lag behind before it misses some (vLLM: `hwm`).
const HIGH_WATER: usize = 4_096;

/// What goes to subscribers.
#[derive(Clone, Debug)]
enum Sent {
    Batch(u64, Bytes),
    /// The engine starts anew: connections end.
    Restart,
}

/// Publishes the events of one engine.
pub(in crate::engine) struct Publisher {
    config: EventConfig,
    block_size: u32,
    topic: Bytes,
    events: SocketAddr,
    replay: Option<SocketAddr>,
    state: Mutex<State>,
    sent: broadcast::Sender<Sent>,
}

#[derive(Default)]
struct State {
    next: u64,
    history: VecDeque<(u64, Bytes)>,
    /// Batches that are not sent, and of those the ones that are not kept either.
    dropped: u32,
    lost: u32,
}

/// Open ports that are not served yet.
pub(in crate::engine) struct Ports {
    events: TcpListener,
    replay: Option<TcpListener>,
}

impl Ports {
    /// Opens them on the engine's address.
    pub async fn bind(config: &EventConfig, listen: SocketAddr) -> std::io::Result<Self> {
        let at = |port| SocketAddr::new(listen.ip(), port);
        let events = TcpListener::bind(at(config.port)).await?;
        let replay = match config.replay {
            Some(port) => Some(TcpListener::bind(at(port)).await?),
            None => None,
        };
        Ok(Self { events, replay })
    }
}

impl Publisher {
    /// A publisher of blocks of `block_size` tokens, for the engine at `engine` that serves `model`.
    pub fn new(
        config: EventConfig,
        ports: &Ports,
        block_size: u32,
        engine: SocketAddr,
        model: &str,
    ) -> std::io::Result<Self> {
        Ok(Self {
            config,
            block_size,
            topic: format!("kv@{engine}@{model}").into(),
            events: ports.events.local_addr()?,
            replay: ports.replay.as_ref().map(TcpListener::local_addr).transpose()?,
            state: Mutex::default(),
            sent: broadcast::channel(HIGH_WATER).0,
        })
    }

    /// Where events are published.
    pub fn events(&self) -> SocketAddr {
        self.events
    }

    /// Where they are replayed.
    pub fn replay(&self) -> Option<SocketAddr> {
        self.replay
    }

    /// What `/kv_event_sources` answers.
    pub fn sources(&self) -> serde_json::Value {
        let bound = |address: SocketAddr| format!("tcp://*:{}", address.port());
        serde_json::json!({"0": {
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": bound(self.events),
            "replay_endpoint": self.replay.map(bound),
            "buffer_steps": self.config.history,
            "hwm": HIGH_WATER,
            "max_queue_size": 100_000,
            "topic": String::from_utf8_lossy(&self.topic),
        }})
    }

    /// The next `n` batches are not sent; if `kept`, they can be replayed.
    pub fn drop_next(&self, n: u32, kept: bool) {
        let mut state = self.state.lock();
        state.dropped = n;
        state.lost = if kept { 0 } else { n };
    }

    /// Starts from 0 without a history, and closes the connections.
    pub fn restart(&self) {
        *self.state.lock() = State::default();
        let _ = self.sent.send(Sent::Restart);
    }

    /// Publishes one step's events.
    pub fn publish(&self, announcements: &[Announcement], faults: &Faults) {
        if announcements.is_empty() {
            return;
        }
        let style = Style {
            shape: self.config.shape,
            hashes: self.config.hashes,
            block_size: (faults.event_block_size().unwrap_or(self.block_size), self.block_size),
            seed: u64::from(faults.has_other_seed()) * 0x5eed,
        };
        let payload: Bytes = if faults.has_unreadable_events() {
            Bytes::from_static(b"\xc1 not msgpack")
        } else {
            batch(unix_seconds(), announcements, style).into()
        };
        let mut state = self.state.lock();
        let seq = state.next;
        state.next += 1;
        let lost = state.lost > 0;
        state.lost = state.lost.saturating_sub(1);
        if !lost {
            state.history.push_back((seq, payload.clone()));
            if state.history.len() > self.config.history {
                state.history.pop_front();
            }
        }
        if state.dropped > 0 {
            state.dropped -= 1;
        } else {
            // Without a subscriber nobody listens, which is no error.
            let _ = self.sent.send(Sent::Batch(seq, payload));
        }
    }

    /// Serves both ports for ever.
    pub async fn run(self: Arc<Self>, ports: Ports) {
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                accepted = ports.events.accept() => if let Ok((stream, _)) = accepted {
                    let this = Arc::clone(&self);
                    tasks.spawn(async move {
                        let served = async { this.subscriber(Socket::accept(stream, Kind::Pub).await?).await };
                        log_end(served.await);
                    });
                },
                accepted = accept(ports.replay.as_ref()) => if let Ok((stream, _)) = accepted {
                    let this = Arc::clone(&self);
                    tasks.spawn(async move {
                        let served = async { this.replays(Socket::accept(stream, Kind::Router).await?).await };
                        log_end(served.await);
                    });
                },
                Some(_) = tasks.join_next() => {}
            }
        }
    }

    /// Sends everything from the first subscription on.
    async fn subscriber(&self, mut socket: Socket) -> Result<(), Error> {
        let mut prefix = None;
        let mut sent = self.sent.subscribe();
        loop {
            tokio::select! {
                message = socket.recv() => match message?.first().map(|frame| &frame[..]) {
                    Some([1, wanted @ ..]) => prefix = Some(wanted.to_vec()),
                    Some([0, ..]) => prefix = None,
                    _ => {}
                },
                next = sent.recv() => match next {
                    Ok(Sent::Batch(seq, payload)) => {
                        if prefix.as_ref().is_some_and(|prefix| self.topic.starts_with(prefix)) {
                            let seq = Bytes::copy_from_slice(&seq.to_be_bytes());
                            socket.send_message(&[self.topic.clone(), seq, payload]).await?;
                        }
                    }
                    Ok(Sent::Restart) | Err(RecvError::Closed) => return Ok(()),
                    Err(RecvError::Lagged(_)) => {}
                },
            }
        }
    }

    /// Answers `[empty, start]` with what is still there from `start` on, and the end marker.
    async fn replays(&self, mut socket: Socket) -> Result<(), Error> {
        loop {
            let message = socket.recv().await?;
            let start = message.last().and_then(|start| <[u8; 8]>::try_from(&start[..]).ok());
            let Some(start) = start.map(u64::from_be_bytes) else { continue };
            let history: Vec<(u64, Bytes)> = {
                let state = self.state.lock();
                state.history.iter().filter(|(seq, _)| *seq >= start).cloned().collect()
            };
            for (seq, payload) in history {
                socket.send(&[b"", &self.topic, &seq.to_be_bytes(), &payload]).await?;
            }
            socket.send(&[b"", b"", &[0xff; 8], b""]).await?;
        }
    }
}

async fn accept(listener: Option<&TcpListener>) -> std::io::Result<(tokio::net::TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

fn log_end(ended: Result<(), Error>) {
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection of the KV events ended");
    }
}
