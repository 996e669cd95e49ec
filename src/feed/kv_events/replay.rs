//! Asks an engine for batches that were missed.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use super::sequence::Ask;
use crate::zmtp::{Error, Kind, Message, Socket};

/// Time between two answers, and for all of them.
const BETWEEN: Duration = Duration::from_secs(5);
const ALTOGETHER: Duration = Duration::from_mins(1);
/// The number of the message after the last.
const END: [u8; 8] = [0xff; 8];

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// A batch.
    Batch(u64, Bytes),
    /// That was all, whether everything came.
    End(bool),
}

/// One replay. Dropping it ends the connection.
pub struct Replay {
    /// What was asked for.
    pub ask: Ask,
    opening: Option<Opening>,
    open: Option<Open>,
}

type Opening = Pin<Box<dyn Future<Output = Result<Open, Error>> + Send>>;

struct Open {
    socket: Socket,
    deadline: Instant,
    /// Counts as one of the replays under way.
    _permit: Option<OwnedSemaphorePermit>,
}

impl Replay {
    /// Waits for a permit and then asks.
    pub fn new(ask: Ask, address: SocketAddr, permits: Arc<Semaphore>) -> Self {
        let opening: Opening = Box::pin(async move {
            let permit = permits.acquire_owned().await.ok();
            let mut socket = Socket::connect(address, Kind::Dealer).await?;
            socket.send(&[b"", &ask.from.to_be_bytes()]).await?;
            Ok(Open { socket, deadline: Instant::now() + ALTOGETHER, _permit: permit })
        });
        Self { ask, opening: Some(opening), open: None }
    }

    /// The next answer. Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Answer {
        if let Some(opening) = &mut self.opening {
            let opened = opening.await;
            self.opening = None;
            self.open = opened.inspect_err(|error| tracing::debug!(%error, "no replay of KV events")).ok();
        }
        let Some(open) = &mut self.open else { return Answer::End(false) };
        let deadline = open.deadline.min(Instant::now() + BETWEEN);
        match timeout_at(deadline, open.socket.recv()).await {
            Ok(Ok(message)) => read(&message),
            Ok(Err(error)) => {
                tracing::debug!(%error, "the replay of KV events broke off");
                Answer::End(false)
            }
            Err(_) => Answer::End(false),
        }
    }
}

/// `[empty, topic, number, payload]`; versions before the topic was sent leave it out.
fn read(message: &Message) -> Answer {
    let [.., number, payload] = &message[..] else { return Answer::End(false) };
    match <[u8; 8]>::try_from(&number[..]) {
        Ok(END) => Answer::End(true),
        Ok(number) => Answer::Batch(u64::from_be_bytes(number), payload.clone()),
        Err(_) => Answer::End(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(parts: &[&'static [u8]]) -> Message {
        parts.iter().map(|part| Bytes::from_static(part)).collect()
    }

    #[test]
    fn answers_with_and_without_a_topic_are_read() {
        let batch = || Answer::Batch(5, Bytes::from_static(b"p"));
        let five = b"\0\0\0\0\0\0\0\x05";
        assert_eq!(read(&message(&[b"", b"kv", five, b"p"])), batch());
        assert_eq!(read(&message(&[b"", five, b"p"])), batch());
        assert_eq!(read(&message(&[b"", b"", &END, b""])), Answer::End(true));
        assert_eq!(read(&message(&[b"", &END, b""])), Answer::End(true));
        assert_eq!(read(&message(&[b"", b"x", b""])), Answer::End(false));
        assert_eq!(read(&message(&[b"x"])), Answer::End(false));
    }
}
