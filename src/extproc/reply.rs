//! Builds Envoy's messages from decisions. Nothing is echoed that we did not change.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, ImmediateResponse,
    ProcessingResponse, StreamedBodyResponse, TrailersResponse, body_mutation,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{self as pb, Struct, Value};
use smallvec::SmallVec;

use super::message::{LB_NAMESPACE, OWN_NAMESPACE};
use crate::admission::limits::Limiting;
use crate::decide::Served;
use crate::decision::Record;
use crate::disagg::sidecar;
use crate::prefill::Relayed;
use crate::refusal::{Refusal, Standing};
use crate::request::head::Head;
use crate::session::{Carrier, Issuer};
use crate::state::Endpoint;
use crate::usage::{Attribute, Usage};

/// The header and metadata key of the destination.
pub const DESTINATION: &str = "x-gateway-destination-endpoint";
/// The metadata key of the decision.
pub const DECISION: &str = "x-pilotfish-decision";
/// The metadata key of the scores of all candidates.
const SCORES: &str = "x-gateway-destination-endpoint-scores";
const SERVED_FOR_TESTS: &str = "x-conformance-test-served-endpoint";
const SET_COOKIE: &str = "set-cookie";
/// Metadata keys of the composite cluster's members, one endpoint each.
const RANKED_KEYS: [&str; 3] = ["d1", "d2", "d3"];

/// Wraps one reply.
pub fn message(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}

/// Asks Envoy to wait for this answer so much longer than its `message_timeout`; it does within its `max_message_timeout`.
pub fn wait(longer: Duration) -> ProcessingResponse {
    let longer = pb::Duration { seconds: longer.as_secs() as i64, nanos: longer.subsec_nanos() as i32 };
    ProcessingResponse { override_message_timeout: Some(longer), ..ProcessingResponse::default() }
}

/// Goes on with request headers unchanged; the decision comes with the body.
pub fn continue_request_headers() -> ProcessingResponse {
    message(Response::RequestHeaders(HeadersResponse::default()))
}

/// Goes on with response headers, with these in addition.
pub fn response_headers(set_headers: Vec<HeaderValueOption>) -> ProcessingResponse {
    let response = (!set_headers.is_empty()).then(|| CommonResponse {
        header_mutation: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        ..CommonResponse::default()
    });
    message(Response::ResponseHeaders(HeadersResponse { response }))
}

/// The response header that tells conformance tests who has served.
pub fn served_header(address: &str) -> HeaderValueOption {
    set_header(SERVED_FOR_TESTS, address.to_owned())
}

/// Headers that tell the client what it has left of a limit.
pub fn standing_headers(standing: &Standing) -> impl Iterator<Item = HeaderValueOption> + use<> {
    standing.headers().into_iter().map(|(name, value)| set_header(name, value.to_string()))
}

/// What Envoy's files make headers and descriptors of, where limits are.
fn limit_fields(limiting: &Limiting, own: &mut HashMap<String, Value>) {
    match limiting {
        Limiting::Unlimited => {}
        Limiting::ByEnvoy { limit, generates } => {
            own.insert("limit".to_owned(), string(limit.route.to_string()));
            if *generates {
                own.insert("limit_output".to_owned(), string(limit.route.to_string()));
            }
        }
        Limiting::Charged(_) => {
            for (name, value) in limiting.standing().iter().flat_map(Standing::headers) {
                own.insert(name.trim_start_matches("x-").replace('-', "_"), string(value.to_string()));
            }
        }
    }
}

/// Response headers that tell the client where its session is bound.
pub fn session_headers(tokens: &Issuer, endpoint: &Endpoint) -> Vec<HeaderValueOption> {
    let set_headers = tokens.carriers().map(|carrier| {
        let (name, value) = session_header(carrier, tokens.token(endpoint));
        let mut header = set_header(name, value);
        if matches!(carrier, Carrier::Cookie(_)) {
            // The engine's own cookies stay.
            header.append_action = HeaderAppendAction::AppendIfExistsOrAdd.into();
        }
        header
    });
    set_headers.collect()
}

