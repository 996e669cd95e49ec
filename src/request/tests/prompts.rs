//! The canonical text and the estimate.

use rstest::rstest;
use xxhash_rust::{xxh3::xxh3_64, xxh64::xxh64};

use super::super::*;
use super::{CHAT, chat};

fn text(path: &str, body: &str) -> String {
    let request = parse(path, None, body.as_bytes()).unwrap();
    assert!(request.prompt.is_known(), "{body}");
    rendered(&request, body)
}

fn rendered(request: &LlmRequest, body: &str) -> String {
    let mut text = Vec::new();
    request.prompt.render(body.as_bytes(), &mut |piece| text.extend_from_slice(piece));
    assert_eq!(text.len(), request.prompt.text_len());
    String::from_utf8(text).unwrap()
}

/// Kthena's hash chain: XXH64 of the model, then of the decimal digits before and each block of 64 bytes.
fn kthena_hashes(path: &str, body: &str) -> Vec<u64> {
    let model = parse(path, None, body.as_bytes()).unwrap().model.unwrap_or_default();
    let mut hash = xxh64(model.as_bytes(), 0);
    text(path, body)
        .as_bytes()
        .chunks(64)
        .map(|block| {
            hash = xxh64(&[hash.to_string().as_bytes(), block].concat(), 0);
            hash
        })
        .collect()
}

#[test]
fn kthenas_hash_vectors_come_out() {
    let completion = |model: &str, prompt: &str| {
        kthena_hashes("/v1/completions", &serde_json::json!({"model": model, "prompt": prompt}).to_string())
    };
    assert_eq!(completion("test-model", "Hello World"), [1_993_528_491_812_861_608]);
    let alphabet: String = ('a'..='z').cycle().take(8192).collect();
    let hashes = completion("bench-model", &alphabet);
    assert_eq!(hashes.len(), 128);
    assert_eq!(hashes[0], 2_255_003_460_060_045_391);
    assert_eq!(hashes[1], 11_149_546_857_834_002_314);
    assert_eq!(hashes[127], 3_713_727_362_220_958_295);
    assert_eq!(completion("m", &"a".repeat(65)), [13_915_909_083_615_432_819, 2_655_498_438_455_834_009]);
    assert_eq!(
        completion("m", &"héllo wörld ".repeat(12)),
        [11_859_178_435_642_820_092, 17_803_411_585_659_159_580, 1_066_189_564_980_749_117]
    );
    assert_eq!(
        kthena_hashes(CHAT, r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#),
        [9_652_232_318_509_682_243]
    );
    assert_eq!(
        kthena_hashes(
            CHAT,
            r#"{"messages":[{"content":"You are a helpful assistant.","role":"system"},{"role":"user","content":"Hello"}],
            "model":"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"}"#
        ),
        [13_727_172_389_015_842_410, 17_138_526_159_475_708_050]
    );
}

/// PAR-01.
#[test]
fn one_text_part_is_the_same_as_a_string() {
    let a = r#"{"model":"m","messages":[{"role":"system","content":"You are helpful.\n"},{"role":"user","content":"Seattle?"}]}"#;
    let b = r#"{"model":"m","messages":[{"role":"system","content":[{"text":"You are helpful.\n","type":"text"}]},{"role":"user","content":[{"type":"text","text":"Seattle?"}]}]}"#;
    let split = r#"{"model":"m","messages":[{"role":"system","content":[{"type":"text","text":"You are"},{"type":"input_text","text":" helpful.\n"}]},{"role":"user","content":[{"content":"no","type":"hologram","x":[1]},{"text":"Seattle?"},{"type":"refusal","text":"no"}]}]}"#;
    assert_eq!(text(CHAT, a), text(CHAT, b));
    assert_eq!(chat(a).prompt.estimated_tokens(), chat(b).prompt.estimated_tokens());
    assert_eq!(
        text(CHAT, split),
        "<|im_start|>system\nYou are\n helpful.\n<|im_end|>\n<|im_start|>user\nSeattle?<|im_end|>\n"
    );
}

/// PAR-02.
#[test]
fn media_are_marked_by_their_hash_and_counted_apart() {
    let body = |url: &str| {
        format!(
            r#"{{"model":"vl","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"{url}"}}}},{{"type":"text","text":"What is it?"}}]}}]}}"#
        )
    };
    let url = "https://img.test/1.png";
    let expected =
        format!("<|im_start|>user\n<|media:{:016x}|>\nWhat is it?<|im_end|>\n", xxh3_64(url.as_bytes()));
    assert_eq!(text(CHAT, &body(url)), expected);
    assert_eq!(text(CHAT, &body("https:\\/\\/img.test\\/1.png")), expected);
    assert_ne!(text(CHAT, &body("https://img.test/2.png")), expected);
    let data = format!("data:image/png;base64,iVBORw0KGgo{}", "A".repeat(200_000));
    let (small, large) = (chat(&body(url)).prompt, chat(&body(&data)).prompt);
    assert_eq!((large.images(), large.text_len()), (1, expected.len()));
    assert_eq!(large.estimated_tokens(), small.estimated_tokens());
    assert_eq!(large.estimated_tokens(), (expected.len() as u64 - 26).div_ceil(4) + TOKENS_PER_MEDIA);
}

