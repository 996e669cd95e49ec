//! A server seen through a slow line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

/// Passes connections on; answers may be held back.
#[derive(Debug)]
pub struct SlowLine {
    address: String,
    millis: Arc<AtomicU64>,
    _passing: AbortOnDropHandle<()>,
}

impl SlowLine {
    /// A line to this `host:port`, not slow yet.
    pub async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let millis = Arc::new(AtomicU64::new(0));
        let delay = Arc::clone(&millis);
        let passing = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&server).await else { continue };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(pass(from_client, to_server, Arc::default()));
                tokio::spawn(pass(from_server, to_client, Arc::clone(&delay)));
            }
        });
        Self { address, millis, _passing: AbortOnDropHandle::new(passing) }
    }

    /// Its `host:port`.
    pub fn address(&self) -> String {
        self.address.clone()
    }

    /// Answers come so much later from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.millis.store(delay.as_millis() as u64, Ordering::Relaxed);
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, millis: Arc<AtomicU64>) {
    let mut buffer = vec![0; 16 << 10];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let delay = millis.load(Ordering::Relaxed);
        if delay > 0 {
            tokio::time::sleep(Duration::from_millis(delay)).await;
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}