/// The response header that brings a token to where the client must send it from.
fn session_header(carrier: &Carrier, token: String) -> (&str, String) {
    match carrier {
        Carrier::Header(name) => (name, token),
        Carrier::Cookie(name) => (SET_COOKIE, format!("{name}={token}; Path=/; HttpOnly; SameSite=Lax")),
    }
}

/// Goes on after request trailers.
pub fn continue_request_trailers() -> ProcessingResponse {
    message(Response::RequestTrailers(TrailersResponse::default()))
}

/// Goes on after response trailers.
pub fn continue_response_trailers() -> ProcessingResponse {
    message(Response::ResponseTrailers(TrailersResponse::default()))
}

/// Retries that Envoy may make, if not its own number. Where endpoints have roles, no more than there are alternatives: what
/// Envoy falls back to knows of no roles.
fn retries(served: &Served) -> Option<u32> {
    let asked = served.traffic.attempts;
    if served.leg.pool.disaggregation.is_none() {
        return asked;
    }
    let alternatives = served.ranked.len().saturating_sub(1) as u32;
    Some(asked.map_or(alternatives, |asked| asked.min(alternatives)))
}

/// What a decision changes in the request's headers.
pub fn mutation(served: &Served, new_length: Option<usize>) -> HeaderMutation {
    let mut set = vec![set_header(DESTINATION, destinations(served))];
    if let Some(length) = new_length {
        set.push(set_header("content-length", length.to_string()));
    }
    if let Some(prefill) = &served.by_sidecar {
        set.push(set_header(sidecar::HEADER, prefill.ranked[0].endpoint.destination.to_string()));
    }
    if let Some(rank) = served.ranked.first().and_then(|endpoint| endpoint.rank_header())
        && served.ranked.iter().all(|endpoint| endpoint.rank_header() == Some(rank))
    {
        set.push(set_header("x-data-parallel-rank", rank.to_string()));
    }
    if let Some(timeout) = served.traffic.timeout {
        set.push(set_header("x-envoy-upstream-rq-timeout-ms", timeout.as_millis().to_string()));
    }
    if let Some(retries) = retries(served) {
        set.push(set_header("x-envoy-max-retries", retries.to_string()));
    }
    let destination = |name: &&str| *name != DESTINATION;
    let mut remove: Vec<String> = served.head.to_remove().filter(destination).map(str::to_owned).collect();
    remove.dedup();
    if served.decoded {
        remove.push("content-encoding".to_owned());
    }
    if served.withhold_usage && served.head.get("accept-encoding").is_some() {
        remove.push("accept-encoding".to_owned());
    }
    if let Some(tokens) = &served.tokens {
        take_tokens(tokens, &served.head, &mut set, &mut remove);
    }
    HeaderMutation { set_headers: set, remove_headers: remove }
}

/// Session tokens are for us: what stands where they do reaches no engine, valid or not.
fn take_tokens(tokens: &Issuer, head: &Head, set: &mut Vec<HeaderValueOption>, remove: &mut Vec<String>) {
    let mut cookies: SmallVec<[&str; 1]> = SmallVec::new();
    for carrier in tokens.carriers() {
        match carrier {
            Carrier::Header(name) if head.get(name).is_some() && !remove.iter().any(|n| **n == **name) => {
                remove.push(name.to_string());
            }
            Carrier::Cookie(name) if head.cookie(name).is_some() => cookies.push(name),
            _ => {}
        }
    }
    if cookies.is_empty() {
        return;
    }
    // Envoy removes before it sets, so several lines become one.
    remove.push("cookie".to_owned());
    let rest = head.cookies_without(&cookies);
    if !rest.is_empty() {
        set.push(set_header("cookie", rest));
    }
}

/// `ip:port,ip:port`, best first.
fn destinations(served: &Served) -> String {
    match &served.ranked[..] {
        [one] => one.destination.to_string(),
        many => many.iter().map(|endpoint| &*endpoint.destination).collect::<Vec<_>>().join(","),
    }
}

