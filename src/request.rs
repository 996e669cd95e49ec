//! Reads an LLM request body in one pass: the model, the limits and the prompt, as positions in the body that stays as
//! the client sent it.

mod api;
mod body;
mod conversation;
mod edits;
pub mod encoding;
mod error;
pub mod head;
pub(crate) mod lenient;
mod multipart;
mod outline;
mod parts;
mod prompt;
mod prompts;
mod writer;

#[cfg(test)]
mod tests;

use std::fmt;

use smallvec::SmallVec;

pub use api::Api;
pub use edits::Edits;
pub use error::{ModelProblem, ParseError, Position};
pub use outline::{Member, Outline};
pub use prompt::{BYTES_PER_TOKEN, Prompt, TOKENS_PER_MEDIA};

use body::{Members, Model, StreamOptions};
use prompt::Span;

/// What a request asks for. It owns its data and goes together with the body it was read from.
#[derive(Clone, PartialEq)]
pub struct LlmRequest {
    /// Which API the path names.
    pub api: Api,
    /// The model the client names.
    pub model: Option<Box<str>>,
    /// Whether the response is to be streamed.
    pub stream: bool,
    /// Most output tokens the client wants of each of the `n` answers; what is beyond `u64` is `u64::MAX`.
    pub max_tokens: Option<u64>,
    /// Answers wanted for each prompt, at least 1.
    pub n: u32,
    /// Answers generated for each prompt, of which the best `n` come back; at least 1.
    pub best_of: u32,
    /// The engine's `priority` (vLLM: lower is earlier).
    pub priority: Option<i64>,
    /// The end user as the client names it; not to be trusted.
    pub user: Option<Box<str>>,
    /// vLLM's `cache_salt`: requests with different salts share no cache.
    pub cache_salt: Option<Box<str>>,
    /// The adapter, where it is named apart from the model: `lora_path` (SGLang), `lora_name`, `adapter_id` (TGI).
    pub lora: Option<Box<str>>,
    /// The prompt, as positions in the body.
    pub prompt: Prompt,
    layout: Layout,
}

/// Where to change the body.
#[derive(Clone, PartialEq, Eq)]
struct Layout {
    models: SmallVec<[Span; 1]>,
    /// The model is a form field, not a JSON literal.
    form: bool,
    /// Where a member can be put first, behind the brace of a whole JSON body, and whether it stays alone.
    front: Option<(u32, bool)>,
    stream_end: u32,
    stream_options: StreamOptions,
    /// Something follows that was not read.
    cut_off: bool,
}

impl LlmRequest {
    /// A request without a body: only the path is known.
    pub fn headers_only(path: &str) -> LlmRequest {
        LlmRequest {
            api: Api::from_path(path),
            model: None,
            stream: false,
            max_tokens: None,
            n: 1,
            best_of: 1,
            priority: None,
            user: None,
            cache_salt: None,
            lora: None,
            prompt: Prompt::unknown(),
            layout: Layout {
                models: SmallVec::new(),
                form: false,
                front: None,
                stream_end: 0,
                stream_options: StreamOptions::Absent,
                cut_off: false,
            },
        }
    }

    /// Makes `to` the model's name. Every literal that stands for the top-level `model` is replaced, so that parsers
    /// which take the first of equal keys agree with those which take the last. Nothing to do if the name is `to`
    /// already. A JSON body that names no model gets one where it should have had one.
    pub fn rename_model(&self, to: &str, edits: &mut Edits) {
        if self.layout.models.len() == 1 && self.model.as_deref() == Some(to) {
            return;
        }
        let replacement =
            if self.layout.form { to.to_owned() } else { serde_json::Value::from(to).to_string() };
        if self.takes_model()
            && let Some((at, alone)) = self.layout.front
        {
            let comma = if alone { "" } else { "," };
            edits.insert(at as usize, format!("\"model\":{replacement}{comma}"));
        }
        for model in &self.layout.models {
            edits.replace(model.range(), replacement.as_bytes());
        }
    }

