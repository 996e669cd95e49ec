//! Prompts whose KV waits to be fetched.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ahash::AHashMap;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};
use xxhash_rust::xxh3::Xxh3;

use super::super::scheduler::Kept;

/// What tells one prompt from another.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(in super::super) struct Content {
    pub tokens: usize,
    pub digest: u64,
}

impl Content {
    pub fn of(prompt: &[u32]) -> Self {
        let mut digest = Xxh3::new();
        for token in prompt {
            digest.update(&token.to_le_bytes());
        }
        Self { tokens: prompt.len(), digest: digest.digest() }
    }
}

/// One pinned prompt.
pub(super) struct Pin {
    content: Content,
    blocks: Option<Vec<Vec<u64>>>,
    fetched: Option<oneshot::Sender<()>>,
    /// Its blocks in the scheduler, which go back when this is dropped.
    _kept: Arc<Kept>,
}

impl Pin {
    pub fn new(prompt: &[u32], kept: Arc<Kept>) -> Self {
        Self { content: Content::of(prompt), blocks: None, fetched: None, _kept: kept }
    }

    /// Whoever fetches it must name these blocks.
    pub fn with_blocks(self, blocks: Vec<Vec<u64>>) -> Self {
        Self { blocks: Some(blocks), ..self }
    }

    /// Tells when it is fetched.
    pub fn with_notice(self, fetched: oneshot::Sender<()>) -> Self {
        Self { fetched: Some(fetched), ..self }
    }
}

/// What came of asking for a pin.
pub(in super::super) enum Fetch {
    Done,
    Unknown,
    /// The member of the request that does not fit.
    Differs(&'static str),
}

/// All pins of one engine.
#[derive(Default)]
pub(super) struct Pins {
    kept: Mutex<AHashMap<String, (u64, Pin)>>,
    arrived: Notify,
    serial: AtomicU64,
    expired: AtomicU64,
}

impl Pins {
    /// Answers the number by which [`Pins::expire`] knows it.
    pub fn put(&self, key: String, pin: Pin) -> u64 {
        let serial = self.serial.fetch_add(1, Relaxed);
        let replaced = self.kept.lock().insert(key, (serial, pin));
        drop(replaced);
        self.arrived.notify_waiters();
        serial
    }

    pub fn len(&self) -> usize {
        self.kept.lock().len()
    }

    pub fn expired(&self) -> u64 {
        self.expired.load(Relaxed)
    }

    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.kept.lock());
        drop(all);
    }

    pub fn remove(&self, key: &str) {
        let removed = self.kept.lock().remove(key);
        drop(removed);
    }

    /// Releases a pin unread, unless it is gone or another has taken its place.
    pub fn expire(&self, key: &str, serial: u64) {
        let mut kept = self.kept.lock();
        if kept.get(key).is_some_and(|(of, _)| *of == serial) {
            let expired = kept.remove(key);
            drop(kept);
            drop(expired);
            self.expired.fetch_add(1, Relaxed);
        }
    }

    /// Hands a pin over and releases it.
    pub fn fetch(&self, key: &str, content: &Content, blocks: Option<&[Vec<u64>]>) -> Fetch {
        let mut kept = self.kept.lock();
        let Some((_, pin)) = kept.get(key) else { return Fetch::Unknown };
        if pin.content.tokens != content.tokens {
            return Fetch::Differs("remote_num_tokens");
        }
        if pin.content.digest != content.digest {
            return Fetch::Differs("prompt");
        }
        if pin.blocks.as_deref() != blocks {
            return Fetch::Differs("remote_block_ids");
        }
        let fetched = kept.remove(key);
        drop(kept);
        if let Some((_, Pin { fetched: Some(fetched), .. })) = fetched {
            // Whoever waits for it may have gone.
            let _ = fetched.send(());
        }
        Fetch::Done
    }

    /// The same for a prompt that may still be computed.
    pub async fn fetch_when_there(&self, key: &str, content: &Content) -> Fetch {
        loop {
            let mut arrived = std::pin::pin!(self.arrived.notified());
            arrived.as_mut().enable();
            match self.fetch(key, content, None) {
                Fetch::Unknown => arrived.await,
                result => return result,
            }
        }
    }
}
