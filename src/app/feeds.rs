//! Where resources, configuration and signals come from.

use std::sync::Arc;

use anyhow::{Result, bail};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Admin;
use crate::args::ServeArgs;
use crate::schedule::plugin::Kind;
use crate::schedule::{Pipeline, Scheduler};
use crate::settle::OnUnknownModel;
use crate::topology::Topology;

/// Scraper stand-in until the feed is merged.
#[derive(Clone, Debug)]
pub struct Scraper;

/// Running feeds.
#[derive(Debug)]
pub struct Feeds {}

/// The pipeline to start with.
pub fn first_pipeline(_args: &ServeArgs, _extra: &'static [&'static Kind]) -> Result<Pipeline> {
    Ok(Pipeline::assemble("default", crate::plugins::default_parts(), None)?)
}

/// The scraper.
pub fn scraper(_args: &ServeArgs, _scheduler: &Arc<Scheduler>) -> Scraper {
    Scraper
}

/// What to do when an engine does not serve a model.
pub fn refresh_models(_scraper: &Scraper) -> OnUnknownModel {
    Arc::new(|_| {})
}

impl Feeds {
    /// Starts all.
    pub fn start(
        args: &ServeArgs,
        _extra: &'static [&'static Kind],
        admin: &Arc<Admin>,
        _scraper: Scraper,
        _stop: &CancellationToken,
        _tasks: &TaskTracker,
    ) -> Result<Self> {
        let Some(dir) = &args.resources else {
            bail!("--resources DIR is needed: there is no cluster to read from")
        };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "yaml") {
                let text: Arc<str> = std::fs::read_to_string(&path)?.into();
                files.push((path, text));
            }
        }
        let lowered = crate::resources::lower::lower(&files);
        for problem in &lowered.problems {
            tracing::warn!("{problem}");
        }
        let mut topology = Topology::default();
        let snapshot = topology.apply(lowered.world, Instant::now());
        admin.shared.decider.store.replace(snapshot);
        admin.documents.write().resources = lowered.dump;
        Ok(Self {})
    }
}
