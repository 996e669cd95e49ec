//! The rate limit service that Envoy's filter asks where it enforces token limits in our place.
//!
//! Each descriptor names a limit, whose tokens and which: `limit` (the route, `NAMESPACE/NAME`), `user` (an identity, or
//! empty) and `tokens` (`input` or `output`). Before the request the filter asks with the prompt's tokens as hits of `input`
//! and 0 hits of `output`; after the response it reports the output tokens as hits of `output`, which nothing refuses any
//! more. Hits that are negative come back.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as EnvoyUnit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::Duration as EnvoyDuration;
use tonic::{Request, Response, Status};

use crate::admission::Identity;
use crate::admission::limits::{Both, Charge, Denied, Doors, Kind, Limit, Limiter, Rate, Unit};
use crate::metrics::Metrics;
use crate::refusal::{Refusal, Standing};
use crate::trust::{Caller, Trust};

/// The domain of the shipped Envoy files.
const DOMAIN: &str = "pilotfish";

/// The service.
#[derive(Clone, Debug)]
pub struct TokenLimits {
    doors: Doors,
    metrics: Arc<Metrics>,
    trust: Trust,
}

impl TokenLimits {
    /// A service that admits `trust`ed callers.
    pub fn new(doors: Doors, metrics: Arc<Metrics>, trust: Trust) -> Self {
        Self { doors, metrics, trust }
    }
}

#[tonic::async_trait]
impl RateLimitService for TokenLimits {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        if !request.extensions().get::<Caller>().is_some_and(|caller| self.trust.admits(caller)) {
            self.metrics.untrusted_calls.fetch_add(1, Ordering::Relaxed);
            let why = "list the caller in --trusted-clients, or give it a certificate of --client-ca-file";
            return Err(Status::permission_denied(why));
        }
        let Some(limiter) = self.doors.envoy() else {
            let why = "the picker enforces token limits itself: remove Envoy's rate limit filter, or start the picker with \
                       --limit-enforcement envoy";
            return Err(Status::failed_precondition(why));
        };
        self.metrics.limit_filter.called();
        let request = request.into_inner();
        let asked: Vec<Option<Asked>> =
            request.descriptors.iter().map(|descriptor| read(limiter, &request, descriptor)).collect();
        let unknown = asked.iter().filter(|asked| asked.is_none()).count() as u64;
        self.metrics.unknown_limits.fetch_add(unknown, Ordering::Relaxed);
        decide(limiter, &asked).await.map(Response::new)
    }
}

/// What a descriptor asks.
#[derive(Debug)]
struct Asked {
    limit: Arc<Limit>,
    identity: Identity,
    kind: Kind,
    hits: u64,
    /// Whether the hits are what was used, rather than what will be.
    settles: bool,
    negative: bool,
}

