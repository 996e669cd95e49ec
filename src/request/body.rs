//! The one pass over a JSON body: its top-level members.

use serde::de::{DeserializeSeed, IgnoredAny, MapAccess};
use serde_json::value::RawValue;
use smallvec::SmallVec;

use super::api::Api;
use super::conversation::{Input, Messages};
use super::lenient::{Any, Name, Take};
use super::parts::Content;
use super::prompt::{Markup, Piece, Prompt, Span};
use super::prompts::{Prompts, PromptsOf};
use super::writer::{Role, Writer};

/// What was read, also after an error: then as far as it came.
pub(super) struct Members {
    api: Api,
    writer: Writer,
    /// Every literal that stood for `model`, in order; the last one counts.
    pub(super) models: SmallVec<[Span; 1]>,
    pub(super) model: Model,
    pub(super) stream: bool,
    /// The end of the last `stream` literal.
    pub(super) stream_end: u32,
    pub(super) stream_options: StreamOptions,
    pub(super) max_completion_tokens: Option<u64>,
    pub(super) max_tokens: Option<u64>,
    pub(super) max_output_tokens: Option<u64>,
    pub(super) max_new_tokens: Option<u64>,
    pub(super) n: Option<u64>,
    pub(super) best_of: Option<u64>,
    pub(super) priority: Option<i64>,
    pub(super) user: Option<Box<str>>,
    pub(super) cache_salt: Option<Box<str>>,
    pub(super) lora: Option<Box<str>>,
    prompts: Option<Prompts>,
    messages: Option<Vec<Piece>>,
    input: Option<Vec<Piece>>,
    system: Vec<Piece>,
    instructions: Vec<Piece>,
    tools: Option<Piece>,
    functions: Option<Piece>,
}

/// The last value of `model`.
pub(super) enum Model {
    Absent,
    Name(Box<str>),
    NotAString,
}

/// The last value of `stream_options`, by what it takes to ask for usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamOptions {
    Absent,
    /// Null: to be replaced as a whole.
    Null(Span),
    /// An object without `include_usage`; a member goes to `at`.
    Without {
        at: u32,
        empty: bool,
    },
    /// An object whose `include_usage` is the literal at the span.
    With {
        literal: Span,
        included: bool,
    },
    /// No object: the engine will refuse it.
    Foreign,
}

impl Members {
    pub(super) fn new(api: Api, body: &[u8]) -> Members {
        Members {
            api,
            writer: Writer::new(body),
            models: SmallVec::new(),
            model: Model::Absent,
            stream: false,
            stream_end: 0,
            stream_options: StreamOptions::Absent,
            max_completion_tokens: None,
            max_tokens: None,
            max_output_tokens: None,
            max_new_tokens: None,
            n: None,
            best_of: None,
            priority: None,
            user: None,
            cache_salt: None,
            lora: None,
            prompts: None,
            messages: None,
            input: None,
            system: Vec::new(),
            instructions: Vec::new(),
            tools: None,
            functions: None,
        }
    }

    /// Reads `text`, a part of the body that starts at an object's brace. Nothing but white space may follow it.
    pub(super) fn read(&mut self, text: &[u8]) -> Result<(), serde_json::Error> {
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        Any(TopLevel(self)).deserialize(&mut deserializer)?;
        deserializer.end()
    }

    /// The limit that binds, in the order in which engines look for it. What an API does not know bounds nothing.
    pub(super) fn token_limit(&self) -> Option<u64> {
        match self.api {
            // Engines that take the first of both that is true pass over a 0.
            Api::Chat => self.max_completion_tokens.filter(|most| *most > 0).or(self.max_tokens),
            Api::Completions | Api::Messages => self.max_tokens,
            Api::Responses => self.max_output_tokens,
            Api::Embeddings | Api::Tokenize => None,
            Api::Generate | Api::SglangGenerate => self.max_new_tokens.or(self.max_tokens),
            Api::Other => self
                .max_completion_tokens
                .or(self.max_tokens)
                .or(self.max_output_tokens)
                .or(self.max_new_tokens),
        }
    }

