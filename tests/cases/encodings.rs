//! Bodies that are rewritten, compressed, or read in passing.

use std::io::Write as _;

use serde_json::{Value, json};

use crate::kit::case::{input, list};
use crate::kit::extproc::{CHAT, Stream, body_step, bytes, chat, request_of, run, serve, serve_steps};
use crate::kit::picker::Picker;
use crate::kit::resources::{endpoints, pods, route, server};

async fn picker(case: &Value) -> Picker {
    Picker::serve(&pods(&case["pods"])).await
}

/// The pods of a case behind a ModelServer and a ModelRoute that renames the model.
async fn renaming(case: &Value, alias: &str, real: &str) -> Picker {
    let (alias, real) = (json!(alias), json!(real));
    let target = "  rules: [{targetModels: [{modelServerName: ms}]}]\n";
    let resources = endpoints(&case["pods"])
        + &server("ms", "m", &format!("  model: {real}\n"))
        + &route("r", &format!("  modelName: {alias}\n{target}"));
    Picker::serve(&resources).await
}

#[tokio::test(flavor = "multi_thread")]
async fn par_06_a_renamed_model_is_the_only_change() {
    let case = input("PAR-06");
    let steps = list(case, "steps");
    let given = String::from_utf8(bytes(&steps[1]["rb"])).unwrap();
    let renamed = given.replacen("\"alias\"", "\"real/model-name\"", 1);
    let picker = renaming(case, "alias", "real/model-name").await;
    let served = serve_steps(&picker, steps).await;
    assert_eq!(String::from_utf8(served.replies.body()).unwrap(), renamed);
    let grown = |length: usize| (length + renamed.len() - given.len()).to_string();
    assert_eq!(served.replies.set_header("content-length"), Some(grown(given.len())));
    assert_eq!(served.decision["model"], "alias");
    assert_eq!(served.decision["target_model"], "real/model-name");

    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        if variant.starts_with("no rewrite needed") {
            let same = renaming(case, "alias", "alias").await;
            let served = serve_steps(&same, steps).await;
            assert_eq!(served.replies.body(), given.as_bytes(), "{variant}");
            assert_eq!(served.replies.set_header("content-length"), None, "{variant}");
        } else if variant.contains("nested key") {
            let nested = "{\"metadata\":{\"model\":\"alias\"},\"model\":\"alias\"}";
            let served = serve(&picker, CHAT, nested).await;
            let expected = "{\"metadata\":{\"model\":\"alias\"},\"model\":\"real/model-name\"}";
            assert_eq!(served.replies.body(), expected.as_bytes(), "{variant}");
        } else {
            assert!(variant.contains("quotes/unicode escapes"), "unknown variant {variant}");
            let quoted = renaming(case, "a\"l\u{ef}as", "re\"al/\u{7530}\\").await;
            let odd = "{\"x\":1,\"model\":\"\\u0061\\\"l\\u00efas\",\"messages\":[]}";
            let served = serve(&quoted, CHAT, odd).await;
            let body = String::from_utf8(served.replies.body()).unwrap();
            assert!(
                body.starts_with("{\"x\":1,\"model\":\"") && body.ends_with("\",\"messages\":[]}"),
                "{body}"
            );
            let read: Value = serde_json::from_str(&body).unwrap();
            assert_eq!(read["model"], "re\"al/\u{7530}\\", "{variant}");
        }
    }
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn deflate(text: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn brotli(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    brotli::CompressorWriter::new(&mut out, 4096, 1, 20).write_all(text).unwrap();
    out
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut decoder = flate2::write::GzDecoder::new(Vec::new());
    decoder.write_all(bytes).unwrap();
    decoder.finish().unwrap()
}

/// A gzip stream that inflates to `mebibytes` MiB of spaces: one flushed MiB, repeated. Its checksum is wrong, which only
/// whoever inflates it whole would notice.
fn bomb(mebibytes: usize) -> Vec<u8> {
    let mut compressor = flate2::Compress::new(flate2::Compression::fast(), false);
    let mut chunk = Vec::with_capacity(64 << 10);
    compressor.compress_vec(&vec![b' '; 1 << 20], &mut chunk, flate2::FlushCompress::Full).unwrap();
    [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0xff][..], &chunk.repeat(mebibytes)].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn par_07_compressed_bodies_are_read_and_forwarded_as_they_came() {
    let case = input("PAR-07");
    let steps = list(case, "steps");
    let given = bytes(&steps[1]["rb"]);
    let plain = String::from_utf8(gunzip(&given)).unwrap();
    let encoded = |encoding: &str, body: &[u8]| {
        let [head, _] = request_of(CHAT, &[("content-encoding", encoding)], "");
        [head, body_step("rb", body, true)]
    };
    let picker = picker(case).await;
    let reference = serve(&picker, CHAT, &plain).await;
    let check = async |context: &str, steps: &[Value], forwarded: &[u8]| {
        let served = serve_steps(&picker, steps).await;
        assert_eq!(served.replies.body(), forwarded, "{context}: the bytes are forwarded as they came");
        assert!(!served.replies.removed().contains(&"content-encoding"), "{context}");
        assert_eq!(served.replies.set_header("content-length"), None, "{context}");
        assert_eq!(served.endpoint(), reference.endpoint(), "{context}");
        assert_eq!(served.decision["model"], "m", "{context}");
        assert_eq!(served.prompt_tokens(), reference.prompt_tokens(), "{context}");
        assert!(served.matched_blocks() > 0, "{context}: the same prefix");
    };
    check("as given", steps, &given).await;
    let text = plain.as_bytes();
    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        let refused = async |steps: &[Value], status: i32| {
            let replies = run(&picker, steps).await;
            assert_eq!(replies.refused().status(), status, "{variant}: {}", replies.refused().message());
        };
        match variant {
            "content-encoding: zstd" => {
                let body = zstd::encode_all(text, 1).unwrap();
                check(variant, &encoded("zstd", &body), &body).await;
            }
            "br" => check(variant, &encoded("br", &brotli(text)), &brotli(text)).await,
            "deflate" => check(variant, &encoded("deflate", &deflate(text)), &deflate(text)).await,
            "x-gzip" => check(variant, &encoded("x-gzip", &given), &given).await,
            "gzip, gzip (stacked) -> 415" => refused(&encoded("gzip, gzip", &gzip(&given)), 415).await,
            "content-encoding: identity" => check(variant, &encoded("identity", text), text).await,
            "gzip header but plain body -> 400" => refused(&encoded("gzip", text), 400).await,
            "bomb: 1 MiB gzip that inflates to 1 GiB -> 413 without inflating past the cap" => {
                let bomb = bomb(1 << 10);
                assert!(bomb.len() < 8 << 20, "{}", bomb.len());
                let limited =
                    Picker::with(&pods(&case["pods"])).flag("--max-body-bytes", "8Mi").start().await;
                let replies = run(&limited, &encoded("gzip", &bomb)).await;
                assert_eq!(replies.refused().status(), 413, "{variant}");
                assert_eq!(replies.refused().reason(), "body-too-large", "{variant}");
            }
            rewrite => {
                assert!(rewrite.starts_with("gzip plus model rewrite"), "unknown variant {rewrite}");
                let renaming = renaming(case, "m", "a-longer-name").await;
                let mut announced = encoded("gzip", &given);
                let headers = announced[0]["rh"]["headers"].as_array_mut().unwrap();
                headers.push(json!(["content-length", given.len().to_string()]));
                let served = serve_steps(&renaming, &announced).await;
                let expected = plain.replacen("\"m\"", "\"a-longer-name\"", 1);
                assert_eq!(String::from_utf8(served.replies.body()).unwrap(), expected, "sent plain");
                assert!(served.replies.removed().contains(&"content-encoding"), "the header goes");
                assert_eq!(served.replies.set_header("content-length"), Some(expected.len().to_string()));
            }
        }
    }
}

