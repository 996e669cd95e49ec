//! What a prefill leg costs beside the engine's own time: run by `make bench-pairs`, which shows what it measured.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::json;
use std::time::Duration;
use tokio::time::Instant;

use crate::kit::envoy::Setup;
use crate::kit::http::whole;
use crate::kit::pairs::{ALWAYS, Plan, bodies};

const REQUESTS: usize = 200;
/// Bytes of a prompt: some 500 tokens.
const PROMPT: usize = 2_000;

fn percentile(times: &mut [Duration], share: f64) -> f64 {
    times.sort();
    times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3
}

fn body(at: usize) -> String {
    let text = format!("{at} {}", "x ".repeat(PROMPT / 2));
    json!({"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: make bench-pairs"]
async fn what_a_prefill_leg_adds() {
    for setup in [Setup::FullDuplex, Setup::GatewayShaped] {
        let stand =
            Plan::new(setup, "nixl").start(|picker| picker.config(ALWAYS).flag("--log-level", "warn")).await;
        let direct = Client::builder(TokioExecutor::new()).build_http();
        let url = format!("http://{}/v1/chat/completions", stand.prefill[0].address());
        let (mut alone, mut legs, mut decisions) = (Vec::new(), Vec::new(), Vec::new());
        for at in 0..REQUESTS {
            // The engine asked without a picker, with the very body of a leg, and its turn in between.
            let headers = [("content-type", "application/json"), ("x-request-id", &format!("leg-{at}"))];
            let answer =
                stand.client.post("/v1/chat/completions", &headers, whole(body(at))).await.rest().await;
            assert_eq!(answer.status, 200);
            let decision = stand.picker.decision(&format!("leg-{at}")).await;
            let micros = |value: &serde_json::Value| Duration::from_micros(value.as_u64().unwrap());
            legs.push(micros(&decision["stages_us"]["prefill"]));
            decisions.push(micros(&decision["stages_us"]["decision"]));
            let leg =
                bodies(&stand.prefill[0]).pop().unwrap().replacen(&format!("{at} "), &format!("{at}-"), 1);
            let request = hyper::Request::post(&url).header("content-type", "application/json");
            let request = request.body(Full::new(Bytes::from(leg))).unwrap();
            let began = Instant::now();
            let response = direct.request(request).await.unwrap();
            assert_eq!(response.status(), 200);
            response.into_body().collect().await.unwrap();
            alone.push(began.elapsed());
            stand.clear();
        }
        let added: f64 = percentile(&mut legs, 0.5) - percentile(&mut alone, 0.5);
        eprintln!(
            "{setup:?}: the engine alone {:.2} ms (p50) {:.2} ms (p99); prefill leg {:.2} ms (p50) {:.2} ms (p99); added {added:.2} \
             ms (p50); the decision beside it {:.2} ms (p50)",
            percentile(&mut alone, 0.5),
            percentile(&mut alone, 0.99),
            percentile(&mut legs, 0.5),
            percentile(&mut legs, 0.99),
            percentile(&mut decisions, 0.5),
        );
    }
}
