//! Whether one rule of a ModelRoute applies to a request.

use regex::Regex;

use super::Question;

/// A test on a text. Kthena evaluates exact, then prefix, then regex, and only the first that is set; with none set any
/// text matches.
#[derive(Clone, Debug)]
pub enum TextMatch {
    /// No member set.
    Any,
    /// Equal.
    Exact(Box<str>),
    /// Begins with.
    Prefix(Box<str>),
    /// Matches somewhere: unanchored, as Go's `MatchString`.
    Regex(Regex),
    /// A pattern that does not compile: reported at load, matches nothing.
    Never,
}

impl TextMatch {
    /// Whether `text` passes.
    pub fn matches(&self, text: &str) -> bool {
        match self {
            TextMatch::Any => true,
            TextMatch::Exact(exact) => **exact == *text,
            TextMatch::Prefix(prefix) => text.starts_with(&**prefix),
            TextMatch::Regex(regex) => regex.is_match(text),
            TextMatch::Never => false,
        }
    }
}

/// A test on one header; a missing header is compared as the empty text.
#[derive(Clone, Debug)]
pub struct HeaderMatch {
    /// Lower-case name.
    pub name: Box<str>,
    /// The test.
    pub value: TextMatch,
}

/// All tests of a rule; all must pass.
#[derive(Clone, Debug)]
pub struct RequestMatch {
    /// Exact model name.
    pub model: Option<Box<str>>,
    /// Headers.
    pub headers: Vec<HeaderMatch>,
    /// Path without query.
    pub uri: TextMatch,
}

impl Default for RequestMatch {
    fn default() -> Self {
        Self { model: None, headers: Vec::new(), uri: TextMatch::Any }
    }
}

impl RequestMatch {
    /// Whether the request passes.
    pub fn matches(&self, ask: &Question<'_>) -> bool {
        self.model.as_deref().is_none_or(|model| ask.model == Some(model))
            && self
                .headers
                .iter()
                .all(|test| test.value.matches((ask.header)(&test.name).unwrap_or_default()))
            && self.uri.matches(ask.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(TextMatch::Any, "", true)]
    #[case(TextMatch::Exact("a".into()), "a", true)]
    #[case(TextMatch::Exact("a".into()), "ab", false)]
    #[case(TextMatch::Prefix("".into()), "", true)]
    #[case(TextMatch::Prefix("ab".into()), "abc", true)]
    #[case(TextMatch::Regex(Regex::new("b").unwrap()), "abc", true)]
    #[case(TextMatch::Never, "", false)]
    fn texts(#[case] test: TextMatch, #[case] text: &str, #[case] matches: bool) {
        assert_eq!(test.matches(text), matches);
    }

    #[test]
    fn all_tests_must_pass_and_a_missing_header_is_empty() {
        let rule = RequestMatch {
            model: Some("m".into()),
            headers: vec![HeaderMatch { name: "x-tier".into(), value: TextMatch::Exact("gold".into()) }],
            uri: TextMatch::Prefix("/v1/".into()),
        };
        let ask = |model, path, tier: Option<&'static str>| {
            let header = move |name: &str| tier.filter(|_| name == "x-tier");
            rule.matches(&Question {
                pool: None,
                model: Some(model),
                path,
                header: &header,
                draw: 0,
                forced_model: None,
                takes_model: false,
            })
        };
        assert!(ask("m", "/v1/chat/completions", Some("gold")));
        assert!(!ask("n", "/v1/chat/completions", Some("gold")));
        assert!(!ask("m", "/other", Some("gold")));
        assert!(!ask("m", "/v1/chat/completions", None));
    }
}
