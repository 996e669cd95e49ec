//! What the engine takes for a token: four bytes of text, or what a real tokenizer says.

use std::path::Path;

use super::error::ApiError;
use super::tokenizer::encode;
use super::{EngineError, EngineState};
use crate::prompt::Skipped;
use crate::prompt::token_cache::TokenCache;
use crate::prompt::tokenize::prompt_ids;
use crate::prompt::tokenizer::{Around, LocalTokenizer};
use crate::request::Api;

/// Bytes of token ids that are remembered.
const CACHE_BYTES: u64 = 16 << 20;

/// The tokens of texts and conversations.
pub(super) struct Vocabulary(Option<(LocalTokenizer, TokenCache)>);

impl Vocabulary {
    /// Of a `tokenizer.json`, or of four bytes a token.
    pub fn load(path: Option<&Path>) -> Result<Self, EngineError> {
        let load = |path: &Path| {
            LocalTokenizer::load(path).map_err(|error| EngineError::Tokenizer(error.to_string()))
        };
        Ok(Self(path.map(load).transpose()?.map(|tokenizer| (tokenizer, TokenCache::new(CACHE_BYTES)))))
    }

    /// The tokens of a completion prompt.
    pub fn text(&self, text: &str, around: Around) -> Result<Vec<u32>, ApiError> {
        match &self.0 {
            None => Ok(encode(text)),
            Some((tokenizer, cache)) => {
                tokenizer.encode_cached(cache, text, around).map(|ids| ids.to_vec()).map_err(refused)
            }
        }
    }

    /// The tokens of a conversation: of `body` by the chat template, else of `text`, which stands for it.
    pub fn conversation(&self, api: Api, body: &[u8], text: &str) -> Result<Vec<u32>, ApiError> {
        match &self.0 {
            None => Ok(encode(text)),
            Some((tokenizer, cache)) => {
                prompt_ids(tokenizer, cache, api, body, None).map(|ids| ids.to_vec()).map_err(refused)
            }
        }
    }
}

fn refused(reason: Skipped) -> ApiError {
    ApiError::invalid("messages", format!("The prompt cannot be tokenized: {}.", reason.name()))
}

impl EngineState {
    /// Refuses `/render`, as vLLM does without `--enable-scale-out`.
    pub(super) fn check_scale_out(&self) -> Result<(), ApiError> {
        if self.config.scale_out { Ok(()) } else { Err(ApiError::NotScaledOut) }
    }
}
