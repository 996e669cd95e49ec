//! Reads one JSON message of a response: an event's data or a whole document.

use std::sync::LazyLock;

use memchr::memmem::{self, Finder};
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess};

use super::Usage;
use crate::request::lenient::{Any, Name, Take, Text};

/// What the messages of a response said so far.
#[derive(Debug, Default)]
pub(super) struct Findings {
    counts: Option<Counts>,
    pub(super) error: bool,
    pub(super) done: bool,
    pub(super) events: u64,
    pub(super) skipped_events: u64,
}

/// Counts as one message gives them. What a later message leaves out stays: Anthropic's last one may tell the output only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    prompt: Option<u64>,
    completion: Option<u64>,
    cached: Option<u64>,
}

impl Findings {
    pub(super) fn usage(&self) -> Option<Usage> {
        self.counts.map(|counts| Usage {
            prompt: counts.prompt.unwrap_or_default(),
            completion: counts.completion.unwrap_or_default(),
            cached: counts.cached,
        })
    }

    /// The last usage counts; nothing is ever summed, since engines repeat a running total.
    pub(super) fn note(&mut self, new: Counts) {
        let old = self.counts.unwrap_or_default();
        self.counts = Some(Counts {
            prompt: new.prompt.or(old.prompt),
            completion: new.completion.or(old.completion),
            cached: new.cached.or(old.cached),
        });
    }

    /// Reads a message. True if it is the event that `stream_options.include_usage` adds: no choices, but usage.
    pub(super) fn read(&mut self, data: &[u8]) -> bool {
        /// Longer than the end mark of Anthropic's streams, `{"type":"message_stop"}`, with room for further members.
        const STOP_LENGTH_MAX: usize = 256;
        if !worth_reading(data) {
            self.done |= data.len() <= STOP_LENGTH_MAX && memmem::find(data, b"\"message_stop\"").is_some();
            return false;
        }
        let mut deserializer = serde_json::Deserializer::from_slice(data);
        let Ok(Some(seen)) = Any(Message { nested: false }).deserialize(&mut deserializer) else {
            return false;
        };
        if let Some(counts) = seen.counts {
            self.note(counts);
        }
        self.error |= seen.error;
        self.done |= seen.done;
        seen.choices_empty && seen.counts.is_some() && !seen.error
    }
}

/// Whether a message can say anything that matters here. A quote inside a JSON string is escaped, so text of the model
/// does not match; members that are null, as most events have, do not count.
fn worth_reading(data: &[u8]) -> bool {
    static MEMBERS: LazyLock<[Finder<'static>; 3]> = LazyLock::new(|| {
        [Finder::new(b"\"usage\""), Finder::new(b"\"error\""), Finder::new(b"\"meta_info\"")]
    });
    MEMBERS.iter().any(|member| {
        member.find_iter(data).any(|at| {
            let rest = data[at + member.needle().len()..].trim_ascii_start();
            !rest.strip_prefix(b":").is_some_and(|value| value.trim_ascii_start().starts_with(b"null"))
        })
    })
}

/// Reads a usage object that starts `json`; what follows it does not matter.
pub(super) fn counts_at_start(json: &[u8]) -> Option<Counts> {
    Any(CountsOf).deserialize(&mut serde_json::Deserializer::from_slice(json)).ok().flatten()
}

#[derive(Default)]
struct Seen {
    counts: Option<Counts>,
    error: bool,
    done: bool,
    choices_empty: bool,
}

enum Member {
    Usage,
    Error,
    Choices,
    Kind,
    Envelope,
    Other,
}

fn member(name: &str) -> Member {
    match name {
        // SGLang's own `/generate` reports under `meta_info`.
        "usage" | "meta_info" => Member::Usage,
        "error" => Member::Error,
        "choices" => Member::Choices,
        "type" | "object" => Member::Kind,
        "message" | "response" => Member::Envelope,
        _ => Member::Other,
    }
}

/// A message, or the one inside Anthropic's `message_start` and the Responses API's events.
struct Message {
    nested: bool,
}

impl<'b> Take<'b> for Message {
    type Out = Option<Seen>;

