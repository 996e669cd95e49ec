//! One connection: handshake, heartbeats, messages.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::frame::{Decoder, Incoming, Message, encode, encode_command};

/// Time within which a connection must stand, handshake included.
const HANDSHAKE: Duration = Duration::from_secs(1);
/// Silence after which the system asks the peer's whether it still is there, pause between two such questions, and how
/// many may go without an answer. An engine that says nothing is normal; a host that is gone is known after 25 s.
const SILENCE: (Duration, Duration, u32) = (Duration::from_secs(10), Duration::from_secs(5), 3);

/// The kind of socket at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Publishes.
    Pub,
    /// Subscribes.
    Sub,
    /// Answers each peer by itself.
    Router,
    /// Asks.
    Dealer,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Pub => "PUB",
            Kind::Sub => "SUB",
            Kind::Router => "ROUTER",
            Kind::Dealer => "DEALER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        let peers: &[&[u8]] = match self {
            Kind::Pub => &[b"SUB", b"XSUB"],
            Kind::Sub => &[b"PUB", b"XPUB"],
            Kind::Router => &[b"DEALER", b"REQ", b"ROUTER"],
            Kind::Dealer => &[b"ROUTER", b"REP", b"DEALER"],
        };
        peers.contains(&peer)
    }
}

/// Why a connection could not be made or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The system says so.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The peer closed it.
    #[error("the peer closed the connection")]
    Closed,
    /// No connection, or no whole handshake, in time.
    #[error("no ZeroMQ handshake within a second; check that the port is the one of the KV events")]
    Slow,
    /// What came is not what ZMTP 3 allows, or too much of it.
    #[error("not ZeroMQ as engines speak it: {0}")]
    Protocol(&'static str),
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct Socket {
    stream: TcpStream,
    incoming: BytesMut,
    outgoing: BytesMut,
    decoder: Decoder,
}

impl Socket {
    /// Connects.
    pub async fn connect(address: SocketAddr, kind: Kind) -> Result<Self, Error> {
        let connecting = async { Self::over(TcpStream::connect(address).await?, kind).await };
        timeout(HANDSHAKE, connecting).await.map_err(|_| Error::Slow)?
    }

    /// Answers a connection that was accepted.
    pub async fn accept(stream: TcpStream, kind: Kind) -> Result<Self, Error> {
        timeout(HANDSHAKE, Self::over(stream, kind)).await.map_err(|_| Error::Slow)?
    }

    async fn over(stream: TcpStream, kind: Kind) -> Result<Self, Error> {
        stream.set_nodelay(true)?;
        let (after, between, times) = SILENCE;
        let keepalive = TcpKeepalive::new().with_time(after).with_interval(between).with_retries(times);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let (incoming, outgoing) = (BytesMut::with_capacity(16 << 10), BytesMut::new());
        let mut socket = Self { stream, incoming, outgoing, decoder: Decoder::default() };
        socket.outgoing.extend_from_slice(&greeting());
        encode_command(&ready(kind), &mut socket.outgoing);
        socket.flush().await?;
        while socket.incoming.len() < GREETING {
            socket.read().await?;
        }
        check_greeting(&socket.incoming.split_to(GREETING))?;
        match socket.next().await? {
            Incoming::Command(command) => check_ready(kind, &command)?,
            Incoming::Message(_) => return Err(Error::Protocol("a message before the handshake")),
        }
        Ok(socket)
    }

    /// Where the other end is.
    pub fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// The next message. Nothing is lost if the future is dropped.
    pub async fn recv(&mut self) -> Result<Message, Error> {
        loop {
            self.flush().await?;
            match self.next().await? {
                Incoming::Message(message) => return Ok(message),
                // A heartbeat wants its context back; other commands need no answer.
                Incoming::Command(command) => {
                    if let Some([_, _, context @ ..]) = command.strip_prefix(b"\x04PING") {
                        encode_command(
                            &[b"\x04PONG", &context[..context.len().min(16)]].concat(),
                            &mut self.outgoing,
                        );
                    }
                }
            }
        }
    }

    /// Sends a message. If the future is dropped, the connection must be, too.
    pub async fn send(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        encode(parts.iter().copied(), &mut self.outgoing);
        self.flush().await
    }

    /// Sends a message of shared frames.
    pub async fn send_message(&mut self, parts: &[Bytes]) -> Result<(), Error> {
        encode(parts.iter().map(|part| &part[..]), &mut self.outgoing);
        self.flush().await
    }

    async fn next(&mut self) -> Result<Incoming, Error> {
        loop {
            if let Some(incoming) = self.decoder.decode(&mut self.incoming)? {
                return Ok(incoming);
            }
            self.read().await?;
        }
    }

    async fn read(&mut self) -> Result<(), Error> {
        if self.incoming.capacity() == self.incoming.len() {
            self.incoming.reserve(16 << 10);
        }
        match self.stream.read_buf(&mut self.incoming).await? {
            0 => Err(Error::Closed),
            _ => Ok(()),
        }
    }

    async fn flush(&mut self) -> Result<(), Error> {
        while !self.outgoing.is_empty() {
            self.stream.write_buf(&mut self.outgoing).await?;
        }
        Ok(())
    }
}

const GREETING: usize = 64;

/// Signature, version 3.0, mechanism NULL, client.
fn greeting() -> [u8; GREETING] {
    let mut greeting = [0; GREETING];
    greeting[0] = 0xff;
    greeting[8] = 1;
    greeting[9] = 0x7f;
    greeting[10] = 3;
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

fn check_greeting(greeting: &[u8]) -> Result<(), Error> {
    let (signature, rest) = greeting.split_at(10);
    if signature.first() != Some(&0xff) || signature.last() != Some(&0x7f) {
        return Err(Error::Protocol("no ZMTP greeting"));
    }
    if rest.first().is_none_or(|major| *major < 3) {
        return Err(Error::Protocol("a version before ZMTP 3"));
    }
    if rest.get(2..22) != Some(b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0") {
        return Err(Error::Protocol("a mechanism other than NULL; switch encryption of the KV events off"));
    }
    Ok(())
}

fn ready(kind: Kind) -> Vec<u8> {
    let name = kind.name().as_bytes();
    let mut ready = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    ready.push(name.len() as u8);
    ready.extend_from_slice(name);
    ready
}

fn check_ready(kind: Kind, command: &[u8]) -> Result<(), Error> {
    let mut rest = command.strip_prefix(b"\x05READY").ok_or(Error::Protocol("a refusal of the handshake"))?;
    while let [name_length, after @ ..] = rest {
        let Some((name, after)) = after.split_at_checked(usize::from(*name_length)) else { break };
        let Some((length, after)) = after.split_first_chunk() else { break };
        let Some((value, after)) = after.split_at_checked(u32::from_be_bytes(*length) as usize) else {
            break;
        };
        if name.eq_ignore_ascii_case(b"socket-type") {
            return if kind.talks_to(value) {
                Ok(())
            } else {
                Err(Error::Protocol(
                    "the port belongs to another kind of socket; are events and replay swapped?",
                ))
            };
        }
        rest = after;
    }
    Err(Error::Protocol("a handshake without a socket type"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    async fn pair(ours: Kind, theirs: Kind) -> (Result<Socket, Error>, Result<Socket, Error>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = async { Socket::accept(listener.accept().await.unwrap().0, theirs).await };
        tokio::join!(Socket::connect(address, ours), accepting)
    }

    #[tokio::test]
    async fn messages_go_both_ways_and_heartbeats_are_answered() {
        let (dealer, router) = pair(Kind::Dealer, Kind::Router).await;
        let (mut dealer, mut router) = (dealer.unwrap(), router.unwrap());
        dealer.send(&[b"", b"12345678"]).await.unwrap();
        assert_eq!(&router.recv().await.unwrap()[..], [&b""[..], b"12345678"]);
        encode_command(b"\x04PING\0\x0aback", &mut router.outgoing);
        router.send(&[b"", b"answer"]).await.unwrap();
        assert_eq!(&dealer.recv().await.unwrap()[1][..], b"answer");
        dealer.flush().await.unwrap();
        assert_eq!(router.next().await.unwrap(), Incoming::Command(Bytes::from_static(b"\x04PONGback")));
        drop(dealer);
        assert!(matches!(router.recv().await, Err(Error::Closed)));
    }

    #[tokio::test]
    async fn swapped_ports_and_other_servers_are_told_apart() {
        let (sub, _) = pair(Kind::Sub, Kind::Router).await;
        assert!(sub.unwrap_err().to_string().contains("swapped"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let http = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.write_all(&[b'H'; 80]).await.unwrap();
            stream
        });
        assert!(matches!(
            Socket::connect(address, Kind::Sub).await,
            Err(Error::Protocol("no ZMTP greeting"))
        ));
        drop(http);
    }
}
