//! What goes over the wire: bodies of `/tokenize`, and the answers of both paths.

use std::sync::Arc;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::super::client::Answer;
use crate::prompt::Skipped;
use crate::prompt::tokenize::{Outcome, RemoteAsk};
use crate::request::Api;

/// Members of a request that change its tokens, still as the client wrote them.
#[derive(Deserialize)]
struct Asked<'b> {
    #[serde(borrow, default)]
    messages: Option<&'b RawValue>,
    #[serde(borrow, default)]
    tools: Option<&'b RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'b RawValue>,
    #[serde(borrow, default)]
    text: Option<&'b RawValue>,
    #[serde(borrow, default)]
    add_special_tokens: Option<&'b RawValue>,
    #[serde(borrow, default)]
    add_generation_prompt: Option<&'b RawValue>,
    #[serde(borrow, default)]
    continue_final_message: Option<&'b RawValue>,
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(default)]
    documents: Option<Value>,
    #[serde(default)]
    reasoning_effort: Option<Value>,
}

/// The body of `/tokenize`.
#[derive(Default, Serialize)]
struct Tokenize<'b> {
    model: &'b str,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    messages: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_special_tokens: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_generation_prompt: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    continue_final_message: Option<&'b RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// The body by which `/tokenize` gives the ids of a request; vLLM's form, which SGLang reads the members it knows of.
pub fn tokenize(ask: &RemoteAsk, sglang: bool) -> Result<Bytes, Skipped> {
    let asked: Asked<'_> = serde_json::from_slice(&ask.body).map_err(|_| Skipped::Failed)?;
    let falsehood = serde_json::value::to_raw_value(&false).map_err(|_| Skipped::Failed)?;
    let body = match ask.api {
        Api::Completions | Api::SglangGenerate => Tokenize {
            model: &ask.model,
            prompt: Some(first(asked.prompt.or(asked.text).ok_or(Skipped::Unsupported)?)?),
            add_special_tokens: asked.add_special_tokens,
            ..Tokenize::default()
        },
        Api::Chat => {
            let continued = asked.continue_final_message.is_some_and(|flag| flag.get() == "true");
            Tokenize {
                model: &ask.model,
                messages: Some(asked.messages.ok_or(Skipped::Unsupported)?),
                tools: asked.tools.filter(|tools| tools.get() != "null"),
                add_special_tokens: asked.add_special_tokens.or(sglang.then_some(&*falsehood)),
                // Both at once are refused.
                add_generation_prompt: asked
                    .add_generation_prompt
                    .filter(|_| !continued)
                    .or(continued.then_some(&*falsehood)),
                continue_final_message: asked.continue_final_message,
                chat_template_kwargs: variables(
                    asked.chat_template_kwargs,
                    asked.documents,
                    asked.reasoning_effort,
                ),
                ..Tokenize::default()
            }
        }
        _ => return Err(Skipped::Unsupported),
    };
    serde_json::to_vec(&body).map(Bytes::from).map_err(|_| Skipped::Failed)
}

/// Of a batch the first prompt.
fn first(prompt: &RawValue) -> Result<&RawValue, Skipped> {
    if !prompt.get().starts_with('[') {
        return Ok(prompt);
    }
    let prompts: Vec<&RawValue> = serde_json::from_str(prompt.get()).map_err(|_| Skipped::Failed)?;
    prompts.first().copied().filter(|first| first.get().starts_with('"')).ok_or(Skipped::Unsupported)
}

/// `/tokenize` knows template arguments only, so that what chat requests say apart goes there, as the engine puts it.
fn variables(
    own: Option<Map<String, Value>>,
    documents: Option<Value>,
    effort: Option<Value>,
) -> Option<Map<String, Value>> {
    let mut all = own.unwrap_or_default();
    if let Some(documents) = documents.filter(|documents| !documents.is_null()) {
        all.insert("documents".to_owned(), documents);
    }
    if let Some(effort) = effort.filter(|effort| !effort.is_null() && effort != "auto") {
        let thinks = effort != "none";
        all.entry("enable_thinking").or_insert(Value::Bool(thinks));
        all.insert("reasoning_effort".to_owned(), effort);
    }
    (!all.is_empty()).then_some(all)
}

/// Whether an answer says that the path is not served, rather than that the request is at fault.
pub fn is_not_served(answer: &Answer) -> bool {
    let of_the_model = || memchr::memmem::find(&answer.body, b"NotFoundError").is_some();
    matches!(answer.status, 403 | 405 | 501) || (answer.status == 404 && !of_the_model())
}

