//! What clients and engines put into bodies.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::kit::case::{input, list, text};
use crate::kit::extproc::{CHAT, Served, request_of, run, serve};
use crate::kit::picker::Picker;
use crate::kit::resources::pods;

const COMPLETIONS: &str = "/v1/completions";

async fn picker(case: &Value) -> Picker {
    Picker::with(&pods(&case["pods"])).small_blocks().start().await
}

fn body<'a>(case: &'a Value, name: &str) -> &'a str {
    text(&case["bodies"], name)
}

/// The canonical text of a chat body.
fn canonical(body: &str) -> Vec<u8> {
    let request = pilotfish::request::parse(CHAT, None, body.as_bytes()).unwrap();
    let mut text = Vec::new();
    request.prompt.render(body.as_bytes(), &mut |piece| text.extend_from_slice(piece));
    text
}

/// Blocks of 64 bytes, the last partial one included.
fn blocks(body: &str) -> u64 {
    canonical(body).len().div_ceil(64) as u64
}

/// The whole prompt was found at the chosen endpoint.
fn assert_whole_match(served: &Served, context: &str) {
    let cached = served.decision["predicted_cached_tokens"].as_u64().unwrap();
    let tokens = served.prompt_tokens();
    assert!(cached + 1 >= tokens && cached > 0, "{context}: {cached} of {tokens} tokens matched");
}

fn assert_forwarded(served: &Served, body: &str, context: &str) {
    assert_eq!(String::from_utf8(served.replies.body()).unwrap(), body, "{context}: forwarded as it came");
}

