//! Anthropic's `/v1/messages`, converted as vLLM converts it.

use super::super::json::{Json, Members};
use super::super::skipped::Skipped;
use super::{BILLING, Chat, effort, function_tool, own_variables};

pub fn read(body: &Json) -> Result<Chat, Skipped> {
    let list = body.get("messages").and_then(Json::as_list).ok_or(Skipped::Unsupported)?;
    let mut messages = Vec::new();
    if let Some(system) = body.get("system").and_then(|system| system_text(system, true)) {
        messages.push(message("system", Json::text(system)));
    }
    for message in list {
        convert(message, &mut messages)?;
    }
    let tools = match body.get("tools").and_then(Json::as_list) {
        None => None,
        Some(tools) => Some(tools.iter().map(tool).collect::<Result<Vec<_>, _>>()?),
    };
    let mut variables = own_variables(body)?;
    let output_effort = body.get("output_config").and_then(|config| config.get("effort"));
    let thinking = body.get("thinking").and_then(|thinking| thinking.get("type")).and_then(Json::as_str);
    // vLLM asks its template whether it knows the effort `none`.
    if thinking == Some("disabled") {
        return Err(Skipped::Unsupported);
    }
    effort(output_effort, &mut variables);
    Ok(Chat {
        messages,
        tools,
        variables,
        add_generation_prompt: true,
        continue_final_message: false,
        merge_system: true,
    })
}

fn message(role: &str, content: Json) -> Json {
    Json::object([("role", Json::text(role)), ("content", content)])
}

/// The text of a system prompt or message. In a plain top-level text the billing line stays, as in vLLM.
fn system_text(system: &Json, top: bool) -> Option<String> {
    let text = match system {
        Json::Text(text) if top || !text.starts_with(BILLING) => text.to_string(),
        Json::List(blocks) => blocks
            .iter()
            .filter(|block| block.get("type").and_then(Json::as_str) == Some("text"))
            .filter_map(|block| block.get("text").and_then(Json::as_str))
            .filter(|text| !text.starts_with(BILLING))
            .collect(),
        _ => return None,
    };
    Some(text).filter(|text| !text.is_empty())
}

fn convert(from: &Json, messages: &mut Vec<Json>) -> Result<(), Skipped> {
    let role = from.get("role").and_then(Json::as_str).ok_or(Skipped::Unsupported)?;
    let content = from.get("content");
    if role == "system" {
        let text = content.and_then(|content| system_text(content, false));
        messages.extend(text.map(|text| message("system", Json::text(text))));
        return Ok(());
    }
    let blocks = match content {
        Some(text @ Json::Text(_)) => {
            messages.push(message(role, text.clone()));
            return Ok(());
        }
        Some(Json::List(blocks)) => blocks,
        _ => return Err(Skipped::Unsupported),
    };
    let mut converted = Blocks::default();
    for block in blocks {
        converted.take(block, role, messages)?;
    }
    if role == "user" && converted.parts.is_empty() {
        return Ok(());
    }
    messages.push(converted.into_message(role));
    Ok(())
}

#[derive(Default)]
struct Blocks {
    parts: Vec<Json>,
    calls: Vec<Json>,
    reasoning: Option<String>,
}

impl Blocks {
    /// Takes one block; what a tool answered becomes a message before this one.
    fn take(&mut self, block: &Json, role: &str, messages: &mut Vec<Json>) -> Result<(), Skipped> {
        let text = |name: &str| block.get(name).and_then(Json::as_str);
        match text("type").ok_or(Skipped::Unsupported)? {
            "text" => {
                let text = text("text").filter(|text| !text.is_empty());
                self.parts.extend(
                    text.map(|text| Json::object([("type", Json::text("text")), ("text", Json::text(text))])),
                );
            }
            "thinking" => {
                self.reasoning.get_or_insert_default().push_str(text("thinking").unwrap_or_default());
            }
            "redacted_thinking" | "tool_reference" => {}
            "tool_use" => {
                let input = block.get("input").filter(|input| input.is_truthy()).cloned();
                let function = Json::object([
                    ("arguments", input.unwrap_or_else(|| Json::Object(Members::default()))),
                    ("name", Json::text(text("name").unwrap_or_default())),
                ]);
                self.calls.push(Json::object([
                    ("id", Json::text(text("id").unwrap_or_default())),
                    ("function", function),
                    ("type", Json::text("function")),
                ]));
            }
            "tool_result" if role == "user" => messages.push(tool_result(block)?),
            "image" | "document" => return Err(Skipped::Media),
            _ => return Err(Skipped::Unsupported),
        }
        Ok(())
    }

    fn into_message(mut self, role: &str) -> Json {
        let mut members = Members::default();
        members.insert("role".into(), Json::text(role));
        if let Some(reasoning) = self.reasoning {
            members.insert("reasoning".into(), Json::text(reasoning));
        }
        if !self.calls.is_empty() {
            members.insert("tool_calls".into(), Json::List(self.calls));
        }
        if self.parts.len() == 1 {
            let text = self.parts.pop().and_then(|part| part.get("text").cloned());
            members.insert("content".into(), text.unwrap_or(Json::Null));
        } else if !self.parts.is_empty() {
            members.insert("content".into(), Json::List(self.parts));
        }
        Json::Object(members)
    }
}

fn tool_result(block: &Json) -> Result<Json, Skipped> {
    let text = match block.get("content") {
        None => String::new(),
        Some(Json::Text(text)) => text.to_string(),
        Some(Json::List(items)) => {
            let mut texts = Vec::new();
            for item in items {
                match item.get("type").and_then(Json::as_str) {
                    Some("text") => texts.push(item.get("text").and_then(Json::as_str).unwrap_or_default()),
                    Some("image") => return Err(Skipped::Media),
                    _ => return Err(Skipped::Unsupported),
                }
            }
            texts.join("\n")
        }
        Some(_) => return Err(Skipped::Unsupported),
    };
    let id = block.get("tool_use_id").and_then(Json::as_str).unwrap_or_default();
    Ok(Json::object([
        ("role", Json::text("tool")),
        ("tool_call_id", Json::text(id)),
        ("content", Json::text(text)),
    ]))
}

fn tool(tool: &Json) -> Result<Json, Skipped> {
    // Tools that Anthropic runs have a type and no schema.
    if tool.get("type").is_some_and(|kind| kind.as_str() != Some("custom")) {
        return Err(Skipped::Unsupported);
    }
    let mut function = Members::default();
    for (theirs, ours) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ] {
        function.insert(ours.into(), tool.get(theirs).cloned().unwrap_or(Json::Null));
    }
    function_tool(&Json::Object(function), tool.get("defer_loading"), None)
}
