//! What turns text into ids: Hugging Face's `tokenizers`, or `kitoken` where it proved to give the same ids.
//!
//! kitoken is 3.1 to 3.6 times faster (128 KB of Markdown and Rust: 6 to 8 ms against 19 to 26 ms on three vocabularies of
//! 128,000 to 152,000 tokens). It is another implementation of the same rules, so equality is no given: every file is
//! tried on some thousand texts when it is loaded, and with one difference the reference stays at work.

use std::fmt::Write;

use kitoken::Kitoken;
use tokenizers::Tokenizer;

use super::super::skipped::Skipped;

/// A tokenizer implementation.
pub enum Engine {
    /// `tokenizers`.
    Reference(Box<Tokenizer>),
    /// `kitoken`.
    Fast(Box<Kitoken>),
}

impl Engine {
    /// The faster one, if it agrees with the reference. `file` is the text of `tokenizer.json`; `None` where the reference
    /// knows more than that file.
    pub fn fastest(reference: Tokenizer, file: Option<&[u8]>) -> Self {
        match file.and_then(|file| Kitoken::from_tokenizers_slice(file).ok()) {
            Some(fast) if agree(&reference, &fast) => Engine::Fast(Box::new(fast)),
            _ => Engine::Reference(Box::new(reference)),
        }
    }

    /// Its name, for people.
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Reference(_) => "tokenizers",
            Engine::Fast(_) => "kitoken",
        }
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, around: bool) -> Result<Vec<u32>, Skipped> {
        match self {
            Engine::Reference(engine) => {
                let encoding = engine.encode_fast(text, around).map_err(|_| Skipped::Failed)?;
                Ok(encoding.get_ids().to_vec())
            }
            // Built for texts without tokens around them only.
            Engine::Fast(engine) => engine.encode(text, true).map_err(|_| Skipped::Failed),
        }
    }
}

/// Fragments that tokenizers disagree about if they disagree at all: runs of white space, contractions, digits, marks that
/// combine, scripts without spaces, characters outside the first plane, controls.
const FRAGMENTS: [&str; 46] = [
    "a",
    "The",
    "tokenizer",
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n ",
    "1",
    "23",
    "4567",
    "'s",
    "'LL",
    "'",
    "\"",
    "(",
    ")",
    "{\"",
    "};",
    "//",
    "!!",
    "?",
    "...",
    "_",
    "-",
    "é",
    "e\u{301}",
    "ż",
    "ß",
    "İ",
    "中文",
    "あカ",
    "한",
    "\u{1100}\u{1161}",
    "العربية",
    "क्षि",
    "👍🏽",
    "👩\u{200d}🔬",
    "𝕏",
    "\u{a0}",
    "\u{2003}",
    "\u{feff}",
    "\0",
];
/// Texts that are compared, each of up to twelve fragments.
const TRIALS: usize = 3_000;

fn agree(reference: &Tokenizer, fast: &Kitoken) -> bool {
    let decoder = reference.get_added_tokens_decoder();
    let mut added: Vec<&str> = decoder.values().map(|token| token.content.as_str()).collect();
    added.sort_unstable();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |below: usize| {
        // xorshift64: the same texts at every start.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    (0..TRIALS).all(|_| {
        let mut text = String::new();
        for _ in 0..=draw(12) {
            if !added.is_empty() && draw(8) == 0 {
                text.push_str(added[draw(added.len())]);
            } else if draw(16) == 0 {
                // Writing into a string cannot fail.
                let _ = write!(text, "{}", char::from_u32(draw(0x2_0000) as u32).unwrap_or('x'));
            } else {
                text.push_str(FRAGMENTS[draw(FRAGMENTS.len())]);
            }
        }
        match (reference.encode_fast(text.as_str(), false), fast.encode(&text, true)) {
            (Ok(expected), Ok(ids)) => expected.get_ids() == ids,
            _ => false,
        }
    })
}