    /// Whether its API needs a model and its body, all of which was read, names none.
    pub fn lacks_model(&self) -> bool {
        self.model.is_none() && self.api.is_known() && (self.layout.form || self.layout.front.is_some())
    }

    /// Whether it names no model and [`LlmRequest::rename_model`] can give it one.
    pub fn takes_model(&self) -> bool {
        self.lacks_model() && self.layout.front.is_some()
    }

    /// Asks the engine for the usage event at the end of a stream, if the client streams and did not ask itself; other
    /// stream options stay. True if there was something to do: then the event is ours to take out of the response.
    ///
    /// Only for completions and chat, since the other APIs report usage by themselves. Never in a body that was cut off,
    /// whose own options may lie in the part that is missing.
    pub fn ask_for_usage(&self, edits: &mut Edits) -> bool {
        if !self.stream || self.layout.cut_off || !matches!(self.api, Api::Completions | Api::Chat) {
            return false;
        }
        match self.layout.stream_options {
            StreamOptions::With { included: true, .. } | StreamOptions::Foreign => return false,
            StreamOptions::With { literal, .. } => edits.replace(literal.range(), "true"),
            StreamOptions::Without { at, empty: true } => edits.insert(at as usize, "\"include_usage\":true"),
            StreamOptions::Without { at, empty: false } => {
                edits.insert(at as usize, "\"include_usage\":true,");
            }
            StreamOptions::Null(literal) => edits.replace(literal.range(), "{\"include_usage\":true}"),
            StreamOptions::Absent => {
                edits.insert(self.layout.stream_end as usize, ",\"stream_options\":{\"include_usage\":true}");
            }
        }
        true
    }

    /// Answers generated for each prompt.
    pub fn generated(&self) -> u32 {
        self.n.max(self.best_of)
    }

    /// Most output tokens it may cost, if it says so.
    pub fn most_output(&self) -> Option<u64> {
        Some(self.max_tokens?.saturating_mul(u64::from(self.generated())))
    }

    /// Whether the client itself asks for the usage event (`stream_options.include_usage` is true).
    pub fn includes_usage(&self) -> bool {
        matches!(self.layout.stream_options, StreamOptions::With { included: true, .. })
    }

    fn from_members(api: Api, mut members: Members, cut_off: bool) -> LlmRequest {
        let model = match std::mem::replace(&mut members.model, Model::Absent) {
            Model::Name(name) if !name.trim().is_empty() => Some(name),
            _ => None,
        };
        LlmRequest {
            api,
            model,
            stream: members.stream,
            max_tokens: members.token_limit(),
            n: at_least_one(members.n),
            best_of: at_least_one(members.best_of),
            priority: members.priority,
            user: members.user.take(),
            cache_salt: members.cache_salt.take(),
            lora: members.lora.take(),
            layout: Layout {
                models: std::mem::take(&mut members.models),
                form: false,
                front: None,
                stream_end: members.stream_end,
                stream_options: members.stream_options,
                cut_off,
            },
            prompt: if cut_off || api == Api::Other { Prompt::unknown() } else { members.into_prompt() },
        }
    }
}

/// Names sizes and settings, never the prompt, the user or the salt.
impl fmt::Debug for LlmRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmRequest")
            .field("api", &self.api)
            .field("model", &self.model)
            .field("stream", &self.stream)
            .field("max_tokens", &self.max_tokens)
            .field("n", &self.n)
            .field("priority", &self.priority)
            .field("lora", &self.lora)
            .field("prompt", &self.prompt)
            .finish_non_exhaustive()
    }
}

