//! Reads `messages` and `input`: roles, items, tool calls.

use serde::de::{IgnoredAny, MapAccess, SeqAccess};
use serde_json::value::RawValue;

use super::lenient::{Any, Name, Take, Text};
use super::parts::{Content, PieceOf};
use super::prompt::Markup;
use super::writer::{Role, Writer};

/// `messages`: a list of messages. Out: whether it was a list.
pub(super) struct Messages<'w>(pub(super) &'w mut Writer);

impl<'b> Take<'b> for Messages<'_> {
    type Out = bool;

    fn other(self) -> bool {
        false
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<bool, A::Error> {
        while list.next_element_seed(Any(Message { writer: self.0, items: false }))?.is_some() {}
        Ok(true)
    }
}

/// `input` of the Responses API: a string, or a list of items. Out: whether it was one of both.
pub(super) struct Input<'w>(pub(super) &'w mut Writer);

impl<'b> Take<'b> for Input<'_> {
    type Out = bool;

    fn other(self) -> bool {
        false
    }

    fn text(self, text: Text<'_, 'b>) -> bool {
        let piece = self.0.piece(&text);
        self.0.content.clear();
        self.0.content.push(piece);
        self.0.end_message(Role::Usual(Markup::User));
        true
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<bool, A::Error> {
        while list.next_element_seed(Any(Message { writer: self.0, items: true }))?.is_some() {}
        Ok(true)
    }
}

enum MessageMember {
    Role,
    Content,
    ToolCalls,
    FunctionCall,
    Type,
    Name,
    Arguments,
    Output,
    Other,
}

fn message_member(name: &str) -> MessageMember {
    match name {
        "role" => MessageMember::Role,
        "content" => MessageMember::Content,
        "tool_calls" => MessageMember::ToolCalls,
        "function_call" => MessageMember::FunctionCall,
        "type" => MessageMember::Type,
        "name" => MessageMember::Name,
        "arguments" => MessageMember::Arguments,
        "output" => MessageMember::Output,
        _ => MessageMember::Other,
    }
}

#[derive(Clone, Copy, PartialEq)]
enum ItemType {
    Message,
    FunctionCall,
    FunctionCallOutput,
    Other,
}

/// One message; with `items`, one item of a Responses list, which may also be a call or its result.
struct Message<'w> {
    writer: &'w mut Writer,
    items: bool,
}

impl<'b> Take<'b> for Message<'_> {
    type Out = ();

    fn other(self) {}

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<(), A::Error> {
        let writer = self.writer;
        writer.content.clear();
        writer.calls.clear();
        let (mut role, mut name, mut arguments) = (None, None, None);
        let mut item_type = ItemType::Message;
        while let Some(member) = object.next_key_seed(Name(message_member))? {
            match member {
                MessageMember::Role => role = object.next_value_seed(Any(RoleOf(writer)))?,
                MessageMember::Content => {
                    writer.content.clear();
                    object.next_value_seed(Any(Content(writer)))?;
                }
                MessageMember::Output if self.items => {
                    writer.content.clear();
                    object.next_value_seed(Any(Content(writer)))?;
                }
                MessageMember::ToolCalls => {
                    writer.calls.clear();
                    object.next_value_seed(Any(Calls(writer)))?;
                }
                MessageMember::FunctionCall => {
                    writer.calls.clear();
                    object.next_value_seed(Any(Call(writer)))?;
                }
                MessageMember::Type if self.items => item_type = object.next_value_seed(Any(ItemTypeOf))?,
                MessageMember::Name if self.items => name = object.next_value_seed(Any(PieceOf(writer)))?,
                MessageMember::Arguments if self.items => {
                    arguments = writer.text_or_json(object.next_value::<&RawValue>()?);
                }
                _ => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        let role = match item_type {
            ItemType::Message => role,
            ItemType::FunctionCall => {
                writer.content.clear();
                writer.calls.clear();
                writer.push_call(name, arguments);
                Some(Role::Usual(Markup::Assistant))
            }
            ItemType::FunctionCallOutput => Some(Role::Usual(Markup::Tool)),
            ItemType::Other => None,
        };
        // Engines refuse a message without a role; Kthena leaves it out.
        if let Some(role) = role {
            writer.end_message(role);
        }
        Ok(())
    }
}

struct RoleOf<'w>(&'w mut Writer);

impl<'b> Take<'b> for RoleOf<'_> {
    type Out = Option<Role>;

    fn other(self) -> Option<Role> {
        None
    }

    fn text(self, text: Text<'_, 'b>) -> Option<Role> {
        (!text.as_str().is_empty()).then(|| self.0.role(&text))
    }
}

struct ItemTypeOf;

impl<'b> Take<'b> for ItemTypeOf {
    type Out = ItemType;

    fn other(self) -> ItemType {
        ItemType::Message
    }

    fn text(self, text: Text<'_, 'b>) -> ItemType {
        match text.as_str() {
            "" | "message" => ItemType::Message,
            "function_call" => ItemType::FunctionCall,
            "function_call_output" => ItemType::FunctionCallOutput,
            _ => ItemType::Other,
        }
    }
}

/// `tool_calls`: a list of calls.
struct Calls<'w>(&'w mut Writer);

impl<'b> Take<'b> for Calls<'_> {
    type Out = ();

    fn other(self) {}

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Any(Call(self.0)))?.is_some() {}
        Ok(())
    }
}

enum CallMember {
    Function,
    Name,
    Arguments,
    Other,
}

fn call_member(name: &str) -> CallMember {
    match name {
        "function" | "custom" => CallMember::Function,
        "name" => CallMember::Name,
        "arguments" | "input" => CallMember::Arguments,
        _ => CallMember::Other,
    }
}

/// One call: `{"function": {"name", "arguments"}}`, or the inner object itself.
struct Call<'w>(&'w mut Writer);

impl<'b> Take<'b> for Call<'_> {
    type Out = ();

    fn other(self) {}

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<(), A::Error> {
        let writer = self.0;
        let (mut name, mut arguments) = (None, None);
        let before = writer.calls.len();
        while let Some(member) = object.next_key_seed(Name(call_member))? {
            match member {
                CallMember::Function => {
                    writer.calls.truncate(before);
                    object.next_value_seed(Any(Call(writer)))?;
                }
                CallMember::Name => name = object.next_value_seed(Any(PieceOf(writer)))?,
                CallMember::Arguments => arguments = writer.text_or_json(object.next_value::<&RawValue>()?),
                CallMember::Other => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        if writer.calls.len() == before && (name.is_some() || arguments.is_some()) {
            writer.push_call(name, arguments);
        }
        Ok(())
    }
}
