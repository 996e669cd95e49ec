//! From a chat to the template's variables: content in the form it reads, calls with arguments as objects.

use std::sync::Arc;

use minijinja::Value;

use super::super::json::{Json, Members};
use super::super::skipped::Skipped;
use super::super::template::{ChatTemplate, ContentFormat};
use super::{BILLING, Chat};

/// transformers appends this to a message that is to be continued, and cuts the text where it finds it again.
const END: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Parameters of `apply_chat_template` that transformers keeps from the template.
const CONSUMED: [&str; 9] = [
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "conversation",
];

/// The variables, in the order in which they override each other.
pub fn variables(mut chat: Chat, template: &ChatTemplate, special: &Members) -> Result<Value, Skipped> {
    if chat.merge_system && template.system_first {
        merge_inline_system(&mut chat.messages);
    }
    let mut messages = chat
        .messages
        .iter()
        .map(|message| normalised(message, template.content))
        .collect::<Result<Vec<_>, _>>()?;
    if !template.knows_developer && messages.iter().any(|message| role(message) == "developer") {
        messages = without_developers(messages);
    }
    if chat.continue_final_message {
        if !template.names_content {
            return Err(Skipped::Template);
        }
        mark_the_end(&mut messages)?;
    }
    let mut all: Members = special.clone();
    let own = chat.variables.into_iter().filter(|(name, _)| !CONSUMED.contains(&&**name));
    all.insert("documents".into(), Json::Null);
    all.extend(own);
    all.insert("messages".into(), Json::List(messages));
    all.insert("tools".into(), chat.tools.map_or(Json::Null, Json::List));
    all.insert("add_generation_prompt".into(), Json::Bool(chat.add_generation_prompt));
    Ok(Value::from(&Json::Object(all)))
}

fn role(message: &Json) -> &str {
    message.get("role").and_then(Json::as_str).unwrap_or_default()
}

/// One message with the members that templates are given.
fn normalised(message: &Json, format: ContentFormat) -> Result<Json, Skipped> {
    let role = message.get("role").and_then(Json::as_str).ok_or(Skipped::Unsupported)?;
    let mut parts = Vec::new();
    match message.get("content") {
        None => {}
        Some(Json::Text(text)) => parts.push(Part::of_text(Arc::clone(text))),
        Some(Json::List(items)) => {
            for item in items {
                parts.extend(part(item)?);
            }
        }
        Some(_) => return Err(Skipped::Unsupported),
    }
    if role == "system" {
        parts = parts.into_iter().filter_map(without_billing).collect();
    }
    // Tools answer in one text whatever the template reads.
    let content = match format {
        ContentFormat::Parts if role != "tool" => {
            Json::List(parts.into_iter().map(Part::into_json).collect())
        }
        _ => joined(&parts, format),
    };
    let mut members = Members::default();
    members.insert("role".into(), Json::text(role));
    members.insert("content".into(), content);
    if role == "assistant" {
        if let Some(calls) =
            message.get("tool_calls").and_then(Json::as_list).filter(|calls| !calls.is_empty())
        {
            let calls = calls.iter().map(call).collect::<Result<Vec<_>, _>>()?;
            members.insert("tool_calls".into(), Json::List(calls));
        }
        if let Some(reasoning) = message.get("reasoning").or(message.get("reasoning_content")) {
            members.insert("reasoning".into(), reasoning.clone());
            members.insert("reasoning_content".into(), reasoning.clone());
        }
    }
    if role == "tool"
        && let Some(id) = message.get("tool_call_id")
    {
        members.insert("tool_call_id".into(), id.clone());
    }
    for name in ["name", "task"] {
        if let Some(text @ Json::Text(_)) = message.get(name) {
            members.insert(name.into(), text.clone());
        }
    }
    if role == "developer" {
        members.insert("tools".into(), message.get("tools").cloned().unwrap_or(Json::Null));
    }
    Ok(Json::Object(members))
}

/// A text part, with the members that no API defines.
struct Part {
    text: Arc<str>,
    further: Members,
}

impl Part {
    fn of_text(text: Arc<str>) -> Self {
        Self { text, further: Members::default() }
    }

    fn into_json(self) -> Json {
        let mut members = Members::default();
        members.insert("type".into(), Json::text("text"));
        members.insert("text".into(), Json::Text(self.text));
        members.extend(self.further);
        Json::Object(members)
    }
}

/// Members of content parts that some API defines.
const PART_MEMBERS: [&str; 24] = [
    "type",
    "text",
    "refusal",
    "thinking",
    "closed",
    "uuid",
    "image_url",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "image_pil",
    "data",
    "name",
    "detail",
    "file_id",
    "annotations",
    "logprobs",
    "prompt_cache_breakpoint",
    "tool_reference",
    "prompt_embeds",
];

