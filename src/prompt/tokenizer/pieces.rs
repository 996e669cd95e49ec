//! Takes a text apart where its tokenizer does so itself: at added tokens, and within what lies between at [`cuts`].
//!
//! Hugging Face's pipeline first looks for added tokens in the raw text (those that are not `normalized`, leftmost and
//! longest first), then normalizes every stretch between them, looks for the `normalized` ones in it, and gives each
//! remaining stretch alone to pre-tokenizer and model. So the ids of a text are those of its stretches in a row, if
//! (1) no added token reaches over its own text (`lstrip`, `rstrip`, `single_word`), and (2) the pre-tokenizer does not
//! ask where in the text a stretch stands (`Metaspace` with the scheme `first` does). Without both there are no pieces.

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use tokenizers::AddedToken;

use super::cuts::{self, Cuts};
use super::files::Definition;

/// One stretch of a text.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece<'t> {
    /// An added token.
    Added(u32),
    /// Text without added tokens of the first kind.
    Text(&'t str),
}

/// How a tokenizer's texts are taken apart.
#[derive(Debug)]
pub struct Pieces {
    /// Rounds of search, each with the ids of its patterns.
    rounds: Vec<(AhoCorasick, Vec<u32>)>,
    cuts: Option<Cuts>,
}

impl Pieces {
    /// `None` where stretches do not stand for themselves.
    pub fn new<'a>(definition: &Definition, added: impl Iterator<Item = &'a AddedToken>) -> Option<Self> {
        let added: Vec<&AddedToken> = added.filter(|token| !token.content.is_empty()).collect();
        if added.iter().any(|token| token.lstrip || token.rstrip || token.single_word) {
            return None;
        }
        if !stands_anywhere(&definition.pre_tokenizer) {
            return None;
        }
        let of = |normalized: bool| -> Option<(AhoCorasick, Vec<u32>)> {
            let tokens: Vec<_> = added.iter().filter(|token| token.normalized == normalized).collect();
            let ids =
                tokens.iter().map(|token| definition.id_of(&token.content)).collect::<Option<Vec<_>>>()?;
            let search = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .build(tokens.iter().map(|token| &token.content))
                .ok()?;
            Some((search, ids))
        };
        let mut rounds = vec![of(false)?];
        // The second round reads normalized text, which is the text itself where nothing is normalized.
        if cuts::normalizes_nothing(&definition.normalizer) {
            rounds.push(of(true)?);
        }
        rounds.retain(|(search, _)| search.patterns_len() > 0);
        // A token that holds a space after another letter would reach over a cut.
        let reaches = |token: &&AddedToken| token.content.trim_start_matches(' ').contains(' ');
        let cuts = if added.iter().any(reaches) { None } else { Cuts::new(definition) };
        Some(Self { rounds, cuts })
    }

    /// Whether long stretches are cut further.
    pub fn can_cut(&self) -> bool {
        self.cuts.is_some()
    }

    /// The stretches of a text, in order; empty ones are left out.
    pub fn of<'t>(&self, text: &'t str) -> Vec<Piece<'t>> {
        let mut pieces = vec![Piece::Text(text)];
        for (search, ids) in &self.rounds {
            let mut next = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let Piece::Text(text) = piece else {
                    next.push(piece);
                    continue;
                };
                let mut from = 0;
                for found in search.find_iter(text) {
                    next.push(Piece::Text(&text[from..found.start()]));
                    next.push(Piece::Added(ids[found.pattern().as_usize()]));
                    from = found.end();
                }
                next.push(Piece::Text(&text[from..]));
            }
            pieces = next;
        }
        pieces.retain(|piece| *piece != Piece::Text(""));
        pieces
    }

    /// A stretch in chunks whose ids in a row are those of the stretch.
    pub fn chunks<'t>(&self, stretch: &'t str) -> impl Iterator<Item = &'t str> + use<'t> {
        let cuts = self.cuts.is_some();
        let mut rest = stretch;
        std::iter::from_fn(move || {
            if rest.is_empty() {
                return None;
            }
            let (chunk, later) = rest.split_at(if cuts { Cuts::next(rest) } else { rest.len() });
            rest = later;
            Some(chunk)
        })
    }
}

/// Whether a pre-tokenizer treats a stretch alike wherever it stands.
fn stands_anywhere(pre_tokenizer: &Value) -> bool {
    match pre_tokenizer.get("type").and_then(Value::as_str) {
        None => pre_tokenizer.is_null(),
        Some("Sequence") => pre_tokenizer
            .get("pretokenizers")
            .and_then(Value::as_array)
            .is_some_and(|all| all.iter().all(stands_anywhere)),
        Some("Metaspace") => {
            matches!(pre_tokenizer.get("prepend_scheme").and_then(Value::as_str), Some("never" | "always"))
        }
        Some(
            "BertPreTokenizer" | "ByteLevel" | "CharDelimiterSplit" | "Digits" | "Punctuation" | "Split"
            | "Whitespace" | "WhitespaceSplit",
        ) => true,
        Some(_) => false,
    }
}
