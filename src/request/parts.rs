//! Reads the content of a message: a string, or parts of text, media, tool calls and their results.

use serde::de::{IgnoredAny, MapAccess, SeqAccess};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::lenient::{Any, Name, Take, Text};
use super::prompt::{Markup, Piece};
use super::writer::{Writer, push_call};

/// `content`: a string, or a list of parts. Appends to the writer's content.
pub(super) struct Content<'w>(pub(super) &'w mut Writer);

impl<'b> Take<'b> for Content<'_> {
    type Out = ();

    fn other(self) {}

    fn text(self, text: Text<'_, 'b>) {
        let piece = self.0.piece(&text);
        self.0.content.push(piece);
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<(), A::Error> {
        let mut first = true;
        while let Some(written) = list.next_element_seed(Any(Part { writer: self.0, first }))? {
            first &= !written;
        }
        Ok(())
    }
}

enum PartMember {
    Type,
    Text,
    Media,
    Uuid,
    Name,
    Input,
    Content,
    Other,
}

fn part_member(name: &str) -> PartMember {
    match name {
        "type" => PartMember::Type,
        "text" => PartMember::Text,
        "image_url" | "image" | "image_embeds" | "audio_url" | "input_audio" | "audio" | "audio_embeds"
        | "video_url" | "video" | "file" | "file_id" | "file_url" | "file_data" | "source" => {
            PartMember::Media
        }
        "uuid" => PartMember::Uuid,
        "name" => PartMember::Name,
        "input" => PartMember::Input,
        "content" => PartMember::Content,
        _ => PartMember::Other,
    }
}

#[derive(Clone, Copy, PartialEq)]
enum PartType {
    Text,
    ToolUse,
    ToolResult,
    Absent,
    Other,
}

struct PartTypeOf;

impl<'b> Take<'b> for PartTypeOf {
    type Out = PartType;

    fn other(self) -> PartType {
        PartType::Absent
    }

    fn text(self, text: Text<'_, 'b>) -> PartType {
        match text.as_str() {
            "" => PartType::Absent,
            "text" | "input_text" | "output_text" => PartType::Text,
            "tool_use" => PartType::ToolUse,
            "tool_result" => PartType::ToolResult,
            _ => PartType::Other,
        }
    }
}

/// One part of a content list. Out: whether it left something in the writer's content.
struct Part<'w> {
    writer: &'w mut Writer,
    first: bool,
}

impl Part<'_> {
    fn separate(&mut self) {
        if !self.first {
            self.writer.content.push(Piece::Markup(Markup::Newline));
        }
    }
}

impl<'b> Take<'b> for Part<'_> {
    type Out = bool;

    fn other(self) -> bool {
        false
    }

    fn text(mut self, text: Text<'_, 'b>) -> bool {
        self.separate();
        let piece = self.writer.piece(&text);
        self.writer.content.push(piece);
        true
    }

    fn object<A: MapAccess<'b>>(mut self, mut object: A) -> Result<bool, A::Error> {
        let start = self.writer.content.len();
        let (mut text, mut media, mut uuid, mut name, mut input) = (None, None, None, None, None);
        let mut part_type = PartType::Absent;
        while let Some(member) = object.next_key_seed(Name(part_member))? {
            match member {
                PartMember::Type => part_type = object.next_value_seed(Any(PartTypeOf))?,
                PartMember::Text => text = object.next_value_seed(Any(PieceOf(self.writer)))?,
                PartMember::Media => media = object.next_value_seed(Any(MediaHash))?.or(media),
                PartMember::Uuid => uuid = object.next_value_seed(Any(MediaHash))?,
                PartMember::Name => name = object.next_value_seed(Any(PieceOf(self.writer)))?,
                PartMember::Input => input = self.writer.text_or_json(object.next_value::<&RawValue>()?),
                // The type may come later: what is written here is taken back if the part is no tool result.
                PartMember::Content => {
                    self.writer.content.truncate(start);
                    self.separate();
                    self.writer.content.push(Piece::Markup(Markup::ToolResult));
                    object.next_value_seed(Any(Content(self.writer)))?;
                }
                PartMember::Other => drop(object.next_value::<IgnoredAny>()?),
            }
        }
        if part_type == PartType::ToolResult && self.writer.content.len() > start {
            return Ok(true);
        }
        self.writer.content.truncate(start);
        match (part_type, text, media.or(uuid)) {
            (PartType::Text | PartType::Absent, Some(text), _) => {
                self.separate();
                self.writer.content.push(text);
            }
            (PartType::ToolUse, _, _) => {
                self.separate();
                push_call(&mut self.writer.content, name, input);
            }
            (PartType::Other | PartType::Absent, _, Some(hash)) => {
                self.separate();
                self.writer.content.push(Piece::Media(hash));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The hash of a media part's URL or data: a string, or an object or list that holds one.
struct MediaHash;

impl<'b> Take<'b> for MediaHash {
    type Out = Option<u64>;

    fn other(self) -> Option<u64> {
        None
    }

    fn text(self, text: Text<'_, 'b>) -> Option<u64> {
        Some(xxh3_64(text.as_str().as_bytes()))
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<Option<u64>, A::Error> {
        let mut all = None;
        while let Some(hash) = list.next_element_seed(Any(MediaHash))? {
            let chained = xxh3_64_with_seed(&hash.unwrap_or_default().to_le_bytes(), all.unwrap_or_default());
            all = Some(chained);
        }
        Ok(all)
    }

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<Option<u64>, A::Error> {
        let holds_media = |name: &str| matches!(name, "url" | "data" | "file_id" | "file_data" | "file_url");
        let mut found = None;
        while let Some(media) = object.next_key_seed(Name(holds_media))? {
            if media {
                found = object.next_value_seed(Any(MediaHash))?.or(found);
            } else {
                object.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A string as a piece of the text.
pub(super) struct PieceOf<'w>(pub(super) &'w mut Writer);

impl<'b> Take<'b> for PieceOf<'_> {
    type Out = Option<Piece>;

    fn other(self) -> Option<Piece> {
        None
    }

    fn text(self, text: Text<'_, 'b>) -> Option<Piece> {
        Some(self.0.piece(&text))
    }
}
