//! The body of a prefill leg, and what of a client's body no engine of a pair may see.

use crate::request::{Api, Edits, Member, Outline};

/// Members by which engines are told where KV blocks are, beside `bootstrap_*`. From a client they would make an engine fetch
/// from anywhere.
const TRANSFER: [&str; 3] = ["kv_transfer_params", "ec_transfer_params", "disagg_prefill_dp_rank"];
/// Objects whose members vLLM takes for its own parameters, in the body and in its sampling parameters.
const EXTRAS: [&str; 2] = ["extra_args", "vllm_xargs"];

/// Spellings of the most tokens to generate.
const LIMITS: [&str; 4] = ["max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"];
/// Members that ask for more than one token or for a stream, and mean nothing to a leg that generates one.
const UNWANTED: [&str; 4] = ["min_tokens", "min_new_tokens", "stream_options", "kv_transfer_params"];

/// Whether a member of that name tells engines where KV blocks are.
pub fn is_transfer_field(name: &str) -> bool {
    TRANSFER.contains(&name) || name.starts_with("bootstrap_")
}

/// Whether the prompt of a request may be computed elsewhere than its output: its API generates, and nothing in it asks for
/// what only who computed the prompt can say.
pub fn may_be_split(api: Api, body: &Outline<'_>) -> bool {
    let generates = matches!(
        api,
        Api::Completions | Api::Chat | Api::Responses | Api::Messages | Api::Generate | Api::SglangGenerate
    );
    let asks = |name: &str| body.get(name).is_some_and(|member| !matches!(member.text, "null" | "false"));
    // SGLang takes a list of parameters for a batch of prompts.
    let listed = body.get("sampling_params").is_some_and(|member| member.text.starts_with('['));
    generates && !listed && !asks("prompt_logprobs") && !asks("echo") && !asks("return_logprob")
}

/// How many prompts a body holds; 1 unless it is a list of texts or of lists of token ids.
pub fn prompts(body: &Outline<'_>) -> usize {
    let lists = ["prompt", "text", "input_ids"].iter().filter_map(|name| body.get(name));
    lists.map(|list| prompts_in(list.text)).max().unwrap_or(1)
}

/// Whether prompts come as a list, be it of one.
pub fn is_batch(body: &Outline<'_>) -> bool {
    let lists = ["prompt", "text", "input_ids"].iter().filter_map(|name| body.get(name));
    lists.map(|list| list.text).any(|text| matches!(first_of_list(text), Some(b'"' | b'[')))
}

fn prompts_in(json: &str) -> usize {
    if !matches!(first_of_list(json), Some(b'"' | b'[')) {
        return 1;
    }
    serde_json::from_str::<Vec<serde::de::IgnoredAny>>(json).map_or(1, |list| list.len())
}

/// The first byte of the first element of a list.
fn first_of_list(json: &str) -> Option<u8> {
    json.strip_prefix('[')?.trim_ascii_start().bytes().next()
}

/// Makes of a client's body that of a prefill leg: one token of one answer, no stream, and `fields` in front, at
/// `body.front()`. Everything else stays as it is.
pub fn prefill(api: Api, body: &Outline<'_>, fields: &str) -> Edits {
    let mut edits = Edits::new();
    edits.insert(body.front(), fields.as_bytes());
    let unwanted = |name: &str| UNWANTED.contains(&name) || is_transfer_field(name);
    body.remove(unwanted, &mut edits);
    let mut limited = one_of_each(body, &mut edits);
    for object in nested(body) {
        object.remove(unwanted, &mut edits);
        limited |= one_of_each(&object, &mut edits);
    }
    let sampling = body.get("sampling_params").or_else(|| body.get("parameters"));
    let inside = sampling.and_then(|member| body.of_member(member));
    match api {
        Api::Responses if body.get("max_output_tokens").is_none() => {
            body.put_first("max_output_tokens", "1", &mut edits);
        }
        Api::Completions | Api::Chat | Api::Messages if body.get("max_tokens").is_none() => {
            body.put_first("max_tokens", "1", &mut edits);
        }
        Api::Generate | Api::SglangGenerate if !limited => {
            let name = if api == Api::Generate { "max_tokens" } else { "max_new_tokens" };
            let object = format!("{{\"{name}\":1}}");
            match (inside, sampling) {
                (Some(inside), _) if inside.members().is_empty() => {
                    edits.insert(inside.front(), format!("\"{name}\":1"));
                }
                (Some(inside), _) => inside.put_first(name, "1", &mut edits),
                (None, Some(null)) => edits.replace(null.value.clone(), object),
                (None, None) => body.put_first("sampling_params", &object, &mut edits),
            }
        }
        _ => {}
    }
    edits
}

