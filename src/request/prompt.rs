//! The canonical text of a prompt as a list of pieces of the body, so that it is hashed without being built.

use std::fmt;
use std::ops::Range;

/// Estimated tokens of one image, audio or other media part. Vision encoders emit between 64 and a few thousand tokens
/// a picture; the estimate is a constant so that base64 text never counts as prompt.
pub const TOKENS_PER_MEDIA: u64 = 256;

/// UTF-8 bytes for which one token is estimated, the usual figure for English text with byte-pair vocabularies.
pub const BYTES_PER_TOKEN: usize = 4;

const MEDIA_OPEN: &[u8] = b"<|media:";
const MEDIA_CLOSE: &[u8] = b"|>";
const MEDIA_LENGTH: usize = MEDIA_OPEN.len() + 16 + MEDIA_CLOSE.len();

/// Half-open range of bytes; 8 bytes wide because a long conversation holds thousands of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    start: u32,
    end: u32,
}

impl Span {
    /// The caller has checked that positions fit (`ParseError::TooLarge`).
    pub(super) fn new(start: usize, end: usize) -> Span {
        Span { start: start as u32, end: end as u32 }
    }

    pub(super) fn range(self) -> Range<usize> {
        self.start as usize..self.end as usize
    }

    pub(super) fn len(self) -> usize {
        (self.end - self.start) as usize
    }
}

/// One run of the canonical text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Piece {
    Body(Span),
    Scratch(Span),
    Markup(Markup),
    /// xxh3-64 of a media part's URL or data.
    Media(u64),
}

impl Piece {
    fn len(self) -> usize {
        match self {
            Piece::Body(span) | Piece::Scratch(span) => span.len(),
            Piece::Markup(markup) => markup.text().len(),
            Piece::Media(_) => MEDIA_LENGTH,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// What stands between the client's texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Markup {
    Open,
    Newline,
    Close,
    System,
    Developer,
    User,
    Assistant,
    Tool,
    ToolCall,
    ToolResult,
}

impl Markup {
    pub(super) fn text(self) -> &'static str {
        match self {
            Markup::Open => "<|im_start|>",
            Markup::Newline => "\n",
            Markup::Close => "<|im_end|>\n",
            Markup::System => "<|im_start|>system\n",
            Markup::Developer => "<|im_start|>developer\n",
            Markup::User => "<|im_start|>user\n",
            Markup::Assistant => "<|im_start|>assistant\n",
            Markup::Tool => "<|im_start|>tool\n",
            Markup::ToolCall => "<|tool_call|>",
            Markup::ToolResult => "<|tool_result|>",
        }
    }
}

/// The prompt of a request: its canonical text or its token ids.
///
/// The canonical text is the key of prefix caches. A `prompt` string stands as it is. Messages become
/// `<|im_start|>{role}\n{content}<|im_end|>\n` each (Kthena's text), with these additions, each only when present:
/// - `tools`, then `functions`, stand first as raw JSON, because chat templates render them first;
/// - calls of an assistant turn follow its content as `<|tool_call|>{name}\n{arguments}`; their ids are left out, since
///   most templates do not render them and clients make them anew;
/// - `tool_result` parts (Anthropic) stand in their place as `<|tool_result|>{content}`;
/// - images, audio and other media stand in their place as `<|media:{16 hex digits of xxh3-64 of the URL or data}|>`.
///
/// Parts of one message are joined with a newline, so a text split into two parts is another text.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Prompt {
    pub(super) known: bool,
    pub(super) pieces: Vec<Piece>,
    /// Texts that had JSON escapes, decoded.
    pub(super) scratch: String,
    pub(super) token_ids: Option<Vec<u32>>,
    /// Estimated tokens of what is not in `pieces` or `token_ids`: the other prompts of a batch.
    pub(super) further_tokens: u64,
    pub(super) text_len: usize,
    pub(super) images: usize,
}

impl Prompt {
    pub(super) fn unknown() -> Prompt {
        Prompt::default()
    }

