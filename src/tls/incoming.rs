//! Connections as they come: accepted at once, handed on when their handshake is done.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, stream};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use super::Tls;
use crate::metrics::Metrics;
use crate::trust::Caller;

/// The longest a handshake may take: what is silent until then is no client of ours.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Pause after a failure to accept, such as for want of file descriptors: at once it would fail again.
const PAUSE: Duration = Duration::from_millis(50);

/// A connection with or without TLS.
#[derive(Debug)]
pub struct Connection {
    transport: Transport,
    /// Learned when it was accepted: of a connection that the caller has closed the system knows no address.
    caller: Caller,
}

#[derive(Debug)]
enum Transport {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Transport::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().transport {
            Transport::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Transport::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Plain(stream) => stream.is_write_vectored(),
            Transport::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

struct Door {
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    metrics: Arc<Metrics>,
    handshakes: JoinSet<io::Result<Connection>>,
}

/// The connections that `listener` takes, with TLS if given. Handshakes run beside each other; one that fails or hangs
/// is counted and concerns nobody else. Never ends and never fails; dropping it closes the listener.
pub fn incoming(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    metrics: Arc<Metrics>,
) -> impl Stream<Item = io::Result<Connection>> + Send {
    let door = Door { listener, tls, metrics, handshakes: JoinSet::new() };
    stream::unfold(door, |mut door| async move { Some((Ok(door.next().await), door)) })
}

impl Door {
    async fn next(&mut self) -> Connection {
        loop {
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, from)) => {
                        // It fails on connections that are gone already, which reading will tell.
                        let _ = stream.set_nodelay(true);
                        match &self.tls {
                            None => {
                                let caller = Caller { address: Some(from), certified: false };
                                return Connection { transport: Transport::Plain(stream), caller };
                            }
                            Some(tls) => drop(self.handshakes.spawn(handshake(tls.config(), stream, from))),
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(PAUSE).await;
                    }
                },
                Some(done) = self.handshakes.join_next(), if !self.handshakes.is_empty() => match done {
                    Ok(Ok(connection)) => return connection,
                    Ok(Err(error)) => self.failed(&error),
                    Err(error) => self.failed(&error),
                },
            }
        }
    }

    fn failed(&self, error: &(dyn std::error::Error + 'static)) {
        self.metrics.failed_handshakes.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(error, "a TLS handshake failed");
    }
}

async fn handshake(config: Arc<ServerConfig>, stream: TcpStream, from: SocketAddr) -> io::Result<Connection> {
    let done = timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await??;
    // A server without a CA for its clients asks for no certificate, so one that is here has been verified.
    let certified = done.get_ref().1.peer_certificates().is_some();
    let caller = Caller { address: Some(from), certified };
    Ok(Connection { transport: Transport::Tls(Box::new(done)), caller })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::{CERTIFICATE_FILE, KEY_FILE, TlsOptions};
    use futures::StreamExt;
    use rstest::rstest;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use rustls::{ClientConfig, RootCertStore};
    use std::fs;
    use tokio_rustls::TlsConnector;

    /// A caller with a certificate that is server's and client's alike, which signs itself.
    #[rstest]
    #[tokio::test]
    async fn a_caller_is_certified_by_a_ca_of_clients_alone(#[values(true, false)] with_client_ca: bool) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(CERTIFICATE_FILE);
        fs::write(&file, made.cert.pem()).unwrap();
        fs::write(dir.path().join(KEY_FILE), made.signing_key.serialize_pem()).unwrap();
        let options = TlsOptions {
            dir: Some(dir.path().to_owned()),
            client_ca: with_client_ca.then_some(file),
            ..TlsOptions::default()
        };
        let tls = Arc::new(Tls::new(options).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut incoming = Box::pin(incoming(listener, Some(tls), Arc::default()));

        let certificate: CertificateDer<'static> = made.cert.into();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.clone()).unwrap();
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)
            .unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let from = stream.local_addr().unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let connecting = connector.connect("localhost".try_into().unwrap(), stream);
        let (connected, accepted) = tokio::join!(connecting, incoming.next());
        connected.unwrap();
        let caller = accepted.unwrap().unwrap().connect_info();
        assert_eq!(caller, Caller { address: Some(from), certified: with_client_ca });
    }
}
