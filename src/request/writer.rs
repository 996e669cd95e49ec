//! Collects the pieces of the canonical text while the body is read.

use serde_json::value::RawValue;

use super::lenient::Text;
use super::prompt::{Markup, Piece, Span};

/// Pieces of the conversation so far, and of the message that is being read.
pub(super) struct Writer {
    /// Address of the body's first byte: borrowed strings are located by their address.
    base: usize,
    pub(super) scratch: String,
    /// Finished messages of the member that is being read.
    pub(super) out: Vec<Piece>,
    /// Content of the message that is being read; kept between messages for its memory.
    pub(super) content: Vec<Piece>,
    /// Tool calls of the message that is being read.
    pub(super) calls: Vec<Piece>,
}

/// Who speaks: one of the usual roles, or a text of the client's.
#[derive(Clone, Copy)]
pub(super) enum Role {
    Usual(Markup),
    Other(Piece),
}

impl Writer {
    pub(super) fn new(body: &[u8]) -> Writer {
        Writer {
            base: body.as_ptr().addr(),
            scratch: String::new(),
            out: Vec::new(),
            content: Vec::new(),
            calls: Vec::new(),
        }
    }

    /// Where a part of the body stands.
    pub(super) fn locate(&self, part: &str) -> Span {
        let start = part.as_ptr().addr() - self.base;
        Span::new(start, start + part.len())
    }

    pub(super) fn piece(&mut self, text: &Text<'_, '_>) -> Piece {
        match text {
            Text::InBody(text) => Piece::Body(self.locate(text)),
            Text::Decoded(text) => {
                let start = self.scratch.len();
                self.scratch.push_str(text);
                Piece::Scratch(Span::new(start, self.scratch.len()))
            }
        }
    }

    /// The text of a string, or the JSON of any other value; nothing for null.
    pub(super) fn text_or_json(&mut self, value: &RawValue) -> Option<Piece> {
        let json = value.get();
        match json.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
            Some(text) if memchr::memchr(b'\\', text.as_bytes()).is_none() => {
                Some(Piece::Body(self.locate(text)))
            }
            // Undecodable (a lone surrogate): its JSON is as good a key.
            Some(_) => Some(match serde_json::from_str::<String>(json) {
                Ok(text) => self.piece(&Text::Decoded(&text)),
                Err(_) => Piece::Body(self.locate(json)),
            }),
            None if json == "null" => None,
            None => Some(Piece::Body(self.locate(json))),
        }
    }

    pub(super) fn role(&mut self, text: &Text<'_, '_>) -> Role {
        match text.as_str() {
            "system" => Role::Usual(Markup::System),
            "developer" => Role::Usual(Markup::Developer),
            "user" => Role::Usual(Markup::User),
            "assistant" => Role::Usual(Markup::Assistant),
            "tool" => Role::Usual(Markup::Tool),
            _ => Role::Other(self.piece(text)),
        }
    }

    pub(super) fn push_call(&mut self, name: Option<Piece>, arguments: Option<Piece>) {
        push_call(&mut self.calls, name, arguments);
    }

    /// Ends the message: its content and calls move to `out`.
    pub(super) fn end_message(&mut self, role: Role) {
        match role {
            Role::Usual(markup) => self.out.push(Piece::Markup(markup)),
            Role::Other(text) => {
                self.out.extend([Piece::Markup(Markup::Open), text, Piece::Markup(Markup::Newline)]);
            }
        }
        self.out.append(&mut self.content);
        self.out.append(&mut self.calls);
        self.out.push(Piece::Markup(Markup::Close));
    }
}

pub(super) fn push_call(pieces: &mut Vec<Piece>, name: Option<Piece>, arguments: Option<Piece>) {
    pieces.push(Piece::Markup(Markup::ToolCall));
    pieces.extend(name);
    pieces.push(Piece::Markup(Markup::Newline));
    pieces.extend(arguments);
}
