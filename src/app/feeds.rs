//! Where resources, configuration and signals come from.

use std::sync::Arc;

use anyhow::{Result, bail};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::Admin;
use crate::args::ServeArgs;
use crate::feed::scrape::{ScrapeConfig, Scraper};
use crate::schedule::plugin::Kind;
use crate::schedule::{Pipeline, Scheduler};
use crate::settle::OnUnknownModel;
use crate::topology::Topology;

/// Running feeds.
#[derive(Debug)]
pub struct Feeds {
    _scraper: Scraper,
}

/// The pipeline to start with.
pub fn first_pipeline(_args: &ServeArgs, _extra: &'static [&'static Kind]) -> Result<Pipeline> {
    Ok(Pipeline::assemble("default", crate::plugins::default_parts(), None)?)
}

/// The scraper. An engine that started anew holds nothing of what was sent to the old one.
pub fn scraper(args: &ServeArgs, scheduler: &Arc<Scheduler>) -> Scraper {
    let config = ScrapeConfig { interval: args.scrape_interval, ..ScrapeConfig::default() };
    let scheduler = Arc::clone(scheduler);
    let forget = move |slot| {
        if let Some(index) = &scheduler.pipeline().index {
            index.forget(slot);
        }
    };
    Scraper::new(config, Arc::new(forget))
}

/// What to do when an engine does not serve a model: ask it again what it serves.
pub fn refresh_models(scraper: &Scraper) -> OnUnknownModel {
    let scraper = scraper.clone();
    Arc::new(move |endpoint| scraper.refresh_models(endpoint))
}

impl Feeds {
    /// Starts all.
    pub fn start(
        args: &ServeArgs,
        _extra: &'static [&'static Kind],
        admin: &Arc<Admin>,
        scraper: Scraper,
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
        scraper.follow(&snapshot.endpoints);
        admin.shared.decider.store.replace(snapshot);
        admin.documents.write().resources = lowered.dump;
        Ok(Self { _scraper: scraper })
    }
}
