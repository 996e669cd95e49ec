//! Ids against Python's `tokenizers`, and out of the cache against from scratch.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde::Deserialize;

use super::cuts::Cuts;
use super::*;

const SMALL: &str = "tests/data/tokenizers/small";

fn small() -> LocalTokenizer {
    LocalTokenizer::load(Path::new(SMALL)).unwrap()
}

/// The small tokenizer, and every real one that `scripts/tokenizers.py` fetched.
fn all() -> Vec<(String, LocalTokenizer)> {
    let mut found = vec![("small".to_owned(), small())];
    let cache = std::env::var_os("PILOTFISH_CACHE").map(PathBuf::from).unwrap_or_default();
    for entry in std::fs::read_dir(cache.join("tokenizers")).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        found.push((name, LocalTokenizer::load(&entry.path()).unwrap()));
    }
    found
}

#[derive(Deserialize)]
struct Expected {
    text: String,
    with: Vec<u32>,
    without: Vec<u32>,
}

#[test]
fn ids_are_those_of_the_python_library() {
    let expected: Vec<Expected> =
        serde_json::from_str(include_str!("../../../tests/data/tokenizers/small/expected.json")).unwrap();
    let (tokenizer, cache) = (small(), TokenCache::new(1 << 20));
    assert_eq!(tokenizer.engine(), "kitoken");
    for Expected { text, with, without } in expected {
        for _ in 0..2 {
            assert_eq!(tokenizer.encode(&text, Around::Added).unwrap(), with, "{text:?}");
            assert_eq!(tokenizer.encode(&text, Around::NotAdded).unwrap(), without, "{text:?}");
            assert_eq!(*tokenizer.encode_cached(&cache, &text, Around::Added).unwrap(), with, "{text:?}");
            assert_eq!(
                *tokenizer.encode_cached(&cache, &text, Around::NotAdded).unwrap(),
                without,
                "{text:?}"
            );
        }
    }
}

/// Text in which everything meets everything: words, runs of white space, added tokens whole and broken, many scripts.
fn texts() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        8 => "[a-zA-Z]{1,9}",
        8 => Just(" ".to_owned()),
        2 => "[ \t\r\n\u{a0}\u{2003}]{1,5}",
        3 => "[!-/:-@\\[-`{-~]{1,4}",
        2 => "[0-9]{1,6}",
        2 => "[à-ÿżźĀ-ſ\u{300}-\u{305}]{1,4}",
        1 => "[一-丿あ-おア-オ가-각ا-ي🐟-🐡]{1,3}",
        2 => prop::sample::select(vec![
            "<|im_start|>", "<|im_end|>\n", "<s>", "</s>", "<|tool|>", "<|tool|>>", "<think>", "</think>", "<|im", "it's",
            "<｜User｜>", "<｜Assistant｜>", "<|eot_id|>", "<|endoftext|>", "'LL", "e\u{301}",
        ]).prop_map(str::to_owned),
        1 => "\\PC{1,3}",
    ];
    prop::collection::vec(fragment, 0..900).prop_map(|fragments| fragments.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Turn after turn of a growing text, and the text again with something new in its middle.
    #[test]
    fn cached_ids_are_those_from_scratch(first in texts(), second in texts(), third in texts()) {
        thread_local!(static ALL: Vec<(String, LocalTokenizer)> = all());
        ALL.with(|all| {
            for (name, tokenizer) in all {
                let cache = TokenCache::new(1 << 20);
                for text in [&first, &(first.clone() + &second), &(first.clone() + &third + &second), &second] {
                    for around in [Around::Added, Around::NotAdded] {
                        let cached = tokenizer.encode_cached(&cache, text, around).unwrap();
                        let scratch = tokenizer.encode(text, around).unwrap();
                        prop_assert_eq!(&cached[..], &scratch[..], "{}", name);
                    }
                }
            }
            Ok(())
        })?;
    }
}

#[test]
fn a_text_that_grows_keeps_all_chunks_but_the_last() {
    let tokenizer = small();
    let pieces = tokenizer.pieces.as_ref().unwrap();
    let text = "The quick brown fox, 1 of 12, jumps over the lazy dog. ".repeat(400);
    let grown = format!("{text}And then it sleeps.");
    let before: Vec<&str> = pieces.chunks(&text).collect();
    let after: Vec<&str> = pieces.chunks(&grown).collect();
    assert!(before.len() > 8, "{} chunks", before.len());
    assert_eq!(before[..before.len() - 1], after[..before.len() - 1]);
    assert_eq!(after.concat(), grown);
}

