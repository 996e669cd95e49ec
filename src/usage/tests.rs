//! Captured and made-up responses, cut and encoded in every way.

use std::io::{Read, Write};

use proptest::prelude::*;
use rstest::rstest;

use super::json_body::{TAIL, WHOLE_MAX};
use super::sse::{EVENT_MAX, HOLD_MAX};
use super::*;

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";

macro_rules! capture {
    ($name:literal) => {
        include_bytes!(concat!("../../tests/data/vllm/usage-", $name, ".txt"))
    };
}

#[allow(clippy::unnecessary_wraps, reason = "compared with what a scanner gives")]
fn usage(prompt: u64, completion: u64, cached: Option<u64>) -> Option<Usage> {
    Some(Usage { prompt, completion, cached })
}

/// Scans a body in these chunks; gives the scanner at the end and what it forwarded.
fn scan<'c>(mut scanner: Scanner, chunks: impl IntoIterator<Item = &'c [u8]>) -> (Scanner, Vec<u8>) {
    let mut forwarded = Vec::new();
    for chunk in chunks {
        match scanner.push(chunk) {
            Forward::Unchanged => forwarded.extend_from_slice(chunk),
            Forward::Replaced(bytes) => forwarded.extend_from_slice(&bytes),
        }
    }
    forwarded.extend(scanner.finish());
    (scanner, forwarded)
}

fn events(body: &[u8], withhold: bool) -> (Scanner, Vec<u8>) {
    scan(Scanner::new(Some(EVENTS), None, withhold), [body])
}

#[rstest]
#[case(capture!("chat-stream"), usage(4, 2, Some(0)), 4)]
#[case(capture!("chat-stream-plain"), None, 3)]
#[case(capture!("completion-stream-continuous"), usage(62, 3, Some(32)), 4)]
#[case(capture!("messages-stream"), usage(42, 4, Some(32)), 9)]
#[case(capture!("generate-stream"), None, 3)]
fn captured_streams(#[case] body: &[u8], #[case] expected: Option<Usage>, #[case] count: u64) {
    for size in [1, 7, 100, body.len()] {
        let (scanner, forwarded) = scan(Scanner::new(Some(EVENTS), None, false), body.chunks(size));
        assert_eq!(scanner.usage(), expected);
        assert_eq!((scanner.events(), scanner.bytes()), (count, body.len() as u64));
        assert!(scanner.saw_done() && !scanner.saw_error());
        assert_eq!(forwarded, body);
    }
}

#[test]
fn captured_responses_stream() {
    let (scanner, _) = events(capture!("responses-stream"), false);
    assert_eq!(scanner.usage(), usage(40, 4, Some(0)));
    assert!(scanner.saw_done() && !scanner.saw_error());
}

#[rstest]
#[case(capture!("chat"), usage(42, 6, Some(0)))]
#[case(capture!("completion"), usage(62, 8, Some(0)))]
#[case(capture!("messages"), usage(42, 6, Some(32)))]
#[case(capture!("responses"), usage(37, 6, Some(0)))]
fn captured_documents(#[case] body: &[u8], #[case] expected: Option<Usage>) {
    for content_type in [Some(JSON), None] {
        let (scanner, forwarded) = scan(Scanner::new(content_type, None, true), body.chunks(9));
        assert_eq!(scanner.usage(), expected);
        assert!(!scanner.saw_error());
        assert_eq!(forwarded, body);
    }
}

const SPLIT: &[u8] = b"data: {\"id\":\"1\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n\
    data: {\"id\":\"1\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":10,\"total_tokens\":17}}\n\n\
    data: [DONE]\n\n";

/// PAR-13.
#[test]
fn usage_split_anywhere_is_counted_once_and_every_chunk_passes_at_once() {
    for at in 0..SPLIT.len() {
        let mut scanner = Scanner::new(Some(EVENTS), None, false);
        for chunk in [&SPLIT[..at], &SPLIT[at..], b""] {
            assert_eq!(scanner.push(chunk), Forward::Unchanged);
        }
        assert!(scanner.finish().is_empty());
        assert_eq!(scanner.usage(), usage(7, 10, None));
    }
    let two_lines = b"data: {\"usage\":\ndata: {\"prompt_tokens\":3}}\n\n";
    for at in 0..two_lines.len() {
        let chunks = [&two_lines[..at], b"", &two_lines[at..]];
        let (scanner, _) = scan(Scanner::new(Some(EVENTS), None, false), chunks);
        assert_eq!((scanner.usage(), scanner.events()), (usage(3, 0, None), 1));
    }
    let unfinished = SPLIT.strip_suffix(b"\n\ndata: [DONE]\n\n").unwrap();
    assert_eq!(events(unfinished, false).0.usage(), usage(7, 10, None));
    let mut running = String::new();
    for n in 1..=10 {
        running += "data:{\"choices\":[{}],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":";
        running += &n.to_string();
        running += "}}\r\n\r\n";
    }
    assert_eq!(events(running.as_bytes(), false).0.usage(), usage(7, 10, None));
}

