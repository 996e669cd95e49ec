//! Prompts computed at one engine and outputs generated at another, through Envoy: what both engines are sent.

use rstest::rstest;
use serde_json::{Value, json};

use crate::kit::envoy::Setup;
use crate::kit::http::whole;
use crate::kit::pairs::{ALWAYS, Plan, bodies, text};

/// Long enough to fill blocks, so that there is something to hand over.
fn prompt() -> String {
    "the quick brown fox jumps over the lazy dog ".repeat(12)
}

/// A client's body for an API, with what a prefill leg must change, in an order and spacing of its own.
fn body(path: &str, stream: bool) -> String {
    let prompt = prompt();
    match path {
        "/v1/completions" => format!(
            "{{ \"prompt\" : \"{prompt}\", \"model\":\"tiny\",\"max_tokens\":5 ,\"stream\": {stream}}}"
        ),
        "/v1/chat/completions" => format!(
            "{{\"model\":\"tiny\",  \"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}],\"stream\":{stream},\
             \"max_completion_tokens\":5,\"temperature\":0.70}}"
        ),
        "/v1/responses" => {
            format!(
                "{{\"model\":\"tiny\",\"input\":\"{prompt}\",\"max_output_tokens\":5,\"stream\":{stream}}}"
            )
        }
        _ => format!(
            "{{\"max_tokens\":5,\"model\":\"tiny\",\"stream\":{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]}}"
        ),
    }
}

/// What the prefill leg makes of it, without transfer fields.
fn prefill_body(path: &str, client: &str) -> String {
    let plain = client
        .replace("\"stream\": true", "\"stream\": false")
        .replace("\"stream\":true", "\"stream\":false");
    match path {
        "/v1/chat/completions" => {
            let limited = plain.replace("\"max_completion_tokens\":5", "\"max_completion_tokens\":1");
            format!("{{\"max_tokens\":1,{}", &limited[1..])
        }
        "/v1/responses" => plain.replace("\"max_output_tokens\":5", "\"max_output_tokens\":1"),
        _ => plain.replace("\"max_tokens\":5", "\"max_tokens\":1"),
    }
}

/// Cuts the transfer fields out of a body, which come first, and gives them as JSON.
fn fields(connector: &str, body: &str) -> (Value, String) {
    let names: &[&str] = match connector {
        "nixl" | "mooncake" => &["kv_transfer_params"],
        "sglang" => &["bootstrap_host", "bootstrap_port", "bootstrap_room"],
        _ => &[],
    };
    let (mut fields, mut rest) = (json!({}), body[1..].to_owned());
    for name in names {
        let value = rest.strip_prefix(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{name} in {rest}"));
        let mut values = serde_json::Deserializer::from_str(value).into_iter::<Value>();
        fields[*name] = values.next().unwrap().unwrap();
        let end = values.byte_offset();
        rest = value[end..].strip_prefix(',').unwrap().to_owned();
    }
    (fields, format!("{{{rest}"))
}

const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];

