//! Where models' tokenizers are, by the configuration: its `tokenizers` section, and llm-d's `token-producer`.

use std::sync::Arc;

use super::Reader;
use crate::document::{Node, Place};
use crate::resources::tokenizer;
use crate::state::TokenizerSource;

/// Where models' tokenizers are. Also the list of URLs that an annotation may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerSettings {
    /// Model, as its engines know it, and source; without a model the source of all others.
    entries: Vec<(Option<Arc<str>>, TokenizerSource)>,
}

impl TokenizerSettings {
    /// The source for a model: what its ModelServer says, if that may be trusted, else what the configuration says.
    pub fn resolve<'a>(
        &'a self,
        annotated: Option<&'a TokenizerSource>,
        model: &str,
    ) -> Option<&'a TokenizerSource> {
        let trusted = annotated.filter(|source| match source {
            TokenizerSource::Url(url) => self.lists(url),
            TokenizerSource::File(_) | TokenizerSource::Engine => true,
        });
        trusted.or_else(|| {
            let of = |wanted: Option<&str>| {
                self.entries.iter().find(|(model, _)| model.as_deref() == wanted).map(|(_, source)| source)
            };
            of(Some(model)).or_else(|| of(None))
        })
    }

    /// Whether an operator listed this URL, so that prompts may be sent there.
    pub fn lists(&self, url: &str) -> bool {
        self.sources().any(|source| matches!(source, TokenizerSource::Url(listed) if &**listed == url))
    }

    /// All sources.
    pub fn sources(&self) -> impl Iterator<Item = &TokenizerSource> {
        self.entries.iter().map(|(_, source)| source)
    }
}

/// Reads `tokenizers`: a list of `{model, source}`.
pub fn section(reader: &mut Reader<'_>, node: &Node) {
    for entry in reader.list(node, "tokenizers") {
        if !reader.members(entry, "a tokenizer", &["model", "source"]) {
            continue;
        }
        let model = reader.text(entry, "model", "a tokenizer");
        let source = reader.text(entry, "source", "a tokenizer");
        let (Some((model, place)), Some((text, at))) = (model, source) else { continue };
        add(reader, Some((model, place)), text, at);
    }
}

fn add(reader: &mut Reader<'_>, model: Option<(&str, Place)>, text: &str, at: Place) {
    let known = |(name, _): &(Option<Arc<str>>, _)| name.as_deref() == model.map(|(name, _)| name);
    if let Some((name, place)) = model
        && reader.tokenizers.entries.iter().any(known)
    {
        let message = format!("the tokenizer of model `{name}` is described twice");
        reader.problems.error(place, message, None);
        return;
    }
    match tokenizer::parse(text) {
        Ok(source) => reader.tokenizers.entries.push((model.map(|(name, _)| name.into()), source)),
        Err((message, advice)) => reader.problems.error(at, message, Some(advice.to_owned())),
    }
}

/// Where llm-d's renderer listens if nothing else is said.
const RENDERER: &str = "http://localhost:8000";