/// What Envoy's clusters, logs and limits read: the destination in every form, the decision, the request in numbers.
/// Also what every endpoint that may serve would tell the client of its session: where Envoy does not show us response
/// headers, and no message says whether it will, it takes the header from here, by the address that served.
pub fn metadata(served: &Served, record: &Record, with_scores: bool) -> Struct {
    let mut lb = HashMap::with_capacity(5);
    lb.insert(DESTINATION.to_owned(), string(destinations(served)));
    lb.insert(DECISION.to_owned(), string(record.id.to_string()));
    for (key, endpoint) in RANKED_KEYS.iter().zip(&served.ranked) {
        lb.insert((*key).to_owned(), string(endpoint.destination.to_string()));
    }
    if with_scores {
        lb.insert(SCORES.to_owned(), structure(scores(record)));
    }
    let mut own = HashMap::with_capacity(5);
    own.insert("model".to_owned(), string(record.model.to_string()));
    if let Some(target) = &record.target_model {
        own.insert("target_model".to_owned(), string(target.to_string()));
    }
    if let Some(pool) = &record.pool {
        own.insert("pool".to_owned(), string(pool.to_string()));
    }
    if let Some(user) = record.identity.name() {
        own.insert("user".to_owned(), string(user.to_owned()));
    }
    own.insert("prompt_tokens".to_owned(), number(record.prompt_tokens));
    limit_fields(&served.limiting, &mut own);
    if let Some(tokens) = &served.tokens {
        own.insert("session".to_owned(), structure(session_by_address(tokens)));
    }
    Struct {
        fields: HashMap::from([
            (LB_NAMESPACE.to_owned(), structure(lb)),
            (OWN_NAMESPACE.to_owned(), structure(own)),
        ]),
    }
}

/// Address -> weighted sum of the scores, of every candidate that no filter dropped.
fn scores(record: &Record) -> HashMap<String, Value> {
    let candidates = record.legs.first().into_iter().flat_map(|leg| &leg.rows);
    let candidates = candidates.filter(|row| row.filtered_by.is_none());
    let score = |total: f32| Value { kind: Some(Kind::NumberValue(f64::from(total))) };
    candidates.map(|row| (row.endpoint.to_string(), score(row.total))).collect()
}

/// Response header -> address -> value.
fn session_by_address(tokens: &Issuer) -> HashMap<String, Value> {
    let by_address = |carrier| {
        let header = |endpoint: &Arc<Endpoint>| {
            let (_, value) = session_header(carrier, tokens.token(endpoint));
            (endpoint.destination.to_string(), string(value))
        };
        structure(tokens.ranked().iter().map(header).collect())
    };
    let name = |carrier: &Carrier| match carrier {
        Carrier::Header(name) => name.to_string(),
        Carrier::Cookie(_) => SET_COOKIE.to_owned(),
    };
    tokens.carriers().map(|carrier| (name(carrier), by_address(carrier))).collect()
}

/// The output tokens, once known, and what the operator has reported of them.
pub fn usage(usage: &Usage, reports: &[Arc<Attribute>]) -> Struct {
    let own = HashMap::from([("output_tokens".to_owned(), number(usage.completion))]);
    let mut namespaces = HashMap::from([(OWN_NAMESPACE.to_owned(), own)]);
    for report in reports {
        if let Some(value) = report.value(usage) {
            let value = Value { kind: Some(Kind::NumberValue(value as f64)) };
            namespaces
                .entry(report.namespace.to_string())
                .or_default()
                .insert(report.name.to_string(), value);
        }
    }
    Struct { fields: namespaces.into_iter().map(|(name, fields)| (name, structure(fields))).collect() }
}

/// A header reply that carries a decision.
pub fn routed_headers(mutation: HeaderMutation, metadata: Struct) -> ProcessingResponse {
    let response = CommonResponse {
        header_mutation: Some(mutation),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        dynamic_metadata: Some(metadata),
        ..message(Response::RequestHeaders(HeadersResponse { response: Some(response) }))
    }
}

