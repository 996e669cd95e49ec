//! The ports: connections, and the faults that live below HTTP (refuse, reset, silent shutdown).

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::Service;

use super::events::Ports;
use super::fault::{Fault, Faults};
use super::sse::ConnectionReset;
use super::transfer::channel;
use super::{EngineError, EngineState, http};

fn closes_port(faults: &Faults) -> bool {
    faults.refuses() || faults.has(Fault::SilentShutdown)
}

/// One address and what is served there.
struct Port {
    address: SocketAddr,
    listener: Option<TcpListener>,
    router: Router,
}

impl Port {
    fn new(address: SocketAddr, listener: TcpListener, router: Router) -> Self {
        Self { address, listener: Some(listener), router }
    }

    async fn accept(&self) -> std::io::Result<(TcpStream, Router)> {
        match &self.listener {
            Some(listener) => listener.accept().await.map(|(stream, _)| (stream, self.router.clone())),
            None => std::future::pending().await,
        }
    }

    async fn follow(&mut self, closed: bool) -> Result<(), EngineError> {
        if closed {
            self.listener = None;
        } else if self.listener.is_none() {
            let address = self.address;
            let bound = TcpListener::bind(address).await;
            self.listener = Some(bound.map_err(|source| EngineError::Listen { address, source })?);
        }
        Ok(())
    }
}

/// The next connection of any port.
async fn accept(ports: &[Port]) -> std::io::Result<(TcpStream, Router)> {
    let accepts = ports.iter().map(|port| Box::pin(port.accept()));
    futures::future::select_all(accepts).await.0
}

/// Serves until `shutdown`. The ports follow the faults: closed while one of them says so.
pub(super) async fn run(
    state: Arc<EngineState>,
    listener: TcpListener,
    bootstrap: Option<TcpListener>,
    event_ports: Option<Ports>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), EngineError> {
    let mut ports = vec![Port::new(state.address, listener, http::router(&state))];
    if let (Some(listener), Some(address)) = (bootstrap, state.bootstrap) {
        ports.push(Port::new(address, listener, channel::bootstrap(&state)));
    }
    let mut faults = state.faults.subscribe();
    faults.mark_changed();
    let mut tasks = JoinSet::new();
    tasks.spawn(state.scheduler.clone().run(state.faults.subscribe()));
    if let (Some(publisher), Some(ports)) = (&state.publisher, event_ports) {
        tasks.spawn(publisher.clone().run(ports));
    }
    let mut reopen: Option<Instant> = None;
    let mut shutdown = pin!(shutdown);
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => return Ok(()),
            changed = faults.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                let now = faults.borrow_and_update().clone();
                reopen = now.refusal_time().map(|time| Instant::now() + time);
                for port in &mut ports {
                    port.follow(closes_port(&now)).await?;
                }
            }
            () = tokio::time::sleep_until(reopen.unwrap_or_else(Instant::now)), if reopen.is_some() => {
                reopen = None;
                state.clear_fault(Fault::Refuse(None));
            }
            Some(_) = tasks.join_next() => {}
            accepted = accept(&ports) => match accepted {
                Ok((stream, router)) => {
                    tasks.spawn(serve(state.clone(), router, stream));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            },
        }
    }
}

/// Serves one connection until it ends or a fault ends it.
async fn serve(state: Arc<EngineState>, router: Router, stream: TcpStream) {
    let mut faults = state.faults.subscribe();
    if faults.borrow_and_update().has(Fault::ResetAccept) {
        // With no time to linger, closing sends RST instead of FIN.
        let _ = stream.set_zero_linger();
        return;
    }
    let _ = stream.set_nodelay(true);
    let reset = ConnectionReset::default();
    let extension = reset.clone();
    let service = service_fn(move |request: http::HttpRequest<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(extension.clone());
        let response = router.clone().call(request);
        async move { Ok::<_, Infallible>(response.await.unwrap_or_else(|never| match never {})) }
    });
    let service = service_fn(move |request| -> Pin<Box<dyn Future<Output = _> + Send>> {
        Box::pin(hyper::service::Service::call(&service, request))
    });
    let mut connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    loop {
        tokio::select! {
            _ = &mut connection => return,
            () = reset.0.notified() => {
                let _ = connection.into_parts().io.into_inner().set_zero_linger();
                return;
            }
            changed = faults.changed() => {
                if changed.is_err() {
                    return;
                }
                if faults.borrow_and_update().refuses() {
                    Pin::new(&mut connection).graceful_shutdown();
                }
            }
        }
    }
}