    /// Kthena's order: `prompt`, else `messages`, else `input`.
    pub(super) fn into_prompt(self) -> Prompt {
        let scratch = self.writer.scratch;
        match self.prompts {
            Some(Prompts::Text { piece, further_tokens }) => {
                return Prompt { further_tokens, ..Prompt::from_pieces(vec![piece], scratch) };
            }
            Some(Prompts::TokenIds { ids, further_tokens }) => {
                return Prompt { known: true, token_ids: Some(ids), further_tokens, ..Prompt::unknown() };
            }
            Some(Prompts::Unclear) => return Prompt::unknown(),
            None => {}
        }
        let (first, rest) = match (self.messages, self.input) {
            (Some(messages), _) => (self.system, messages),
            (None, Some(input)) => (self.instructions, input),
            (None, None) => return Prompt::unknown(),
        };
        let mut pieces = rest;
        pieces.splice(0..0, self.tools.into_iter().chain(self.functions).chain(first));
        Prompt::from_pieces(pieces, scratch)
    }

    fn set_model(&mut self, literal: &RawValue) {
        self.models.push(self.writer.locate(literal.get()));
        self.model = text_of(literal).map_or(Model::NotAString, Model::Name);
    }

    /// `tools` and `functions` as they stand; none for null and empty lists.
    fn definitions(&self, value: &RawValue) -> Option<Piece> {
        let json = value.get();
        let inner = json.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let nothing = json == "null" || inner.is_some_and(|inner| inner.trim().is_empty());
        (!nothing).then(|| Piece::Body(self.writer.locate(json)))
    }

    fn first_message(&mut self, role: Markup) -> Vec<Piece> {
        if self.writer.content.iter().all(|piece| piece.is_empty()) {
            return Vec::new();
        }
        self.writer.calls.clear();
        self.writer.out = Vec::new();
        self.writer.end_message(Role::Usual(role));
        std::mem::take(&mut self.writer.out)
    }
}

#[derive(Clone, Copy)]
enum Member {
    Model,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    MaxNewTokens,
    N,
    BestOf,
    Priority,
    User,
    CacheSalt,
    Lora,
    Sampling,
    Prompt,
    Ids,
    EngineText,
    Messages,
    Input,
    System,
    Instructions,
    Tools,
    Functions,
    Other,
}

fn member(name: &str) -> Member {
    match name {
        "model" => Member::Model,
        "stream" => Member::Stream,
        "stream_options" => Member::StreamOptions,
        "max_tokens" => Member::MaxTokens,
        "max_completion_tokens" => Member::MaxCompletionTokens,
        "max_output_tokens" => Member::MaxOutputTokens,
        "max_new_tokens" => Member::MaxNewTokens,
        "n" => Member::N,
        "best_of" => Member::BestOf,
        "priority" => Member::Priority,
        "user" => Member::User,
        "cache_salt" => Member::CacheSalt,
        "lora_path" | "lora_name" | "adapter_id" => Member::Lora,
        "sampling_params" | "parameters" => Member::Sampling,
        "prompt" => Member::Prompt,
        "token_ids" | "input_ids" => Member::Ids,
        "text" | "inputs" => Member::EngineText,
        "messages" => Member::Messages,
        "input" => Member::Input,
        "system" => Member::System,
        "instructions" => Member::Instructions,
        "tools" => Member::Tools,
        "functions" => Member::Functions,
        _ => Member::Other,
    }
}

struct TopLevel<'m>(&'m mut Members);

impl<'b> Take<'b> for TopLevel<'_> {
    type Out = ();

    fn other(self) {}

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<(), A::Error> {
        let it = self.0;
        let generates = matches!(it.api, Api::Generate | Api::SglangGenerate);
        while let Some(member) = object.next_key_seed(Name(member))? {
            match member {
                Member::Prompt => it.prompts = object.next_value_seed(Any(PromptsOf(&mut it.writer)))?,
                Member::Ids | Member::EngineText if generates => {
                    // SGLang documents `text` or `input_ids`, the other one null.
                    let prompts = object.next_value_seed(Any(PromptsOf(&mut it.writer)))?;
                    it.prompts = prompts.or(it.prompts.take());
                }
                Member::Messages => {
                    it.writer.out = Vec::new();
                    let is_list = object.next_value_seed(Any(Messages(&mut it.writer)))?;
                    it.messages = is_list.then(|| std::mem::take(&mut it.writer.out));
                }
                Member::Input if it.api == Api::Embeddings => {
                    it.prompts = object.next_value_seed(Any(PromptsOf(&mut it.writer)))?;
                }
                Member::Input => {
                    it.writer.out = Vec::new();
                    let is_input = object.next_value_seed(Any(Input(&mut it.writer)))?;
                    it.input = is_input.then(|| std::mem::take(&mut it.writer.out));
                }
                Member::System => {
                    it.writer.content.clear();
                    object.next_value_seed(Any(Content(&mut it.writer)))?;
                    it.system = it.first_message(Markup::System);
                }
                Member::Instructions => {
                    it.writer.content.clear();
                    object.next_value_seed(Any(Content(&mut it.writer)))?;
                    it.instructions = it.first_message(Markup::Developer);
                }
                Member::Other | Member::Ids | Member::EngineText => drop(object.next_value::<IgnoredAny>()?),
                small => it.small(small, object.next_value::<&'b RawValue>()?),
            }
        }
        Ok(())
    }
}

