//! What engines publish about their KV caches: one msgpack payload is a batch of events.
//!
//! Batches and events come as arrays or as maps, from vLLM and from SGLang alike; which, changed between versions. Nothing
//! is copied but hashes and tokens, and those into space that the next event uses again. A bad event is skipped by itself.
//! Everything a payload can announce is bounded by its own length.

mod cursor;
mod extra;

use std::borrow::Cow;

pub use extra::{Extra, ExtraKeys};

use cursor::{Bad, Cursor};

/// How a batch or an event was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Members by place.
    Array,
    /// Members by name.
    Map,
}

impl Shape {
    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Array => "array",
            Shape::Map => "map",
        }
    }
}

/// What a payload says beside its events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Head {
    /// When the engine made the batch, seconds since 1970 by its own clock.
    pub time: Option<f64>,
    /// The data-parallel rank.
    pub rank: Option<u64>,
    /// How its events are written; none if it has none.
    pub shape: Option<Shape>,
}

/// Blocks were stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stored<'a> {
    /// What the engine calls each block, in order of the chain.
    pub hashes: &'a [u64],
    /// The block before the first; none at the start of a chain.
    pub parent: Option<u64>,
    /// Tokens of all blocks. Empty where an event names blocks only.
    pub tokens: &'a [u32],
    /// Tokens in a block.
    pub block_size: usize,
    /// Where the blocks are.
    pub medium: Option<&'a str>,
    /// The LoRA adapter by name.
    pub adapter: Option<&'a str>,
    /// The LoRA adapter by the engine's number, where it has no name.
    pub adapter_id: Option<u64>,
    /// SGLang's `cache_salt`. vLLM has it among the extra keys.
    pub salt: Option<&'a str>,
    /// What else is hashed into each block.
    pub extra: ExtraKeys<'a>,
    /// The KV cache group.
    pub group: u64,
    /// How the layers of that group attend.
    pub attention: Option<&'a str>,
}

/// Copies of blocks are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Removed<'a> {
    /// One copy of each.
    pub hashes: &'a [u64],
    /// Where it was.
    pub medium: Option<&'a str>,
    /// The KV cache group.
    pub group: u64,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// `BlockStored`.
    Stored(Stored<'a>),
    /// `BlockRemoved`.
    Removed(Removed<'a>),
    /// `AllBlocksCleared`.
    Cleared,
}

/// Why one event was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadEvent {
    /// Its kind is none that this version knows.
    UnknownKind,
    /// A store whose members are not what they should be: the blocks are not known of.
    Store,
    /// Any other: it may have taken blocks away.
    Other,
}

/// The payload is no batch, or ends within an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a batch of KV events")]
pub struct Unreadable;

impl From<Bad> for Unreadable {
    fn from(_: Bad) -> Self {
        Self
    }
}

/// Reads payloads.
#[derive(Debug, Default)]
pub struct Decoder {
    hashes: Vec<u64>,
    tokens: Vec<u32>,
}

