//! Writes what one engine holds into the block index that Kthena's routers read in Redis, by the events it publishes.
//!
//! `mirror` knows what the engine holds, `apply` puts events into it, `ranks` keeps the sockets, `writer` makes Redis say
//! what the mirror says. Redis may fail for any time: the mirror knows what is to be written, and no more than that.

mod apply;
mod mirror;
mod ranks;
mod writer;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::Notify;

pub use apply::Counts;
pub use mirror::{Field, Mirror};

use super::redis::{Address, Connection, Health};
use crate::state::endpoint::EngineKind;
use apply::State;
use parking_lot::Mutex;

/// Whom to follow and where to write.
#[derive(Clone, Debug)]
pub struct RelayConfig {
    /// Where the engine serves HTTP.
    pub engine: SocketAddr,
    /// Which engine it is.
    pub kind: EngineKind,
    /// `NAME.NAMESPACE`, the name of the engine in the index.
    pub identity: String,
    /// The model under which blocks are written.
    pub model: String,
    /// `HOST:PORT` of the events of rank 0; the engine is asked if it is not given.
    pub events: Option<String>,
    /// `HOST:PORT` from which missed events of rank 0 are replayed; the engine is asked.
    pub replay: Option<String>,
    /// Where the index is.
    pub redis: Address,
}

/// A relay.
#[derive(Debug)]
pub struct Relay {
    config: RelayConfig,
    state: Mutex<State>,
    /// The mirror has something to be written.
    changed: Notify,
}

/// What a relay has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Fields that Redis should have.
    pub fields: usize,
    /// Fields of which Redis may say something else.
    pub unwritten: usize,
    /// What came from the engine.
    pub counts: Counts,
}

impl Relay {
    /// Follows nobody yet.
    pub fn new(config: RelayConfig) -> Self {
        let state = Mutex::new(State::new(&config.model));
        Self { config, state, changed: Notify::new() }
    }

    /// Works until it is dropped.
    pub async fn run(&self) {
        let connection = Connection::new(self.config.redis.clone());
        let redis = &self.config.redis;
        let report = |health| match health {
            Health::Well => tracing::info!(%redis, "Redis answers"),
            Health::Failing(why) => tracing::warn!(
                %redis,
                why,
                "Redis does not answer: what the engine holds is kept in mind and written once it does"
            ),
        };
        let writer = writer::Writer::new(self, connection.clone());
        tokio::join!(connection.keep(report), self.follow(), writer.run(), self.tell());
    }

    /// What has been done.
    pub fn progress(&self) -> Progress {
        let state = self.state.lock();
        Progress { fields: state.mirror.fields(), unwritten: state.mirror.unwritten(), counts: state.counts }
    }

    /// Logs once a minute what has been done since.
    async fn tell(&self) {
        let mut last = Progress::default();
        loop {
            tokio::time::sleep(Duration::from_mins(1)).await;
            let now = self.progress();
            if now != last {
                let Progress { fields, unwritten, counts } = now;
                tracing::info!(fields, unwritten, ?counts, "blocks in the shared index");
            }
            last = now;
        }
    }
}
