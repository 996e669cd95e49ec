//! Which inference API a path belongs to.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

/// An inference API, told by the path of the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI `/v1/completions`.
    Completions,
    /// OpenAI `/v1/chat/completions`.
    Chat,
    /// OpenAI `/v1/responses`.
    Responses,
    /// OpenAI `/v1/embeddings`.
    Embeddings,
    /// Anthropic `/v1/messages`.
    Messages,
    /// `/tokenize` of vLLM and SGLang, and Anthropic's `/v1/messages/count_tokens`.
    Tokenize,
    /// vLLM `/inference/v1/generate`: token ids in, token ids out.
    Generate,
    /// `/generate` of SGLang and TGI, and TGI's `/generate_stream`.
    SglangGenerate,
    /// Any other path.
    Other,
}

/// The ends of paths; the longer of two that end alike stands first.
const SUFFIXES: [(&str, Api); 10] = [
    ("/chat/completions", Api::Chat),
    ("/completions", Api::Completions),
    ("/responses", Api::Responses),
    ("/embeddings", Api::Embeddings),
    ("/v1/messages", Api::Messages),
    ("/v1/messages/count_tokens", Api::Tokenize),
    ("/tokenize", Api::Tokenize),
    ("/inference/v1/generate", Api::Generate),
    ("/generate", Api::SglangGenerate),
    ("/generate_stream", Api::SglangGenerate),
];

impl Api {
    /// Tells the API from a path, whatever its query. A trailing slash, a prefix such as `/openai`, vLLM's `/render` twins
    /// (same body) and escapes such as `%6f` make no difference.
    pub fn from_path(path: &str) -> Api {
        let path = decoded(path);
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("/render").unwrap_or(path);
        SUFFIXES.iter().find(|(suffix, _)| path.ends_with(suffix)).map_or(Api::Other, |(_, api)| *api)
    }

    /// Whether the API cannot do without a `model`, so that a request without one is malformed. The engines' own
    /// endpoints (tokenize, generate) serve their only model when none is named.
    pub fn is_known(self) -> bool {
        matches!(self, Api::Completions | Api::Chat | Api::Responses | Api::Embeddings | Api::Messages)
    }

    /// The name for logs and metric labels.
    pub fn name(self) -> &'static str {
        match self {
            Api::Completions => "completions",
            Api::Chat => "chat",
            Api::Responses => "responses",
            Api::Embeddings => "embeddings",
            Api::Messages => "messages",
            Api::Tokenize => "tokenize",
            Api::Generate => "generate",
            Api::SglangGenerate => "sglang-generate",
            Api::Other => "other",
        }
    }
}

/// A path without its query, as engines' servers read it.
pub(super) fn decoded(path: &str) -> Cow<'_, str> {
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    if path.contains('%') { percent_decode_str(path).decode_utf8_lossy() } else { path.into() }
}

#[cfg(test)]
mod tests {
    use super::Api;
    use rstest::rstest;

    #[rstest]
    #[case("/v1/chat/completions", Api::Chat)]
    #[case("/v1/chat/completions/", Api::Chat)]
    #[case("/openai/v1/chat/completions", Api::Chat)]
    #[case("/v1/chat/completions/render", Api::Chat)]
    #[case("/v1/chat/completions/batch", Api::Other)]
    #[case("/v1/completions?x=/v1/messages", Api::Completions)]
    #[case("/v1/responses", Api::Responses)]
    #[case("/v1/responses/resp_1/cancel", Api::Other)]
    #[case("/v1/embeddings", Api::Embeddings)]
    #[case("/anthropic/v1/messages", Api::Messages)]
    #[case("/v1/messages/count_tokens", Api::Tokenize)]
    #[case("/tokenize", Api::Tokenize)]
    #[case("/inference/v1/generate", Api::Generate)]
    #[case("/generate", Api::SglangGenerate)]
    #[case("/generate_stream", Api::SglangGenerate)]
    #[case("/v1/chat/c%6fmpletions", Api::Chat)]
    #[case("/v1/chat%2Fcompletions%2f", Api::Chat)]
    #[case("/v1/chat/completions%3Fx", Api::Other)]
    #[case("/v1/chat/c%256fmpletions", Api::Other)]
    #[case("/v1/chat/c%ffmpletions%", Api::Other)]
    #[case("/v1/audio/transcriptions?x=%2Ftokenize", Api::Other)]
    #[case("/v1/audio/transcriptions", Api::Other)]
    #[case("/regenerate", Api::Other)]
    #[case("/", Api::Other)]
    #[case("", Api::Other)]
    fn path_names_the_api(#[case] path: &str, #[case] api: Api) {
        assert_eq!(Api::from_path(path), api);
    }

    #[test]
    fn only_apis_that_require_a_model_are_known() {
        assert!(Api::Chat.is_known() && Api::Messages.is_known());
        assert!(!Api::SglangGenerate.is_known() && !Api::Tokenize.is_known() && !Api::Other.is_known());
    }
}