/// A body reply of the buffered modes that carries a decision; `body` replaces what came.
pub fn routed_body(mutation: HeaderMutation, metadata: Struct, body: Option<Vec<u8>>) -> ProcessingResponse {
    let response = CommonResponse {
        header_mutation: Some(mutation),
        body_mutation: body.map(|body| BodyMutation { mutation: Some(body_mutation::Mutation::Body(body)) }),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        dynamic_metadata: Some(metadata),
        ..message(Response::RequestBody(BodyResponse { response: Some(response) }))
    }
}

/// One piece of a request body in full duplex.
pub fn request_piece(body: Vec<u8>, end_of_stream: bool) -> ProcessingResponse {
    message(Response::RequestBody(BodyResponse { response: Some(streamed(body, end_of_stream)) }))
}

/// One piece of a response body in full duplex.
pub fn response_piece(body: Vec<u8>, end_of_stream: bool) -> ProcessingResponse {
    message(Response::ResponseBody(BodyResponse { response: Some(streamed(body, end_of_stream)) }))
}

/// The reply to a response body piece in the other modes; `body` replaces what came.
pub fn response_body(body: Option<Vec<u8>>) -> ProcessingResponse {
    let response = body.map(|body| CommonResponse {
        body_mutation: Some(BodyMutation { mutation: Some(body_mutation::Mutation::Body(body)) }),
        ..CommonResponse::default()
    });
    message(Response::ResponseBody(BodyResponse { response }))
}

fn streamed(body: Vec<u8>, end_of_stream: bool) -> CommonResponse {
    let piece = StreamedBodyResponse { body, end_of_stream, ..StreamedBodyResponse::default() };
    CommonResponse {
        body_mutation: Some(BodyMutation {
            mutation: Some(body_mutation::Mutation::StreamedResponse(piece)),
        }),
        ..CommonResponse::default()
    }
}

/// Answers the client in place of an engine: a refusal.
pub fn refused(refusal: &Refusal) -> ProcessingResponse {
    let reason = refusal.reason;
    let mut headers = vec![
        set_header("content-type", "application/json".to_owned()),
        set_header("x-pilotfish-reason", reason.name().to_owned()),
    ];
    if let Some(dropped) = reason.dropped_reason() {
        headers.push(set_header("x-llm-d-request-dropped-reason", dropped.to_owned()));
    }
    if let Some(after) = refusal.retry_after {
        headers.push(set_header("retry-after", after.as_secs().max(1).to_string()));
    }
    headers.extend(refusal.standing.iter().flat_map(standing_headers));
    immediate(
        reason.status(),
        headers,
        refusal.body(),
        format!("pilotfish_{}", reason.name().replace('-', "_")),
    )
}

/// Answers the client in place of an engine: a JSON body.
pub fn answered(body: String) -> ProcessingResponse {
    let headers = vec![set_header("content-type", "application/json".to_owned())];
    immediate(200, headers, body, "pilotfish_answered".to_owned())
}

/// Tells the client what a prefill endpoint said of its request.
pub fn relayed(relayed: Relayed) -> ProcessingResponse {
    let content_type = relayed.content_type.map_or("application/json".to_owned(), String::from);
    let headers = vec![set_header("content-type", content_type)];
    immediate(relayed.status, headers, relayed.body, "pilotfish_prefill_answered".to_owned())
}

fn immediate(
    status: u16,
    set_headers: Vec<HeaderValueOption>,
    body: impl Into<Vec<u8>>,
    details: String,
) -> ProcessingResponse {
    message(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: i32::from(status) }),
        headers: Some(HeaderMutation { set_headers, remove_headers: Vec::new() }),
        body: body.into(),
        details,
        ..ImmediateResponse::default()
    }))
}

fn set_header(name: &str, value: String) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue {
            key: name.to_owned(),
            raw_value: value.into_bytes(),
            ..HeaderValue::default()
        }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

fn string(text: String) -> Value {
    Value { kind: Some(Kind::StringValue(text)) }
}

fn number(value: u64) -> Value {
    Value { kind: Some(Kind::NumberValue(value as f64)) }
}

fn structure(fields: HashMap<String, Value>) -> Value {
    Value { kind: Some(Kind::StructValue(Struct { fields })) }
}
