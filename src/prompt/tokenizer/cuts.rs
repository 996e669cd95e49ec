//! Where a stretch of text can be cut so that both sides keep their ids: before a single space that follows a visible ASCII
//! character and precedes an ASCII letter.
//!
//! Why that is exact, for the byte-level BPE tokenizers of [`PATTERNS`] (pre-tokenizer: a row of `Split`s by these
//! patterns, then `ByteLevel` without a pattern and without an added space; or `ByteLevel` with its own pattern):
//!
//! 1. The model sees each pre-token alone, so it is enough that pre-tokens of `A + " b.."` are those of `A` and of `" b.."`.
//! 2. In every pattern, no alternative takes U+0020 once it has taken a character that is not white space: a space is only
//!    ever the optional first character, or part of a run of white space. So no match crosses the cut.
//! 3. The only look-around is `(?!\S)` after `\s+`. What it looks at follows white space, so it never lies behind `A`, which
//!    ends in a visible character. Every alternative that reaches the end of `A` has taken that character and finds there
//!    either the end or a space; neither continues it. So matches in `A` are the same with and without what follows.
//! 4. A match begins at the space: in the last pattern `\s+` always matches there. An earlier `Split` whose pattern matches
//!    no space (digits, CJK) leaves one piece across the cut, which the last one then divides.
//! 5. NFC changes nothing across the cut: U+0020 combines with nothing before it, an ASCII character with nothing before it.
//! 6. No added token crosses it ([`super::pieces`] makes sure).
//!
//! Property tests compare with the whole text on every tokenizer at hand.

use serde_json::Value;

use super::files::Definition;

/// Patterns of `Split` for which the argument above was checked by hand.
const PATTERNS: [&str; 8] = [
    // Llama 3, cl100k
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Qwen 2 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // GPT-2, StarCoder
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    // o200k: GPT-4o, gpt-oss, Llama 4
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // Mistral's Tekken
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    // DeepSeek 3 and 4; written with the characters themselves where the others have escapes
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    DIGITS,
    CJK,
];
/// Matches no space: it may stand before another pattern, not alone.
const DIGITS: &str = r"\p{N}{1,3}";
/// The same.
const CJK: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";

/// Chunks are at least so long where a cut allows it.
const SHORTEST: usize = 384;
/// From here on the first cut is taken.
const LONG: usize = 2_048;

/// The permission to cut.
#[derive(Debug)]
pub struct Cuts(());

impl Cuts {
    /// `None` where the argument does not hold, or nobody has checked it.
    pub fn new(definition: &Definition) -> Option<Self> {
        let model = definition.model.kind == "BPE"
            && definition.model.dropout.is_none_or(|dropout| dropout == 0.0)
            && (normalizes_nothing(&definition.normalizer) || is_nfc(&definition.normalizer));
        (model && splits_are_known(&definition.pre_tokenizer)).then_some(Self(()))
    }

    /// Where the first chunk of a text ends. It depends on what stands in the chunk and at its end only, so a text that
    /// grows keeps all its chunks but the last; and on the letters around the cut, so that after a change in the middle the
    /// cuts soon fall into the same places again.
    pub fn next(text: &str) -> usize {
        let bytes = text.as_bytes();
        let mut at = SHORTEST;
        while at + 1 < bytes.len() {
            let Some(space) = memchr::memchr(b' ', &bytes[at..bytes.len() - 1]) else { return bytes.len() };
            let space = at + space;
            let allowed = bytes[space - 1].is_ascii_graphic() && bytes[space + 1].is_ascii_alphabetic();
            if allowed && (space >= LONG || wanted(&bytes[space - 8..space])) {
                return space;
            }
            at = space + 1;
        }
        bytes.len()
    }
}

/// One place in sixteen, by the eight bytes before it.
fn wanted(before: &[u8]) -> bool {
    let number = before.iter().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0
}

/// Whether a normalizer leaves every text as it is.
pub fn normalizes_nothing(normalizer: &Value) -> bool {
    normalizer.is_null() || normalizer.get("normalizers").and_then(Value::as_array).is_some_and(Vec::is_empty)
}

fn kind(value: &Value) -> &str {
    value.get("type").and_then(Value::as_str).unwrap_or_default()
}

fn is_nfc(normalizer: &Value) -> bool {
    kind(normalizer) == "NFC"
}

fn splits_are_known(pre_tokenizer: &Value) -> bool {
    let byte_level = |value: &Value, own_pattern: bool| {
        kind(value) == "ByteLevel"
            && value.get("add_prefix_space") == Some(&Value::Bool(false))
            && value.get("use_regex").and_then(Value::as_bool).unwrap_or(true) == own_pattern
    };
    if byte_level(pre_tokenizer, true) {
        return true;
    }
    let Some(all) = pre_tokenizer.get("pretokenizers").and_then(Value::as_array) else { return false };
    let Some((last, splits)) = all.split_last() else { return false };
    let patterns: Option<Vec<&str>> = splits.iter().map(known_pattern).collect();
    // With its own pattern it divides what the splits left, and its pattern is GPT-2's.
    let divides = |patterns: &[&str]| patterns.last().is_some_and(|last| *last != DIGITS && *last != CJK);
    patterns.is_some_and(|patterns| byte_level(last, true) || byte_level(last, false) && divides(&patterns))
}

/// The pattern of a `Split` that leaves every match a piece of its own.
fn known_pattern(split: &Value) -> Option<&str> {
    let isolates = kind(split) == "Split"
        && split.get("behavior").and_then(Value::as_str) == Some("Isolated")
        && split.get("invert") != Some(&Value::Bool(true));
    let pattern = split.get("pattern")?.get("Regex")?.as_str()?;
    (isolates && PATTERNS.contains(&pattern)).then_some(pattern)
}
