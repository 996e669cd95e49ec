//! The body of a request as it arrived, and the contiguous text that the parser reads.

use super::joined::Joined;
use crate::refusal::{Reason, Refusal};
use crate::request::encoding::{DecodeError, Encoding};
use crate::request::head::Head;
use crate::request::{self, LlmRequest};

/// A request body.
#[derive(Debug)]
pub enum Body {
    /// The request has none.
    Absent,
    /// It has one that Envoy does not show us.
    Unseen,
    /// All of it.
    Whole(Chunks),
    /// Its beginning; Envoy's buffer was full.
    CutOff(Chunks),
}

/// Body bytes in the pieces they came in.
#[derive(Default)]
pub struct Chunks {
    /// The pieces.
    pub pieces: Vec<Vec<u8>>,
    /// Their bytes together.
    pub len: usize,
}

impl std::fmt::Debug for Chunks {
    /// Prompts stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes in {} pieces", self.len, self.pieces.len())
    }
}

impl Chunks {
    /// One piece.
    pub fn of(bytes: Vec<u8>) -> Self {
        Self { len: bytes.len(), pieces: vec![bytes] }
    }

    /// Appends a piece; an empty one is dropped. Small pieces are joined: each one by itself would cost more memory than it
    /// holds, without being counted.
    pub fn push(&mut self, bytes: Vec<u8>) {
        const SMALL: usize = 4 << 10;
        self.len += bytes.len();
        match self.pieces.last_mut() {
            Some(last) if bytes.len() < SMALL && last.len() < SMALL => last.extend_from_slice(&bytes),
            _ if bytes.is_empty() => {}
            _ => self.pieces.push(bytes),
        }
    }

    /// All in one slice, copied only if there are several pieces.
    pub fn contiguous(&self) -> Joined<'_> {
        Joined::of(&self.pieces, self.len)
    }
}

/// The text that was parsed.
pub enum Text<'a> {
    /// The body itself.
    AsSent(Joined<'a>),
    /// The body, decompressed.
    Decoded(Vec<u8>),
}

impl std::fmt::Debug for Text<'_> {
    /// Prompts stay out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.bytes().len())
    }
}

impl Text<'_> {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Text::AsSent(bytes) => bytes,
            Text::Decoded(bytes) => bytes,
        }
    }

    /// The decompressed body, if it had to be.
    pub fn into_decoded(self) -> Option<Vec<u8>> {
        match self {
            Text::AsSent(_) => None,
            Text::Decoded(bytes) => Some(bytes),
        }
    }
}

/// Parses what arrived.
pub fn parse<'a>(head: &Head, body: &'a Body, max_body: usize) -> Result<(LlmRequest, Text<'a>), Refusal> {
    let path = head.path();
    let nothing = || Text::AsSent(Joined::of(&[], 0));
    match body {
        Body::Absent if head.method() == "POST" && request::Api::from_path(path).is_known() => {
            Err(Refusal::new(Reason::MalformedBody, "this path needs a request body, and none was sent"))
        }
        Body::Absent => {
            let mut request = LlmRequest::headers_only(path);
            // Without a body nothing is asked to be generated.
            request.n = 0;
            Ok((request, nothing()))
        }
        Body::Unseen => Ok((LlmRequest::headers_only(path), nothing())),
        Body::CutOff(chunks) => cut_off(head, chunks),
        Body::Whole(chunks) => {
            let text = text(head, chunks, max_body)?;
            let parsed = request::parse(path, head.get("content-type"), text.bytes())
                .map_err(|error| Refusal::new(Reason::MalformedBody, error.to_string()))?;
            Ok((parsed, text))
        }
    }
}

/// The body decoded, if it came encoded.
pub fn decoded(head: &Head, body: &Body, max_body: usize) -> Result<Option<Vec<u8>>, Refusal> {
    match body {
        Body::Whole(chunks) => Ok(text(head, chunks, max_body)?.into_decoded()),
        Body::CutOff(_) | Body::Absent | Body::Unseen => Ok(None),
    }
}

/// The text of a body that is there as a whole; `decoded` is its decoded form, if that is at hand.
pub fn whole<'a>(
    head: &Head,
    body: &'a Body,
    decoded: Option<Vec<u8>>,
    max_body: usize,
) -> Result<Option<Text<'a>>, Refusal> {
    match (body, decoded) {
        (Body::Whole(_), Some(decoded)) => Ok(Some(Text::Decoded(decoded))),
        (Body::Whole(chunks), None) => text(head, chunks, max_body).map(Some),
        (Body::CutOff(_) | Body::Absent | Body::Unseen, _) => Ok(None),
    }
}