#[test]
fn the_usage_event_is_withheld_and_nothing_else() {
    let without =
        [&SPLIT[..SPLIT.iter().position(|byte| *byte == b'\n').unwrap() + 2], b"data: [DONE]\n\n"].concat();
    let (scanner, forwarded) = events(SPLIT, true);
    assert_eq!(scanner.usage(), usage(7, 10, None));
    assert_eq!(forwarded, without);
    let (_, forwarded) = events(capture!("chat-stream"), true);
    assert!(!String::from_utf8(forwarded).unwrap().contains("\"usage\""));
    for kept in
        [&capture!("messages-stream")[..], capture!("responses-stream"), capture!("chat-stream-plain")]
    {
        assert_eq!(events(kept, true).1, kept);
    }
}

#[test]
fn whole_events_pass_at_once_while_usage_is_withheld() {
    let mut scanner = Scanner::new(Some(EVENTS), None, true);
    assert_eq!(scanner.push(b"data: {\"a\":1}\n\n"), Forward::Unchanged);
    assert_eq!(scanner.push(b": ping\n\ndata: {\"choi"), Forward::Replaced(b": ping\n\n".to_vec()));
    assert_eq!(scanner.push(b"ces\":[]"), Forward::Replaced(Vec::new()));
    assert_eq!(scanner.push(b"}\n\n"), Forward::Replaced(b"data: {\"choices\":[]}\n\n".to_vec()));
    assert_eq!(scanner.push(b"data: [DONE]"), Forward::Replaced(Vec::new()));
    assert_eq!(scanner.finish(), b"data: [DONE]");
    assert_eq!(scanner.events(), 2);
    assert!(scanner.saw_done());
}

#[test]
fn a_line_feed_after_a_split_carriage_return_goes_with_its_event() {
    let event = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}";
    let body = format!("data: a\r\n\r\n{event}\r\n\r\ndata: b\r\n\r\n");
    for at in 0..body.len() {
        let (head, tail) = body.as_bytes().split_at(at);
        let (_, forwarded) = scan(Scanner::new(Some(EVENTS), None, true), [head, tail]);
        assert_eq!(forwarded, b"data: a\r\n\r\ndata: b\r\n\r\n");
    }
    let (_, forwarded) = events(body.replace("\r\n", "\r").as_bytes(), true);
    assert_eq!(forwarded, b"data: a\r\rdata: b\r\r");
}

#[test]
fn a_long_event_is_not_held_back() {
    let mut scanner = Scanner::new(Some(EVENTS), None, true);
    let long =
        [b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1},\"x\":\"", "x".repeat(HOLD_MAX).as_bytes()]
            .concat();
    assert_eq!(scanner.push(&long[..100]), Forward::Replaced(Vec::new()));
    assert_eq!(scanner.push(&long[100..]), Forward::Replaced(long.clone()));
    assert_eq!(scanner.push(b"\"}\n\n"), Forward::Unchanged);
    assert_eq!(scanner.usage(), usage(1, 0, None));
    // Whole in one chunk it stays too: what the client sees does not depend on the chunks.
    let whole = [&long, &b"\"}\n\n"[..]].concat();
    assert!(events(&whole, true).1 == whole);
}

#[test]
fn an_event_that_is_too_long_is_counted_and_not_kept() {
    let long =
        [b"data: {\"usage\":{\"prompt_tokens\":9},\"x\":\"", "x".repeat(EVENT_MAX).as_bytes(), b"\"}\n\n"]
            .concat();
    let body = [&long, &b"data: {\"usage\":{\"prompt_tokens\":1}}\n\n"[..]].concat();
    for size in [1000, body.len()] {
        for withhold in [false, true] {
            let (scanner, forwarded) = scan(Scanner::new(Some(EVENTS), None, withhold), body.chunks(size));
            assert_eq!(scanner.usage(), usage(1, 0, None));
            assert_eq!((scanner.events(), scanner.skipped_events()), (2, 1));
            assert!(forwarded == body);
        }
    }
}

