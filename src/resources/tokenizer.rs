//! `pilotfish.dev/tokenizer`, and the `source` of a tokenizer in the configuration: where a model's tokenizer is.
//!
//! Prompts go to a URL, and files are read by this process, so neither is taken from whoever may label a pod: a URL must
//! stand in the configuration, a file must lie below `--tokenizer-dir`.

use std::sync::Arc;

use crate::state::TokenizerSource;

/// The annotation on a ModelServer.
pub const ANNOTATION: &str = "pilotfish.dev/tokenizer";

/// Reads a source: `engine`, a URL, or a path below the folder of tokenizers.
///
/// # Errors
///
/// What is wrong, and what to write instead.
pub fn parse(text: &str) -> Result<TokenizerSource, (String, &'static str)> {
    let text = text.trim();
    if text == "engine" {
        return Ok(TokenizerSource::Engine);
    }
    if let Some((scheme, rest)) = text.split_once("://") {
        if scheme != "http" {
            let advice = "write http://HOST:PORT; this version speaks no TLS to tokenizers";
            return Err((format!("`{scheme}` is not a scheme of tokenizers"), advice));
        }
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.is_empty() || rest.contains(['?', '#', ' ']) || authority.contains('@') {
            return Err((format!("`{text}` is not the URL of a tokenizer"), "write http://HOST:PORT"));
        }
        return Ok(TokenizerSource::Url(Arc::from(text.trim_end_matches('/'))));
    }
    let outside = text.is_empty()
        || text.starts_with(['/', '\\'])
        || text.split(['/', '\\']).any(|part| part == "..")
        || text.contains('\0');
    if outside {
        let advice = "name a tokenizer.json, or a folder with one, relative to --tokenizer-dir";
        return Err((format!("`{text}` does not lie below --tokenizer-dir"), advice));
    }
    Ok(TokenizerSource::File(Arc::from(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("engine", TokenizerSource::Engine)]
    #[case("http://render:8000/", TokenizerSource::Url("http://render:8000".into()))]
    #[case("qwen3", TokenizerSource::File("qwen3".into()))]
    #[case("a/tokenizer.json", TokenizerSource::File("a/tokenizer.json".into()))]
    #[case("a..b/tokenizer.json", TokenizerSource::File("a..b/tokenizer.json".into()))]
    fn sources_are_told_by_their_form(#[case] text: &str, #[case] expected: TokenizerSource) {
        assert_eq!(parse(text), Ok(expected));
    }

    #[rstest::rstest]
    #[case("")]
    #[case("/etc/passwd")]
    #[case("../x")]
    #[case("a/../../x")]
    #[case("a\\..\\x")]
    #[case("https://x")]
    #[case("file:///etc/passwd")]
    #[case("http://")]
    #[case("http://user@host")]
    #[case("http://host/?q")]
    fn what_leads_elsewhere_is_refused(#[case] text: &str) {
        assert!(parse(text).is_err());
    }
}