fn text<'a>(head: &Head, chunks: &'a Chunks, max_body: usize) -> Result<Text<'a>, Refusal> {
    let Some(value) = head.get("content-encoding") else { return Ok(Text::AsSent(chunks.contiguous())) };
    let encoding = Encoding::from_header(value).map_err(|_| {
        let why =
            "content-encoding is not one of gzip, deflate, br, zstd: send the body in one of these, or plain";
        Refusal::new(Reason::UnsupportedEncoding, why)
    })?;
    if encoding == Encoding::Identity {
        return Ok(Text::AsSent(chunks.contiguous()));
    }
    encoding.decode(&chunks.pieces, max_body).map(Text::Decoded).map_err(|error| {
        let reason = match error {
            DecodeError::TooLarge { .. } => Reason::BodyTooLarge,
            DecodeError::Corrupt { .. } => Reason::MalformedBody,
        };
        Refusal::new(reason, error.to_string())
    })
}

/// A body of which Envoy's buffer held only the beginning. Without `content-length` Envoy does not say whether it was cut
/// or only followed by trailers, so it is read as a whole first.
fn cut_off<'a>(head: &Head, chunks: &'a Chunks) -> Result<(LlmRequest, Text<'a>), Refusal> {
    let too_large = || {
        let why = "the body is larger than Envoy's buffer and its `model` lies behind it: raise \
                   request_body_buffer_limit, or send `model` first";
        Refusal::new(Reason::BodyTooLarge, why)
    };
    let compressed = head
        .get("content-encoding")
        .is_some_and(|value| Encoding::from_header(value) != Ok(Encoding::Identity));
    if compressed {
        return Err(too_large());
    }
    let text = chunks.contiguous();
    let request = request::parse_prefix(head.path(), &text).ok_or_else(too_large)?;
    Ok((request, Text::AsSent(text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(path: &str, more: &[(&str, &str)]) -> Head {
        let fixed = [(":method", "POST"), (":path", path)];
        Head::new(fixed.iter().chain(more).map(|(name, value)| ((*name).to_owned(), (*value).to_owned())))
    }

    fn whole(text: &str) -> Body {
        Body::Whole(Chunks::of(text.as_bytes().to_vec()))
    }

    #[test]
    fn pieces_are_copied_only_if_there_are_several() {
        let mut chunks = Chunks::of(b"ab".to_vec());
        assert!(std::ptr::eq(&raw const *chunks.contiguous(), &raw const *chunks.pieces[0]));
        chunks.push(Vec::new());
        chunks.push(b"c".to_vec());
        assert_eq!((&*chunks.contiguous(), chunks.len, chunks.pieces.len()), (&b"abc"[..], 3, 1));
        chunks.push(vec![b'x'; 9_000]);
        chunks.push(b"d".to_vec());
        assert_eq!((chunks.contiguous().len(), chunks.pieces.len()), (9_004, 3));
    }

    #[test]
    fn a_missing_body_is_malformed_on_known_paths_only() {
        let reason =
            |path, body: &Body| parse(&head(path, &[]), body, 1 << 20).map(|_| ()).map_err(|r| r.reason);
        assert_eq!(reason("/v1/chat/completions", &whole("")), Err(Reason::MalformedBody));
        assert_eq!(reason("/v1/chat/completions", &Body::Absent), Err(Reason::MalformedBody));
        assert_eq!(reason("/anything", &whole("{}")), Ok(()));
        assert_eq!(reason("/anything", &Body::Absent), Ok(()));
    }

    #[test]
    fn a_request_without_a_body_asks_for_no_answer() {
        let answers = |body: &Body| parse(&head("/v1/models", &[]), body, 10).unwrap().0.n;
        assert_eq!((answers(&Body::Absent), answers(&Body::Unseen)), (0, 1));
    }

    #[test]
    fn a_cut_off_body_is_routed_if_its_model_arrived() {
        let body = |text: &str| Body::CutOff(Chunks::of(text.as_bytes().to_vec()));
        let path = head("/v1/chat/completions", &[]);
        let (request, _) = parse(&path, &body("{\"model\":\"m\",\"messages\":[{\"ro"), 10).unwrap();
        assert_eq!(request.model.as_deref(), Some("m"));
        let refused = parse(&path, &body("{\"messages\":[{\"ro"), 10).unwrap_err();
        assert_eq!(refused.reason, Reason::BodyTooLarge);
        let zipped = head("/v1/chat/completions", &[("content-encoding", "gzip")]);
        assert_eq!(parse(&zipped, &body("x"), 10).unwrap_err().reason, Reason::BodyTooLarge);
    }

    #[test]
    fn encodings_that_cannot_be_read_are_named() {
        let reason = |encoding| {
            let head = head("/v1/chat/completions", &[("content-encoding", encoding)]);
            parse(&head, &whole("plain"), 1 << 20).map(|_| ()).unwrap_err().reason
        };
        assert_eq!(reason("gzip, gzip"), Reason::UnsupportedEncoding);
        assert_eq!(reason("gzip"), Reason::MalformedBody);
    }
}