#[rstest]
#[case("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n", true)]
#[case("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n", true)]
#[case("data: {\"object\":\"error\",\"message\":\"x\"}\n\n", true)]
#[case(
    "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"x\"},\"usage\":null}}\n\n",
    true
)]
#[case("data: {\"error\":null,\"usage\":{}}\n\n", false)]
#[case("data: {\"choices\":[{\"delta\":{\"content\":\"\\\"error\\\": {}\"}}]}\n\n", false)]
#[case("data: {\"choices\":[{\"error\":\"inner\"}]}\n\n", false)]
#[case("data: {\"error\":\n\n", false)]
#[case(": {\"error\":{}}\n\n", false)]
fn errors_inside_a_good_stream_are_seen(#[case] body: &str, #[case] error: bool) {
    assert_eq!(events(body.as_bytes(), false).0.saw_error(), error);
}

#[rstest]
#[case("data: {\"usage\":\ndata: {\"prompt_tokens\":3}}\n\n", usage(3, 0, None))]
#[case("\u{feff}data: {\"usage\":{\"completion_tokens\":3}}\n\n", usage(0, 3, None))]
#[case(
    "data: {\"meta_info\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"cached_tokens\":1}}\n\n",
    usage(3, 2, Some(1))
)]
#[case("data: {\"usage\":{\"prompt_tokens\":3,\"prompt_tokens_details\":null}}\n\n", usage(3, 0, None))]
#[case("data: {\"usage\":{\"prompt_tokens\":3}}\n\ndata: {\"usage\" : null}\n\n", usage(3, 0, None))]
#[case(
    "data: {\"usage\":{\"input_tokens\":3}}\n\ndata: {\"usage\":{\"output_tokens\":5}}\n\n",
    usage(3, 5, None)
)]
#[case(
    "data: {\"usage\":\"x\"}\n\ndata: {\"usage\":{\"prompt_tokens\":-1}}\n\ndata: {\"usage\":[]}\n\n",
    None
)]
#[case("data: {\"x\":{\"usage\":{\"prompt_tokens\":3}}}\n\n", None)]
#[case("datax: {\"usage\":{\"prompt_tokens\":3}}\n\n", None)]
fn usage_of_every_form(#[case] body: &str, #[case] expected: Option<Usage>) {
    assert_eq!(events(body.as_bytes(), false).0.usage(), expected);
}

fn encode(encoding: &str, plain: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::default();
    let mut out = Vec::new();
    match encoding {
        "gzip" => {
            flate2::read::GzEncoder::new(plain, level).read_to_end(&mut out).unwrap();
        }
        "deflate" => {
            flate2::read::ZlibEncoder::new(plain, level).read_to_end(&mut out).unwrap();
        }
        "raw" => {
            flate2::read::DeflateEncoder::new(plain, level).read_to_end(&mut out).unwrap();
        }
        "br" => {
            brotli::CompressorWriter::new(&mut out, 4096, 5, 22).write_all(plain).unwrap();
        }
        _ => out = zstd::encode_all(plain, 3).unwrap(),
    }
    out
}

