//! Against what vLLM 0.32.0 makes of the same bodies (`tests/data/vllm/conversations.json`).

use minijinja::Value;
use serde::Deserialize;

use super::conversation;
use super::*;
use crate::prompt::template::ContentFormat;

#[derive(Deserialize)]
struct Case {
    name: String,
    path: String,
    /// Whether the template knows developers.
    developer: bool,
    /// Whether the template wants the system message first.
    merge: bool,
    body: Json,
    string: Expected,
    openai: Expected,
}

#[derive(Deserialize)]
struct Expected {
    messages: Json,
    tools: Json,
    kwargs: Json,
}

fn template(case: &Case, format: ContentFormat) -> ChatTemplate {
    let mut source = "{#- content #}".to_owned();
    if case.developer {
        source.push_str("{# 'developer' #}");
    }
    if case.merge {
        source.push_str("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}{% endfor %}");
    }
    if format == ContentFormat::Parts {
        source.push_str("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}");
    }
    let template = ChatTemplate::new(&source).unwrap();
    assert_eq!(template.content, format);
    template
}

fn dumped(value: &Value) -> String {
    ChatTemplate::new("{{ x | tojson }}").unwrap().render(&Value::from_pairs([("x", value.clone())])).unwrap()
}

fn chat(path: &str, body: &Json) -> Result<Chat, Skipped> {
    let read: fn(&Json) -> Result<Chat, Skipped> = match Api::from_path(path) {
        Api::Chat => completions,
        Api::Messages => messages::read,
        _ => responses::read,
    };
    read(body)
}

#[test]
fn conversations_are_what_vllm_gives_to_the_template() {
    let cases: Vec<Case> =
        serde_json::from_str(include_str!("../../../tests/data/vllm/conversations.json")).unwrap();
    assert!(cases.len() > 30);
    for case in &cases {
        for (format, expected) in [(ContentFormat::Text, &case.string), (ContentFormat::Parts, &case.openai)]
        {
            let what = format!("{} {format:?}", case.name);
            let chat = chat(&case.path, &case.body).unwrap_or_else(|reason| panic!("{what}: {reason:?}"));
            assert_eq!(
                Json::Bool(chat.continue_final_message),
                expected.kwargs.as_object().unwrap()["continue_final_message"],
                "{what}"
            );
            let variables =
                conversation::variables(chat, &template(case, format), &Members::default()).unwrap();
            let of = |name: &str| {
                dumped(&variables.get_attr(name).unwrap()).replace("CONTINUE_FINAL_MESSAGE_TAG ", "")
            };
            assert_eq!(of("messages"), dumped(&Value::from(&expected.messages)), "{what}");
            assert_eq!(of("tools"), dumped(&Value::from(&expected.tools)), "{what}");
            for (name, value) in expected
                .kwargs
                .as_object()
                .unwrap()
                .iter()
                .filter(|(name, _)| &***name != "continue_final_message")
            {
                assert_eq!(of(name), dumped(&Value::from(value)), "{what}: {name}");
            }
        }
    }
}

/// `PartialEq` without `Debug`: a body cannot be printed.
impl std::fmt::Debug for Json {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&dumped(&Value::from(self)))
    }
}

#[rstest::rstest]
#[case(
    "/v1/chat/completions",
    r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#,
    Skipped::Media
)]
#[case(
    "/v1/messages",
    r#"{"messages":[{"role":"user","content":[{"type":"image","source":{}}]}]}"#,
    Skipped::Media
)]
#[case(
    "/v1/responses",
    r#"{"input":[{"role":"user","content":[{"type":"input_image","image_url":"x"}]}]}"#,
    Skipped::Media
)]
#[case("/v1/responses", r#"{"input":"x","previous_response_id":"r"}"#, Skipped::Unsupported)]
#[case(
    "/v1/chat/completions",
    r#"{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ 1 }}"}"#,
    Skipped::Unsupported
)]
#[case(
    "/v1/chat/completions",
    r#"{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"tokenize":true}}"#,
    Skipped::Unsupported
)]
#[case("/v1/chat/completions", r#"{"messages":[{"content":"x"}]}"#, Skipped::Unsupported)]
#[case(
    "/v1/messages",
    r#"{"messages":[{"role":"user","content":"x"}],"thinking":{"type":"disabled"}}"#,
    Skipped::Unsupported
)]
#[case("/v1/chat/completions", "{", Skipped::Failed)]
fn what_only_the_engine_knows_is_skipped(#[case] path: &str, #[case] body: &str, #[case] expected: Skipped) {
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let rendered = read(Api::from_path(path), body.as_bytes())
        .unwrap()
        .and_then(|chat| render(chat, &template, &Members::default()));
    assert_eq!(rendered, Err(expected));
}

#[rstest::rstest]
#[case("{{ m.content }}", "I am ", Ok("<user>q<assistant>I am "))]
#[case("{{ m.content | trim }}", "I am ", Ok("<user>q<assistant>I am"))]
#[case("{{ m.content[:3] }}", "I am", Err(Skipped::Template))]
fn a_continued_message_ends_the_text(
    #[case] shown: &str,
    #[case] last: &str,
    #[case] expected: Result<&str, Skipped>,
) {
    let source = format!("{{% for m in messages %}}<{{{{ m.role }}}}>{shown}</s>{{% endfor %}}");
    let template =
        ChatTemplate::new(&source.replace("</s>", "{{ '</s>' if m.role == 'assistant' }}")).unwrap();
    let body = serde_json::json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}],
        "continue_final_message": true});
    let chat = read(Api::Chat, body.to_string().as_bytes()).unwrap().unwrap();
    assert_eq!(render(chat, &template, &Members::default()).as_deref(), expected.as_deref());
}