/// Every connector, every API, whole and streamed: the prefill engine gets the client's bytes but for what makes it one token
/// of one answer, the decode engine gets the client's bytes, both with what their connector wants and nothing else; the engines
/// check what they are told of transfers, and the client gets its whole answer.
#[rstest]
#[tokio::test]
async fn both_engines_get_the_clients_bytes_and_what_their_connector_wants(
    #[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup,
    #[values("http", "lmcache", "shared-storage", "nixl", "mooncake", "sglang")] connector: &'static str,
) {
    let stand = Plan::new(setup, connector)
        .start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off"))
        .await;
    for path in PATHS {
        for stream in [false, true] {
            stand.clear();
            let sent = body(path, stream);
            let transferred = stand.decode[0].state.transferred();
            let answer = stand.client.post(path, &[], whole(sent.clone())).await.rest().await;
            let what =
                format!("{connector} {path} stream {stream}: {}", String::from_utf8_lossy(&answer.body));
            assert_eq!(answer.status, 200, "{what}");
            if !stream {
                assert!(text(&answer.json()).split_whitespace().count() >= 5, "{what}");
            }
            let (prefill, decode) = stand.only_bodies();
            let (told_prefill, prefill) = fields(connector, &prefill);
            let (told_decode, decode) = fields(connector, &decode);
            assert_eq!(prefill, prefill_body(path, &sent), "{what}");
            assert_eq!(decode, sent, "{what}");
            match connector {
                "nixl" => {
                    let asked = json!({"do_remote_decode": true, "do_remote_prefill": false});
                    assert_eq!(told_prefill["kv_transfer_params"], asked, "{what}");
                    let params = &told_decode["kv_transfer_params"];
                    assert_eq!(
                        params["remote_engine_id"],
                        json!(*stand.prefill[0].state.engine_id()),
                        "{what}"
                    );
                }
                "mooncake" => {
                    let (p, d) = (&told_prefill["kv_transfer_params"], &told_decode["kv_transfer_params"]);
                    let id = &p["transfer_id"];
                    let asked =
                        json!({"do_remote_decode": true, "do_remote_prefill": false, "transfer_id": id});
                    assert_eq!(*p, asked, "{what}");
                    let bootstrap = stand.prefill[0].state.bootstrap_address().unwrap();
                    let told = json!({
                        "do_remote_decode": false, "do_remote_prefill": true, "transfer_id": id,
                        "remote_bootstrap_addr": format!("http://{bootstrap}"),
                        "remote_engine_id": *stand.prefill[0].state.engine_id(),
                    });
                    assert_eq!(*d, told, "{what}");
                }
                "sglang" => {
                    let bootstrap = stand.prefill[0].state.bootstrap_address().unwrap();
                    assert_eq!(told_prefill, told_decode, "{what}");
                    assert_eq!(told_decode["bootstrap_host"], "127.0.0.1", "{what}");
                    assert_eq!(told_decode["bootstrap_port"], bootstrap.port(), "{what}");
                    assert!(told_decode["bootstrap_room"].as_i64().is_some(), "{what}");
                }
                _ => {}
            }
            let moves = u64::from(!matches!(connector, "http" | "lmcache" | "shared-storage"));
            assert_eq!(stand.decode[0].state.transferred() - transferred, moves, "{what}");
            assert_eq!(stand.prefill[0].state.pinned(), 0, "{what}");
            stand.until_idle().await;
        }
    }
    assert_eq!((stand.decided("pair").await, stand.fell_back("").await), (8.0, 0.0));
}

/// With llm-d's sidecar nothing is called and no body changes: its header names the prefill endpoint, whatever a client said.
#[rstest]
#[tokio::test]
async fn a_sidecar_is_told_by_its_header(#[values(Setup::FullDuplex, Setup::GatewayShaped)] setup: Setup) {
    let stand = Plan::new(setup, "sidecar")
        .start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off"))
        .await;
    let sent = body("/v1/chat/completions", true);
    let forged = [("x-prefiller-host-port", "10.9.9.9:1"), ("content-type", "application/json")];
    let answer = stand.client.post("/v1/chat/completions", &forged, whole(sent.clone())).await.rest().await;
    assert_eq!(answer.status, 200);
    assert_eq!(bodies(&stand.prefill[0]), Vec::<String>::new());
    let requests = stand.decode[0].state.requests();
    let posts: Vec<_> = requests.iter().filter(|request| request.method == "POST").collect();
    let [request] = &posts[..] else { panic!("{posts:?}") };
    assert_eq!(request.body, sent);
    assert_eq!(request.header("x-prefiller-host-port"), Some(&*stand.prefill[0].address()));
    stand.until_idle().await;
}

/// Blocks that are given up once they are fetched serve one answer to one prompt: what wants several is one endpoint's.
#[rstest]
#[case::nixl("nixl", false)]
#[case::mooncake("mooncake", false)]
#[case::lmcache("lmcache", true)]
#[tokio::test]
async fn several_answers_or_prompts_are_split_only_where_all_find_the_blocks(
    #[case] connector: &'static str,
    #[case] split: bool,
) {
    let stand = Plan::new(Setup::FullDuplex, connector)
        .start(|picker| picker.config(ALWAYS).flag("--usage-injection", "off"))
        .await;
    let prompt = prompt();
    let answers = format!("{{\"model\":\"tiny\",\"prompt\":\"{prompt}\",\"max_tokens\":5,\"n\":2}}");
    let prompts = format!("{{\"model\":\"tiny\",\"prompt\":[\"{prompt}\",\"{prompt}\"],\"max_tokens\":5}}");
    for sent in [&answers, &prompts] {
        stand.clear();
        let answer = stand.client.post("/v1/completions", &[], whole(sent.clone())).await.rest().await;
        assert_eq!(answer.status, 200, "{sent}");
        assert_eq!(bodies(&stand.prefill[0]).len(), usize::from(split), "{sent}");
        assert_eq!(bodies(&stand.decode[0]), std::slice::from_ref(sent));
    }
    let decided = if split { "pair" } else { "unfit" };
    assert_eq!(stand.decided(decided).await, 2.0);
    stand.until_idle().await;
}
