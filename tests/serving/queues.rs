//! What 10,000 requests cost that wait: run by `make bench-queue`, which shows what it measured.

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::transport::Endpoint;

use crate::cases::load::{IDLE, scraped};
use crate::kit::engine::Answer;
use crate::kit::extproc::{CHAT, Stream, request_of, response};
use crate::kit::process::Process;

const WAITING: usize = 10_000;
/// Connections, as Envoy's workers make them.
const CONNECTIONS: usize = 8;
const MEASURED: Duration = Duration::from_secs(10);
const PROMPT: usize = 4_000;

async fn streams(picker: &Process, n: usize) -> Vec<Stream> {
    let address = format!("http://{}", picker.grpc);
    let channels = (0..CONNECTIONS).map(|_| Endpoint::from_shared(address.clone()).unwrap().connect_lazy());
    let channels: Vec<_> = channels.collect();
    let body =
        json!({"model": "m", "messages": [{"role": "user", "content": "x".repeat(PROMPT)}]}).to_string();
    let opened = (0..n).map(|at| {
        let (channel, body) = (channels[at % CONNECTIONS].clone(), &body);
        async move {
            let mut stream = Stream::over(channel).await;
            stream.send_all(&request_of(CHAT, &[("x-client", &format!("client-{}", at % 100))], body));
            stream
        }
    });
    join_all(opened).await
}

fn reason(stream: &Stream) -> String {
    stream.replies.immediate().map_or_else(|| "served".to_owned(), |refused| refused.reason())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement: make bench-queue"]
async fn ten_thousand_that_wait() {
    let (servers, resources) = scraped(&[Answer::page(IDLE), Answer::page(IDLE)]).await;
    let flags = "--queue-requests 20000 --queue-timeout 10m --identity header:x-client --log-level warn";
    let picker = Process::start(&resources, flags).await;
    picker.until("pilotfish_endpoints", &[("state", "up")], 2.0).await;
    let (_, empty) = picker.used();
    // The engines let everybody wait.
    let busy = "process_start_time_seconds 1\nvllm:num_requests_running 8\nvllm:num_requests_waiting 50\n\
                vllm:kv_cache_usage_perc 0.5\n";
    for server in &servers {
        server.answer(Answer::page(busy));
    }
    picker.until("pilotfish_pool_saturation", &[], 1.0).await;
    let (before, _) = picker.used();
    sleep(MEASURED).await;
    let (after, _) = picker.used();
    let idle = (after - before) / MEASURED.as_secs_f64();

    let mut waiting = streams(&picker, WAITING).await;
    picker.until("pilotfish_queue_requests", &[], WAITING as f64).await;
    let (before, _) = picker.used();
    sleep(MEASURED).await;
    let (after, full) = picker.used();
    let held = (after - before) / MEASURED.as_secs_f64();
    println!(
        "{WAITING} wait with {PROMPT} bytes each: {:.1} % of a core while they do ({:.1} % with nobody waiting), {:.0} MiB \
         resident ({empty:.0} before, {:.1} KiB a request)",
        held * 100.0,
        idle * 100.0,
        full,
        (full - empty) * 1024.0 / WAITING as f64,
    );

    // Engines freeze: their readings are unknown after a while, and what is unknown is not full.
    for server in &servers {
        server.answer(Answer::Hang);
    }
    let (before, _) = picker.used();
    let began = Instant::now();
    for stream in &mut waiting {
        stream.until_decided().await;
        assert_eq!(reason(stream), "served");
    }
    let took = began.elapsed();
    let (after, _) = picker.used();
    println!(
        "readings go stale after 2 s: all {WAITING} are served {took:.1?} after the engines froze, {:.1} s of CPU",
        after - before
    );
    join_all(waiting.into_iter().map(|stream| async move { stream.respond(&response(1_000, 10)).await }))
        .await;
    picker.until("pilotfish_reserved_requests", &[], 0.0).await;

    // Nobody is there any more while they wait.
    for server in &servers {
        server.answer(Answer::page(busy));
    }
    picker.until("pilotfish_pool_saturation", &[], 1.0).await;
    let mut waiting = streams(&picker, WAITING).await;
    picker.until("pilotfish_queue_requests", &[], WAITING as f64).await;
    let began = Instant::now();
    picker.apply(&crate::kit::resources::pool());
    for stream in &mut waiting {
        stream.until_decided().await;
        assert_eq!(reason(stream), "no-endpoints");
    }
    println!("the pool loses its endpoints: all {WAITING} are refused within {:.1?}", began.elapsed());
    drop(waiting);
    picker.until("pilotfish_streams", &[], 0.0).await;
    let (_, left) = picker.used();
    println!("{left:.0} MiB resident afterwards");
}
