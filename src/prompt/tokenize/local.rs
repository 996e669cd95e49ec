//! From a body to ids with a tokenizer in this process.

use std::sync::Arc;

use serde::Deserialize;

use super::super::chat;
use super::super::skipped::Skipped;
use super::super::token_cache::{Key, TokenCache};
use super::super::tokenizer::{Around, LocalTokenizer};
use super::Outcome;
use crate::request::Api;

/// Purposes of cache entries, beside those of the tokenizer.
const BODY: u64 = 4;

/// The key of a whole body.
pub fn body_key(tokenizer: &LocalTokenizer, cache: &TokenCache, api: Api, body: &[u8]) -> Key {
    cache.key(tokenizer.space(BODY).wrapping_add(api as u64), body)
}

/// Members of a completion body that change its tokens.
#[derive(Deserialize)]
struct Completion {
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
    #[serde(default)]
    prompt_embeds: Option<serde::de::IgnoredAny>,
}

/// The ids of a prompt: of `text` where there is one, else of the conversation in `body`.
pub fn prompt_ids(
    tokenizer: &LocalTokenizer,
    cache: &TokenCache,
    api: Api,
    body: &[u8],
    text: Option<&str>,
) -> Outcome {
    let key = body_key(tokenizer, cache, api, body);
    if let Some(ids) = cache.get(&key) {
        return Ok(ids);
    }
    let (ids, lasting) = match (text, chat::read(api, body)) {
        (Some(text), _) => (completion(tokenizer, cache, body, text)?, true),
        (None, None) => return Err(Skipped::Unsupported),
        (None, Some(chat)) => {
            let chat = chat?;
            let template = tokenizer.template(chat.has_tools()).ok_or(Skipped::Template)?;
            let text = chat::render(chat, template, tokenizer.special_tokens())?;
            (tokenizer.encode_cached(cache, &text, Around::NotAdded)?, !template.uses_clock)
        }
    };
    if lasting {
        cache.put(key, Arc::clone(&ids));
    }
    Ok(ids)
}

fn completion(tokenizer: &LocalTokenizer, cache: &TokenCache, body: &[u8], text: &str) -> Outcome {
    let options: Completion = serde_json::from_slice(body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body))
        .map_err(|_| Skipped::Failed)?;
    if options.truncate_prompt_tokens.is_some() || options.prompt_embeds.is_some() {
        return Err(Skipped::Unsupported);
    }
    let around = if options.add_special_tokens == Some(false) { Around::NotAdded } else { Around::Added };
    tokenizer.encode_cached(cache, text, around)
}
