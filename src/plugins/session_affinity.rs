//! What both session affinities share: their parameters, and the endpoint that a request is bound to.

use std::sync::Arc;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::schedule::plugin::{Needs, ParameterError, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::session::{Binding, Carrier, Session};

/// How a session is bound to an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// The response carries a signed token that names the endpoint, and the client brings it back.
    #[default]
    EncodedEndpointHeader,
    /// The client sends an id of its own, and a table here says where it is bound.
    SessionId,
}

/// Where the token stands.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct HeaderConfig {
    /// The request and response header; `x-session-token` if none is given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
}

/// Where a session id may stand: exactly one of these.
#[derive(Clone, Debug, Default, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct SourceConfig {
    /// A request header.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// A cookie.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cookie: Option<String>,
    /// llm-d's name for what a `session-id-producer` or `agent-identity` of the same configuration reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attribute: Option<String>,
}

/// Ids and their table.
#[derive(Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct IdConfig {
    /// The first source that is present wins; the header `x-session-id` if none is given.
    pub sources: Vec<SourceConfig>,
    /// Seconds that a binding lives without a request, above 0.
    pub eviction_ttl_seconds: f64,
    /// Accepted as llm-d has it; has no effect: expired bindings go when the next is made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction_sweep_seconds: Option<f64>,
    /// Most bindings kept, at least 1; the oldest go.
    pub max_sessions: usize,
}

impl Default for IdConfig {
    fn default() -> Self {
        Self {
            sources: Vec::new(),
            eviction_ttl_seconds: 300.0,
            eviction_sweep_seconds: None,
            max_sessions: 100_000,
        }
    }
}

/// Parameters of both plugins.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Parameters {
    /// `encoded_endpoint_header` or `session_id`; the settings of the other have no effect.
    pub strategy: Strategy,
    /// The header of `encoded_endpoint_header`.
    pub encoded_endpoint_header_config: HeaderConfig,
    /// A cookie in place of the header of `encoded_endpoint_header`, for browsers: answered by
    /// `set-cookie: NAME=token; Path=/; HttpOnly; SameSite=Lax`.
    pub cookie: Option<String>,
    /// The sources and the table of `session_id`.
    pub session_id_config: IdConfig,
    /// Accepted as llm-d has it; has no effect: one profile is run.
    pub profile_name: Option<String>,
}

/// The parameters' schema under a manual of its own.
pub fn schema(manual: &str) -> schemars::Schema {
    let mut schema = schemars::schema_for!(Parameters);
    schema.insert("description".to_owned(), Value::String(manual.to_owned()));
    schema
}

/// Reads the parameters of either plugin.
pub fn affinity(given: Value) -> Result<Affinity, ParameterError> {
    let config = parameters::<Parameters>(given)?;
    let binding = match config.strategy {
        Strategy::EncodedEndpointHeader => token(config)?,
        Strategy::SessionId => id(&config.session_id_config)?,
    };
    Ok(Affinity { binding: Arc::new(binding) })
}

fn token(config: Parameters) -> Result<Binding, ParameterError> {
    let carrier = match (config.cookie, config.encoded_endpoint_header_config.header) {
        (Some(_), Some(_)) => {
            let why = "give `cookie` or `encodedEndpointHeaderConfig.header`, not both";
            return Err(ParameterError(why.to_owned()));
        }
        (Some(name), None) => cookie(&name)?,
        (None, Some(name)) => token_header(&name)?,
        (None, None) => token_header("x-session-token")?,
    };
    Ok(Binding::Token(carrier))
}

fn id(config: &IdConfig) -> Result<Binding, ParameterError> {
    let ttl = Duration::try_from_secs_f64(config.eviction_ttl_seconds).unwrap_or_default();
    if ttl.is_zero() {
        return Err(ParameterError("`evictionTtlSeconds` must be above 0".to_owned()));
    }
    if config.max_sessions == 0 {
        return Err(ParameterError("`maxSessions` must be 1 or more".to_owned()));
    }
    let mut sources = config.sources.iter().map(source).collect::<Result<Vec<_>, _>>()?;
    if sources.is_empty() {
        sources.push(header("x-session-id")?);
    }
    Ok(Binding::Id { sources, ttl, capacity: config.max_sessions })
}

fn source(config: &SourceConfig) -> Result<Carrier, ParameterError> {
    match (&config.header, &config.cookie, &config.attribute) {
        (Some(name), None, None) => header(name),
        (None, Some(name), None) => cookie(name),
        (None, None, Some(name)) => {
            let why = "nothing in this configuration publishes the attribute";
            Err(ParameterError(format!("{why} `{name}`: give a `header` or a `cookie`")))
        }
        _ => Err(ParameterError("a source is exactly one of `header` and `cookie`".to_owned())),
    }
}

fn header(name: &str) -> Result<Carrier, ParameterError> {
    let name = name.trim().to_ascii_lowercase();
    // Destinations, decisions and what Envoy frames messages by are not a client's to give, nor ours to replace.
    let reserved = ["cookie", "set-cookie", "content-length", "transfer-encoding", "host", "connection"];
    if !is_token(&name) || reserved.contains(&&*name) || crate::request::head::is_control(&name) {
        return Err(ParameterError(format!("`{name}` cannot be the header of a session")));
    }
    Ok(Carrier::Header(name.into()))
}

