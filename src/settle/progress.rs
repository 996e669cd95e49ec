//! What the witnesses of a response report.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::Instant;

use crate::state::pool::BrokenCause;
use crate::usage::Usage;

/// What the ext_proc stream has seen.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// When the decision went out.
    pub decided: Option<Instant>,
    /// When the last message of the response phase came.
    pub last_word: Option<Instant>,
    /// When the first body byte came.
    pub first_byte: Option<Instant>,
    /// Whether anything of a response was seen.
    pub response_begun: bool,
    /// Whether its end was seen: the last piece, or trailers.
    pub complete: bool,
    /// Whether trailers came.
    pub trailers: bool,
    /// Response status, 0 if unknown.
    pub status: u16,
    /// Whether an engine answered, rather than Envoy in its place.
    pub from_upstream: Option<bool>,
    /// Attempts of Envoy's router, 0 if unknown.
    pub attempts: u32,
    /// The endpoint that served.
    pub served: Option<SocketAddr>,
    /// Body bytes seen.
    pub response_bytes: u64,
    /// Events with data seen, about one a token; 0 where the body is no stream.
    pub events: u64,
    /// Usage from Envoy's own filter.
    pub usage_in_trailers: Option<Usage>,
    /// Usage from our scanner.
    pub usage_scanned: Option<Usage>,
    /// Whether the stream carried an error object behind its status 200.
    pub saw_error: bool,
    /// Whether the stream announced its own end (`[DONE]` and its kin).
    pub saw_done: bool,
}

impl Progress {
    /// Takes over what a message says of the upstream side.
    pub fn learn(&mut self, facts: &UpstreamFacts) {
        self.served = facts.served.or(self.served);
        self.attempts = facts.attempts.unwrap_or(self.attempts);
        self.status = facts.status.unwrap_or(self.status);
        self.from_upstream = facts.from_upstream.or(self.from_upstream);
    }

    /// The best usage known from the stream.
    pub fn usage(&self) -> Option<Usage> {
        self.usage_in_trailers.or(self.usage_scanned)
    }

    /// Decision to first body byte.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        Some(self.first_byte?.duration_since(self.decided?))
    }
}

/// What the response phase says about the upstream side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpstreamFacts {
    /// The endpoint that served.
    pub served: Option<SocketAddr>,
    /// Attempts of Envoy's router.
    pub attempts: Option<u32>,
    /// Response status.
    pub status: Option<u16>,
    /// Whether the response came from upstream, rather than from Envoy in its place.
    pub from_upstream: Option<bool>,
}

/// What an access-log entry says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AccessLogFacts {
    /// Response status, 0 if unknown.
    pub status: u16,
    /// Whether an engine answered.
    pub from_upstream: bool,
    /// Attempts.
    pub attempts: u32,
    /// The endpoint that served.
    pub served: Option<SocketAddr>,
    /// Response body bytes.
    pub response_bytes: u64,
    /// Usage from Envoy's own filter.
    pub usage: Option<Usage>,
    /// Request sent to first response body byte.
    pub time_to_first_token: Option<Duration>,
    /// Why the response broke off, if it did.
    pub broken: Option<BrokenCause>,
}
