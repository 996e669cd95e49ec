//! Envoy's access log over gRPC: the second witness of how a request ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::address::Address as AddressKind;
use envoy_types::pb::envoy::config::core::v3::socket_address::PortSpecifier;
use envoy_types::pb::envoy::config::core::v3::{Address, Metadata};
use envoy_types::pb::envoy::data::accesslog::v3::{
    AccessLogCommon, AccessLogType, HttpAccessLogEntry, ResponseFlags,
};
use envoy_types::pb::envoy::service::accesslog::v3::access_log_service_server::AccessLogService;
use envoy_types::pb::envoy::service::accesslog::v3::stream_access_logs_message::LogEntries;
use envoy_types::pb::envoy::service::accesslog::v3::{StreamAccessLogsMessage, StreamAccessLogsResponse};
use envoy_types::pb::google::protobuf::value::Kind;
use tonic::{Request, Response, Status, Streaming};

use super::message;
use super::reply::DECISION;
use crate::metrics::Metrics;
use crate::settle::{AccessLogFacts, Ledger};
use crate::state::pool::BrokenCause;
use crate::trust::{Caller, Trust};

/// The custom tag of the shipped Envoy files: request sent to first response body byte, milliseconds.
const TTFT_TAG: &str = "ttft_ms";

/// The service.
#[derive(Clone, Debug)]
pub struct AccessLog {
    ledger: Arc<Ledger>,
    metrics: Arc<Metrics>,
    trust: Trust,
}

impl AccessLog {
    /// A service that admits `trust`ed callers.
    pub fn new(ledger: Arc<Ledger>, metrics: Arc<Metrics>, trust: Trust) -> Self {
        Self { ledger, metrics, trust }
    }
}

#[tonic::async_trait]
impl AccessLogService for AccessLog {
    async fn stream_access_logs(
        &self,
        request: Request<Streaming<StreamAccessLogsMessage>>,
    ) -> Result<Response<StreamAccessLogsResponse>, Status> {
        if !request.extensions().get::<Caller>().is_some_and(|caller| self.trust.admits(caller)) {
            self.metrics.untrusted_calls.fetch_add(1, Ordering::Relaxed);
            let why = "list the caller in --trusted-clients, or give it a certificate of --client-ca-file";
            return Err(Status::permission_denied(why));
        }
        let mut messages = request.into_inner();
        while let Some(message) = messages.message().await? {
            if let Some(LogEntries::HttpLogs(entries)) = message.log_entries {
                for entry in &entries.log_entry {
                    if let Some((decision, facts)) = read(entry) {
                        self.ledger.access_log(decision, facts);
                    }
                }
            }
        }
        Ok(Response::new(StreamAccessLogsResponse {}))
    }
}

/// The decision an entry names, and what it says; `None` for requests that no picker decided.
fn read(entry: &HttpAccessLogEntry) -> Option<(&str, AccessLogFacts)> {
    let common = entry.common_properties.as_ref()?;
    let kind = AccessLogType::try_from(common.access_log_type).unwrap_or(AccessLogType::NotSet);
    // Entries in the middle of a request, or of single attempts, say nothing of its end.
    if !matches!(kind, AccessLogType::NotSet | AccessLogType::DownstreamEnd) {
        return None;
    }
    let decision = decision(common.metadata.as_ref()?)?;
    let response = entry.response.as_ref();
    let details = response.map_or("", |r| r.response_code_details.as_str());
    let ttft = common.custom_tags.get(TTFT_TAG).and_then(|tag| tag.parse::<f64>().ok());
    Some((
        decision,
        AccessLogFacts {
            status: response.and_then(|r| r.response_code).map_or(0, |code| code.value as u16),
            from_upstream: details == "via_upstream",
            attempts: common.upstream_request_attempt_count,
            served: common.upstream_remote_address.as_ref().and_then(socket_address),
            response_bytes: response.map_or(0, |r| r.response_body_bytes),
            usage: message::usage(common.metadata.as_ref()),
            time_to_first_token: ttft.and_then(|millis| Duration::try_from_secs_f64(millis / 1e3).ok()),
            broken: broken(common, details),
        },
    ))
}

fn decision(metadata: &Metadata) -> Option<&str> {
    match &metadata.filter_metadata.get(message::LB_NAMESPACE)?.fields.get(DECISION)?.kind {
        Some(Kind::StringValue(id)) => Some(id),
        _ => None,
    }
}

fn socket_address(address: &Address) -> Option<std::net::SocketAddr> {
    let Some(AddressKind::SocketAddress(address)) = &address.address else { return None };
    let Some(PortSpecifier::PortValue(port)) = address.port_specifier else { return None };
    Some(std::net::SocketAddr::new(address.address.parse().ok()?, u16::try_from(port).ok()?))
}

/// Why the response broke off: by Envoy's flags, or by the details it gives where flags are silent.
fn broken(common: &AccessLogCommon, details: &str) -> Option<BrokenCause> {
    let none = ResponseFlags::default();
    let flags = common.response_flags.as_ref().unwrap_or(&none);
    if flags.downstream_connection_termination
        || flags.downstream_remote_reset
        || details.starts_with("downstream")
    {
        Some(BrokenCause::Client)
    } else if flags.upstream_request_timeout
        || flags.stream_idle_timeout
        || flags.duration_timeout
        || flags.upstream_max_stream_duration_reached
    {
        Some(BrokenCause::Timeout)
    } else if flags.upstream_connection_termination
        || flags.upstream_remote_reset
        || flags.upstream_connection_failure
        || flags.local_reset
        || flags.upstream_protocol_error
        || details.starts_with("upstream_reset")
    {
        Some(BrokenCause::Upstream)
    } else {
        None
    }
}