impl Decoder {
    /// Hands every event of `payload` to `each`. Events before an error were handed over.
    pub fn decode(
        &mut self,
        payload: &[u8],
        mut each: impl FnMut(Result<Event<'_>, BadEvent>),
    ) -> Result<Head, Unreadable> {
        let mut cursor = Cursor::new(payload);
        let mut head = Head::default();
        if let Some(members) = cursor.array_if()? {
            for place in 0..members {
                match place {
                    0 => head.time = cursor.float()?,
                    1 => head.shape = self.events(&mut cursor, &mut each)?,
                    2 => head.rank = cursor.int()?,
                    _ => cursor.skip()?,
                }
            }
            return if members >= 2 { Ok(head) } else { Err(Unreadable) };
        }
        let mut has_events = false;
        for _ in 0..cursor.map()? {
            match &*cursor.text()?.unwrap_or_default() {
                "ts" => head.time = cursor.float()?,
                "events" => {
                    has_events = true;
                    head.shape = self.events(&mut cursor, &mut each)?;
                }
                "data_parallel_rank" | "attn_dp_rank" => head.rank = cursor.int()?,
                _ => cursor.skip()?,
            }
        }
        if has_events { Ok(head) } else { Err(Unreadable) }
    }

    fn events(
        &mut self,
        cursor: &mut Cursor<'_>,
        each: &mut impl FnMut(Result<Event<'_>, BadEvent>),
    ) -> Result<Option<Shape>, Unreadable> {
        let mut shape = None;
        for _ in 0..cursor.array_if()?.ok_or(Unreadable)? {
            let start = *cursor;
            shape = start.shape().or(shape);
            if self.event(cursor, each).is_err() {
                *cursor = start;
                each(Err(judge(start)));
                cursor.skip()?;
            }
        }
        Ok(shape)
    }

    fn event(
        &mut self,
        cursor: &mut Cursor<'_>,
        each: &mut impl FnMut(Result<Event<'_>, BadEvent>),
    ) -> Result<(), Bad> {
        self.hashes.clear();
        self.tokens.clear();
        let mut fields = Fields::default();
        if let Some(members) = cursor.array_if()? {
            let kind = cursor.text_if()?.filter(|_| members > 0).ok_or(Bad)?;
            let order = order_of(kind);
            for place in 0..members - 1 {
                let field = order.get(place).copied().unwrap_or(Field::Other);
                self.field(cursor, field, &mut fields)?;
            }
            fields.kind = Some(kind);
        } else {
            for _ in 0..cursor.map()? {
                let name = cursor.text()?.unwrap_or_default();
                self.field(cursor, field_of(&name), &mut fields)?;
            }
        }
        let event = match fields.kind.ok_or(Bad)? {
            STORED if !self.hashes.is_empty() => Event::Stored(fields.stored(&self.hashes, &self.tokens)),
            REMOVED if !self.hashes.is_empty() => Event::Removed(Removed {
                hashes: &self.hashes,
                medium: fields.medium,
                group: fields.group.unwrap_or(0),
            }),
            CLEARED => Event::Cleared,
            _ => return Err(Bad),
        };
        each(Ok(event));
        Ok(())
    }

    fn field<'a>(&mut self, cursor: &mut Cursor<'a>, field: Field, into: &mut Fields<'a>) -> Result<(), Bad> {
        match field {
            Field::Kind => into.kind = cursor.text_if()?,
            Field::Hashes => cursor.hashes(&mut self.hashes)?,
            Field::Tokens => cursor.tokens(&mut self.tokens)?,
            Field::Parent => into.parent = cursor.hash_if()?,
            Field::BlockSize => into.block_size = cursor.int()?,
            Field::AdapterId => into.adapter_id = cursor.int()?,
            Field::Medium => into.medium = cursor.text_if()?,
            Field::Adapter => into.adapter = cursor.text_if()?,
            Field::Extra => into.extra = ExtraKeys::read(cursor)?,
            Field::Group => into.group = cursor.int()?,
            Field::Attention => into.attention = cursor.text_if()?,
            Field::Salt => into.salt = cursor.text_if()?,
            Field::Other => cursor.skip()?,
        }
        Ok(())
    }
}

const STORED: &str = "BlockStored";
const REMOVED: &str = "BlockRemoved";
const CLEARED: &str = "AllBlocksCleared";

#[derive(Clone, Copy)]
enum Field {
    Kind,
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    AdapterId,
    Medium,
    Adapter,
    Extra,
    Group,
    Attention,
    Salt,
    Other,
}

/// The places of members in an array, after the kind.
fn order_of(kind: &str) -> &'static [Field] {
    match kind {
        STORED => &[
            Field::Hashes,
            Field::Parent,
            Field::Tokens,
            Field::BlockSize,
            Field::AdapterId,
            Field::Medium,
            Field::Adapter,
            Field::Extra,
            Field::Group,
            Field::Attention,
        ],
        REMOVED => &[Field::Hashes, Field::Medium, Field::Group],
        _ => &[],
    }
}

fn field_of(name: &str) -> Field {
    match name {
        "type" => Field::Kind,
        "block_hashes" => Field::Hashes,
        "parent_block_hash" => Field::Parent,
        "token_ids" => Field::Tokens,
        "block_size" => Field::BlockSize,
        "lora_id" => Field::AdapterId,
        "medium" => Field::Medium,
        "lora_name" => Field::Adapter,
        "extra_keys" => Field::Extra,
        "group_idx" => Field::Group,
        "kv_cache_spec_kind" => Field::Attention,
        "cache_salt" => Field::Salt,
        _ => Field::Other,
    }
}

#[derive(Default)]
struct Fields<'a> {
    kind: Option<&'a str>,
    parent: Option<u64>,
    block_size: Option<u64>,
    adapter_id: Option<u64>,
    medium: Option<&'a str>,
    adapter: Option<&'a str>,
    extra: ExtraKeys<'a>,
    group: Option<u64>,
    attention: Option<&'a str>,
    salt: Option<&'a str>,
}

impl<'a> Fields<'a> {
    fn stored(&self, hashes: &'a [u64], tokens: &'a [u32]) -> Stored<'a> {
        // Versions that do not say it mean what the tokens show.
        let block_size = self.block_size.map_or(tokens.len() / hashes.len().max(1), |size| size as usize);
        Stored {
            hashes,
            parent: self.parent,
            tokens,
            block_size,
            medium: self.medium,
            adapter: self.adapter.filter(|name| !name.is_empty()),
            adapter_id: self.adapter_id,
            salt: self.salt.filter(|salt| !salt.is_empty()),
            extra: self.extra,
            group: self.group.unwrap_or(0),
            attention: self.attention,
        }
    }
}

/// What an event that could not be read would have been.
fn judge(mut event: Cursor<'_>) -> BadEvent {
    let kind = match event.array_if() {
        Ok(Some(1..)) => event.text().ok().flatten(),
        Ok(Some(0)) | Err(Bad) => None,
        Ok(None) => kind_in_map(&mut event).ok().flatten(),
    };
    match kind.as_deref() {
        Some(STORED) => BadEvent::Store,
        Some(REMOVED | CLEARED) | None => BadEvent::Other,
        Some(_) => BadEvent::UnknownKind,
    }
}

fn kind_in_map<'a>(event: &mut Cursor<'a>) -> Result<Option<Cow<'a, str>>, Bad> {
    for _ in 0..event.map()? {
        if event.text()?.as_deref() == Some("type") {
            return event.text();
        }
        event.skip()?;
    }
    Ok(None)
}

#[cfg(test)]
pub(super) mod tests;
