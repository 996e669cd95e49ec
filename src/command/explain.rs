//! `explain`: the decision table for one request, from a running server or from files.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::runtime;
use crate::admin::view;
use crate::admission::identity::Attributes;
use crate::args::{ExplainArgs, Format};
use crate::config;
use crate::decide::{Arrived, Body, Chunks, Decider, Settings};
use crate::feed::file::{self, Resources};
use crate::metrics::Metrics;
use crate::request::head::Head;
use crate::schedule::plugin::Kind;
use crate::schedule::{Pipeline, Scheduler};
use crate::snapshot::Store;
use crate::topology::Topology;

/// Runs the command.
pub fn run(args: &ExplainArgs, extra_plugins: &[&Kind]) -> Result<()> {
    let body = read_body(&args.body)?;
    let decision = match (&args.server, &args.resources) {
        (Some(server), _) => runtime()?.block_on(ask(server, args, body))?,
        (None, Some(resources)) => runtime()?.block_on(offline(resources, args, body, extra_plugins))?,
        (None, None) => bail!("explain needs --server URL of a running picker, or --resources DIR"),
    };
    match args.format {
        Format::Json => println!("{decision:#}"),
        Format::Text => print!("{}", table(&decision)),
    }
    Ok(())
}

fn read_body(from: &str) -> Result<Vec<u8>> {
    if from != "-" {
        return std::fs::read(from).with_context(|| format!("--body {from}"));
    }
    let mut body = Vec::new();
    std::io::stdin().read_to_end(&mut body).context("the body on standard input")?;
    Ok(body)
}

/// Asks a running server.
async fn ask(server: &str, args: &ExplainArgs, body: Vec<u8>) -> Result<Value> {
    let headers: serde_json::Map<String, Value> =
        args.headers.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    let question = json!({"path": args.path, "headers": headers, "body": String::from_utf8_lossy(&body)});
    let request = http::Request::post(format!("{}/debug/explain", server.trim_end_matches('/')))
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(question.to_string())))
        .context("--server takes a URL such as http://127.0.0.1:9090")?;
    let client = Client::builder(TokioExecutor::new()).build_http();
    let answer = client.request(request).await.with_context(|| format!("no picker answers at {server}"))?;
    let status = answer.status();
    let bytes = answer.into_body().collect().await?.to_bytes();
    let text = String::from_utf8_lossy(&bytes);
    if !status.is_success() {
        bail!("{server} answered {status}: {text}");
    }
    serde_json::from_str(&text).with_context(|| format!("{server} is no picker"))
}

/// Explains from files: endpoints as if up, with nothing booked and every signal unknown.
async fn offline(
    resources: &Path,
    args: &ExplainArgs,
    body: Vec<u8>,
    extra_plugins: &[&Kind],
) -> Result<Value> {
    let loaded = file::load(resources).with_context(|| format!("--resources {}", resources.display()))?;
    let lowered = Resources::default().reload(loaded);
    lowered.problems.iter().for_each(|problem| eprint!("{problem}"));
    let pipeline = match &args.config {
        None => Pipeline::assemble("default", crate::plugins::default_parts(), None)?,
        Some(path) => {
            let text = file::text_of(path).map_err(|why| anyhow::anyhow!("{}: {why}", path.display()))?;
            let read = config::read(
                path,
                text,
                &config::Options { allow_unsupported: true, extra_plugins, ..config::Options::default() },
                None,
            );
            read.problems.iter().for_each(|problem| eprint!("{problem}"));
            read.pipeline.context("the scheduler configuration cannot be used")?
        }
    };
    let store = Store::default();
    let snapshot = Topology::default().apply(lowered.world, Instant::now());
    for endpoint in &snapshot.endpoints {
        endpoint.health.accepted();
    }
    store.replace(snapshot);
    let decider = Decider {
        store: Arc::new(store),
        admission: Arc::default(),
        scheduler: Arc::new(Scheduler::new(pipeline, Arc::default(), std::time::Duration::from_secs(2))),
        tokenizing: Arc::default(),
        shared: None,
        limiter: None,
        metrics: Arc::new(Metrics::default()),
        settings: Settings::default(),
    };
    let fixed =
        [(":method", "POST"), (":path", &args.path)].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let now = Instant::now();
    let arrived = Arrived {
        pool: None,
        head: Head::new(fixed.into_iter().chain(args.headers.iter().cloned())),
        body: Body::Whole(Chunks::of(body)),
        attributes: Attributes::new(),
        subset: None,
        sees_response: false,
        started: now,
        complete: now,
    };
    let record = decider.explain(&arrived).await.map_err(|refusal| anyhow::anyhow!("refused: {refusal}"))?;
    Ok(view::decision(&record))
}

/// The decision for people: one line a candidate, the picked first.
fn table(decision: &Value) -> String {
    let mut out = format!(
        "model {} -> {}  pool {}  route {}  prompt tokens {}\n",
        text(&decision["model"]),
        text(&decision["target_model"]),
        text(&decision["pool"]),
        text(&decision["route"]),
        decision["prompt_tokens"],
    );
    if let Some(split) = decision["split"].as_str() {
        out.extend(["prefill and decode: ", split, "\n"]);
    }
    let legs = decision["legs"].as_array().map_or(&[][..], Vec::as_slice);
    for leg in legs {
        if legs.len() > 1 {
            out.extend([&text(&leg["role"]), ":\n"]);
        }
        leg["candidates"]
            .as_array()
            .into_iter()
            .flatten()
            .for_each(|candidate| out.push_str(&row(candidate)));
    }
    out
}

/// One candidate.
fn row(candidate: &Value) -> String {
    let endpoint = text(&candidate["endpoint"]);
    if let Some(why) = candidate["filtered_by"].as_str() {
        return format!("  {endpoint:<22} dropped by {why}\n");
    }
    let scores = candidate["scores"].as_object().into_iter().flatten().map(|(name, score)| {
        let abstained = if score["raw"].is_null() { " (abstained)" } else { "" };
        format!("{name} {:.3} x {}{abstained}", score["used"].as_f64().unwrap_or(0.0), score["weight"])
    });
    let total = candidate["total"].as_f64().unwrap_or(0.0);
    format!("  {endpoint:<22} {total:.3} = {}\n", scores.collect::<Vec<_>>().join(" + "))
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