fn part(item: &Json) -> Result<Option<Part>, Skipped> {
    if let Json::Text(text) = item {
        return Ok(Some(Part::of_text(Arc::clone(text))));
    }
    let members = item.as_object().ok_or(Skipped::Unsupported)?;
    let kind = item.get("type").and_then(Json::as_str).ok_or(Skipped::Media)?;
    if item.get("uuid").is_some() {
        return Err(Skipped::Media);
    }
    let text = match kind {
        "text" | "input_text" | "output_text" => item.get("text"),
        "refusal" => item.get("refusal"),
        "thinking" => item.get("thinking"),
        "image_url" | "input_image" | "audio_url" | "input_audio" | "video_url" | "image_embeds"
        | "audio_embeds" | "video_embeds" | "image_pil" => return Err(Skipped::Media),
        _ => return Err(Skipped::Unsupported),
    };
    match text {
        Some(Json::Text(text)) => {
            let further = members.iter().filter(|(name, _)| !PART_MEMBERS.contains(&&***name));
            let further = further.map(|(name, value)| (Arc::clone(name), value.clone())).collect();
            Ok(Some(Part { text: Arc::clone(text), further }))
        }
        None if matches!(kind, "text" | "refusal") => Ok(None),
        _ => Err(Skipped::Unsupported),
    }
}

/// Parts as one text. Where templates read text, empty parts are left out before they are joined.
fn joined(parts: &[Part], format: ContentFormat) -> Json {
    let texts = parts.iter().map(|part| &*part.text);
    let texts: Vec<&str> = match format {
        ContentFormat::Text => texts.filter(|text| !text.is_empty()).collect(),
        ContentFormat::Parts => texts.collect(),
    };
    Json::text(texts.join("\n"))
}

fn without_billing(part: Part) -> Option<Part> {
    if !part.text.starts_with(BILLING) {
        return Some(part);
    }
    let rest = part.text.split_once('\n').map(|(_, rest)| rest).filter(|rest| !rest.is_empty())?;
    Some(Part { text: rest.into(), further: part.further })
}

/// A call whose arguments are an object, as templates want them; what is no object becomes an empty one.
fn call(call: &Json) -> Result<Json, Skipped> {
    let mut members = call.as_object().ok_or(Skipped::Unsupported)?.clone();
    if call.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(Skipped::Unsupported);
    }
    let mut function = call.get("function").and_then(Json::as_object).ok_or(Skipped::Unsupported)?.clone();
    let arguments = match function.get("arguments") {
        Some(Json::Text(text)) => Json::parse(text.as_bytes()),
        other => other.cloned(),
    };
    let arguments = arguments.filter(|arguments| arguments.as_object().is_some());
    function.insert("arguments".into(), arguments.unwrap_or_else(|| Json::Object(Members::default())));
    members.insert("function".into(), Json::Object(function));
    Ok(Json::Object(members))
}

/// Developer messages become system messages, and all system messages become the first.
fn without_developers(messages: Vec<Json>) -> Vec<Json> {
    let messages: Vec<Json> = messages
        .into_iter()
        .map(|message| match message {
            Json::Object(mut members) if members.get("role").and_then(Json::as_str) == Some("developer") => {
                members.insert("role".into(), Json::text("system"));
                members.shift_remove("tools");
                Json::Object(members)
            }
            other => other,
        })
        .collect();
    let is_system = |message: &&Json| role(message) == "system";
    let (count, first) =
        (messages.iter().filter(is_system).count(), messages.first().as_ref().is_some_and(is_system));
    if count == 1 && first {
        return messages;
    }
    let texts: Vec<String> = messages
        .iter()
        .filter(is_system)
        .filter_map(|message| message.get("content"))
        .map(|content| match content.as_list() {
            Some(parts) => {
                let texts: Vec<&str> =
                    parts.iter().filter_map(|part| part.get("text").and_then(Json::as_str)).collect();
                texts.join("\n")
            }
            None => content.as_str().unwrap_or_default().to_owned(),
        })
        .filter(|text| !text.is_empty())
        .collect();
    let merged = Json::object([("role", Json::text("system")), ("content", Json::text(texts.join("\n\n")))]);
    std::iter::once(merged).chain(messages.into_iter().filter(|message| !is_system(&message))).collect()
}

/// System messages of `/v1/messages`, already plain texts, joined into the first.
fn merge_inline_system(messages: &mut Vec<Json>) {
    let mut text = String::new();
    messages.retain(|message| {
        let system = role(message) == "system";
        if system {
            text.push_str(message.get("content").and_then(Json::as_str).unwrap_or_default());
        }
        !system
    });
    if !text.is_empty() {
        messages.insert(0, Json::object([("role", Json::text("system")), ("content", Json::text(text))]));
    }
}

fn mark_the_end(messages: &mut [Json]) -> Result<(), Skipped> {
    let Some(Json::Object(message)) = messages.last_mut() else { return Err(Skipped::Template) };
    let mark = |text: &mut Arc<str>| *text = Arc::from(format!("{text}{END}"));
    match message.get_mut("content") {
        Some(Json::Text(text)) => {
            mark(text);
            Ok(())
        }
        Some(Json::List(parts)) => {
            for part in parts.iter_mut().rev() {
                if let Json::Object(part) = part
                    && let Some(Json::Text(text)) = part.get_mut("text")
                {
                    mark(text);
                    return Ok(());
                }
            }
            Err(Skipped::Template)
        }
        _ => Err(Skipped::Template),
    }
}

/// Cuts the text where the continued message ends. A template that trims the message is cut before the white space there.
pub fn cut_at_the_end(mut text: String) -> Result<String, Skipped> {
    let at = text.rfind(END.trim_end()).ok_or(Skipped::Template)?;
    let whole = text[at..].starts_with(END);
    text.truncate(at);
    if !whole {
        // Python's white space has four separators that Rust's has not.
        let kept = text.trim_end_matches(|letter: char| {
            letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
        });
        text.truncate(kept.len());
    }
    Ok(text)
}
