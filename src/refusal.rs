//! Why a request is answered by the picker instead of an engine: the reason, its status and its words.

use std::borrow::Cow;
use std::time::Duration;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $reason:ident = $name:literal, $status:literal, $kind:literal, $dropped:expr;)+) => {
        /// The stable, machine-readable reason, sent as `x-pilotfish-reason` and counted in `requests_total`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[doc = $doc])+ $reason,)+ }

        impl Reason {
            /// Every reason.
            pub const ALL: &'static [Reason] = &[$(Reason::$reason,)+];

            /// The name on the wire and in labels.
            pub fn name(self) -> &'static str {
                match self { $(Reason::$reason => $name,)+ }
            }

            /// The HTTP status it is answered with.
            pub fn status(self) -> u16 {
                match self { $(Reason::$reason => $status,)+ }
            }

            /// The `type` of the OpenAI error object.
            pub fn kind(self) -> &'static str {
                match self { $(Reason::$reason => $kind,)+ }
            }

            /// llm-d's dropped-reason value, where it has one.
            pub fn dropped_reason(self) -> Option<&'static str> {
                match self { $(Reason::$reason => $dropped,)+ }
            }
        }
    };
}

reasons! {
    /// The body cannot be read as what its path promises.
    MalformedBody = "malformed-body", 400, "invalid_request_error", None;
    /// No ModelRoute serves the model.
    UnknownModel = "unknown-model", 404, "invalid_request_error", None;
    /// The body stopped arriving.
    BodyTimeout = "body-timeout", 408, "invalid_request_error", None;
    /// `prefer: if-available`, and no endpoint holds the prompt.
    NotCached = "not-cached", 412, "invalid_request_error", None;
    /// The body is larger than the limit, or decodes to more.
    BodyTooLarge = "body-too-large", 413, "invalid_request_error", None;
    /// A content-encoding that cannot be read.
    UnsupportedEncoding = "unsupported-encoding", 415, "invalid_request_error", None;
    /// The pool is full, and requests of its priority do not wait.
    Shed = "shed", 429, "rate_limit_error", Some("rejected-saturated");
    /// The pool had no room in time.
    QueueTimeout = "queue-timeout", 429, "rate_limit_error", Some("rejected-ttl-expired");
    /// The pool is full and its queue is.
    QueueFull = "queue-full", 429, "rate_limit_error", Some("rejected-saturated");
    /// The tokens of a limit are used up.
    Limited = "limited", 429, "rate_limit_error", None;
    /// No endpoint is there to take the request.
    NoEndpoints = "no-endpoints", 503, "service_unavailable", Some("rejected-no-endpoints");
    /// The prompt was to be computed elsewhere, that failed, and no endpoint does both.
    PrefillFailed = "prefill-failed", 503, "server_error", None;
    /// Filters left no endpoint.
    Filtered = "filtered", 503, "service_unavailable", Some("rejected-saturated");
    /// All buffers are full.
    Overloaded = "overloaded", 503, "service_unavailable", None;
    /// Token limits cannot be checked, and nothing goes unchecked.
    LimiterUnavailable = "limiter-unavailable", 503, "service_unavailable", None;
    /// No configuration stands yet.
    NotReady = "not-ready", 503, "service_unavailable", None;
    /// The process ends and will not wait for this request.
    ShuttingDown = "shutting-down", 503, "service_unavailable", Some("rejected-shutting-down");
    /// Envoy is configured in a way that cannot work.
    UnsupportedMode = "unsupported-mode", 503, "service_unavailable", None;
    /// The decision took longer than `--decision-timeout`.
    DecisionTimeout = "decision-timeout", 503, "service_unavailable", None;
    /// A fault of our own.
    Internal = "internal", 503, "service_unavailable", None;
}

/// What rate-limit headers say of one limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Tokens that a full bucket holds.
    pub limit: u32,
    /// Tokens that are left.
    pub remaining: u32,
    /// Seconds until the bucket is full again, if nobody takes anything.
    pub reset: u32,
}

impl Standing {
    /// Header names with their values.
    pub fn headers(&self) -> [(&'static str, u32); 3] {
        [
            ("x-ratelimit-limit", self.limit),
            ("x-ratelimit-remaining", self.remaining),
            ("x-ratelimit-reset", self.reset),
        ]
    }
}

/// A request that the picker answers itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", reason.name())]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// What the client is told; never any text of its prompt.
    pub message: Cow<'static, str>,
    /// When trying again makes sense.
    pub retry_after: Option<Duration>,
    /// What the client has left of a limit.
    pub standing: Option<Standing>,
}

impl Refusal {
    /// A refusal that trying again will not change.
    pub fn new(reason: Reason, message: impl Into<Cow<'static, str>>) -> Self {
        Self { reason, message: message.into(), retry_after: None, standing: None }
    }

    /// Says when to try again.
    pub fn retry_after(mut self, after: Duration) -> Self {
        self.retry_after = Some(after);
        self
    }

    /// The OpenAI error object.
    pub fn body(&self) -> String {
        serde_json::json!({
            "error": {"message": self.message, "type": self.reason.kind(), "param": null, "code": self.reason.name()}
        })
        .to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_is_an_openai_error_object_whatever_the_message() {
        let refusal = Refusal::new(Reason::UnknownModel, "the model \"x\\y\" is not served");
        let body: serde_json::Value = serde_json::from_str(&refusal.body()).unwrap();
        assert_eq!(body["error"]["code"], "unknown-model");
        assert_eq!(body["error"]["message"], "the model \"x\\y\" is not served");
        assert_eq!(body["error"]["type"], "invalid_request_error");
    }

    #[test]
    fn nothing_foreseen_is_a_500() {
        assert!(Reason::ALL.iter().all(|reason| reason.status() != 500));
    }
}
