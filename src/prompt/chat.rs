//! From a request's body to the conversation its engine gives to the chat template.
//!
//! ```text
//!   /v1/chat/completions  ---------------> Chat --.
//!   /v1/messages   messages.rs   --------> Chat --+-> conversation.rs: content in the template's form, calls with
//!   /v1/responses  responses.rs  --------> Chat --'   arguments as objects, roles the template knows  -> variables
//! ```
//!
//! The rules are vLLM's (0.32.0): what it converts is converted, what it refuses is refused, and what only it can know
//! (media, stored responses, templates of its own) is skipped.

mod conversation;
mod messages;
mod responses;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use super::json::{Json, Members};
use super::skipped::Skipped;
use super::template::ChatTemplate;
use crate::request::Api;

/// A conversation in the form of the chat API, before it meets a template.
pub(super) struct Chat {
    messages: Vec<Json>,
    /// In the order and with the members that vLLM dumps.
    tools: Option<Vec<Json>>,
    /// Further variables of the template, the client's own first.
    variables: Members,
    add_generation_prompt: bool,
    continue_final_message: bool,
    /// Came from `/v1/messages`, whose inline system messages join the first where the template wants that.
    merge_system: bool,
}

impl Chat {
    /// Whether it has tools: some models have a template of its own for that.
    pub fn has_tools(&self) -> bool {
        self.tools.is_some()
    }
}

/// Reads a body. `None`: the API has no conversation.
pub(super) fn read(api: Api, body: &[u8]) -> Option<Result<Chat, Skipped>> {
    let convert: fn(&Json) -> Result<Chat, Skipped> = match api {
        Api::Chat => completions,
        Api::Messages => messages::read,
        Api::Responses => responses::read,
        _ => return None,
    };
    Some(match Json::parse(body) {
        Some(body) => convert(&body),
        None => Err(Skipped::Failed),
    })
}

/// Renders a conversation: the text, exactly as the engine will tokenize it.
pub(super) fn render(chat: Chat, template: &ChatTemplate, special: &Members) -> Result<String, Skipped> {
    let continued = chat.continue_final_message;
    let variables = conversation::variables(chat, template, special)?;
    let text = template.render(&variables).map_err(|_| Skipped::Template)?;
    if continued { conversation::cut_at_the_end(text) } else { Ok(text) }
}

/// `/v1/chat/completions`.
fn completions(body: &Json) -> Result<Chat, Skipped> {
    // A template of the request's own is refused by engines unless told otherwise; the others change the tokens in ways
    // that only the engine knows.
    if ["chat_template", "truncate_prompt_tokens", "prompt_embeds"]
        .iter()
        .any(|name| body.get(name).is_some())
        || flag(body, "add_special_tokens") == Some(true)
    {
        return Err(Skipped::Unsupported);
    }
    let messages = body.get("messages").and_then(Json::as_list).ok_or(Skipped::Unsupported)?;
    let tools = match body.get("tools").and_then(Json::as_list) {
        None => None,
        Some(tools) => Some(tools.iter().map(chat_tool).collect::<Result<Vec<_>, _>>()?),
    };
    let continue_final_message = flag(body, "continue_final_message").unwrap_or(false);
    let mut variables = own_variables(body)?;
    if let Some(documents) = body.get("documents") {
        variables.insert("documents".into(), documents.clone());
    }
    effort(body.get("reasoning_effort"), &mut variables);
    Ok(Chat {
        messages: messages.iter().map(with_ordered_calls).collect(),
        tools,
        variables,
        add_generation_prompt: flag(body, "add_generation_prompt").unwrap_or(!continue_final_message),
        continue_final_message,
        merge_system: false,
    })
}

/// Members of calls in the order in which vLLM's validation leaves them, since some templates print whole calls.
fn with_ordered_calls(message: &Json) -> Json {
    let mut message = message.clone();
    if let Json::Object(members) = &mut message
        && let Some(Json::List(calls)) = members.get_mut("tool_calls")
    {
        calls.iter_mut().for_each(order_call);
    }
    message
}

fn order_call(call: &mut Json) {
    let Json::Object(members) = call else { return };
    reorder(members, &["id", "function", "type"]);
    if let Some(Json::Object(function)) = members.get_mut("function") {
        reorder(function, &["arguments", "name"]);
    }
}

/// Brings these members to the front.
fn reorder(members: &mut Members, first: &[&str]) {
    for name in first.iter().rev() {
        if let Some(at) = members.get_index_of(*name) {
            members.move_index(at, 0);
        }
    }
}

fn flag(body: &Json, name: &str) -> Option<bool> {
    body.get(name).and_then(Json::as_bool)
}

/// What the client gives to the template itself.
fn own_variables(body: &Json) -> Result<Members, Skipped> {
    let own = body.get("chat_template_kwargs").and_then(Json::as_object).cloned().unwrap_or_default();
    if own.contains_key("chat_template") || own.contains_key("tokenize") {
        return Err(Skipped::Unsupported);
    }
    Ok(own)
}

/// A reasoning effort turns thinking on, or off with `none`, where the client does not say so itself.
fn effort(effort: Option<&Json>, variables: &mut Members) {
    let Some(effort) = effort.filter(|effort| effort.as_str() != Some("auto")) else { return };
    if !variables.contains_key("enable_thinking") {
        variables.insert("enable_thinking".into(), Json::Bool(effort.as_str() != Some("none")));
    }
    variables.insert("reasoning_effort".into(), effort.clone());
}

/// A tool with the members that vLLM knows, in its order, absent ones as null.
fn chat_tool(tool: &Json) -> Result<Json, Skipped> {
    if tool.get("type").is_some_and(|kind| kind.as_str() != Some("function")) {
        return Err(Skipped::Unsupported);
    }
    let function = tool.get("function").ok_or(Skipped::Unsupported)?;
    function_tool(
        function,
        function.get("defer_loading").or(tool.get("defer_loading")),
        tool.get("defer_loading"),
    )
}

fn function_tool(function: &Json, deferred: Option<&Json>, outer: Option<&Json>) -> Result<Json, Skipped> {
    let name = function.get("name").and_then(Json::as_str).ok_or(Skipped::Unsupported)?;
    let or_null = |member: &str| function.get(member).cloned().unwrap_or(Json::Null);
    let mut members: Members = [
        (Arc::from("name"), Json::text(name)),
        (Arc::from("description"), or_null("description")),
        (Arc::from("parameters"), or_null("parameters")),
    ]
    .into_iter()
    .collect();
    if let Some(strict) = function.get("strict") {
        members.insert("strict".into(), strict.clone());
    }
    if let Some(deferred) = deferred {
        members.insert("defer_loading".into(), deferred.clone());
    }
    let mut tool = Json::object([("type", Json::text("function")), ("function", Json::Object(members))]);
    if let (Json::Object(tool), Some(outer)) = (&mut tool, outer) {
        tool.insert("defer_loading".into(), outer.clone());
    }
    Ok(tool)
}

/// What Claude's command line writes into the system prompt, new in every request; engines take it out.
const BILLING: &str = "x-anthropic-billing-header";