/// Sends a response piece by piece, each forwarded before the next is sent, and gives the usage that was settled.
async fn stream_response(picker: &Picker, request: &[Value], head: &Value, pieces: &[Vec<u8>]) -> Value {
    static IDS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let id = format!("response-{}", IDS.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let mut request = request.to_vec();
    request[0]["rh"]["headers"].as_array_mut().unwrap().push(json!(["x-request-id", id]));
    let mut stream = Stream::of(picker, &request).await;
    stream.until_decided().await;
    stream.send(head);
    let mut sent = 0;
    for (at, piece) in pieces.iter().enumerate() {
        let last = at + 1 == pieces.len();
        stream.send(&body_step("sb", piece, last));
        sent += piece.len();
        let forwarded = stream
            .until(|replies| {
                let pieces = replies.response_pieces();
                pieces.iter().map(|(bytes, _)| bytes.len()).sum::<usize>() >= sent
                    && (!last || pieces.last().is_some_and(|(_, end)| *end))
            })
            .await;
        assert_eq!(forwarded.response_body().len(), sent, "nothing but what came is forwarded");
    }
    let replies = stream.finish().await;
    assert_eq!(replies.response_body(), pieces.concat(), "forwarded as it came");
    let ends = replies.response_pieces().iter().filter(|(_, end)| *end).count();
    assert_eq!(ends, 1);
    picker.decision(&id).await["usage"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn par_13_usage_is_found_wherever_the_response_is_split() {
    let case = input("PAR-13");
    let steps = list(case, "steps");
    let (request, head) = (&steps[..2], &steps[2]);
    let given: Vec<Vec<u8>> = steps[3..].iter().map(|step| bytes(&step["sb"])).collect();
    let whole = given.concat();
    let picker = picker(case).await;
    let expected = json!({"prompt": 7, "completion": 10, "source": "scanner"});
    let mut responses = 0;
    let mut check = async |context: String, pieces: Vec<Vec<u8>>| {
        let usage = stream_response(&picker, request, head, &pieces).await;
        assert_eq!(usage, expected, "{context}");
        responses += 1;
        let tokens = picker.metrics().await;
        let counted = |kind| tokens.sum("pilotfish_tokens_total", &[("kind", kind)]);
        assert_eq!(
            (counted("prompt"), counted("output")),
            (7.0 * f64::from(responses), 10.0 * f64::from(responses)),
            "{context}: counted once"
        );
    };
    check("as given".to_owned(), given.clone()).await;
    for variant in list(case, "variants") {
        let variant = variant.as_str().unwrap();
        match variant {
            "every 2-way split position of the last 160 bytes" => {
                for at in whole.len() - 160..=whole.len() {
                    check(format!("split at {at}"), vec![whole[..at].to_vec(), whole[at..].to_vec()]).await;
                }
            }
            "one byte per chunk" => {
                check(variant.to_owned(), whole.iter().map(|byte| vec![*byte]).collect()).await;
            }
            "EOS as an empty body chunk" => {
                check(variant.to_owned(), [&given[..], &[Vec::new()]].concat()).await;
            }
            "no blank line after the last event" => {
                check(variant.to_owned(), vec![whole.trim_ascii_end().to_vec()]).await;
                let usage_last = whole.strip_suffix(b"\n\ndata: [DONE]\n\n").unwrap();
                check("the usage event ends the response".to_owned(), vec![usage_last.to_vec()]).await;
            }
            continuous => {
                assert!(continuous.starts_with("continuous_usage_stats"), "unknown variant {continuous}");
                let event = |n: u64| {
                    let usage = json!({"prompt_tokens": 7, "completion_tokens": n, "total_tokens": 7 + n});
                    format!("data: {}\n\n", json!({"choices": [{"delta": {"content": "a"}}], "usage": usage}))
                };
                let events = (1..=10).map(|n| event(n).into_bytes());
                check(variant.to_owned(), events.chain([b"data: [DONE]\n\n".to_vec()]).collect()).await;
            }
        }
    }
    // An event too long to keep is passed on unread; what follows is read.
    let long = [b"data: {\"x\":\"".to_vec(), vec![b'x'; 2 << 20], b"\"}\n\n".to_vec()].concat();
    let pieces = long.chunks(60_000).map(<[u8]>::to_vec).chain([whole.clone()]).collect();
    check("an event of 2 MiB before the usage".to_owned(), pieces).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn par_16_compressed_responses_are_read_aside() {
    let case = input("PAR-16");
    let steps = list(case, "steps");
    let given = bytes(&steps[3]["sb"]);
    let expected = json!({"prompt": 7, "completion": 10, "source": "scanner"});
    let picker = picker(case).await;
    let usage = stream_response(&picker, &steps[..2], &steps[2], std::slice::from_ref(&given)).await;
    assert_eq!(usage, expected);
    let bytewise: Vec<Vec<u8>> = given.iter().map(|byte| vec![*byte]).collect();
    assert_eq!(stream_response(&picker, &steps[..2], &steps[2], &bytewise).await, expected);

    // The head of the response stays as it is, and the coding that the client asked for is not narrowed.
    let mut stream = Stream::of(&picker, &steps[..2]).await;
    assert!(!stream.until_decided().await.removed().contains(&"accept-encoding"));
    let replies = stream.respond(&steps[2..]).await;
    let mutated = replies.all.iter().any(|reply| format!("{reply:?}").contains("content-encoding"));
    assert!(!mutated, "content-encoding stays");
    assert_eq!(replies.response_body(), given);

    // Where usage is asked for in the client's place and withheld, the response must come uncompressed.
    let asking = chat("{\"model\":\"m\",\"stream\":true,\"messages\":[]}");
    let mut modes = json!({"first_message": {"protocol_config": {
        "request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}}});
    modes["first_message"]["protocol_config"]["send_body_without_waiting_for_header_response"] = json!(false);
    let mut steps = vec![modes];
    steps.extend(asking);
    steps[1]["rh"]["headers"].as_array_mut().unwrap().push(json!(["accept-encoding", "gzip, br"]));
    let replies = run(&picker, &steps).await;
    assert!(String::from_utf8(replies.body()).unwrap().contains("include_usage"));
    assert!(replies.removed().contains(&"accept-encoding"), "{:?}", replies.removed());
}