/// Reads a whole body. JSON, or a multipart form if `content_type` says so.
///
/// On an unknown path a body that cannot be read is no error: its model and prompt are unknown. A missing `model` never is
/// an error here ([`Api::is_known`] tells where it should be one). Of equal keys the last one counts, as in Python.
pub fn parse(path: &str, content_type: Option<&str>, body: &[u8]) -> Result<LlmRequest, ParseError> {
    let api = Api::from_path(path);
    let parsed = match multipart::boundary(content_type) {
        Some(boundary) => boundary
            .and_then(|boundary| form(path, &boundary, body))
            .map_err(|problem| ParseError::Multipart { problem }),
        None => json(api, body).map(|request| LlmRequest {
            // TGI streams by path, not by member.
            stream: request.stream
                || (api == Api::SglangGenerate && api::decoded(path).contains("/generate_stream")),
            ..request
        }),
    };
    match parsed {
        Err(_) if api == Api::Other => Ok(LlmRequest::headers_only(path)),
        parsed => parsed,
    }
}

/// Reads the beginning of a body whose rest is not known (Envoy's `BUFFERED_PARTIAL` beyond its limit). Something only
/// if a complete top-level `model` string lies in what arrived. The prompt is unknown; its estimate counts the bytes
/// that arrived.
pub fn parse_prefix(path: &str, prefix: &[u8]) -> Option<LlmRequest> {
    let api = Api::from_path(path);
    if u32::try_from(prefix.len()).is_err() {
        return None;
    }
    let mut members = Members::new(api, prefix);
    match members.read(&prefix[byte_order_mark(prefix)..]) {
        Err(error) if !error.is_eof() => return None,
        _ => {}
    }
    let mut request = LlmRequest::from_members(api, members, true);
    request.model.as_ref()?;
    request.prompt.further_tokens = prompt::estimate_text(prefix.len());
    Some(request)
}

fn json(api: Api, body: &[u8]) -> Result<LlmRequest, ParseError> {
    if u32::try_from(body.len()).is_err() {
        return Err(ParseError::TooLarge { bytes: body.len() });
    }
    let skipped = byte_order_mark(body);
    let start = body.len() - body[skipped..].trim_ascii_start().len();
    if matches!(body.get(start), Some(b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n')) {
        return Err(ParseError::NotAnObject { at: Position::of(body, start) });
    }
    let mut members = Members::new(api, body);
    members.read(&body[skipped..]).map_err(|error| {
        let at = Position::of_json_error(&body[skipped..], skipped, &error);
        // serde_json's texts may quote the body, so they are only looked at.
        if error.is_eof() {
            ParseError::CutOff { at }
        } else if error.to_string().starts_with("recursion limit") {
            ParseError::TooDeep { at }
        } else {
            ParseError::NotJson { at }
        }
    })?;
    if let (true, Some(literal)) = (api.is_known(), members.models.last()) {
        let problem = match &members.model {
            Model::Name(name) if name.trim().is_empty() => Some(ModelProblem::Blank),
            Model::NotAString => Some(ModelProblem::NotAString),
            Model::Absent | Model::Name(_) => None,
        };
        if let Some(problem) = problem {
            return Err(ParseError::Model { at: Position::of(body, literal.range().start), problem });
        }
    }
    let mut request = LlmRequest::from_members(api, members, false);
    // The body begins with the brace of an object: anything else was refused.
    let alone = body[start + 1..].trim_ascii_start().starts_with(b"}");
    request.layout.front = Some((start as u32 + 1, alone));
    Ok(request)
}

fn at_least_one(number: Option<u64>) -> u32 {
    number.map_or(1, |number| u32::try_from(number).unwrap_or(u32::MAX).max(1))
}

/// Length of the byte order mark that some clients send before the JSON.
fn byte_order_mark(body: &[u8]) -> usize {
    if body.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 }
}

fn form(path: &str, boundary: &str, body: &[u8]) -> Result<LlmRequest, &'static str> {
    if u32::try_from(body.len()).is_err() {
        return Err("it has 4 GiB or more; send a shorter one");
    }
    let form = multipart::read(boundary, body)?;
    let mut request = LlmRequest::headers_only(path);
    request.model = form.model.filter(|name| !name.trim().is_empty());
    request.stream = form.stream;
    request.user = form.user;
    request.layout.models = form.models;
    request.layout.form = true;
    Ok(request)
}
