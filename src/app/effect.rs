//! Puts what feeds describe into effect: topology, snapshot, and everything that follows endpoints and pools.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::time::Instant;

use crate::admin::Admin;
use crate::document::{Problem, Severity};
use crate::metrics::Degraded;
use crate::resources::lower::{Lowered, Unroutable};
use crate::topology::{Topology, World};

/// The topology in effect.
#[derive(Debug)]
pub struct Effect {
    topology: Topology,
    reported: HashSet<Problem>,
    reported_of_pods: HashSet<Problem>,
    unroutable: HashSet<Unroutable>,
    admin: Arc<Admin>,
}

impl Effect {
    /// Nothing stands yet.
    pub fn new(admin: Arc<Admin>) -> Self {
        Self {
            topology: Topology::default(),
            reported: HashSet::new(),
            reported_of_pods: HashSet::new(),
            unroutable: HashSet::new(),
            admin,
        }
    }

    /// Makes `world` what requests see.
    pub fn stand(&mut self, world: World) {
        let admin = &self.admin;
        let snapshot = self.topology.apply(world, Instant::now());
        let tokenizing = &admin.shared.decider.tokenizing;
        tokenizing.follow(snapshot.pools.iter().map(|pool| &**pool));
        admin.scraper.follow(&snapshot.endpoints);
        admin.events.follow(&snapshot.endpoints);
        let pools = snapshot.pools.clone();
        let routes: HashSet<Arc<str>> =
            snapshot.routes.all().iter().map(|route| Arc::clone(&route.label)).collect();
        // Before the snapshot: a request that sees a limit finds its bucket.
        admin.doors.watched().follow(snapshot.routes.all().iter().filter_map(|route| route.limit.as_ref()));
        let admission = &admin.shared.decider.admission;
        admission.prepare(&pools);
        admin.shared.decider.store.replace(snapshot);
        // After it: whoever leaves a queue now is picked an endpoint of this snapshot.
        admission.follow(&pools, &|route| routes.contains(route));
        self.forget_the_gone();
    }

    /// Adds what only the flags tell to what is wrong with documents.
    pub fn judge(&self, lowered: &mut Lowered) {
        let limiter = self.admin.doors.watched();
        lowered.judge_stores(|address| limiter.allows(address));
    }

    /// Shows documents and what is wrong with them; what is new of that is logged.
    pub fn show(&mut self, mut lowered: Lowered) {
        self.judge(&mut lowered);
        let settings = self.admin.shared.decider.tokenizing.sources.load();
        let unlisted = lowered.tokenizer_urls.iter().filter(|(url, _)| !settings.lists(url));
        lowered.problems.extend(unlisted.map(|(_, problem)| problem.clone()));
        let had_problems = !self.reported.is_empty();
        report_new("resources", &lowered.problems, &mut self.reported);
        if had_problems && self.reported.is_empty() {
            tracing::info!("nothing is wrong with the resources any more");
        }
        self.admin.shared.metrics.set_degraded(Degraded::Resources, lowered.has_errors());
        let mut documents = self.admin.documents.write();
        documents.resources = lowered.dump;
        documents.resource_problems = lowered.problems;
    }

    /// Shows what is wrong with pods; what is new of that is logged.
    pub fn show_pods(&mut self, problems: Vec<Problem>, unroutable: Vec<Unroutable>) {
        report_new("pods", &problems, &mut self.reported_of_pods);
        let unroutable: HashSet<Unroutable> = unroutable.into_iter().collect();
        for Unroutable { pod, why, .. } in unroutable.difference(&self.unroutable) {
            tracing::warn!(%pod, why, "a ready pod gets no requests");
        }
        let mut documents = self.admin.documents.write();
        documents.pod_problems = problems;
        documents.unroutable = unroutable.iter().cloned().collect();
        self.unroutable = unroutable;
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

/// Logs those of `problems` that were not there before.
fn report_new(of: &str, problems: &[Problem], before: &mut HashSet<Problem>) {
    let new: Vec<Problem> = problems.iter().filter(|problem| !before.contains(problem)).cloned().collect();
    report(of, &new);
    *before = problems.iter().cloned().collect();
}

/// Logs problems, each with its place and advice.
pub fn report(of: &str, problems: &[Problem]) {
    for problem in problems {
        match problem.severity {
            Severity::Error => tracing::error!("{of}: {}", problem.to_string().trim_end()),
            Severity::Warning => tracing::warn!("{of}: {}", problem.to_string().trim_end()),
        }
    }
}