#[derive(Deserialize)]
struct Rendered {
    token_ids: Vec<u32>,
    #[serde(default)]
    model: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum RenderedEach {
    One(Rendered),
    Batch(Vec<Rendered>),
}

/// The ids of `/render`: one object, or for completions a list of them, of which the first counts.
pub fn rendered(body: &[u8], model: &str) -> Outcome {
    let rendered = match serde_json::from_slice(body) {
        Ok(RenderedEach::One(rendered)) => rendered,
        Ok(RenderedEach::Batch(batch)) => batch.into_iter().next().ok_or(Skipped::BadAnswer)?,
        Err(_) => return Err(Skipped::BadAnswer),
    };
    if rendered.model.is_some_and(|theirs| theirs != model) {
        return Err(Skipped::BadAnswer);
    }
    not_empty(rendered.token_ids)
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
    #[serde(default)]
    count: Option<usize>,
}

/// The ids of `/tokenize`.
pub fn tokenized(body: &[u8]) -> Outcome {
    let Ok(Tokenized { tokens, count }) = serde_json::from_slice(body) else {
        return Err(Skipped::BadAnswer);
    };
    if count.is_some_and(|count| count != tokens.len()) {
        return Err(Skipped::BadAnswer);
    }
    not_empty(tokens)
}

fn not_empty(ids: Vec<u32>) -> Outcome {
    if ids.is_empty() { Err(Skipped::BadAnswer) } else { Ok(Arc::from(ids)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured(text: &str) -> &[u8] {
        let body = text.split("\n\n").nth(1).unwrap();
        body.trim().as_bytes()
    }

    #[rstest::rstest]
    #[case(include_str!("../../../tests/data/vllm/render_chat.txt"), "tiny", &[0, 128_803, 50_433, 678, 943, 27_124, 16, 128_804])]
    #[case(include_str!("../../../tests/data/vllm/render_comp.txt"), "lora1", &[50_433, 678, 943, 27_124, 16])]
    #[case(include_str!("../../../tests/data/vllm/render_messages.txt"), "tiny", &[0, 44_489, 128_803, 50_433, 678, 943, 27_124, 16, 128_804])]
    #[case(include_str!("../../../tests/data/vllm/render_responses.txt"), "tiny", &[0, 128_803, 50_433, 678, 943, 27_124, 16, 128_804])]
    fn a_real_vllms_renderings_are_read(#[case] capture: &str, #[case] model: &str, #[case] ids: &[u32]) {
        assert_eq!(rendered(captured(capture), model).as_deref(), Ok(ids));
        assert_eq!(rendered(captured(capture), "another"), Err(Skipped::BadAnswer));
    }

    #[test]
    fn a_real_vllms_tokens_are_read() {
        let capture = include_str!("../../../tests/data/vllm/tok_chat_continue.txt");
        let ids = [0, 128_803, 23_166, 1_031, 128_804, 43, 1_030];
        assert_eq!(tokenized(captured(capture)).as_deref(), Ok(&ids[..]));
    }

    #[rstest::rstest]
    #[case("")]
    #[case("{}")]
    #[case(r#"{"tokens":[]}"#)]
    #[case(r#"{"tokens":[1,2],"count":3}"#)]
    #[case(r#"{"tokens":[-1]}"#)]
    #[case(r#"{"tokens":"1"}"#)]
    fn what_is_no_list_of_ids_is_a_bad_answer(#[case] body: &str) {
        assert_eq!(tokenized(body.as_bytes()), Err(Skipped::BadAnswer));
        assert_eq!(
            rendered(
                body.replace("tokens", "token_ids").replace(",2", "").replace("[1]", "[]").as_bytes(),
                "m"
            ),
            Err(Skipped::BadAnswer)
        );
    }

    fn body(api: Api, text: &str, sglang: bool) -> Result<String, Skipped> {
        let ask = RemoteAsk {
            target: crate::prompt::tokenize::Target::Url("http://x".into()),
            api,
            path: "/".into(),
            body: Bytes::copy_from_slice(text.as_bytes()),
            model: "m".into(),
            budget: std::time::Duration::ZERO,
        };
        tokenize(&ask, sglang).map(|body| String::from_utf8(body.to_vec()).unwrap())
    }

    #[rstest::rstest]
    #[case(
        Api::Completions,
        r#"{"model":"x","prompt":"hi","max_tokens":3}"#,
        false,
        r#"{"model":"m","prompt":"hi"}"#
    )]
    #[case(
        Api::Completions,
        r#"{"prompt":["a","b"],"add_special_tokens":false}"#,
        false,
        r#"{"model":"m","prompt":"a","add_special_tokens":false}"#
    )]
    #[case(Api::SglangGenerate, r#"{"text":"hi"}"#, true, r#"{"model":"m","prompt":"hi"}"#)]
    #[case(
        Api::Chat,
        r#"{"messages":[{"role":"user", "content":"é"}],"tools":[{"a":1}]}"#,
        false,
        r#"{"model":"m","messages":[{"role":"user", "content":"é"}],"tools":[{"a":1}]}"#
    )]
    #[case(
        Api::Chat,
        r#"{"messages":[],"continue_final_message":true}"#,
        false,
        r#"{"model":"m","messages":[],"add_generation_prompt":false,"continue_final_message":true}"#
    )]
    #[case(Api::Chat, r#"{"messages":[],"reasoning_effort":"low","documents":[1],"chat_template_kwargs":{"x":1}}"#, false, r#"{"model":"m","messages":[],"chat_template_kwargs":{"documents":[1],"enable_thinking":true,"reasoning_effort":"low","x":1}}"#)]
    #[case(
        Api::Chat,
        r#"{"messages":[]}"#,
        true,
        r#"{"model":"m","messages":[],"add_special_tokens":false}"#
    )]
    fn tokenize_is_told_all_that_changes_the_tokens(
        #[case] api: Api,
        #[case] text: &str,
        #[case] sglang: bool,
        #[case] expected: &str,
    ) {
        assert_eq!(body(api, text, sglang).unwrap(), expected);
    }

    #[test]
    fn apis_that_tokenize_does_not_know_are_unsupported() {
        assert_eq!(body(Api::Responses, r#"{"input":"x"}"#, false), Err(Skipped::Unsupported));
        assert_eq!(body(Api::Completions, r#"{"prompt":[[1]]}"#, false), Err(Skipped::Unsupported));
    }
}