/// Tokens are taken out of the request and put into the response: what means something else to client or engine cannot be it.
fn token_header(name: &str) -> Result<Carrier, ParameterError> {
    let carrier = header(name)?;
    let means_something = [
        "authorization",
        "proxy-authorization",
        "content-type",
        "content-encoding",
        "accept",
        "accept-encoding",
        "te",
        "upgrade",
        "user-agent",
        "x-request-id",
    ];
    match &carrier {
        Carrier::Header(name)
            if means_something.contains(&&**name)
                || name.starts_with("x-envoy-")
                || name.starts_with("x-forwarded-")
                || crate::request::head::PRIVILEGED.contains(&&**name) =>
        {
            Err(ParameterError(format!(
                "`{name}` cannot be the header of a token: it means something else already"
            )))
        }
        _ => Ok(carrier),
    }
}

fn cookie(name: &str) -> Result<Carrier, ParameterError> {
    if is_token(name) {
        Ok(Carrier::Cookie(name.into()))
    } else {
        Err(ParameterError(format!("`{name}` is no name of a cookie")))
    }
}

/// Whether a text is a `token` of RFC 9110, section 5.6.2, as names of headers and cookies are.
fn is_token(name: &str) -> bool {
    let special = b"!#$%&'*+-.^_`|~";
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || special.contains(&byte))
}

/// A configured affinity.
#[derive(Debug)]
pub struct Affinity {
    binding: Arc<Binding>,
}

impl Affinity {
    /// What it needs to be known.
    pub fn needs(&self) -> Needs {
        Needs { session: Some(Arc::clone(&self.binding)), ..Needs::default() }
    }

    /// The candidate that the request is bound to, if any is.
    pub fn bound(&self, cx: &Cycle<'_>, candidates: &[Candidate]) -> Option<usize> {
        let slot = Session::under(cx.ask.sessions, &self.binding)?.bound(cx.now)?;
        candidates.iter().position(|candidate| cx.endpoint(candidate).slot == slot)
    }
}

#[cfg(test)]
pub mod testing {
    //! A request of a session that a token binds.

    use super::*;
    use crate::request::head::Head;
    use crate::session::{self, Key};
    use crate::state::Pool;

    /// The session of a request to `pool` whose token names the endpoint of another pool's member, as that stood once.
    pub fn session(pool: &Pool, bound: &crate::state::Endpoint) -> Session {
        let affinity = Arc::new(session::Affinity::new(Binding::Token(header("x-session-token").unwrap())));
        let key = Key::random();
        let token = key.token(pool, bound);
        let head = Head::new([("x-session-token".to_owned(), token)]);
        Session::read(&affinity, &head, pool, &key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn header_of(name: &str) -> Carrier {
        Carrier::Header(name.into())
    }

    #[rstest]
    #[case(Value::Null, header_of("x-session-token"))]
    #[case(json!({"strategy": "encoded_endpoint_header", "profileName": "decode"}), header_of("x-session-token"))]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "X-My-Token"}}), header_of("x-my-token"))]
    #[case(json!({"cookie": "chat"}), Carrier::Cookie("chat".into()))]
    fn tokens_stand_where_the_parameters_say(#[case] given: Value, #[case] carrier: Carrier) {
        assert_eq!(*affinity(given).unwrap().binding, Binding::Token(carrier));
    }

    #[test]
    fn ids_have_llm_ds_defaults_and_sources_in_order() {
        let binding = |given| (*affinity(given).unwrap().binding).clone();
        let expected =
            |sources, secs, capacity| Binding::Id { sources, ttl: Duration::from_millis(secs), capacity };
        assert_eq!(
            binding(json!({"strategy": "session_id"})),
            expected(vec![header_of("x-session-id")], 300_000, 100_000)
        );
        let sources = json!([{"header": "Session-Id"}, {"cookie": "Chat"}]);
        let config = json!({"sources": sources, "evictionTtlSeconds": 1.5, "evictionSweepSeconds": 10, "maxSessions": 7});
        assert_eq!(
            binding(json!({"strategy": "session_id", "sessionIdConfig": config})),
            expected(vec![header_of("session-id"), Carrier::Cookie("Chat".into())], 1_500, 7)
        );
    }

    #[rstest]
    #[case(json!({"strategy": "sticky"}), "unknown variant `sticky`")]
    #[case(json!({"cookie": "a", "encodedEndpointHeaderConfig": {"header": "b"}}), "not both")]
    #[case(json!({"cookie": "a b"}), "no name of a cookie")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": ":path"}}), "cannot be the header")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "x-gateway-destination-endpoint"}}), "cannot be the header")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "Set-Cookie"}}), "cannot be the header")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "Authorization"}}), "means something else")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "x-envoy-attempt-count"}}), "means something else")]
    #[case(json!({"encodedEndpointHeaderConfig": {"header": "x-llm-d-model-name-rewrite"}}), "means something else")]
    #[case(json!({"strategy": "session_id", "sessionIdConfig": {"sources": [{}]}}), "exactly one")]
    #[case(json!({"strategy": "session_id", "sessionIdConfig": {"sources": [{"header": "a", "cookie": "b"}]}}), "exactly one")]
    #[case(json!({"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "a"}]}}), "attribute `a`")]
    #[case(json!({"strategy": "session_id", "sessionIdConfig": {"evictionTtlSeconds": 0}}), "above 0")]
    #[case(json!({"strategy": "session_id", "sessionIdConfig": {"maxSessions": 0}}), "1 or more")]
    fn wrong_parameters_say_what_is_wrong(#[case] given: Value, #[case] why: &str) {
        let error = affinity(given).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