    fn other(self) -> Option<Seen> {
        None
    }

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<Option<Seen>, A::Error> {
        let mut seen = Seen::default();
        while let Some(member) = object.next_key_seed(Name(member))? {
            match member {
                Member::Usage => seen.counts = object.next_value_seed(Any(CountsOf))?.or(seen.counts),
                Member::Error => seen.error |= object.next_value_seed(Any(IsObjectOrText))?,
                Member::Choices => seen.choices_empty = object.next_value_seed(Any(IsEmptyList))?,
                Member::Kind => match object.next_value_seed(Any(KindOf))? {
                    Kind::Error => seen.error = true,
                    Kind::Finished => seen.done = true,
                    Kind::Other => {}
                },
                Member::Envelope if !self.nested => {
                    if let Some(inner) = object.next_value_seed(Any(Message { nested: true }))? {
                        seen.counts = inner.counts.or(seen.counts);
                        seen.error |= inner.error;
                    }
                }
                Member::Envelope | Member::Other => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        Ok(Some(seen))
    }
}

enum Kind {
    Error,
    Finished,
    Other,
}

struct KindOf;

impl<'b> Take<'b> for KindOf {
    type Out = Kind;

    fn other(self) -> Kind {
        Kind::Other
    }

    fn text(self, text: Text<'_, 'b>) -> Kind {
        match text.as_str() {
            "error" => Kind::Error,
            "message_stop" | "response.completed" | "response.incomplete" | "response.failed" => {
                Kind::Finished
            }
            _ => Kind::Other,
        }
    }
}

struct IsObjectOrText;

impl<'b> Take<'b> for IsObjectOrText {
    type Out = bool;

    fn other(self) -> bool {
        false
    }

    fn text(self, _: Text<'_, 'b>) -> bool {
        true
    }

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<bool, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(true)
    }
}

struct IsEmptyList;

impl<'b> Take<'b> for IsEmptyList {
    type Out = bool;

    fn other(self) -> bool {
        false
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<bool, A::Error> {
        let mut empty = true;
        while list.next_element::<IgnoredAny>()?.is_some() {
            empty = false;
        }
        Ok(empty)
    }
}

enum Count {
    /// OpenAI and SGLang: cached tokens included.
    Prompt,
    /// The Responses API includes cached tokens here, Anthropic counts them apart.
    Input,
    Completion,
    Details,
    Cached,
    CacheRead,
    CacheCreation,
    Other,
}

fn count(name: &str) -> Count {
    match name {
        "prompt_tokens" => Count::Prompt,
        "input_tokens" => Count::Input,
        "completion_tokens" | "output_tokens" => Count::Completion,
        "prompt_tokens_details" | "input_tokens_details" => Count::Details,
        "cached_tokens" => Count::Cached,
        "cache_read_input_tokens" => Count::CacheRead,
        "cache_creation_input_tokens" => Count::CacheCreation,
        _ => Count::Other,
    }
}

/// A usage object; nothing if it is none or counts nothing that we know.
struct CountsOf;

impl<'b> Take<'b> for CountsOf {
    type Out = Option<Counts>;

    fn other(self) -> Option<Counts> {
        None
    }

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<Option<Counts>, A::Error> {
        let mut counts = Counts::default();
        let (mut input, mut cache_read, mut cache_creation) = (None, None, None);
        while let Some(name) = object.next_key_seed(Name(count))? {
            match name {
                Count::Prompt => counts.prompt = object.next_value_seed(Any(Number))?,
                Count::Input => input = object.next_value_seed(Any(Number))?,
                Count::Completion => counts.completion = object.next_value_seed(Any(Number))?,
                Count::Cached => counts.cached = object.next_value_seed(Any(Number))?,
                Count::CacheRead => cache_read = object.next_value_seed(Any(Number))?,
                Count::CacheCreation => cache_creation = object.next_value_seed(Any(Number))?,
                Count::Details => {
                    let details: Option<Counts> = object.next_value_seed(Any(CountsOf))?;
                    counts.cached = details.and_then(|details| details.cached).or(counts.cached);
                }
                Count::Other => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        // Anthropic: input_tokens is the part that was neither read from the cache nor written to it.
        let all_input = input.map(|input: u64| {
            input.saturating_add(cache_read.unwrap_or(0)).saturating_add(cache_creation.unwrap_or(0))
        });
        counts.prompt = counts.prompt.or(all_input);
        counts.cached = counts.cached.or(cache_read);
        Ok((counts != Counts::default()).then_some(counts))
    }
}

struct Number;

impl Take<'_> for Number {
    type Out = Option<u64>;

    fn other(self) -> Option<u64> {
        None
    }

    fn number(self, number: u64) -> Option<u64> {
        Some(number)
    }
}
