//! Reads `tokenizer.json`, and `tokenizer_config.json` and `chat_template.jinja` beside it.

use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{AddedToken, Tokenizer};

use super::super::json::{Json, Members};
use super::super::template::{ChatTemplate, TemplateError};

/// Why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{path}: {source}; copy the model's tokenizer.json there")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file is no tokenizer, or no configuration of one.
    #[error("{path} is not valid: {why}; copy the model's file anew")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A chat template is wrong.
    #[error("{path}: {source}")]
    Template {
        /// The file it stands in.
        path: PathBuf,
        /// What is wrong.
        source: TemplateError,
    },
    /// The file lies outside of the folder of tokenizers.
    #[error("{0} leads out of --tokenizer-dir; put the file into that folder")]
    Outside(PathBuf),
}

/// The parts of `tokenizer.json` that tell how texts may be taken apart.
#[derive(Debug, Default, Deserialize)]
pub struct Definition {
    /// `normalizer`.
    #[serde(default)]
    pub normalizer: Value,
    /// `pre_tokenizer`.
    #[serde(default)]
    pub pre_tokenizer: Value,
    /// `model`, without vocabulary and merges.
    pub model: Model,
    #[serde(skip)]
    ids: ahash::AHashMap<String, u32>,
}

/// `model`.
#[derive(Debug, Default, Deserialize)]
pub struct Model {
    /// `BPE`, `Unigram`, `WordPiece`, ...
    #[serde(rename = "type", default)]
    pub kind: String,
    /// Share of merges left out at random.
    #[serde(default)]
    pub dropout: Option<f32>,
}

impl Definition {
    /// The id of an added token.
    pub fn id_of(&self, content: &str) -> Option<u32> {
        self.ids.get(content).copied()
    }
}

/// What was loaded.
pub struct Loaded {
    /// The reference implementation.
    pub reference: Tokenizer,
    /// How texts may be taken apart.
    pub definition: Definition,
    /// Templates and special tokens.
    pub templates: Templates,
    /// The text of `tokenizer.json`, if it says all that the reference knows.
    pub exact_file: Option<Vec<u8>>,
}

/// Chat templates, and the tokens they name.
#[derive(Debug, Default)]
pub struct Templates {
    default: Option<ChatTemplate>,
    with_tools: Option<ChatTemplate>,
    /// `bos_token`, `eos_token` and so on.
    pub special: Special,
}

/// Special tokens by name.
#[derive(Default)]
pub struct Special(Members);

impl std::ops::Deref for Special {
    type Target = Members;

    fn deref(&self) -> &Members {
        &self.0
    }
}

impl std::fmt::Debug for Special {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl Templates {
    /// The template for requests with or without tools.
    pub fn of(&self, tools: bool) -> Option<&ChatTemplate> {
        self.with_tools.as_ref().filter(|_| tools).or(self.default.as_ref())
    }
}

/// Loads a `tokenizer.json`, or the one in a folder.
pub fn load(path: &Path) -> Result<Loaded, LoadError> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    let bytes = std::fs::read(&file).map_err(|source| LoadError::Read { path: file.clone(), source })?;
    let text = String::from_utf8_lossy(&bytes);
    let invalid = |why: String| LoadError::Invalid { path: file.clone(), why };
    let mut reference = Tokenizer::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    reference.with_truncation(None).map_err(|error| invalid(error.to_string()))?;
    reference.with_padding(None);
    let mut definition: Definition =
        serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let folder = file.parent().unwrap_or(Path::new("."));
    let (templates, further) = configuration(folder)?;
    let known = reference.get_added_tokens_decoder();
    let further: Vec<AddedToken> =
        further.into_iter().filter(|token| !known.values().any(|k| k.content == token.content)).collect();
    let exact = further.is_empty();
    if !exact {
        reference.add_tokens(further).map_err(|error| invalid(error.to_string()))?;
    }
    definition.ids =
        reference.get_added_tokens_decoder().iter().map(|(id, token)| (token.content.clone(), *id)).collect();
    Ok(Loaded { reference, definition, templates, exact_file: exact.then_some(bytes) })
}

/// Ids before and after a text, found by trying; `None` if they are not the same round every text.
pub fn around(reference: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |text: &str, around| Some(reference.encode_fast(text, around).ok()?.get_ids().to_vec());
    let (with, without) = (ids("a b", true)?, ids("a b", false)?);
    let at = with.windows(without.len()).position(|window| window == without)?;
    let (before, after) = (with[..at].to_vec(), with[at + without.len()..].to_vec());
    let holds = ["", "x", "Hello, wörld\n"].into_iter().all(|text| {
        let expected = ids(text, false).map(|middle| [&before[..], &middle, &after].concat());
        ids(text, true) == expected
    });
    holds.then_some((before, after))
}

/// `tokenizer_config.json` and `chat_template.jinja`, if they are there; and added tokens that only they name.
fn configuration(folder: &Path) -> Result<(Templates, Vec<AddedToken>), LoadError> {
    let mut templates = Templates::default();
    let path = folder.join("tokenizer_config.json");
    let config = match read_if_there(&path)? {
        None => Json::Null,
        Some(text) => Json::parse(text.as_bytes())
            .ok_or_else(|| LoadError::Invalid { path: path.clone(), why: "it is not JSON".to_owned() })?,
    };
    let compile = |source: &str, path: &Path| {
        ChatTemplate::new(source)
            .map(Some)
            .map_err(|source| LoadError::Template { path: path.to_owned(), source })
    };
    match config.get("chat_template") {
        Some(Json::Text(source)) => templates.default = compile(source, &path)?,
        Some(Json::List(named)) => {
            for entry in named {
                let text = |member: &str| entry.get(member).and_then(Json::as_str);
                match (text("name"), text("template")) {
                    (Some("default"), Some(source)) => templates.default = compile(source, &path)?,
                    (Some("tool_use"), Some(source)) => templates.with_tools = compile(source, &path)?,
                    _ => {}
                }
            }
        }
        _ => {}
    }
    let jinja = folder.join("chat_template.jinja");
    if let Some(source) = read_if_there(&jinja)? {
        templates.default = compile(&source, &jinja)?;
    }
    templates.special = Special(special_tokens(&config));
    Ok((templates, added_tokens(&config)))
}

fn read_if_there(path: &Path) -> Result<Option<String>, LoadError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read { path: path.to_owned(), source }),
    }
}

/// `..._token` members, each a text or an object with one.
fn special_tokens(config: &Json) -> Members {
    let members = config.as_object().into_iter().flatten();
    members
        .filter(|(name, _)| {
            ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
                .contains(&&***name)
        })
        .filter_map(|(name, value)| {
            let text = value.as_str().or_else(|| value.get("content").and_then(Json::as_str))?;
            Some((name.clone(), Json::text(text)))
        })
        .collect()
}

fn added_tokens(config: &Json) -> Vec<AddedToken> {
    let decoder = config.get("added_tokens_decoder").and_then(Json::as_object).into_iter().flatten();
    decoder
        .filter_map(|(_, token)| {
            let flag = |name: &str| token.get(name).and_then(Json::as_bool).unwrap_or(false);
            let content = token.get("content").and_then(Json::as_str)?;
            Some(
                AddedToken::from(content, flag("special"))
                    .lstrip(flag("lstrip"))
                    .rstrip(flag("rstrip"))
                    .single_word(flag("single_word"))
                    .normalized(flag("normalized")),
            )
        })
        .collect()
}
