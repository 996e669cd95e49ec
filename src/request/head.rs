//! The headers of a request, as far as a decision looks at them.

use std::time::Duration;

/// Request headers with lower-case names, in the order they came.
#[derive(Clone, Default)]
pub struct Head {
    headers: Vec<(String, String)>,
}

/// Headers that only we and Envoy may set. A client's copies are removed and never obeyed: whoever could forge them could
/// send requests, or other people's prompts, anywhere.
pub const CONTROL: [&str; 12] = [
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-gateway-destination-endpoint-scores",
    "x-prefiller-host-port",
    "x-prefiller-url",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-data-parallel-rank",
    "x-kv-cache-source-host-port",
    "x-vllm-priority",
    "x-llm-d-request-dropped-reason",
];

/// Hints, removed before the engine sees them: latency goals, cache preference, session.
pub const HINTS: [&str; 7] = [
    "x-llm-d-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
    "x-slo-ttft-ms",
    "x-slo-tpot-ms",
    "prefer",
    "x-session-token",
    "x-session-id",
];

/// Times to the first token that clients ask for, in milliseconds. New name first.
const FIRST_TOKEN_GOALS: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"];

/// Hints that name other people's rights: obeyed only with `--trust-hints`, removed always. New name first, old alias next.
pub const PRIVILEGED: [&str; 6] =
    [MODEL_REWRITE, MODEL_REWRITE_ALIAS, OBJECTIVES[0], OBJECTIVES[1], FAIRNESS_IDS[0], FAIRNESS_IDS[1]];

/// Names the InferenceObjective of a request.
const OBJECTIVES: [&str; 2] = ["x-llm-d-inference-objective", "x-gateway-inference-objective"];
/// Names whose turn a request takes.
const FAIRNESS_IDS: [&str; 2] = ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"];

/// Forces the target model's name.
pub const MODEL_REWRITE: &str = "x-llm-d-model-name-rewrite";
const MODEL_REWRITE_ALIAS: &str = "x-gateway-model-name-rewrite";
/// Milliseconds of the longest goal that means anything: a day.
const LONGEST_GOAL: u64 = 86_400_000;
const OWN_PREFIX: &str = "x-pilotfish-";

/// Whether only we and Envoy may set the header of that lower-case name.
pub fn is_control(name: &str) -> bool {
    name.starts_with(OWN_PREFIX) || CONTROL.contains(&name)
}

impl std::fmt::Debug for Head {
    /// Names only: values hold credentials.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.headers.iter().map(|(name, _)| name)).finish()
    }
}

impl Head {
    /// Takes names and values; names are lowered.
    pub fn new(headers: impl IntoIterator<Item = (String, String)>) -> Self {
        let headers = headers.into_iter().map(|(mut name, value)| {
            name.make_ascii_lowercase();
            (name, value)
        });
        Self { headers: headers.collect() }
    }