/// PAR-16.
#[rstest]
fn compressed_bodies_pass_untouched_and_are_read_aside(
    #[values("gzip", "deflate", "raw", "br", "zstd")] encoding: &str,
) {
    let header = if encoding == "raw" { "deflate" } else { encoding };
    for (content_type, body) in
        [(EVENTS, SPLIT), (JSON, br#"{"usage":{"prompt_tokens":7,"completion_tokens":10}}"#)]
    {
        let encoded = encode(encoding, body);
        for size in [1, 5, encoded.len()] {
            let (scanner, forwarded) =
                scan(Scanner::new(Some(content_type), Some(header), true), encoded.chunks(size));
            assert_eq!(scanner.usage(), usage(7, 10, None), "{encoding} {content_type} {size}");
            assert_eq!(forwarded, encoded);
            assert_eq!(scanner.bytes(), encoded.len() as u64);
        }
        let (scanner, forwarded) = scan(Scanner::new(Some(content_type), Some(header), true), [body]);
        assert_eq!((scanner.usage(), forwarded.as_slice()), (None, body), "not encoded at all");
    }
}

#[rstest]
fn a_compressed_stream_that_breaks_off_is_read_as_far_as_it_came(
    #[values("gzip", "deflate", "br", "zstd")] encoding: &str,
) {
    // Noise after the usage, so that it lies in a block of its own well before the cut.
    let noise: String = (0..200_000_u32)
        .map(|n| char::from(b'a' + (n.wrapping_mul(2_654_435_761) >> 24) as u8 % 26))
        .collect();
    let body = format!("data: {{\"usage\":{{\"prompt_tokens\":7}}}}\n\ndata: {noise}\n\n");
    let encoded = encode(encoding, body.as_bytes());
    let cut = &encoded[..encoded.len() * 9 / 10];
    let (scanner, forwarded) = scan(Scanner::new(Some(EVENTS), Some(encoding), false), cut.chunks(1000));
    assert_eq!(scanner.usage(), usage(7, 0, None));
    assert_eq!(forwarded, cut);
}

#[rstest]
#[case(Some("compress"), Some(EVENTS))]
#[case(Some("gzip, gzip"), Some(EVENTS))]
#[case(None, Some("audio/mpeg"))]
fn unreadable_bodies_pass(#[case] encoding: Option<&str>, #[case] content_type: Option<&str>) {
    let (scanner, forwarded) = scan(Scanner::new(content_type, encoding, true), [SPLIT]);
    assert_eq!((scanner.usage(), forwarded.as_slice()), (None, SPLIT));
}

#[test]
fn of_a_long_document_the_end_is_searched() {
    let text = "x\\\"usage\\\":{}".repeat(WHOLE_MAX / 8);
    let with_usage = |before: &str, after: &str| {
        format!(
            "{{\"usage\":{{\"prompt_tokens\":1}},\"choices\":[\"{before}\"],\"usage\":{{\"prompt_tokens\":7}},\"z\":\"{after}\"}}"
        )
    };
    for (body, expected) in [
        (with_usage(&text, &text[..1000]), usage(7, 0, None)),
        (with_usage(&text, &"z".repeat(TAIL + 1)), None),
    ] {
        for size in [1 << 14, 99_991, body.len()] {
            let (scanner, _) = scan(Scanner::new(Some(JSON), None, false), body.as_bytes().chunks(size));
            assert_eq!(scanner.usage(), expected);
        }
    }
}

proptest! {
    #[test]
    fn chunks_make_no_difference(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":1}}", "data: {\"choices\":[{}],\"usage\":null}",
            "data: {\"usage\":{\"completion_tokens\":9}}", "data: {\"error\":{}}", "data: [DONE]", "event: x", ": c", "data", "é",
            "\n", "\n", "\n\n", "\r", "\r\r", "\r\n", "\r\n\r\n", "\n\r",
        ]), 0..30),
        cuts in prop::collection::vec(0_usize..40, 1..20),
        withhold in any::<bool>(),
    ) {
        let body = pieces.concat().into_bytes();
        let (whole, forwarded) = events(&body, withhold);
        let mut chunks = Vec::new();
        let mut rest = body.as_slice();
        for cut in cuts.iter().chain(&[1]).cycle() {
            if rest.is_empty() { break; }
            let (chunk, left) = rest.split_at((*cut).min(rest.len()));
            chunks.push(chunk);
            rest = left;
        }
        let (split, forwarded_in_pieces) = scan(Scanner::new(Some(EVENTS), None, withhold), chunks);
        prop_assert_eq!(split.usage(), whole.usage());
        prop_assert_eq!((split.events(), split.saw_done(), split.saw_error()), (whole.events(), whole.saw_done(), whole.saw_error()));
        prop_assert_eq!(&forwarded_in_pieces, &forwarded);
        if !withhold { prop_assert_eq!(&forwarded, &body); }
        let (again, forwarded_again) = events(&forwarded, withhold);
        prop_assert_eq!(forwarded_again, forwarded);
        prop_assert!(again.events() <= whole.events());
    }

    #[test]
    fn no_bytes_panic(body in prop::collection::vec(any::<u8>(), 0..300), size in 1_usize..50,
        encoding in prop::sample::select(vec![None, Some("gzip"), Some("deflate"), Some("br"), Some("zstd")])) {
        for content_type in [None, Some(EVENTS), Some(JSON)] {
            let (_, forwarded) = scan(Scanner::new(content_type, encoding, false), body.chunks(size));
            prop_assert_eq!(&forwarded, &body);
        }
    }
}
