//! One request for token ids.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::super::skipped::Skipped;
use super::{RemoteAsk, Target};
use crate::request::{Api, Edits, LlmRequest};
use crate::state::TokenizerSource;
use crate::state::endpoint::EngineKind;

/// A request whose prompt is to be tokenized.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Where the tokenizer of its pool's model is.
    pub source: Option<&'a TokenizerSource>,
    /// The pool, within which one model name means one tokenizer.
    pub pool: &'a str,
    /// The parsed request.
    pub request: &'a LlmRequest,
    /// Its path.
    pub path: &'a str,
    /// The body it was parsed from.
    pub body: &'a [u8],
    /// The model's name as the pool's engines know it.
    pub model: &'a str,
    /// An endpoint of the pool, for [`TokenizerSource::Engine`].
    pub engine: Option<(SocketAddr, EngineKind)>,
    /// The longest wait.
    pub budget: Duration,
}

impl Ask<'_> {
    /// The text of a prompt that is no conversation.
    pub(super) fn prompt_text(&self) -> Result<Option<String>, Skipped> {
        match self.request.api {
            Api::Chat | Api::Messages | Api::Responses => Ok(None),
            Api::Completions | Api::SglangGenerate | Api::Embeddings => {
                let mut text = Vec::with_capacity(self.request.prompt.text_len());
                self.request.prompt.render(self.body, &mut |piece| text.extend_from_slice(piece));
                String::from_utf8(text).map(Some).map_err(|_| Skipped::Failed)
            }
            Api::Tokenize | Api::Generate | Api::Other => Err(Skipped::Unsupported),
        }
    }

    /// Keeps answers apart that may differ for one body: by pool and model, not by endpoint.
    pub(super) fn remote_space(&self) -> u64 {
        let model = xxh3_64_with_seed(self.model.as_bytes(), self.request.api as u64);
        xxh3_64_with_seed(self.pool.as_bytes(), model)
    }

    pub(super) fn for_remote(&self, target: Target) -> RemoteAsk {
        let mut edits = Edits::new();
        if self.request.model.is_some() {
            self.request.rename_model(self.model, &mut edits);
        }
        let body =
            if edits.is_empty() { Bytes::copy_from_slice(self.body) } else { edits.apply(self.body).into() };
        let path = self.path.split_once('?').map_or(self.path, |(path, _)| path);
        RemoteAsk {
            target,
            api: self.request.api,
            path: path.trim_end_matches('/').into(),
            body,
            model: self.model.into(),
            budget: self.budget,
        }
    }
}