#[tokio::test(flavor = "multi_thread")]
async fn par_01_text_parts_are_the_text_itself() {
    let case = input("PAR-01");
    let picker = picker(case).await;
    let (a, b) = (body(case, "A"), body(case, "B"));
    let first = serve(&picker, CHAT, a).await;
    assert_eq!(first.matched_blocks(), 0);
    let again = serve(&picker, CHAT, a).await;
    let parts = serve(&picker, CHAT, b).await;
    assert_eq!(again.endpoint(), first.endpoint());
    assert_eq!(parts.endpoint(), first.endpoint(), "parts go where the plain text went");
    assert_eq!(parts.matched_blocks(), again.matched_blocks());
    assert_whole_match(&parts, "B");
    assert!(parts.prompt_tokens().abs_diff(first.prompt_tokens()) <= 1);
    assert_forwarded(&parts, b, "B");

    let (system, user) = ("You are a helpful assistant. ".repeat(40), "Describe Seattle?");
    let split = |user: Value| {
        let (one, two) = system.split_at(600);
        let system = json!([{"type": "text", "text": one}, {"type": "text", "text": two}]);
        let messages = json!([{"role": "system", "content": system}, {"role": "user", "content": user}]);
        json!({"model": "m", "messages": messages}).to_string()
    };
    let split_body = split(json!([{"type": "text", "text": user}]));
    let split_first = serve(&picker, CHAT, &split_body).await;
    let matched = split_first.matched_blocks();
    assert!(matched >= 600 / 64, "the text before the split is the same: {matched}");
    assert!(matched < again.matched_blocks(), "parts are joined with a newline, which makes another text");
    assert_whole_match(&serve(&picker, CHAT, &split_body).await, "the split text is stable");

    let unknown =
        split(json!([{"type": "hologram", "hologram": {"x": [1, null]}}, {"type": "text", "text": user}]));
    assert_forwarded(&serve(&picker, CHAT, &unknown).await, &unknown, "an unknown part");
    for odd in [json!([null, 5, "text"]), json!({"type": "text"}), json!(7)] {
        let odd = split(odd);
        assert_forwarded(&serve(&picker, CHAT, &odd).await, &odd, "an odd part");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn par_02_another_image_is_another_prompt() {
    let case = input("PAR-02");
    let picker = picker(case).await;
    let first = serve(&picker, CHAT, body(case, "A")).await;
    let same = serve(&picker, CHAT, body(case, "A2")).await;
    assert_eq!(same.endpoint(), first.endpoint());
    assert_eq!(same.matched_blocks(), blocks(body(case, "A")), "A2 is A");
    let other = serve(&picker, CHAT, body(case, "B")).await;
    assert_eq!(other.matched_blocks(), 0, "the image stands in the first block");
    let data = serve(&picker, CHAT, body(case, "C")).await;
    assert_eq!(data.matched_blocks(), 0);
    assert_eq!(data.prompt_tokens(), first.prompt_tokens(), "an image counts the same whatever its bytes");
    assert_forwarded(&data, body(case, "C"), "C");
    let again = serve(&picker, CHAT, body(case, "C")).await;
    assert_eq!(again.matched_blocks(), blocks(body(case, "A")), "200 kB of image are no text blocks");
    assert_eq!(again.endpoint(), data.endpoint());
}

#[tokio::test(flavor = "multi_thread")]
async fn par_03_calls_of_an_assistant_turn_are_part_of_the_prompt() {
    let case = input("PAR-03");
    for other in ["absent", "empty"] {
        let picker = picker(case).await;
        let first = serve(&picker, CHAT, body(case, "null")).await;
        assert_forwarded(&first, body(case, "null"), "null");
        let same = serve(&picker, CHAT, body(case, other)).await;
        assert_forwarded(&same, body(case, other), other);
        assert_eq!(same.endpoint(), first.endpoint(), "{other}");
        assert_eq!(same.prompt_tokens(), first.prompt_tokens(), "{other}");
        assert_whole_match(&same, other);
    }
    let picker = picker(case).await;
    serve(&picker, CHAT, body(case, "null")).await;
    let diverging = serve(&picker, CHAT, body(case, "other_args")).await;
    assert_forwarded(&diverging, body(case, "other_args"), "other_args");
    let (one, two) = (canonical(body(case, "null")), canonical(body(case, "other_args")));
    let common = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
    assert!(two[common..].starts_with(b"Oslo"), "the arguments are where they differ");
    assert_eq!(diverging.matched_blocks(), common as u64 / 64, "up to the block that holds the arguments");
    assert!(common / 64 >= 1, "there is a block before them");
}

#[tokio::test(flavor = "multi_thread")]
async fn par_04_tools_stand_before_everything() {
    let case = input("PAR-04");
    let (one, two) = (body(case, "T1"), body(case, "T2"));
    let other_tools = picker(case).await;
    serve(&other_tools, CHAT, one).await;
    assert_eq!(serve(&other_tools, CHAT, two).await.matched_blocks(), 0, "other tools share nothing");

    let picker = picker(case).await;
    let first = serve(&picker, CHAT, one).await;
    let longer = one.replacen("xxxx\"}]}", "xxxx and more of it\"}]}", 1);
    assert_ne!(longer, one);
    let grown = serve(&picker, CHAT, &longer).await;
    assert_eq!(grown.endpoint(), first.endpoint());
    let (short, long) = (canonical(one), canonical(&longer));
    let common = short.iter().zip(&long).take_while(|(a, b)| a == b).count();
    assert_eq!(grown.matched_blocks(), common as u64 / 64, "every block before the longer end");

    let (tools, messages) = one.split_once(",\"messages\":").unwrap();
    let tools_last = format!(
        "{{\"model\":\"m\",\"messages\":{},{}}}",
        messages.strip_suffix('}').unwrap(),
        tools.strip_prefix("{\"model\":\"m\",").unwrap()
    );
    assert_eq!(
        serde_json::from_str::<Value>(&tools_last).unwrap(),
        serde_json::from_str::<Value>(one).unwrap(),
        "the same members in another order"
    );
    let moved = serve(&picker, CHAT, &tools_last).await;
    assert_eq!(moved.matched_blocks(), blocks(one), "where `tools` stands makes no difference");
}

#[tokio::test(flavor = "multi_thread")]
async fn par_05_prompts_of_every_form_are_accepted_and_measured() {
    let case = input("PAR-05");
    assert_eq!(text(case, "path"), COMPLETIONS);
    let picker = picker(case).await;
    for (name, tokens) in [("ids", 64), ("ids2", 96), ("batch_ids", 48), ("batch_str", 2)] {
        let served = serve(&picker, COMPLETIONS, body(case, name)).await;
        assert_eq!(served.prompt_tokens(), tokens, "{name}");
        assert_forwarded(&served, body(case, name), name);
    }
    for name in ["empty", "mixed"] {
        let served = serve(&picker, COMPLETIONS, body(case, name)).await;
        assert_forwarded(&served, body(case, name), name);
    }
    // The key of a batch is its first prompt.
    let prompt = "the first prompt of a batch ".repeat(20);
    let batch = json!({"model": "m", "prompt": [prompt, "another"]}).to_string();
    let alone = json!({"model": "m", "prompt": prompt}).to_string();
    let first = serve(&picker, COMPLETIONS, &batch).await;
    let second = serve(&picker, COMPLETIONS, &alone).await;
    assert_eq!(second.endpoint(), first.endpoint());
    assert_eq!(second.matched_blocks(), (prompt.len() as u64).div_ceil(64));
}

#[tokio::test(flavor = "multi_thread")]
async fn par_05_token_ids_are_matched_block_by_block_without_a_tokenizer() {
    let case = input("PAR-05");
    let picker = Picker::serve(&pods(&case["pods"])).await;
    let first = serve(&picker, COMPLETIONS, body(case, "ids")).await;
    assert_eq!(first.decision["predicted_cached_tokens"], 0);
    let second = serve(&picker, COMPLETIONS, body(case, "ids2")).await;
    assert_eq!(second.endpoint(), first.endpoint());
    assert_eq!((&second.decision["predicted_cached_tokens"], second.prompt_tokens()), (&json!(64), 96));
    assert_eq!(second.decision["rung"], "approximate");
    let ids: Vec<u32> = (1..=96).collect();
    let held = picker.post("/debug/cache", &json!({"model": "m", "token_ids": ids})).await;
    assert_eq!((&held["blocks"], &held["block_size"]), (&json!(6), &json!(16)));
    let holders = list(&held, "holders");
    assert_eq!(holders.len(), 1, "one endpoint, by one source: {held}");
    assert_eq!((&holders[0]["depth"], &holders[0]["endpoint"]), (&json!(6), &json!(second.endpoint())));
    let skipped = picker.metric("pilotfish_tokenize_skipped_total", &[]).await;
    assert_eq!(skipped, 0.0, "no tokenizer was asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn par_08_characters_may_be_split_between_pieces() {
    let case = input("PAR-08");
    let whole: Vec<u8> =
        list(case, "steps")[1..].iter().flat_map(|step| crate::kit::extproc::bytes(&step["rb"])).collect();
    let whole = String::from_utf8(whole).unwrap();
    let head = list(case, "steps")[0].clone();
    let in_pieces = |bytes: &[u8], size: usize| -> Vec<Value> {
        let count = bytes.len().div_ceil(size);
        let pieces = bytes.chunks(size).enumerate();
        let pieces = pieces.map(|(at, piece)| crate::kit::extproc::body_step("rb", piece, at + 1 == count));
        std::iter::once(head.clone()).chain(pieces).collect()
    };
    let picker = picker(case).await;
    let once = crate::kit::extproc::serve_steps(&picker, &in_pieces(whole.as_bytes(), usize::MAX)).await;
    let variants = [
        ("as given", list(case, "steps").to_vec(), whole.clone().into_bytes()),
        ("one byte per chunk", in_pieces(whole.as_bytes(), 1), whole.clone().into_bytes()),
        (
            "UTF-8 BOM efbbbf before {",
            in_pieces(&[b"\xef\xbb\xbf", whole.as_bytes()].concat(), 1),
            [b"\xef\xbb\xbf", whole.as_bytes()].concat(),
        ),
    ];
    for (context, steps, expected) in variants {
        let served = crate::kit::extproc::serve_steps(&picker, &steps).await;
        assert_eq!(served.replies.body(), expected, "{context}");
        assert_eq!(served.endpoint(), once.endpoint(), "{context}");
        assert_eq!(served.prompt_tokens(), once.prompt_tokens(), "{context}");
        assert_whole_match(&served, context);
    }

    let mut broken = whole.clone().into_bytes();
    let inside = broken.iter().position(|byte| *byte == 0xe9).unwrap();
    broken[inside] = 0xff;
    let replies = run(&picker, &in_pieces(&broken, 7)).await;
    assert_eq!((replies.refused().status(), &*replies.refused().reason()), (400, "malformed-body"));

    // A block of 64 bytes may cut a character: 3 bytes each, after a head of ASCII.
    let mut long = String::from("{\"model\":\"m\",\"prompt\":\"x");
    for _ in 0..100 {
        let _ = write!(long, "\u{90a3}");
    }
    long.push_str("\"}");
    let cut = serve(&picker, COMPLETIONS, &long).await;
    assert_eq!(cut.replies.body(), long.as_bytes());
    assert_whole_match(&serve(&picker, COMPLETIONS, &long).await, "a character cut by a block");

    // A response split inside a character comes through as it is, its usage read.
    let event = "data: {\"choices\":[{\"delta\":{\"content\":\"\u{90a3}\"}}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n";
    let at = event.find('\u{90a3}').unwrap() + 1;
    let mut stream = crate::kit::extproc::Stream::of(
        &picker,
        &request_of(COMPLETIONS, &[("x-request-id", "split")], &whole),
    )
    .await;
    stream.until_decided().await;
    let replies = stream
        .respond(&[
            json!({"sh": {"headers": [[":status", "200"], ["content-type", "text/event-stream"]], "eos": false}}),
            crate::kit::extproc::body_step("sb", &event.as_bytes()[..at], false),
            crate::kit::extproc::body_step("sb", &event.as_bytes()[at..], true),
        ])
        .await;
    assert_eq!(replies.response_body(), event.as_bytes());
    let usage = picker.decision("split").await["usage"].clone();
    assert_eq!(usage, json!({"prompt": 3, "completion": 5, "source": "scanner"}));
}