#[rstest]
#[case(r#"{"type":"input_audio","input_audio":{"format":"wav","data":"DATA"}}"#)]
#[case(r#"{"image_url":{"detail":"low","url":"DATA"}}"#)]
#[case(r#"{"type":"input_image","image_url":"DATA"}"#)]
#[case(r#"{"source":{"type":"base64","media_type":"image/png","data":"DATA"},"type":"image"}"#)]
#[case(r#"{"type":"file","file":{"file_id":"DATA"}}"#)]
#[case(r#"{"type":"image_url","image_url":null,"uuid":"DATA"}"#)]
#[case(r#"{"type":"tool_result","content":[{"type":"image","source":{"data":"DATA"}}]}"#)]
fn every_media_form_is_seen(#[case] part: &str) {
    let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{part}]}}]}}"#);
    let marker = format!("<|media:{:016x}|>", xxh3_64(b"DATA"));
    assert!(text(CHAT, &body).contains(&marker));
    assert_eq!(chat(&body).prompt.images(), 1);
}

/// PAR-03.
#[test]
fn tool_calls_follow_the_content_which_may_be_missing() {
    let body = |content: &str, city: &str, id: &str| {
        format!(
            r#"{{"model":"m","messages":[{{"role":"user","content":"weather?"}},{{"role":"assistant",{content}"tool_calls":[{{"id":"{id}","type":"function","function":{{"name":"get_weather","arguments":"{{\"city\":\"{city}\"}}"}}}}]}},{{"role":"tool","tool_call_id":"{id}","content":"18C"}}]}}"#
        )
    };
    let expected = "<|im_start|>user\nweather?<|im_end|>\n<|im_start|>assistant\n<|tool_call|>get_weather\n\
        {\"city\":\"Paris\"}<|im_end|>\n<|im_start|>tool\n18C<|im_end|>\n";
    for content in ["\"content\":null,", "", "\"content\":\"\",", "\"content\":[],"] {
        assert_eq!(text(CHAT, &body(content, "Paris", "c1")), expected, "{content}");
    }
    assert_eq!(text(CHAT, &body("", "Paris", "another-id")), expected);
    let other = text(CHAT, &body("", "Oslo", "c1"));
    let common = expected.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    assert_eq!(common, expected.find("Paris").unwrap());
}