/// llm-d's `token-producer`: with `vllm` a rendering service for `modelName`; else 4 bytes are taken for a token, as here.
pub fn token_producer(reader: &mut Reader<'_>, kind: &str, place: Place, parameters: Option<&Node>) {
    let Some(node) = parameters.filter(|node| !node.is_blank()) else { return };
    let what = format!("the parameters of `{kind}`");
    if !reader.members(node, &what, &["modelName", "vllm", "estimate", "udsTokenizerConfig"]) {
        return;
    }
    if let Some(at) = node.key_place("udsTokenizerConfig") {
        let message = "`udsTokenizerConfig` is not available in this version".to_owned();
        reader.unsupported(at, message, "4 bytes are taken for a token");
    }
    if let Some(at) = node.key_place("estimate") {
        let message = "`estimate` has no effect in this version: 4 bytes are taken for a token";
        reader.problems.warning(at, message, None);
    }
    let Some(vllm) = node.get("vllm") else { return };
    if !vllm.is_blank() {
        reader.members(vllm, "`vllm`", &["url", "timeout", "mmTimeout"]);
    }
    for member in ["timeout", "mmTimeout"] {
        if let Some(at) = vllm.key_place(member) {
            let message =
                format!("`{member}` has no effect in this version: requests wait for their own budget");
            reader.problems.warning(at, message, None);
        }
    }
    let (url, at) = match vllm.get("url") {
        Some(url) => (url.as_str().unwrap_or_default(), url.place),
        None => (RENDERER, place),
    };
    let model = node.get("modelName").and_then(|name| Some((name.as_str()?, name.place)));
    add(reader, model, url, at);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Options, Read, read};
    use crate::document::Severity;
    use std::path::Path;

    const HEAD: &str = "apiVersion: pilotfish.dev/v1alpha1\nkind: EndpointPickerConfig\n";

    fn config(text: &str) -> Read {
        read(Path::new("c.yaml"), format!("{HEAD}{text}").into(), &Options::default(), None)
    }

    fn url(text: &str) -> TokenizerSource {
        TokenizerSource::Url(text.into())
    }

    #[test]
    fn a_model_has_its_own_tokenizer_and_a_url_is_trusted_only_if_it_is_listed() {
        let read = config(
            "tokenizers:\n- {model: a, source: qwen3/tokenizer.json}\n- {model: b, source: 'http://render:8000'}\n- {model: c, source: engine}\n",
        );
        assert!(read.problems.is_empty(), "{:?}", read.problems);
        let settings = read.tokenizers;
        let file = TokenizerSource::File("qwen3/tokenizer.json".into());
        assert_eq!(settings.resolve(None, "a"), Some(&file));
        assert_eq!(settings.resolve(None, "b"), Some(&url("http://render:8000")));
        assert_eq!(settings.resolve(None, "c"), Some(&TokenizerSource::Engine));
        assert_eq!(settings.resolve(None, "d"), None);
        let (listed, stranger) = (url("http://render:8000"), url("http://elsewhere"));
        assert_eq!(settings.resolve(Some(&listed), "a"), Some(&listed));
        assert_eq!(settings.resolve(Some(&stranger), "a"), Some(&file));
        assert_eq!(settings.resolve(Some(&stranger), "d"), None);
        assert_eq!(settings.resolve(Some(&TokenizerSource::Engine), "a"), Some(&TokenizerSource::Engine));
    }

    #[rstest::rstest]
    #[case("tokenizers:\n- {model: a, source: ../x}\n", (4, 22), "does not lie below --tokenizer-dir")]
    #[case("tokenizers:\n- {model: a, source: 'https://x'}\n", (4, 22), "`https` is not a scheme")]
    #[case("tokenizers:\n- {modle: a, source: x}\n", (4, 4), "unknown member `modle`")]
    #[case("tokenizers:\n- {model: a, source: x}\n- {model: a, source: z}\n", (5, 11), "described twice")]
    #[case("tokenizers: qwen\n", (3, 13), "`tokenizers` must be a list")]
    #[case("plugins:\n- {type: token-producer, parameters: {vllm: {url: 'ftp://x'}}}\n", (4, 51), "`ftp` is not a scheme")]
    #[case("plugins:\n- {type: token-producer, parameters: {udsTokenizerConfig: {}}}\n", (4, 39), "is not available")]
    fn a_wrong_tokenizer_is_an_error_at_its_place(
        #[case] text: &str,
        #[case] place: (u32, u32),
        #[case] message: &str,
    ) {
        let read = config(text);
        let found = read.problems.iter().any(|problem| {
            (problem.line, problem.column) == place
                && problem.severity == Severity::Error
                && problem.message.contains(message)
        });
        assert!(found && read.pipeline.is_none(), "{:?}", read.problems);
    }

    #[test]
    fn a_token_producer_with_vllm_is_a_renderer_and_without_parameters_nothing() {
        let one = config(
            "plugins:\n- {type: random}\n- {type: token-producer, parameters: {modelName: m, vllm: {url: 'http://r:1', timeout: 5s}}}\n",
        );
        assert!(one.pipeline.is_some(), "{:?}", one.problems);
        assert_eq!(one.tokenizers.resolve(None, "m"), Some(&url("http://r:1")));
        assert_eq!(one.tokenizers.resolve(None, "n"), None);
        assert!(one.problems.iter().any(|problem| problem.message.contains("`timeout` has no effect")));
        let all = config("plugins:\n- {type: random}\n- {type: tokenizer, parameters: {vllm: {}}}\n");
        assert_eq!(all.tokenizers.resolve(None, "n"), Some(&url(RENDERER)));
        let none = config("plugins:\n- {type: random}\n- {type: token-producer}\n");
        assert_eq!(none.tokenizers, TokenizerSettings::default());
    }
}