impl Members {
    /// Members of which the literal itself is of interest, or that are so short that reading them twice is free.
    fn small(&mut self, member: Member, value: &RawValue) {
        match member {
            Member::Model => self.set_model(value),
            Member::Stream => {
                self.stream = value.get() == "true";
                self.stream_end = self.writer.locate(value.get()).range().end as u32;
            }
            Member::StreamOptions => self.stream_options = stream_options(&self.writer, value),
            Member::MaxTokens => self.max_tokens = whole_number(value),
            Member::MaxCompletionTokens => self.max_completion_tokens = whole_number(value),
            Member::MaxOutputTokens => self.max_output_tokens = whole_number(value),
            Member::MaxNewTokens => self.max_new_tokens = whole_number(value),
            Member::N => self.n = whole_number(value),
            Member::BestOf => self.best_of = whole_number(value),
            Member::Priority => self.priority = value.get().parse().ok(),
            Member::User => self.user = text_of(value),
            Member::CacheSalt => self.cache_salt = text_of(value),
            Member::Lora => self.lora = text_of(value),
            Member::Tools => self.tools = self.definitions(value),
            Member::Functions => self.functions = self.definitions(value),
            Member::Sampling => {
                // An error is impossible, the value has been scanned; a list (SGLang batches) sets nothing.
                let _ = Any(Sampling(self)).deserialize(&mut serde_json::Deserializer::from_str(value.get()));
            }
            _ => {}
        }
    }
}

/// `sampling_params` of vLLM and SGLang, `parameters` of TGI.
struct Sampling<'m>(&'m mut Members);

impl<'b> Take<'b> for Sampling<'_> {
    type Out = ();

    fn other(self) {}

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<(), A::Error> {
        while let Some(member) = object.next_key_seed(Name(member))? {
            let value = object.next_value::<&RawValue>()?;
            if let Member::MaxTokens | Member::MaxNewTokens | Member::N | Member::Lora = member {
                self.0.small(member, value);
            }
        }
        Ok(())
    }
}

fn stream_options(writer: &Writer, value: &RawValue) -> StreamOptions {
    struct Options;
    impl<'b> Take<'b> for Options {
        /// Whether there are members, and the last `include_usage`.
        type Out = (bool, Option<&'b RawValue>);

        fn other(self) -> Self::Out {
            (false, None)
        }

        fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<Self::Out, A::Error> {
            let (mut any, mut include) = (false, None);
            while let Some(wanted) = object.next_key_seed(Name(|name| name == "include_usage"))? {
                let literal = object.next_value::<&'b RawValue>()?;
                any = true;
                include = if wanted { Some(literal) } else { include };
            }
            Ok((any, include))
        }
    }
    let json = value.get();
    if json == "null" {
        return StreamOptions::Null(writer.locate(json));
    }
    if !json.starts_with('{') {
        return StreamOptions::Foreign;
    }
    match Any(Options).deserialize(&mut serde_json::Deserializer::from_str(json)) {
        Ok((_, Some(include))) => {
            StreamOptions::With { literal: writer.locate(include.get()), included: include.get() == "true" }
        }
        Ok((any, None)) => {
            StreamOptions::Without { at: writer.locate(json).range().start as u32 + 1, empty: !any }
        }
        Err(_) => StreamOptions::Foreign,
    }
}

fn text_of(value: &RawValue) -> Option<Box<str>> {
    serde_json::from_str::<String>(value.get()).ok().map(String::into_boxed_str)
}

/// A whole number that is not negative, `16.0` included; what is too large saturates.
fn whole_number(value: &RawValue) -> Option<u64> {
    let digits = value.get();
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(digits.parse().unwrap_or(u64::MAX));
    }
    let number =
        digits.parse::<f64>().ok().filter(|_| digits.starts_with(|first: char| first.is_ascii_digit()))?;
    // The cast saturates.
    (number.fract() == 0.0 || number.is_infinite()).then_some(number as u64)
}