    /// The first value of a header by its lower-case name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The value of a header that stands there once.
    pub fn only(&self, name: &str) -> Option<&str> {
        let mut values =
            self.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| value.as_str());
        values.next().filter(|_| values.next().is_none())
    }

    /// The first cookie of that name.
    pub fn cookie(&self, name: &str) -> Option<&str> {
        self.cookies().find_map(|cookie| cookie_value(cookie, name))
    }

    /// The cookies but those of these names, as one header value; empty if there are no others.
    pub fn cookies_without(&self, names: &[&str]) -> String {
        let mut rest = String::new();
        let is_named = |cookie: &&str| names.iter().any(|name| cookie_value(cookie, name).is_some());
        for cookie in self.cookies().filter(|cookie| !is_named(cookie)) {
            if !rest.is_empty() {
                rest.push_str("; ");
            }
            rest.push_str(cookie);
        }
        rest
    }

    /// `name=value`, from every `cookie` header.
    fn cookies(&self) -> impl Iterator<Item = &str> {
        let lines = self.headers.iter().filter(|(name, _)| name == "cookie");
        lines.flat_map(|(_, value)| value.split(';').map(str::trim)).filter(|cookie| !cookie.is_empty())
    }

    /// The method, empty if none came.
    pub fn method(&self) -> &str {
        self.get(":method").unwrap_or_default()
    }

    /// The path without its query, `/` if none came.
    pub fn path(&self) -> &str {
        let path = self.get(":path").unwrap_or("/");
        path.split(['?', '#']).next().unwrap_or(path)
    }

    /// The path with its query, `/` if none came.
    pub fn target(&self) -> &str {
        self.get(":path").unwrap_or("/")
    }

    /// The length that the client announced.
    pub fn content_length(&self) -> Option<u64> {
        self.get("content-length")?.trim().parse().ok()
    }

    /// The model name that a trusted caller forces.
    pub fn model_rewrite(&self) -> Option<&str> {
        let found = self.get(MODEL_REWRITE).or_else(|| self.get(MODEL_REWRITE_ALIAS));
        found.filter(|name| !name.trim().is_empty())
    }

    /// The InferenceObjective that a trusted caller names; of several the first.
    pub fn objective(&self) -> Option<&str> {
        self.first_of(&OBJECTIVES)
    }

    /// Whether several headers name an objective.
    pub fn names_several_objectives(&self) -> bool {
        self.headers.iter().filter(|(name, _)| OBJECTIVES.contains(&name.as_str())).nth(1).is_some()
    }

    /// Whose turn the request takes, as a trusted caller says.
    pub fn fairness_id(&self) -> Option<&str> {
        self.first_of(&FAIRNESS_IDS)
    }

    /// The time to the first token that the client asks for.
    pub fn first_token_goal(&self) -> Option<Duration> {
        let millis: u64 = self.first_of(&FIRST_TOKEN_GOALS)?.parse().ok()?;
        Some(Duration::from_millis(millis.min(LONGEST_GOAL)))
    }

    /// The first value that is not blank, of the first of these headers that has one.
    fn first_of(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.get(name).map(str::trim).filter(|value| !value.is_empty()))
    }

    /// Whether the client wants an answer only from an endpoint that holds some of its prompt (`prefer: if-available`).
    pub fn only_if_cached(&self) -> bool {
        self.get("prefer")
            .is_some_and(|value| value.split(',').any(|one| one.trim().eq_ignore_ascii_case("if-available")))
    }

    /// Headers present that must not reach the engine.
    pub fn to_remove(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|(name, _)| name.as_str()).filter(|name| is_removed(name))
    }

    /// Headers that reach the engine, with their values, but for pseudo headers.
    pub fn forwarded(&self) -> impl Iterator<Item = (&str, &str)> {
        let all = self.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        all.filter(|(name, _)| !name.starts_with(':') && !is_removed(name))
    }
}

fn is_removed(name: &str) -> bool {
    // Nearly every header of nearly every request ends here: none of ours begins otherwise.
    (name.starts_with("x-") || name == "prefer")
        && (is_control(name) || [&HINTS[..], &PRIVILEGED].iter().any(|list| list.contains(&name)))
}

fn cookie_value<'c>(cookie: &'c str, name: &str) -> Option<&'c str> {
    let (found, value) = cookie.split_once('=')?;
    (found.trim_end() == name).then(|| value.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(headers: &[(&str, &str)]) -> Head {
        Head::new(headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    #[test]
    fn names_are_matched_in_any_case_and_paths_lose_their_query() {
        let head = head(&[(":path", "/v1/chat/completions?x=1"), ("X-Tier", "gold"), ("x-tier", "second")]);
        assert_eq!(head.path(), "/v1/chat/completions");
        assert_eq!(head.get("x-tier"), Some("gold"));
        assert_eq!(head.method(), "");
    }

    #[test]
    fn cookies_are_found_in_every_line_and_left_out_by_name() {
        let head = head(&[("cookie", "a=1; mine=x=y;b=2"), ("Cookie", " mine=second ; c=\"3\"")]);
        assert_eq!((head.cookie("mine"), head.cookie("c")), (Some("x=y"), Some("3")));
        assert_eq!((head.cookie("min"), head.cookie("MINE")), (None, None));
        assert_eq!(head.cookies_without(&["mine"]), "a=1; b=2; c=\"3\"");
        assert_eq!(head.cookies_without(&["mine", "a", "c"]), "b=2");
        assert_eq!(super::Head::default().cookies_without(&["mine"]), "");
    }

    #[test]
    fn every_control_header_and_hint_is_removed_and_nothing_else() {
        let names = [&CONTROL[..], &HINTS, &PRIVILEGED, &["x-pilotfish-anything"]].concat();
        let mut all: Vec<(&str, &str)> = names.iter().map(|name| (*name, "v")).collect();
        all.extend([(":path", "/"), ("x-request-id", "1"), ("authorization", "b"), ("preferred", "c")]);
        assert_eq!(head(&all).to_remove().collect::<Vec<_>>(), names);
    }
}