/// One token of one answer, as a whole; true if the object limits tokens.
fn one_of_each(object: &Outline<'_>, edits: &mut Edits) -> bool {
    let mut limited = false;
    let mut set = |member: &Member<'_>, value: &str| {
        if member.text != value {
            edits.replace(member.value.clone(), value.as_bytes());
        }
    };
    for member in object.members() {
        match &*member.name {
            name if LIMITS.contains(&name) => {
                set(member, "1");
                limited = true;
            }
            "n" | "best_of" if member.text != "null" => set(member, "1"),
            "stream" | "background" if member.text != "null" => set(member, "false"),
            _ => {}
        }
    }
    limited
}

/// Whether a body tells engines where KV blocks are.
pub fn has_transfer_fields(body: &Outline<'_>) -> bool {
    body.members().iter().any(|member| is_transfer_field(&member.name) && member.text != "null")
}

/// Takes out of a client's body what only we may tell engines.
pub fn without_transfer_fields(body: &Outline<'_>, edits: &mut Edits) {
    body.remove(is_transfer_field, edits);
    for nested in nested(body) {
        nested.remove(is_transfer_field, edits);
    }
}

/// The objects within a body whose members engines take for its own.
fn nested<'b>(body: &Outline<'b>) -> Vec<Outline<'b>> {
    let of = |object: &Outline<'b>, names: &[&str]| -> Vec<Outline<'b>> {
        let members = object.members().iter().filter(|member| names.contains(&&*member.name));
        members.filter_map(|member| object.of_member(member)).collect()
    };
    let mut found = of(body, &["sampling_params", "parameters"]);
    let mut extras = of(body, &EXTRAS);
    extras.extend(found.iter().flat_map(|sampling| of(sampling, &EXTRAS)));
    found.append(&mut extras);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn prefilled(path: &str, body: &str, fields: &str) -> String {
        let outline = Outline::of(body.as_bytes()).unwrap();
        let edits = prefill(Api::from_path(path), &outline, fields);
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[rstest]
    #[case::no_limit("/v1/completions", r#"{"prompt":"a"}"#, r#"{"max_tokens":1,"prompt":"a"}"#)]
    #[case::one("/v1/completions", r#"{"prompt":"a","max_tokens":1}"#, r#"{"prompt":"a","max_tokens":1}"#)]
    #[case::null(
        "/v1/completions",
        r#"{"prompt":"a","max_tokens":null}"#,
        r#"{"prompt":"a","max_tokens":1}"#
    )]
    #[case::both(
        "/v1/chat/completions",
        r#"{"max_tokens":9,"max_completion_tokens":8,"messages":[]}"#,
        r#"{"max_tokens":1,"max_completion_tokens":1,"messages":[]}"#
    )]
    #[case::newer_only(
        "/v1/chat/completions",
        r#"{"max_completion_tokens":8,"messages":[]}"#,
        r#"{"max_tokens":1,"max_completion_tokens":1,"messages":[]}"#
    )]
    #[case::stream(
        "/v1/chat/completions",
        r#"{"max_tokens":9,"stream" : true, "stream_options":{"include_usage":true}, "messages":[]}"#,
        r#"{"max_tokens":1,"stream" : false, "messages":[]}"#
    )]
    #[case::answers(
        "/v1/completions",
        r#"{"n":3,"best_of":4,"min_tokens":5,"max_tokens":6,"prompt":"a"}"#,
        r#"{"n":1,"best_of":1,"max_tokens":1,"prompt":"a"}"#
    )]
    #[case::twice("/v1/completions", r#"{"n":3,"n":2,"max_tokens":6}"#, r#"{"n":1,"n":1,"max_tokens":1}"#)]
    #[case::untouched(
        "/v1/chat/completions",
        r#"{"max_tokens":2,"stop":["x"],"logprobs":true,"response_format":{"type":"json_schema","max_tokens":7}}"#,
        r#"{"max_tokens":1,"stop":["x"],"logprobs":true,"response_format":{"type":"json_schema","max_tokens":7}}"#
    )]
    #[case::responses("/v1/responses", r#"{"input":"a"}"#, r#"{"max_output_tokens":1,"input":"a"}"#)]
    #[case::background(
        "/v1/responses",
        r#"{"input":"a","max_output_tokens":64,"background":true}"#,
        r#"{"input":"a","max_output_tokens":1,"background":false}"#
    )]
    #[case::messages(
        "/v1/messages",
        r#"{"max_tokens":64,"messages":[]}"#,
        r#"{"max_tokens":1,"messages":[]}"#
    )]
    #[case::generate(
        "/inference/v1/generate",
        r#"{"token_ids":[1],"sampling_params":{"max_tokens":9,"min_tokens":2}}"#,
        r#"{"token_ids":[1],"sampling_params":{"max_tokens":1}}"#
    )]
    #[case::generate_without(
        "/generate",
        r#"{"text":"a"}"#,
        r#"{"sampling_params":{"max_new_tokens":1},"text":"a"}"#
    )]
    #[case::generate_empty(
        "/generate",
        r#"{"text":"a","sampling_params":{}}"#,
        r#"{"text":"a","sampling_params":{"max_new_tokens":1}}"#
    )]
    #[case::generate_null(
        "/generate",
        r#"{"text":"a","sampling_params":null}"#,
        r#"{"text":"a","sampling_params":{"max_new_tokens":1}}"#
    )]
    #[case::fields_within(
        "/inference/v1/generate",
        r#"{"token_ids":[1],"sampling_params":{"max_tokens":1,"extra_args":{"kv_transfer_params":{},"x":1}}}"#,
        r#"{"token_ids":[1],"sampling_params":{"max_tokens":1,"extra_args":{"x":1}}}"#
    )]
    #[case::a_clients_own_fields(
        "/v1/completions",
        r#"{"kv_transfer_params":{"remote_host":"evil"},"bootstrap_room":7,"prompt":"a","max_tokens":1}"#,
        r#"{"prompt":"a","max_tokens":1}"#
    )]
    fn a_prefill_leg_generates_one_token(#[case] path: &str, #[case] body: &str, #[case] expected: &str) {
        assert_eq!(prefilled(path, body, ""), expected);
        let with_fields = prefilled(path, body, "\"f\":0,");
        assert_eq!(with_fields, format!("{{\"f\":0,{}", &expected[1..]), "fields come first");
    }

    #[rstest]
    #[case(r#"{"prompt":"a"}"#, 1, false)]
    #[case(r#"{"prompt":["a"]}"#, 1, true)]
    #[case(r#"{"prompt":["a","b"]}"#, 2, true)]
    #[case(r#"{"prompt":[1,2,3]}"#, 1, false)]
    #[case(r#"{"prompt":[[1,2],[3]]}"#, 2, true)]
    #[case(r#"{"messages":[{"role":"user","content":["a","b"]}],"n":3}"#, 1, false)]
    fn prompts_are_counted(#[case] body: &str, #[case] expected: usize, #[case] batch: bool) {
        let outline = Outline::of(body.as_bytes()).unwrap();
        assert_eq!((prompts(&outline), is_batch(&outline)), (expected, batch));
    }

    #[test]
    fn what_clients_say_of_transfers_is_taken_out_wherever_engines_look() {
        let body = br#"{"vllm_xargs":{"kv_transfer_params":{},"a":1},"bootstrap_pair_key":1,"p":2,"parameters":{"bootstrap_room":3}}"#;
        let mut edits = Edits::new();
        without_transfer_fields(&Outline::of(body).unwrap(), &mut edits);
        assert_eq!(edits.apply(body), br#"{"vllm_xargs":{"a":1},"p":2,"parameters":{}}"#);
    }

    #[rstest]
    #[case("/generate", r#"{"text":["a"],"sampling_params":[{"n":1}]}"#, false)]
    #[case("/v1/completions", r#"{"prompt":"a","echo":true}"#, false)]
    #[case("/v1/completions", r#"{"prompt":"a","echo":false,"prompt_logprobs":null}"#, true)]
    #[case("/v1/chat/completions", r#"{"prompt_logprobs":0}"#, false)]
    #[case("/v1/embeddings", r#"{"input":"a"}"#, false)]
    fn what_only_the_prefill_can_say_is_not_split(
        #[case] path: &str,
        #[case] body: &str,
        #[case] expected: bool,
    ) {
        let outline = Outline::of(body.as_bytes()).unwrap();
        assert_eq!(may_be_split(Api::from_path(path), &outline), expected);
    }
}
