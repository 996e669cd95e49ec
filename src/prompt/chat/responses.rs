//! OpenAI's `/v1/responses`, converted as vLLM converts it.

use super::super::json::{Json, Members};
use super::super::skipped::Skipped;
use super::{Chat, effort, function_tool, own_variables};

pub fn read(body: &Json) -> Result<Chat, Skipped> {
    // The conversation, or a part of it, lies with the engine.
    if ["previous_response_id", "prompt", "conversation", "previous_input_messages"]
        .iter()
        .any(|name| body.get(name).is_some())
    {
        return Err(Skipped::Unsupported);
    }
    let mut messages = Vec::new();
    if let Some(text) = body.get("instructions").filter(|text| text.is_truthy()) {
        messages.push(Json::object([("role", Json::text("system")), ("content", text.clone())]));
    }
    let mut continued = false;
    match body.get("input") {
        Some(text @ Json::Text(_)) => {
            messages.push(Json::object([("role", Json::text("user")), ("content", text.clone())]));
        }
        Some(Json::List(items)) => {
            let first = messages.len();
            for item in items {
                take(item, &mut messages, first)?;
            }
            continued = items.last().is_some_and(is_partial);
        }
        _ => return Err(Skipped::Unsupported),
    }
    let tools = match body.get("tools").and_then(Json::as_list).filter(|tools| !tools.is_empty()) {
        None => None,
        Some(tools) => Some(tools.iter().map(tool).collect::<Result<Vec<_>, _>>()?),
    };
    let mut variables = own_variables(body)?;
    effort(body.get("reasoning").and_then(|reasoning| reasoning.get("effort")), &mut variables);
    Ok(Chat {
        messages,
        tools,
        variables,
        add_generation_prompt: !continued,
        continue_final_message: continued,
        merge_system: false,
    })
}

/// An answer that is to be continued.
fn is_partial(item: &Json) -> bool {
    let text = |name: &str| item.get(name).and_then(Json::as_str);
    matches!(text("type"), None | Some("message" | "reasoning"))
        && matches!(text("status"), Some("in_progress" | "incomplete"))
}

/// Takes one item. What belongs to one answer of the assistant (reasoning, text, calls) is gathered in one message.
fn take(item: &Json, messages: &mut Vec<Json>, first: usize) -> Result<(), Skipped> {
    let text = |name: &str| item.get(name).and_then(Json::as_str);
    let kind = text("type");
    let role = text("role");
    let answer = |name: &str, value: Json, messages: &mut Vec<Json>| {
        if let Some(open) = open_answer(messages, first)
            && open.get(name).is_none_or(|before| *before == Json::Null)
        {
            open.insert(name.into(), value);
        } else {
            messages.push(Json::object([("role", Json::text("assistant")), (name, value)]));
        }
    };
    match (kind, role) {
        (Some("function_call"), _) => {
            if item.get("namespace").is_some() {
                return Err(Skipped::Unsupported);
            }
            let member = |name: &str| item.get(name).cloned().unwrap_or(Json::Null);
            let function = Json::object([("name", member("name")), ("arguments", member("arguments"))]);
            let call = Json::object([
                ("id", member("call_id")),
                ("function", function),
                ("type", Json::text("function")),
            ]);
            let known = open_answer(messages, first).and_then(|open| open.get_mut("tool_calls"));
            if let Some(Json::List(calls)) = known {
                calls.push(call);
            } else {
                answer("tool_calls", Json::List(vec![call]), messages);
            }
        }
        (Some("function_call_output"), _) => {
            let member = |name: &str| item.get(name).cloned().unwrap_or(Json::Null);
            messages.push(Json::object([
                ("role", Json::text("tool")),
                ("content", member("output")),
                ("tool_call_id", member("call_id")),
            ]));
        }
        (Some("reasoning"), _) => {
            if item.get("encrypted_content").is_some_and(Json::is_truthy) {
                return Err(Skipped::Unsupported);
            }
            let of = |name: &str| item.get(name).and_then(Json::as_list).and_then(<[Json]>::first);
            let reasoning = of("content").or(of("summary")).and_then(|part| part.get("text")).cloned();
            answer("reasoning", reasoning.unwrap_or_else(|| Json::text("")), messages);
        }
        (None | Some("message"), Some("assistant")) => {
            let content = item.get("content").ok_or(Skipped::Unsupported)?;
            let text = match content {
                Json::List(parts) => parts.first().and_then(|part| part.get("text")),
                text => Some(text),
            };
            answer("content", text.ok_or(Skipped::Unsupported)?.clone(), messages);
        }
        (None | Some("message"), Some(_)) => messages.push(item.clone()),
        _ => return Err(Skipped::Unsupported),
    }
    Ok(())
}

/// The assistant's message that is last, if it came from the input.
fn open_answer(messages: &mut [Json], first: usize) -> Option<&mut Members> {
    match messages.get_mut(first..)?.last_mut() {
        Some(Json::Object(members)) if members.get("role").and_then(Json::as_str) == Some("assistant") => {
            Some(members)
        }
        _ => None,
    }
}

fn tool(tool: &Json) -> Result<Json, Skipped> {
    if tool.get("type").and_then(Json::as_str) != Some("function") {
        return Err(Skipped::Unsupported);
    }
    function_tool(tool, tool.get("defer_loading"), None)
}
