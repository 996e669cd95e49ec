//! Puts what feeds describe into effect: topology, snapshot, and everything that follows endpoints and pools.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::time::Instant;

use super::feeds::report;
use crate::admin::Admin;
use crate::document::Problem;
use crate::metrics::Degraded;
use crate::resources::lower::Lowered;
use crate::topology::{Topology, World};

/// The topology in effect.
#[derive(Debug)]
pub struct Effect {
    topology: Topology,
    reported: HashSet<Problem>,
    admin: Arc<Admin>,
}

impl Effect {
    /// Nothing stands yet.
    pub fn new(admin: Arc<Admin>) -> Self {
        Self { topology: Topology::default(), reported: HashSet::new(), admin }
    }

    /// Makes `world` what requests see.
    pub fn stand(&mut self, world: World) {
        let admin = &self.admin;
        let snapshot = self.topology.apply(world, Instant::now());
        let tokenizing = &admin.shared.decider.tokenizing;
        tokenizing.follow(snapshot.pools.iter().map(|pool| &**pool));
        admin.scraper.follow(&snapshot.endpoints);
        admin.events.follow(&snapshot.endpoints);
        admin.shared.decider.store.replace(snapshot);
        self.forget_the_gone();
    }

    /// Shows documents and what is wrong with them; what is new of that is logged.
    pub fn show(&mut self, mut lowered: Lowered) {
        let settings = self.admin.shared.decider.tokenizing.sources.load();
        let unlisted = lowered.tokenizer_urls.iter().filter(|(url, _)| !settings.lists(url));
        lowered.problems.extend(unlisted.map(|(_, problem)| problem.clone()));
        let problems: HashSet<Problem> = lowered.problems.iter().cloned().collect();
        let new: Vec<Problem> =
            lowered.problems.iter().filter(|problem| !self.reported.contains(problem)).cloned().collect();
        report("resources", &new);
        let solved = self.reported.difference(&problems).count();
        if solved > 0 && problems.is_empty() {
            tracing::info!("nothing is wrong with the resources any more");
        }
        self.reported = problems;
        self.admin.shared.metrics.set_degraded(Degraded::Resources, lowered.has_errors());
        let mut documents = self.admin.documents.write();
        documents.resources = lowered.dump;
        documents.resource_problems = lowered.problems;
    }

    /// Drops cache knowledge of endpoints whose grace period is over.
    pub fn forget_the_gone(&mut self) {
        self.topology.prune(Instant::now());
        let live: HashSet<u64> = self.topology.live_slots().collect();
        let live = |slot| live.contains(&slot);
        self.admin.shared.decider.scheduler.retain(&live);
        self.admin.events.retain(&live);
    }

    /// One line of what stands.
    pub fn tell(&self) {
        let snapshot = self.admin.shared.decider.store.load();
        tracing::info!(
            endpoints = snapshot.endpoints.len(),
            pools = snapshot.pools.len(),
            routes = snapshot.routes.all().len(),
            "resources stand"
        );
    }
}