fn read(limiter: &Limiter, request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> Option<Asked> {
    let entry = |key: &str| {
        descriptor.entries.iter().find(|entry| entry.key == key).map(|entry| entry.value.as_str())
    };
    let known = Some(&request.domain).filter(|domain| *domain == DOMAIN).and_then(|_| entry("limit"));
    let limit = known.and_then(|route| limiter.find(route))?;
    let kind = Kind::ALL.into_iter().find(|kind| Some(kind.name()) == entry("tokens"))?;
    let identity = entry("user").filter(|user| !user.is_empty()).map(Identity::named).unwrap_or_default();
    let hits = descriptor.hits_addend.map_or(u64::from(request.hits_addend), |hits| hits.value);
    let negative = descriptor.is_negative_hits;
    let settles = hits > 0 && (kind == Kind::Output || negative);
    Some(Asked { limit, identity, kind, hits, settles, negative })
}

/// Settles what is reported, and charges what is asked for: all of it or nothing.
async fn decide(limiter: &Arc<Limiter>, asked: &[Option<Asked>]) -> Result<RateLimitResponse, Status> {
    let mut answer = RateLimitResponse { overall_code: Code::Ok.into(), ..RateLimitResponse::default() };
    let ok = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
    answer.statuses = vec![ok; asked.len()];
    let mut charges: Vec<Charge> = Vec::new();
    let mut refused: Option<Refusal> = None;
    for asked in asked.iter().flatten().filter(|asked| asked.settles) {
        settle(limiter, asked);
    }
    for demand in demands(asked) {
        match limiter.charge(&demand.limit, &demand.identity, demand.asks).await {
            Ok(charge) => {
                for &(at, kind) in &demand.members {
                    answer.statuses[at] =
                        status(Code::Ok, &demand.limit, kind, *charge.standings().get(kind));
                }
                charges.push(charge);
            }
            Err(Denied::Unavailable) => {
                return Err(Status::unavailable("the token limits cannot be checked at present"));
            }
            Err(denied) => {
                let Denied::Limited(limited) = &denied else { continue };
                for &(at, kind) in demand.members.iter().filter(|(_, kind)| *kind == limited.kind) {
                    answer.statuses[at] =
                        status(Code::OverLimit, &demand.limit, kind, Some(limited.standing));
                }
                let refusal = denied.refusal(&demand.limit);
                refused = refused.filter(|other| other.retry_after >= refusal.retry_after).or(Some(refusal));
            }
        }
    }
    match refused {
        Some(refusal) => {
            answer.overall_code = Code::OverLimit.into();
            answer.response_headers_to_add = refusal_headers(&refusal);
            answer.raw_body = refusal.body().into_bytes();
        }
        None => {
            let scarcest = charges.iter().map(Charge::standing).min_by_key(|standing| standing.remaining);
            answer.response_headers_to_add = scarcest.iter().flat_map(standing_headers).collect();
            charges.into_iter().for_each(Charge::keep);
        }
    }
    Ok(answer)
}

fn settle(limiter: &Arc<Limiter>, asked: &Asked) {
    let hits = i64::try_from(asked.hits).unwrap_or(i64::MAX);
    let mut tokens = Both::default();
    *tokens.get_mut(asked.kind) = if asked.negative { -hits } else { hits };
    limiter.settle(&asked.limit, &asked.identity, &tokens);
}

/// What descriptors ask of one limit for one identity.
struct Demand {
    limit: Arc<Limit>,
    identity: Identity,
    asks: Both<Option<u64>>,
    /// The descriptors, by their positions.
    members: Vec<(usize, Kind)>,
}

/// Descriptors that ask for the same buckets are one demand: both kinds are charged in one step.
fn demands(asked: &[Option<Asked>]) -> impl Iterator<Item = Demand> {
    let mut demands: BTreeMap<(Arc<str>, Identity), Demand> = BTreeMap::new();
    let asks = asked.iter().enumerate().filter_map(|(at, asked)| Some((at, asked.as_ref()?)));
    for (at, asked) in asks.filter(|(_, asked)| !asked.settles) {
        let begin = || {
            let (limit, identity) = (Arc::clone(&asked.limit), asked.identity.clone());
            Demand { limit, identity, asks: Both::default(), members: Vec::new() }
        };
        let demand =
            demands.entry((Arc::clone(&asked.limit.route), asked.identity.clone())).or_insert_with(begin);
        demand.members.push((at, asked.kind));
        let hits = demand.asks.get_mut(asked.kind);
        *hits = Some(hits.unwrap_or(0).saturating_add(asked.hits));
    }
    demands.into_values()
}

fn status(code: Code, limit: &Limit, kind: Kind, standing: Option<Standing>) -> DescriptorStatus {
    let standing = standing.unwrap_or_default();
    DescriptorStatus {
        code: code.into(),
        current_limit: limit.rates.get(kind).map(|rate| current(limit, kind, rate)),
        limit_remaining: standing.remaining,
        duration_until_reset: Some(EnvoyDuration { seconds: i64::from(standing.reset), nanos: 0 }),
        ..DescriptorStatus::default()
    }
}

fn current(limit: &Limit, kind: Kind, rate: Rate) -> RateLimit {
    let unit = match rate.unit {
        Unit::Second => EnvoyUnit::Second,
        Unit::Minute => EnvoyUnit::Minute,
        Unit::Hour => EnvoyUnit::Hour,
        Unit::Day => EnvoyUnit::Day,
        Unit::Month => EnvoyUnit::Month,
    };
    let name = format!("{} {}", limit.route, kind.name());
    RateLimit { name, requests_per_unit: rate.tokens, unit: unit.into() }
}

fn refusal_headers(refusal: &Refusal) -> Vec<HeaderValue> {
    let mut headers = vec![
        header("content-type", "application/json".to_owned()),
        header("x-pilotfish-reason", refusal.reason.name().to_owned()),
    ];
    headers
        .extend(refusal.retry_after.map(|after| header("retry-after", after.as_secs().max(1).to_string())));
    headers.extend(refusal.standing.iter().flat_map(standing_headers));
    headers
}

fn standing_headers(standing: &Standing) -> impl Iterator<Item = HeaderValue> + use<> {
    standing.headers().into_iter().map(|(name, value)| header(name, value.to_string()))
}

fn header(key: &str, value: String) -> HeaderValue {
    HeaderValue { key: key.to_owned(), value, ..HeaderValue::default() }
}
