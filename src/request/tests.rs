//! The members of a body, its errors and its edits.

mod prompts;

use proptest::prelude::*;
use rstest::rstest;

use super::*;

const CHAT: &str = "/v1/chat/completions";

fn chat(body: &str) -> LlmRequest {
    parse(CHAT, Some("application/json"), body.as_bytes()).unwrap()
}

fn renamed(body: &str, to: &str) -> String {
    let mut edits = Edits::new();
    chat(body).rename_model(to, &mut edits);
    String::from_utf8(edits.apply(body.as_bytes())).unwrap()
}

/// A rewrite may name the model of a body that names none.
#[rstest]
#[case(CHAT, r#"{"messages":[]}"#, r#"{"model":"b","messages":[]}"#)]
#[case(CHAT, " {  } ", r#" {"model":"b"  } "#)]
#[case(CHAT, "\u{feff}{\"n\":1}", "\u{feff}{\"model\":\"b\",\"n\":1}")]
#[case("/anything", r#"{"n":1}"#, r#"{"n":1}"#)]
fn a_missing_model_is_filled_in_on_known_paths(
    #[case] path: &str,
    #[case] body: &str,
    #[case] expected: &str,
) {
    let request = parse(path, None, body.as_bytes()).unwrap();
    let mut edits = Edits::new();
    request.rename_model("b", &mut edits);
    assert_eq!(String::from_utf8(edits.apply(body.as_bytes())).unwrap(), expected);
    let known = path == CHAT;
    assert_eq!((request.lacks_model(), request.takes_model()), (known, known));
    assert!(!chat(r#"{"model":"m"}"#).lacks_model() && !LlmRequest::headers_only(CHAT).lacks_model());
}

#[test]
fn members_are_read() {
    let request = chat(
        r#"{"model":"m","stream":true,"max_tokens":7,"max_completion_tokens":9,"n":2,"priority":-3,"user":"\u0041\/b",
        "cache_salt":"s","lora_path":"l","seed":9007199254740993,"x":{"model":"inner","stream":false}} "#,
    );
    assert_eq!(request.api, Api::Chat);
    assert_eq!(request.model.as_deref(), Some("m"));
    assert!(request.stream);
    assert_eq!((request.max_tokens, request.n, request.priority), (Some(9), 2, Some(-3)));
    assert_eq!(request.user.as_deref(), Some("A/b"));
    assert_eq!((request.cache_salt.as_deref(), request.lora.as_deref()), (Some("s"), Some("l")));
    assert!(!request.prompt.is_known());
}

#[rstest]
#[case("16", Some(16))]
#[case("16.0", Some(16))]
#[case("99999999999999999999999", Some(u64::MAX))]
#[case("1e400", Some(u64::MAX))]
#[case("0", Some(0))]
#[case("null", None)]
#[case("-1", None)]
#[case("1.5", None)]
#[case("\"16\"", None)]
#[case("[16]", None)]
fn limits_of_odd_types_count_as_unset(#[case] literal: &str, #[case] expected: Option<u64>) {
    let bounds =
        [(CHAT, "max_tokens"), ("/v1/completions", "max_tokens"), ("/v1/responses", "max_output_tokens")];
    for (path, name) in bounds {
        let body = format!(r#"{{"model":"m","{name}":{literal},"messages":[]}}"#);
        assert_eq!(parse(path, None, body.as_bytes()).unwrap().max_tokens, expected, "{path} {body}");
    }
    for name in ["max_tokens", "max_new_tokens"] {
        let body = format!(r#"{{"inputs":"x","parameters":{{"{name}":{literal}}}}}"#);
        assert_eq!(parse("/generate", None, body.as_bytes()).unwrap().max_tokens, expected, "{body}");
    }
}

/// What an engine passes over must not bound what its answer is charged.
#[rstest]
#[case(CHAT, r#""max_completion_tokens":3,"max_tokens":9"#, Some(3))]
#[case(CHAT, r#""max_completion_tokens":0,"max_tokens":9"#, Some(9))]
#[case(CHAT, r#""max_output_tokens":3,"max_new_tokens":3"#, None)]
#[case("/v1/completions", r#""max_completion_tokens":3,"max_tokens":9"#, Some(9))]
#[case("/v1/completions", r#""max_completion_tokens":3"#, None)]
#[case("/v1/responses", r#""max_completion_tokens":3,"max_tokens":4,"max_output_tokens":9"#, Some(9))]
#[case("/v1/messages", r#""max_completion_tokens":3,"max_tokens":9"#, Some(9))]
#[case("/generate", r#""max_tokens":3,"max_new_tokens":9"#, Some(9))]
#[case("/tokenize", r#""max_tokens":3"#, None)]
fn only_the_bound_that_the_api_knows_counts(
    #[case] path: &str,
    #[case] members: &str,
    #[case] expected: Option<u64>,
) {
    let body = format!(r#"{{"model":"m",{members}}}"#);
    assert_eq!(parse(path, None, body.as_bytes()).unwrap().max_tokens, expected, "{body}");
}

#[test]
fn wrong_types_of_optional_members_are_no_errors() {
    let request = chat(
        r#"{"model":"m","stream":"yes","n":null,"priority":{},"user":7,"cache_salt":[],"stream_options":3,"messages":"x",
        "tools":9,"system":[1,null],"input":1e5,"prompt":{"id":"p"},"sampling_params":[{"max_tokens":3}]}"#,
    );
    assert!(!request.stream && !request.prompt.is_known());
    assert_eq!((request.n, request.max_tokens, request.priority), (1, None, None));
}

#[rstest]
#[case("", "CutOff", 0, 1, 1)]
#[case("{\"model\":\"secret", "CutOff", 16, 1, 16)]
#[case("{\"model\":\"secret\"", "CutOff", 17, 1, 17)]
#[case("{\"a\":1,\n \"b\":secret}", "NotJson", 13, 2, 6)]
#[case("{\"a\":1} {\"secret\":2}", "NotJson", 8, 1, 9)]
#[case("\u{feff}{\"a\":secret}", "NotJson", 8, 1, 9)]
#[case("secret", "NotJson", 0, 1, 1)]
#[case("\n [\"secret\"]", "NotAnObject", 2, 2, 2)]
#[case("\n{\"model\":7}", "Model", 10, 2, 10)]
#[case("{\"model\":null}", "Model", 9, 1, 10)]
#[case("{\"model\":\" \\t\"}", "Model", 9, 1, 10)]
fn errors_name_the_place_and_quote_nothing(
    #[case] body: &str,
    #[case] kind: &str,
    #[case] offset: usize,
    #[case] line: usize,
    #[case] column: usize,
) {
    let error = parse(CHAT, None, body.as_bytes()).unwrap_err();
    let text = error.to_string();
    assert!(format!("{error:?}").starts_with(kind), "{error:?}");
    assert!(text.contains(&format!("byte {offset} (line {line}, column {column})")), "{text}");
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn invalid_utf8_in_a_read_string_is_an_error() {
    let body = b"{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}";
    assert!(matches!(parse(CHAT, None, body), Err(ParseError::NotJson { .. })));
}

#[test]
fn deep_nesting_is_an_error_where_it_is_read_and_skipped_elsewhere() {
    let deep = |levels: usize| {
        format!("{}{}{}", r#"[{"type":"tool_result","content":"#.repeat(levels), "1", "}]".repeat(levels))
    };
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":{}}}]}}"#, deep(500));
    assert!(matches!(parse("/v1/messages", None, body.as_bytes()), Err(ParseError::TooDeep { .. })));
    let body = format!(r#"{{"model":"m","x":{}{},"messages":[]}}"#, "[".repeat(100_000), "]".repeat(100_000));
    assert!(chat(&body).prompt.is_known());
}

#[test]
fn unknown_paths_take_a_model_where_there_is_one() {
    let parse = |content_type, body: &[u8]| parse("/v1/rerank", content_type, body).unwrap();
    let request = parse(None, br#"{"model":"m","prompt":"x","query":"q"}"#);
    assert_eq!(request.model.as_deref(), Some("m"));
    assert!(!request.prompt.is_known());
    for body in [&b"hello"[..], b"", b"[1]", br#"{"model":7}"#, br#"{"x":1}"#, br#"{"model":"m""#] {
        assert_eq!(parse(None, body).model, None);
    }
    assert_eq!(parse(Some("multipart/form-data"), b"x").model, None);
}

#[test]
fn forms_are_routed_and_renamed() {
    let body = b"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b\r\n\
        Content-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n\xff\x00\r\n--b--\r\n";
    let content_type = Some("multipart/form-data; boundary=\"b\"");
    let request = parse("/v1/audio/transcriptions", content_type, body).unwrap();
    assert_eq!(request.model.as_deref(), Some("whisper"));
    let mut edits = Edits::new();
    request.rename_model("big \"w\"", &mut edits);
    let changed = edits.apply(body);
    let again = parse("/v1/audio/transcriptions", content_type, &changed).unwrap();
    assert_eq!(again.model.as_deref(), Some("big \"w\""));
    assert!(matches!(parse(CHAT, content_type, b"--b\r\nx"), Err(ParseError::Multipart { .. })));
}

/// PAR-06.
#[rstest]
#[case(
    concat!("{ \"model\" : \"alias\",\n \"seed\":9007199254740993, \"temperature\":1e-7,\"top_p\":0.10,\"logit_bias\":{\"50256\":-100},",
        r#""user":"\u0041\/<b>&", "messages":[{"role":"user","content":"hi"}], "x":1, "x":2 }"#),
    concat!("{ \"model\" : \"real/model-name\",\n \"seed\":9007199254740993, \"temperature\":1e-7,\"top_p\":0.10,\"logit_bias\":{\"50256\":-100},",
        r#""user":"\u0041\/<b>&", "messages":[{"role":"user","content":"hi"}], "x":1, "x":2 }"#)
)]
#[case(
    r#"{"metadata":{"model":"alias"},"model":"alias"}"#,
    r#"{"metadata":{"model":"alias"},"model":"real/model-name"}"#
)]
#[case(r#"{"model":"al\u00efas\" \"model\":\"x"}"#, r#"{"model":"real/model-name"}"#)]
#[case(r#"{"mod\u0065l":"a"}"#, r#"{"mod\u0065l":"real/model-name"}"#)]
#[case(r#"{"model":7,"model":"b"}"#, r#"{"model":"real/model-name","model":"real/model-name"}"#)]
#[case("\u{feff}{\"model\":\"b\"}", "\u{feff}{\"model\":\"real/model-name\"}")]
#[case(r#"{"model":"real/model-name"}"#, r#"{"model":"real/model-name"}"#)]
fn renaming_changes_the_model_literal_only(#[case] body: &str, #[case] expected: &str) {
    assert_eq!(renamed(body, "real/model-name"), expected);
}

#[test]
fn a_new_name_is_escaped_and_an_equal_one_is_no_edit() {
    assert_eq!(renamed(r#"{"model":"a"}"#, "a\"\\\n"), r#"{"model":"a\"\\\n"}"#);
    let mut edits = Edits::new();
    chat(r#"{"model":"\u0061"}"#).rename_model("a", &mut edits);
    assert!(edits.is_empty());
}

#[test]
fn the_last_of_equal_keys_counts() {
    let request = chat(
        r#"{"model":"a","model":"b","stream":true,"stream":false,"messages":[{"role":"user","content":"x"}],"messages":[]}"#,
    );
    assert_eq!(request.model.as_deref(), Some("b"));
    assert!(!request.stream);
    assert_eq!(request.prompt.text_len(), 0);
}

#[rstest]
#[case(r#"{"stream":true}"#, Some(r#"{"stream":true,"stream_options":{"include_usage":true}}"#))]
#[case(
    r#"{"stream":true,"stream_options":null}"#,
    Some(r#"{"stream":true,"stream_options":{"include_usage":true}}"#)
)]
#[case(
    r#"{"stream":true,"stream_options":{ }}"#,
    Some(r#"{"stream":true,"stream_options":{"include_usage":true }}"#)
)]
#[case(
    r#"{"stream_options":{"continuous_usage_stats":false},"stream":true}"#,
    Some(r#"{"stream_options":{"include_usage":true,"continuous_usage_stats":false},"stream":true}"#)
)]
#[case(
    r#"{"stream":true,"stream_options":{"include_usage" : false,"a":1}}"#,
    Some(r#"{"stream":true,"stream_options":{"include_usage" : true,"a":1}}"#)
)]
#[case(
    r#"{"stream":true,"stream_options":{"include_usage":true,"include_usage":null}}"#,
    Some(r#"{"stream":true,"stream_options":{"include_usage":true,"include_usage":true}}"#)
)]
#[case(r#"{"stream":true,"stream_options":{"include_usage":true}}"#, None)]
#[case(r#"{"stream":true,"stream_options":"x"}"#, None)]
#[case(r#"{"stream":false}"#, None)]
#[case("{}", None)]
fn usage_is_asked_for_once(#[case] body: &str, #[case] expected: Option<&str>) {
    let mut edits = Edits::new();
    let request = chat(body);
    assert_eq!(request.ask_for_usage(&mut edits), expected.is_some());
    let changed = edits.apply(body.as_bytes());
    assert_eq!(changed, expected.unwrap_or(body).as_bytes());
    assert!(!request.includes_usage() || expected.is_none());
    if expected.is_some() {
        assert!(parse(CHAT, None, &changed).unwrap().includes_usage());
    }
    let other = parse("/v1/responses", None, body.as_bytes()).unwrap();
    assert!(!other.ask_for_usage(&mut Edits::new()));
}

#[test]
fn tgi_streams_by_path() {
    for (path, stream) in [("/generate_stream", true), ("/generate", false)] {
        let body = br#"{"inputs":"x","parameters":{"max_new_tokens":5,"adapter_id":"l"}}"#;
        let request = parse(path, None, body).unwrap();
        assert_eq!((request.stream, request.max_tokens), (stream, Some(5)));
        assert_eq!(request.lora.as_deref(), Some("l"));
        assert_eq!((request.model, request.prompt.text_len()), (None, 1));
    }
}

#[test]
fn a_prefix_counts_if_it_holds_the_model() {
    let body = r#"{"stream":true,"model":"m","messages":[{"role":"user","content":"é"}]}"#;
    let end_of_model = body.find(",\"messages").unwrap();
    for cut in 0..body.len() {
        let request = parse_prefix(CHAT, &body.as_bytes()[..cut]);
        assert_eq!(request.is_some(), cut >= end_of_model, "{cut}");
        if let Some(request) = request {
            assert_eq!(request.model.as_deref(), Some("m"));
            assert!(!request.prompt.is_known() && !request.ask_for_usage(&mut Edits::new()));
            assert_eq!(request.prompt.estimated_tokens(), cut.div_ceil(4) as u64);
            let mut edits = Edits::new();
            request.rename_model("longer", &mut edits);
            assert!(edits.apply(&body.as_bytes()[..cut]).starts_with(br#"{"stream":true,"model":"longer""#));
        }
    }
    assert!(parse_prefix(CHAT, br#"{"model":"m",]"#).is_none());
    assert!(parse_prefix(CHAT, br#"{"x":{"model":"m"},"#).is_none());
}

#[test]
fn debug_output_holds_no_text_of_the_client() {
    let body =
        r#"{"model":"m","user":"SECRET","cache_salt":"SECRET","prompt":"SECRET \n","messages":"SECRET"}"#;
    let request = parse("/v1/completions", None, body.as_bytes()).unwrap();
    assert!(request.prompt.is_known());
    assert!(!format!("{request:?}").contains("SECRET"));
}

proptest! {
    #[test]
    fn no_bytes_panic(body in prop::collection::vec(any::<u8>(), 0..200), path in prop::sample::select(vec![CHAT, "/v1/responses", "/x", "/generate"])) {
        let _ = parse(path, None, &body);
        let _ = parse(path, Some("multipart/form-data; boundary=b"), &body);
        let _ = parse_prefix(path, &body);
    }

    /// Cutting or flipping a byte of a valid body gives an error or a request, never a panic, and positions that hold.
    #[test]
    fn damaged_bodies_never_panic(at in 0_usize..600, byte in any::<u8>(), cut in any::<bool>()) {
        let mut body = br#"{"model":"m\u0041","stream":true,"stream_options":{"include_usage":false},"tools":[{"a":1}],"system":"s",
            "messages":[{"role":"user","content":[{"type":"text","text":"a\nb"},{"type":"image_url","image_url":{"url":"u"}}]},
            {"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"a\":1}"}}]}]}"#.to_vec();
        let at = at % body.len();
        if cut { body.truncate(at); } else { body[at] = byte; }
        let mut edits = Edits::new();
        if let Ok(request) = parse(CHAT, None, &body) {
            let mut length = 0;
            request.prompt.render(&body, &mut |piece| length += piece.len());
            prop_assert_eq!(length, request.prompt.text_len());
            request.rename_model("other", &mut edits);
            request.ask_for_usage(&mut edits);
            let again = parse(CHAT, None, &edits.apply(&body)).unwrap();
            prop_assert_eq!(again.prompt.text_len(), length);
            prop_assert!(request.model.is_none() || again.model.as_deref() == Some("other"));
        }
    }
}