/// PAR-04.
#[test]
fn tools_stand_first_wherever_their_key_is() {
    let tools = r#"[{"type":"function","function":{"name":"a","parameters":{}}}]"#;
    let messages = r#"[{"role":"user","content":"x"}]"#;
    let first = text(CHAT, &format!(r#"{{"model":"m","tools":{tools},"messages":{messages}}}"#));
    let last = text(CHAT, &format!(r#"{{"messages":{messages},"model":"m","tools": {tools} }}"#));
    assert_eq!(first, last);
    assert_eq!(first, format!("{tools}<|im_start|>user\nx<|im_end|>\n"));
    let functions = text(CHAT, &format!(r#"{{"functions":[1],"messages":{messages},"tools":{tools}}}"#));
    assert_eq!(functions, format!("{tools}[1]<|im_start|>user\nx<|im_end|>\n"));
    let system = text("/v1/messages", &format!(r#"{{"system":"S","messages":{messages},"tools":{tools}}}"#));
    assert_eq!(system, format!("{tools}<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"));
    for none in ["null", "[ ]"] {
        let without = text(CHAT, &format!(r#"{{"tools":{none},"messages":{messages}}}"#));
        assert_eq!(without, "<|im_start|>user\nx<|im_end|>\n");
    }
}

/// PAR-05.
#[rstest]
#[case("[1,2,3]", Some(&[1, 2, 3][..]), 3)]
#[case("[[1,2,3],[4,5]]", Some(&[1, 2, 3][..]), 5)]
#[case("[4294967295]", Some(&[u32::MAX][..]), 1)]
#[case(r#"["a","b"]"#, None, 2)]
#[case(r#"["abcde","\n"]"#, None, 3)]
#[case(r#""""#, None, 0)]
fn prompts_of_every_form_are_estimated(
    #[case] prompt: &str,
    #[case] ids: Option<&[u32]>,
    #[case] tokens: u64,
) {
    for (path, body) in [
        ("/v1/completions", format!(r#"{{"model":"m","prompt":{prompt}}}"#)),
        ("/v1/embeddings", format!(r#"{{"model":"m","input":{prompt}}}"#)),
        ("/inference/v1/generate", format!(r#"{{"model":"m","token_ids":{prompt}}}"#)),
        ("/generate", format!(r#"{{"text":null,"input_ids":{prompt},"inputs":null}}"#)),
    ] {
        let request = parse(path, None, body.as_bytes()).unwrap();
        assert!(request.prompt.is_known(), "{body}");
        assert_eq!(request.prompt.token_ids(), ids);
        assert_eq!(request.prompt.estimated_tokens(), tokens);
        if ids.is_some() {
            assert_eq!(rendered(&request, &body), "");
        }
    }
}

#[rstest]
#[case("[]")]
#[case("[[]]")]
#[case(r#"["a",1]"#)]
#[case(r#"[1,"a"]"#)]
#[case("[1,-2]")]
#[case("[1.5]")]
#[case("[4294967296]")]
#[case("[[1],2]")]
#[case("[[1,null],[2]]")]
#[case("[null]")]
#[case("[{}]")]
#[case("7")]
#[case("null")]
fn unclear_prompts_are_accepted_as_unknown(#[case] prompt: &str) {
    let body = format!(r#"{{"model":"m","prompt":{prompt},"max_tokens":3}}"#);
    let request = parse("/v1/completions", None, body.as_bytes()).unwrap();
    assert!(!request.prompt.is_known());
    assert_eq!((request.max_tokens, request.prompt.estimated_tokens()), (Some(3), 0));
    assert_eq!(rendered(&request, &body), "");
}

#[test]
fn a_batch_is_keyed_by_its_first_prompt() {
    assert_eq!(text("/v1/completions", r#"{"model":"m","prompt":["a\t","b"]}"#), "a\t");
}

#[test]
fn responses_items_become_messages() {
    let body = r#"{"model":"m","input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]},
        {"type":"reasoning","summary":[]},
        {"type":"function_call","call_id":"1","name":"f","arguments":"{}"},
        {"type":"function_call_output","call_id":"1","output":"42"},
        {"type":"message","role":"","content":"dropped"}],"instructions":"Be brief."}"#;
    assert_eq!(
        text("/v1/responses", body),
        "<|im_start|>developer\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n\
        <|im_start|>assistant\n<|tool_call|>f\n{}<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
    );
    assert_eq!(
        text("/v1/responses", r#"{"input":"hi","instructions":""}"#),
        "<|im_start|>user\nhi<|im_end|>\n"
    );
}

#[test]
fn anthropic_messages_are_read() {
    let body = r#"{"model":"m","max_tokens":4,"messages":[{"role":"user","content":"go"},
        {"role":"assistant","content":[{"type":"thinking","thinking":"hm"},{"type":"text","text":"ok"},{"type":"tool_use","id":"t1","name":"ls","input":{"p":1}}]},
        {"role":"user","content":[{"content":[{"type":"text","text":"a"},{"type":"text","text":"b"}],"tool_use_id":"t1","type":"tool_result"},{"type":"text","text":"more"}]}],
        "system":[{"type":"text","text":"S"}]}"#;
    assert_eq!(
        text("/v1/messages", body),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n\
        <|im_start|>assistant\nok\n<|tool_call|>ls\n{\"p\":1}<|im_end|>\n\
        <|im_start|>user\n<|tool_result|>a\nb\nmore<|im_end|>\n"
    );
}

#[test]
fn prompt_wins_over_messages_and_messages_over_input() {
    let messages = r#""messages":[{"role":"critic","content":"x"}]"#;
    assert_eq!(text(CHAT, &format!(r#"{{{messages},"prompt":"p","tools":[1]}}"#)), "p");
    assert_eq!(text(CHAT, &format!(r#"{{"input":"i",{messages}}}"#)), "<|im_start|>critic\nx<|im_end|>\n");
    assert_eq!(text(CHAT, &format!(r#"{{"prompt":null,{messages}}}"#)), "<|im_start|>critic\nx<|im_end|>\n");
}

#[test]
fn messages_that_are_none_are_left_out() {
    let body = r#"{"messages":[7,null,"x",[1],{"content":"no role"},{"role":3,"content":"x"},{"role":"user","content":{"a":1}}]}"#;
    assert_eq!(text(CHAT, body), "<|im_start|>user\n<|im_end|>\n");
}

/// PAR-08: chunks are joined before they are read, so a character is never cut; a byte order mark changes nothing.
#[test]
fn multi_byte_text_is_kept() {
    let body = "{\"model\":\"m\",\"prompt\":\"\"郣两 🌍\"}".replace("\"\"", "\"");
    assert_eq!(text("/v1/completions", &body), "郣两 🌍");
    let marked = format!("\u{feff}{body}");
    assert_eq!(text("/v1/completions", &marked), "郣两 🌍");
    let escaped = r#"{"model":"m","prompt":"\u90e3\u4e24 \ud83c\udf0d"}"#;
    assert_eq!(text("/v1/completions", escaped), "郣两 🌍");
}
