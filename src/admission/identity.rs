//! Who sends a request, as far as its limits and its turn depend on it.
//!
//! Envoy authenticates; here its result is read. What Envoy vouches for (an attribute, a header that it sets and clients'
//! copies of which it removes) is taken as it is. What the client says of itself (`user`, its session) is a claim: it is
//! kept apart from what is vouched for, so that nobody spends the tokens of somebody else by naming him.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use smallvec::SmallVec;
use xxhash_rust::xxh3::xxh3_64;

use crate::request::LlmRequest;
use crate::request::head::Head;

/// Bytes of the longest name that is kept as it is: it is part of keys in Redis and of log lines.
const LONGEST: usize = 128;
/// Bytes of a longer name that are kept in front of its hash.
const KEPT: usize = 96;

/// What names that are claimed begin with.
const CLAIMS: [&str; 3] = ["user:", "session:", "vouched:"];

/// Where an identity is looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An attribute that Envoy sends (`request_attributes` of its ext_proc filter).
    Attribute(Arc<str>),
    /// A header that Envoy sets, by its lower-case name.
    Header(Box<str>),
    /// The member `user` of the body.
    User,
    /// The header `x-session-id`.
    Session,
}

/// Text that names no source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no source of identities: write attribute:NAME, header:NAME, user or session")]
pub struct UnknownSource(String);

impl FromStr for Source {
    type Err = UnknownSource;

    fn from_str(text: &str) -> Result<Self, UnknownSource> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        match (kind.trim(), name.trim()) {
            ("attribute", name) if !name.is_empty() => Ok(Source::Attribute(name.into())),
            ("header", name) if !name.is_empty() => Ok(Source::Header(name.to_ascii_lowercase().into())),
            ("user", "") => Ok(Source::User),
            ("session", "") => Ok(Source::Session),
            _ => Err(UnknownSource(text.to_owned())),
        }
    }
}

impl Source {
    /// The value, and what keeps a claim apart from what is vouched for.
    fn read<'a>(&self, asks: &Asks<'a>) -> Option<(&'static str, &'a str)> {
        let (prefix, value) = match self {
            Source::Attribute(name) => {
                ("", asks.attributes.iter().find(|(known, _)| known == name).map(|(_, value)| &**value))
            }
            // A header that stands there twice is the work of two, of whom one may be the client.
            Source::Header(name) => ("", asks.head.only(name)),
            Source::User => ("user:", asks.request.user.as_deref()),
            Source::Session => ("session:", asks.head.get("x-session-id")),
        };
        let value = value.map(str::trim).filter(|value| !value.is_empty())?;
        let looks_claimed = prefix.is_empty() && CLAIMS.iter().any(|claim| value.starts_with(claim));
        Some((if looks_claimed { "vouched:" } else { prefix }, value))
    }
}

/// Attributes that Envoy sends with a request, by name.
pub type Attributes = SmallVec<[(Arc<str>, Box<str>); 1]>;

/// What a request says, and what Envoy says of it.
#[derive(Clone, Copy, Debug)]
pub struct Asks<'a> {
    /// Its headers.
    pub head: &'a Head,
    /// Its body.
    pub request: &'a LlmRequest,
    /// Attributes of Envoy, by name.
    pub attributes: &'a Attributes,
}

/// Who sends a request. All that nobody is known of are one.
#[derive(Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(Option<Arc<str>>);

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name().unwrap_or("anonymous"))
    }
}

impl Identity {
    /// The first source that says something decides.
    pub fn of(sources: &[Source], asks: &Asks<'_>) -> Self {
        let found = sources.iter().find_map(|source| source.read(asks));
        Self(found.map(|(prefix, value)| bounded(prefix, value)))
    }

    /// That of a known name.
    pub fn named(name: &str) -> Self {
        Self(Some(bounded("", name)))
    }

    /// The name; none of the anonymous.
    pub fn name(&self) -> Option<&str> {
        self.0.as_deref()
    }

    /// The name to be kept.
    pub fn shared(&self) -> Option<Arc<str>> {
        self.0.clone()
    }
}

/// The name, or its beginning and a hash of all of it.
fn bounded(prefix: &str, value: &str) -> Arc<str> {
    if prefix.len() + value.len() <= LONGEST {
        return if prefix.is_empty() { value.into() } else { [prefix, value].concat().into() };
    }
    let hash = xxh3_64(value.as_bytes());
    format!("{prefix}{}#{hash:016x}", &value[..value.floor_char_boundary(KEPT)]).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("attribute:metadata.filter_metadata['jwt']['sub']", Source::Attribute("metadata.filter_metadata['jwt']['sub']".into()))]
    #[case("header:X-Client-Id", Source::Header("x-client-id".into()))]
    #[case("user", Source::User)]
    #[case(" session", Source::Session)]
    fn sources_are_read(#[case] text: &str, #[case] source: Source) {
        assert_eq!(text.parse(), Ok(source));
    }

    #[rstest]
    #[case("")]
    #[case("header")]
    #[case("header:")]
    #[case("user:x")]
    #[case("cookie:x")]
    fn what_is_no_source_is_said_so(#[case] text: &str) {
        assert!(text.parse::<Source>().unwrap_err().to_string().contains(&format!("`{text}`")));
    }

    fn identity(
        sources: &str,
        headers: &[(&str, &str)],
        user: Option<&str>,
        attribute: Option<&str>,
    ) -> Identity {
        let head = Head::new(headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let mut request = LlmRequest::headers_only("/");
        request.user = user.map(Into::into);
        let attributes: Attributes =
            attribute.map(|value| ("sub".into(), value.into())).into_iter().collect();
        let sources: Vec<Source> = sources.split(',').filter_map(|source| source.parse().ok()).collect();
        Identity::of(&sources, &Asks { head: &head, request: &request, attributes: &attributes })
    }

    #[test]
    fn the_first_source_that_speaks_decides_and_claims_are_kept_apart() {
        let all = "attribute:sub,header:x-client,user,session";
        let headers = [("x-client", "alice"), ("x-session-id", "s1")];
        assert_eq!(identity(all, &headers, Some("alice"), Some("bob")).name(), Some("bob"));
        assert_eq!(identity(all, &headers, Some("alice"), Some("  ")).name(), Some("alice"));
        assert_eq!(identity(all, &headers[1..], Some("alice"), None).name(), Some("user:alice"));
        assert_eq!(identity(all, &headers[1..], None, None).name(), Some("session:s1"));
        assert_eq!(identity(all, &[], None, None), Identity::default());
        assert_eq!(
            identity("", &headers, Some("alice"), Some("bob")),
            Identity::default(),
            "nothing is asked for"
        );
    }

    #[test]
    fn nobody_is_vouched_for_by_a_name_that_is_a_claim_or_by_two() {
        let named = |name: &str| identity("header:x-client", &[("x-client", name)], None, None);
        let claimed = identity("user", &[], Some("alice"), None);
        assert_eq!(named("user:alice").name(), Some("vouched:user:alice"));
        assert_ne!(named("user:alice"), claimed);
        assert_ne!(named("vouched:user:alice"), named("user:alice"));
        let twice = [("x-client", "alice"), ("x-client", "mallory")];
        assert_eq!(identity("header:x-client", &twice, None, None), Identity::default());
    }

    #[test]
    fn long_names_stay_apart_and_short() {
        let (a, b) = ("é".repeat(100) + "a", "é".repeat(100) + "b");
        let (a, b) = (identity("user", &[], Some(&a), None), identity("user", &[], Some(&b), None));
        assert_ne!(a, b);
        assert!(a.name().unwrap().len() <= LONGEST);
    }
}
