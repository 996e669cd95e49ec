//! Reads `prompt` and its kin: a string, token ids, or a batch of either.

use serde::de::{IgnoredAny, SeqAccess};

use super::lenient::{Any, Take, Text};
use super::prompt::{Piece, estimate_text};
use super::writer::Writer;

/// What a prompt member holds. Of a batch the first prompt; the others only count.
pub(super) enum Prompts {
    Text {
        piece: Piece,
        further_tokens: u64,
    },
    TokenIds {
        ids: Vec<u32>,
        further_tokens: u64,
    },
    /// An empty list, or one that mixes forms.
    Unclear,
}

/// Reads a prompt member. Out: nothing for null, objects and other values that are no prompt.
pub(super) struct PromptsOf<'w>(pub(super) &'w mut Writer);

impl<'b> Take<'b> for PromptsOf<'_> {
    type Out = Option<Prompts>;

    fn other(self) -> Self::Out {
        None
    }

    fn text(self, text: Text<'_, 'b>) -> Self::Out {
        Some(Prompts::Text { piece: self.0.piece(&text), further_tokens: 0 })
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        let first = list.next_element_seed(Any(Element { writer: Some(self.0) }))?;
        let mut prompts = match first {
            Some(Some(Entry::Text { piece: Some(piece), .. })) => Prompts::Text { piece, further_tokens: 0 },
            Some(Some(Entry::Id(id))) => return flat_ids(id, list).map(Some),
            Some(Some(Entry::Ids(ids))) => Prompts::TokenIds { ids, further_tokens: 0 },
            _ => Prompts::Unclear,
        };
        while let Some(entry) = list.next_element_seed(Any(Element { writer: None }))? {
            match (&mut prompts, entry) {
                (Prompts::Text { further_tokens, .. }, Some(Entry::Text { bytes, .. })) => {
                    *further_tokens += estimate_text(bytes);
                }
                (Prompts::TokenIds { further_tokens, .. }, Some(Entry::Ids(ids))) => {
                    *further_tokens += ids.len() as u64;
                }
                _ => prompts = Prompts::Unclear,
            }
        }
        Ok(Some(prompts))
    }
}

fn flat_ids<'b, A: SeqAccess<'b>>(first: u32, mut list: A) -> Result<Prompts, A::Error> {
    let mut ids = vec![first];
    while let Some(id) = list.next_element_seed(Any(TokenId))? {
        let Some(id) = id else {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(Prompts::Unclear);
        };
        ids.push(id);
    }
    Ok(Prompts::TokenIds { ids, further_tokens: 0 })
}

struct TokenId;

impl Take<'_> for TokenId {
    type Out = Option<u32>;

    fn other(self) -> Option<u32> {
        None
    }

    fn number(self, number: u64) -> Option<u32> {
        u32::try_from(number).ok()
    }
}

enum Entry {
    Text { piece: Option<Piece>, bytes: usize },
    Id(u32),
    Ids(Vec<u32>),
}

/// One element of a prompt list; without a writer its text is only measured.
struct Element<'w> {
    writer: Option<&'w mut Writer>,
}

impl<'b> Take<'b> for Element<'_> {
    type Out = Option<Entry>;

    fn other(self) -> Option<Entry> {
        None
    }

    fn text(self, text: Text<'_, 'b>) -> Option<Entry> {
        Some(Entry::Text { piece: self.writer.map(|writer| writer.piece(&text)), bytes: text.as_str().len() })
    }

    fn number(self, number: u64) -> Option<Entry> {
        u32::try_from(number).ok().map(Entry::Id)
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<Option<Entry>, A::Error> {
        let Some(first) = list.next_element_seed(Any(TokenId))? else { return Ok(None) };
        let Some(first) = first else {
            while list.next_element::<IgnoredAny>()?.is_some() {}
            return Ok(None);
        };
        Ok(match flat_ids(first, list)? {
            Prompts::TokenIds { ids, .. } => Some(Entry::Ids(ids)),
            Prompts::Text { .. } | Prompts::Unclear => None,
        })
    }
}