    pub(super) fn from_pieces(pieces: Vec<Piece>, scratch: String) -> Prompt {
        let text_len = pieces.iter().map(|piece| piece.len()).sum();
        let images = pieces.iter().filter(|piece| matches!(piece, Piece::Media(_))).count();
        Prompt { known: true, pieces, scratch, text_len, images, ..Prompt::default() }
    }

    /// Whether the body said what the prompt is. Unknown: no prompt of a known form, mixed or empty lists, forms, bodies
    /// of unknown APIs or cut off.
    pub fn is_known(&self) -> bool {
        self.known
    }

    /// Hands the canonical text to `sink`, piece by piece in order; `body` is the body that was parsed. Nothing for token
    /// ids and unknown prompts; of a batch the first prompt.
    pub fn render(&self, body: &[u8], sink: &mut dyn FnMut(&[u8])) {
        for piece in &self.pieces {
            match *piece {
                // A body other than the one parsed yields less text, not a panic.
                Piece::Body(span) => sink(body.get(span.range()).unwrap_or_default()),
                Piece::Scratch(span) => sink(self.scratch.as_bytes().get(span.range()).unwrap_or_default()),
                Piece::Markup(markup) => sink(markup.text().as_bytes()),
                Piece::Media(hash) => sink(&media_marker(hash)),
            }
        }
    }

    /// Bytes that [`Prompt::render`] yields.
    pub fn text_len(&self) -> usize {
        self.text_len
    }

    /// The token ids, if the client sent those in place of text; of a batch the first list.
    pub fn token_ids(&self) -> Option<&[u32]> {
        self.token_ids.as_deref()
    }

    /// Prompt tokens the engine will see, over all prompts of a batch: ids exactly, else one per started
    /// [`BYTES_PER_TOKEN`] bytes of canonical text without media markers, plus [`TOKENS_PER_MEDIA`] for each media part.
    /// For a body that was cut off the bytes that arrived count as text: a lower bound. 0 for other unknown prompts.
    pub fn estimated_tokens(&self) -> u64 {
        let ids = self.token_ids.as_ref().map_or(0, Vec::len) as u64;
        let text = self.text_len - self.images * MEDIA_LENGTH;
        estimate_text(text)
            .saturating_add(ids)
            .saturating_add(self.images as u64 * TOKENS_PER_MEDIA)
            .saturating_add(self.further_tokens)
    }

    /// As [`Prompt::estimated_tokens`], of the first prompt of a batch alone.
    pub fn estimated_tokens_of_first(&self) -> u64 {
        self.estimated_tokens().saturating_sub(self.further_tokens)
    }

    /// How many image, audio and other media parts the prompt has.
    pub fn images(&self) -> usize {
        self.images
    }
}

/// Tokens of a text of so many bytes.
pub(super) fn estimate_text(bytes: usize) -> u64 {
    bytes.div_ceil(BYTES_PER_TOKEN) as u64
}

fn media_marker(hash: u64) -> [u8; MEDIA_LENGTH] {
    let mut marker = [0; MEDIA_LENGTH];
    let (open, rest) = marker.split_at_mut(MEDIA_OPEN.len());
    let (hex, close) = rest.split_at_mut(16);
    open.copy_from_slice(MEDIA_OPEN);
    close.copy_from_slice(MEDIA_CLOSE);
    for (place, digit) in hex.iter_mut().enumerate() {
        *digit = b"0123456789abcdef"[(hash >> (60 - 4 * place)) as usize & 0xf];
    }
    marker
}

/// Names sizes only: the text is the client's.
impl fmt::Debug for Prompt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prompt")
            .field("known", &self.known)
            .field("text_len", &self.text_len)
            .field("token_ids", &self.token_ids.as_ref().map(Vec::len))
            .field("images", &self.images)
            .field("estimated_tokens", &self.estimated_tokens())
            .finish_non_exhaustive()
    }
}
