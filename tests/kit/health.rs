//! A client of gRPC health.

use std::net::SocketAddr;

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use super::eventually::within;

fn question(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

/// A new connection without TLS.
pub async fn plain(address: SocketAddr) -> Channel {
    Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap()
}

/// What health says of a service.
pub async fn check(channel: Channel, service: &str) -> Result<ServingStatus, Status> {
    let answer = within("health", HealthClient::new(channel).check(question(service))).await?;
    Ok(answer.into_inner().status())
}

/// Whether it is served, `None` if it is not known.
pub async fn serves(channel: Channel, service: &str) -> Option<bool> {
    match check(channel, service).await {
        Ok(ServingStatus::Serving) => Some(true),
        Ok(ServingStatus::NotServing) => Some(false),
        Err(status) if status.code() == Code::NotFound => None,
        other => panic!("{service}: {other:?}"),
    }
}

/// An open watch of a service.
#[derive(Debug)]
pub struct Watch(Streaming<HealthCheckResponse>);

impl Watch {
    /// Opens one.
    pub async fn of(channel: Channel, service: &str) -> Self {
        Self(HealthClient::new(channel).watch(question(service)).await.unwrap().into_inner())
    }

    /// The next status; `None` at the end.
    pub async fn next(&mut self) -> Option<ServingStatus> {
        let message = within("a change of health", self.0.message()).await;
        message.ok().flatten().map(|answer| answer.status())
    }
}