#[test]
fn after_a_change_the_cuts_fall_into_their_places_again() {
    let words: Vec<String> =
        (0..20_000_u32).map(|n| format!("word{}", n.wrapping_mul(2_654_435_761) % 997)).collect();
    let text = words.join(" ");
    let changed = format!("{} and something new {}", &text[..30_000], &text[30_000..]);
    let tokenizer = small();
    let pieces = tokenizer.pieces.as_ref().unwrap();
    let known: std::collections::HashSet<&str> = pieces.chunks(&text).collect();
    let new = pieces.chunks(&changed).filter(|chunk| !known.contains(chunk)).count();
    assert!(new <= 6, "{new} new chunks of {}", known.len());
}

/// kitoken takes the first of two added tokens that begin alike, the reference the longest.
#[test]
fn the_faster_engine_is_left_out_where_it_gives_other_ids() {
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(format!("{SMALL}/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let longer = serde_json::json!({"id": 1502, "content": "<|tool|>>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    json["added_tokens"].as_array_mut().unwrap().push(longer);
    std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    let tokenizer = LocalTokenizer::load(dir.path()).unwrap();
    assert_eq!(tokenizer.engine(), "tokenizers");
    let cache = TokenCache::new(1 << 20);
    for ids in [
        tokenizer.encode("<|tool|>>x<|tool|>", Around::NotAdded).unwrap(),
        tokenizer.encode_cached(&cache, "<|tool|>>x<|tool|>", Around::NotAdded).unwrap().to_vec(),
    ] {
        assert_eq!((ids.len(), ids[0], ids[2]), (3, 1502, 4));
    }
}

fn definition(json: &str) -> files::Definition {
    serde_json::from_str(json).unwrap()
}

#[rstest::rstest]
#[case(r#"{"model":{"type":"BPE"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}}"#, true)]
#[case(r#"{"model":{"type":"BPE"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":true,"use_regex":true}}"#, false)]
#[case(r#"{"model":{"type":"BPE","dropout":0.1},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}}"#, false)]
#[case(r#"{"model":{"type":"Unigram"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}}"#, false)]
#[case(r#"{"model":{"type":"BPE"},"normalizer":{"type":"NFKC"},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true}}"#, false)]
#[case(r#"{"model":{"type":"BPE"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":"\\p{N}{1,3}"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}}"#, false)]
#[case(r#"{"model":{"type":"BPE"},"pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":".+"},"behavior":"Isolated","invert":false},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]}}"#, false)]
fn only_where_the_argument_holds_texts_are_cut(#[case] json: &str, #[case] cut: bool) {
    assert_eq!(Cuts::new(&definition(json)).is_some(), cut);
}

#[test]
fn a_token_that_reaches_over_its_text_leaves_the_text_whole() {
    let json = r#"{"model":{"type":"BPE"}}"#;
    let reaching = [tokenizers::AddedToken::from("<x>", true).rstrip(true)];
    assert!(Pieces::new(&definition(json), reaching.iter()).is_none());
    let metaspace =
        r#"{"model":{"type":"BPE"},"pre_tokenizer":{"type":"Metaspace","prepend_scheme":"first"}}"#;
    assert!(Pieces::new(&definition(metaspace), [].into_iter()).is_none());
}

#[test]
fn broken_and_missing_files_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = LocalTokenizer::load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("copy"), "{error}");
    std::fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    assert!(LocalTokenizer::load(dir.path()).unwrap_err().to_string().contains("is not valid"));
    std::fs::copy(format!("{SMALL}/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    std::fs::write(dir.path().join("tokenizer_config.json"), r#"{"chat_template":"{% for %}"}"#).unwrap();
    assert!(LocalTokenizer::load(dir.path()).unwrap_err().to_string().contains("chat template"));
}

#[test]
fn templates_come_by_name_and_from_a_file_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(format!("{SMALL}/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    let config = r#"{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"}],"eos_token":{"content":"</s>"}}"#;
    std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    let shown = |tools| {
        let tokenizer = LocalTokenizer::load(dir.path()).unwrap();
        tokenizer.template(tools).unwrap().render(&minijinja::Value::UNDEFINED).unwrap()
    };
    assert_eq!((shown(false), shown(true)), ("d".to_owned(), "t".to_owned()));
    std::fs::write(dir.path().join("chat_template.jinja"), "j\n").unwrap();
    assert_eq!(shown(false), "j");
}
