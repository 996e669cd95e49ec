//! A model's tokenizer in this process: `tokenizer.json`, and the chat template beside it.
//!
//! ```text
//!   text --pieces: added tokens, and what lies between--> --cuts: chunks that stand for themselves--> engine -> ids
//! ```
//!
//! Ids out of the cache are those of the whole text, because a piece is taken apart only where the tokenizer itself treats
//! both sides alone: [`pieces`] and [`cuts`] say why.

mod cuts;
mod engine;
mod files;
mod pieces;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::json::Members;
use super::skipped::Skipped;
use super::template::ChatTemplate;
use super::token_cache::TokenCache;
use engine::Engine;
pub use files::LoadError;
use pieces::{Piece, Pieces};

/// Whether the tokens that a tokenizer adds around a text (beginning of the text, say) are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Around {
    /// As for completion prompts.
    Added,
    /// As for chats, whose template writes them.
    NotAdded,
}

/// A tokenizer, ready to use. Immutable.
pub struct LocalTokenizer {
    /// Unique in this process, so that cache entries of an older version of the file are not found.
    id: u64,
    engine: Engine,
    /// `None` where pieces of a text cannot be told to stand for themselves.
    pieces: Option<Pieces>,
    /// Ids before and after a text; `None` where the engine must say.
    around: Option<(Vec<u32>, Vec<u32>)>,
    templates: files::Templates,
}

/// Smallest chunk that is looked up: below it, encoding costs no more than remembering.
const SMALLEST_KEPT: usize = 24;

impl LocalTokenizer {
    /// Loads `path`, which is a `tokenizer.json` or a folder with one. Takes up to a second for a large vocabulary.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let files::Loaded { reference, definition, templates, exact_file } = files::load(path)?;
        let pieces = Pieces::new(&definition, reference.get_added_tokens_decoder().values());
        let around = files::around(&reference);
        let engine = match (&pieces, &around) {
            (Some(pieces), Some(_)) if pieces.can_cut() => Engine::fastest(reference, exact_file.as_deref()),
            _ => Engine::Reference(Box::new(reference)),
        };
        Ok(Self { id: IDS.fetch_add(1, Relaxed), engine, pieces, around, templates })
    }

    /// Name of the implementation at work, for people.
    pub fn engine(&self) -> &'static str {
        self.engine.name()
    }

    /// Whether the next turn of a conversation costs only what is new.
    pub fn reuses_prefixes(&self) -> bool {
        self.pieces.is_some()
    }

    /// The chat template; some models have one of its own for requests with tools.
    pub fn template(&self, tools: bool) -> Option<&ChatTemplate> {
        self.templates.of(tools)
    }

    /// `bos_token` and the other special tokens by the names that templates know them by.
    pub(super) fn special_tokens(&self) -> &Members {
        &self.templates.special
    }

    /// The ids of a text, from scratch. Added tokens in the text are recognised.
    pub fn encode(&self, text: &str, around: Around) -> Result<Vec<u32>, Skipped> {
        match (&self.around, around) {
            (_, Around::NotAdded) => self.engine.encode(text, false),
            (None, Around::Added) => self.engine.encode(text, true),
            (Some((before, after)), Around::Added) => {
                let mut ids = before.clone();
                ids.extend(self.engine.encode(text, false)?);
                ids.extend(after);
                Ok(ids)
            }
        }
    }

    /// The same ids as [`LocalTokenizer::encode`], by what is in the cache of the text, its pieces and chunks.
    pub fn encode_cached(
        &self,
        cache: &TokenCache,
        text: &str,
        around: Around,
    ) -> Result<Arc<[u32]>, Skipped> {
        let whole = cache.key(self.space(if around == Around::Added { 1 } else { 2 }), text.as_bytes());
        if let Some(ids) = cache.get(&whole) {
            return Ok(ids);
        }
        let ids: Arc<[u32]> = match (&self.pieces, &self.around, around) {
            (None, _, _) | (_, None, Around::Added) => self.encode(text, around)?.into(),
            (Some(pieces), known, around) => {
                let (before, after) = match known {
                    Some((before, after)) if around == Around::Added => (&before[..], &after[..]),
                    _ => (&[][..], &[][..]),
                };
                let mut ids = Vec::with_capacity(before.len() + text.len() / 3 + after.len());
                ids.extend_from_slice(before);
                self.encode_pieces(pieces, cache, text, &mut ids)?;
                ids.extend_from_slice(after);
                ids.into()
            }
        };
        cache.put(whole, Arc::clone(&ids));
        Ok(ids)
    }

    fn encode_pieces(
        &self,
        pieces: &Pieces,
        cache: &TokenCache,
        text: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), Skipped> {
        let space = self.space(3);
        for piece in pieces.of(text) {
            match piece {
                Piece::Added(id) => ids.push(id),
                Piece::Text(text) => {
                    for chunk in pieces.chunks(text) {
                        if chunk.len() < SMALLEST_KEPT {
                            ids.extend(self.engine.encode(chunk, false)?);
                            continue;
                        }
                        let key = cache.key(space, chunk.as_bytes());
                        if let Some(known) = cache.get(&key) {
                            ids.extend_from_slice(&known);
                            continue;
                        }
                        let new = self.engine.encode(chunk, false)?;
                        ids.extend_from_slice(&new);
                        cache.put(key, new.into());
                    }
                }
            }
        }
        Ok(())
    }

    /// Cache entries of one purpose.
    pub(super) fn space(&self, purpose: u64) -> u64 {
        (self.id * 16 + purpose).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

impl std::fmt::Debug for LocalTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalTokenizer")
            .field("engine", &self.engine())
            .field("reuses_prefixes", &self.reuses_prefixes())
            .finish_non_exhaustive()
    }
}
