//! A scorer of one's own, added to the built-in plugins: `cargo run --example custom_plugin`.
//!
//! A plugin is a type with one pure function, a configuration with doc comments, and a `Kind` that names both. This one
//! prefers endpoints whose label says that they stand in a given zone. The line that adds it is `extra_plugins` in `main`.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pilotfish::config;
use pilotfish::prompt::Prepared;
use pilotfish::resources::lower::lower;
use pilotfish::schedule::plugin::{Instance, Kind, Scorer, parameters};
use pilotfish::schedule::{Ask, Candidate, Cycle, Scheduler};
use pilotfish::topology::Topology;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::time::Instant;

/// 1 for endpoints whose label `zone` has the wanted value, 0 for other zones; an endpoint without the label abstains.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
struct Config {
    /// The zone to prefer.
    zone: String,
}

const KIND: Kind = Kind {
    name: "same-zone",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let Config { zone } = parameters(given)?;
        Ok(Instance::scorer(SameZone { zone }))
    },
};

#[derive(Debug)]
struct SameZone {
    zone: String,
}

impl Scorer for SameZone {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        for (candidate, out) in candidates.iter().zip(out) {
            if let Some(zone) = cx.endpoint(candidate).labels.get("zone") {
                *out = if *zone == self.zone { 1.0 } else { 0.0 };
            }
        }
    }
}

const CONFIG: &str = "
apiVersion: pilotfish.dev/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: same-zone, parameters: {zone: b}}
- {type: least-request}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: same-zone, weight: 2}
  - {pluginRef: least-request}
";

const RESOURCES: &str = "
apiVersion: networking.serving.volcano.sh/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: meta-llama/Llama-3.1-8B-Instruct
  inferenceEngine: vLLM
  workloadSelector: {matchLabels: {app: llama}}
  workloadPort: {port: 8000}
---
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: gpu-0, labels: {app: llama, zone: a}}
spec: {address: '10.0.0.1:8000'}
---
apiVersion: pilotfish.dev/v1alpha1
kind: Endpoint
metadata: {name: gpu-1, labels: {app: llama, zone: b}}
spec: {address: '10.0.0.2:8000'}
";

fn main() -> Result<(), Box<dyn Error>> {
    let options = config::Options { extra_plugins: &[&KIND], ..config::Options::default() };
    let read = config::read(Path::new("scheduler.yaml"), CONFIG.into(), &options, None);
    read.problems.iter().for_each(|problem| eprint!("{problem}"));
    let pipeline = read.pipeline.ok_or("the configuration has errors")?;
    println!("{:#}", config::effective(&pipeline));

    let lowered = lower(&[("resources.yaml", RESOURCES.into())]);
    lowered.problems.iter().for_each(|problem| eprint!("{problem}"));
    let snapshot = Topology::default().apply(lowered.world, Instant::now());
    let pool = snapshot.pools.first().ok_or("no pool")?;
    let ask = Ask {
        model: "meta-llama/Llama-3.1-8B-Instruct",
        prompt: &Prepared { tokens: 1_000, ..Prepared::default() },
        max_tokens: Some(100),
        answers: 1,
        sessions: &[],
        subset: None,
        only_if_cached: false,
        may_be_split: false,
        wanted: 2,
        seed: 1,
        detail: 64,
    };
    let scheduler = Scheduler::new(pipeline, Arc::default(), Duration::from_secs(2));
    let picked =
        scheduler.pick(&scheduler.pipeline(), pool, &ask).map_err(|refusal| format!("{refusal:?}"))?;
    for row in &picked.records[0].rows {
        println!("{} scores {:?}, in all {}", row.endpoint, row.raw, row.total);
    }
    println!("picked {}", picked.ranked[0].address);
    Ok(())
}
