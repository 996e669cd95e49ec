//! Wires everything: the one place where parts are built and handed to each other.

mod certificates;
mod cluster;
mod drain;
mod effect;
mod feeds;
mod health;
mod servers;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use parking_lot::RwLock;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{Admin, Documents, exposition};
use crate::admission::Admission;
use crate::admission::limits::Limiter;
use crate::args::{DebugAccess, ServeArgs};
use crate::decide::{Decider, Settings};
use crate::decision::Ring;
use crate::extproc::{Budget, Shared};
use crate::feed::kube::Watches;
use crate::feed::kv_events::EventFeed;
use crate::feed::render::{RenderConfig, Renderer};
use crate::index::TokenIndexes;
use crate::metrics::Metrics;
use crate::prefill::Prefiller;
use crate::schedule::Scheduler;
use crate::schedule::plugin::Kind;
use crate::settle::Ledger;
use crate::snapshot::Store;
use crate::{extproc, readiness, tls};

pub use cluster::NoSource;
pub use servers::{Ports, server_builder};

/// The addresses that were bound.
#[derive(Clone, Debug, Serialize)]
pub struct Bound {
    /// ext_proc, access log, health.
    pub grpc: SocketAddr,
    /// gRPC health alone.
    pub health: SocketAddr,
    /// Metrics and debug pages.
    pub admin: SocketAddr,
    /// The validating webhook, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<SocketAddr>,
    /// ext_proc for one pool each, by its name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pools: BTreeMap<String, SocketAddr>,
}

/// A running picker.
#[derive(Debug)]
pub struct App {
    /// Where it listens.
    pub bound: Bound,
    /// What its pages show, for tests that look inside.
    pub admin: Arc<Admin>,
    args: ServeArgs,
    /// Cancelled when the listeners must close.
    closing: CancellationToken,
    /// Cancelled when everything must stop.
    stop: CancellationToken,
    grpc: tokio::task::JoinHandle<Result<(), tonic::transport::Error>>,
    tasks: TaskTracker,
}

impl App {
    /// Binds, loads resources and configuration, and serves. Plugins of your own go into `extra_plugins`.
    pub async fn start(args: ServeArgs, extra_plugins: &'static [&'static Kind]) -> Result<Self> {
        tls::install_provider();
        let ports = Ports::bind(&args).await?;
        let bound = ports.bound()?;
        let metrics = Arc::new(Metrics::default());
        let store = Arc::new(Store::default());
        let ring = Arc::new(Ring::default());
        let replica = format!("{:08x}", rand::random::<u32>());
        let stop = CancellationToken::new();
        let tasks = TaskTracker::new();
        let closing = CancellationToken::new();
        // A start that fails half-way leaves nothing behind.
        let (stopping, closed) = (stop.clone().drop_guard(), closing.clone().drop_guard());
        let tls = certificates::start(&args, &metrics, &stop, &tasks)?;
        let webhook_tls = certificates::of_webhook(&args, &metrics, &stop, &tasks)?;

        let queue = Arc::new(feeds::queue_of_environment()?);
        let feeds::FirstConfig { pipeline, tokenizers, queue: queue_settings, problems: config_problems } =
            feeds::first_config(&args, extra_plugins, &queue)?;
        effect::report("the scheduler configuration", &config_problems);
        let settings = settings(&args, &replica)?;
        feeds::tell_of_tokens(&settings.session_key, None, &pipeline);
        let renderer = Renderer::new(RenderConfig::default());
        let tokenizing = Arc::new(feeds::tokenizing(&args, &renderer, tokenizers)?);
        let tokens = Arc::new(TokenIndexes::default());
        let scheduler = Arc::new(Scheduler::new(pipeline, Arc::clone(&tokens), args.staleness));
        let admission = Arc::new(Admission::new(queue_settings, args.staleness, most_waiting(&args)));
        let events = EventFeed::new(tokens);
        let scraper = feeds::scraper(&args, &scheduler, &events);
        let ledger = Arc::new(Ledger::new(
            Arc::clone(&metrics),
            Arc::clone(&ring),
            Arc::clone(&scheduler.tokens),
            &replica,
            feeds::refresh_models(&scraper),
        ));
        let doors = feeds::doors(&args, &metrics, &replica, &stop, &tasks)?;
        let shared = Arc::new(Shared {
            decider: Decider {
                store: Arc::clone(&store),
                admission: Arc::clone(&admission),
                scheduler: Arc::clone(&scheduler),
                tokenizing: Arc::clone(&tokenizing),
                shared: feeds::shared_index(&args, &metrics, &stop, &tasks)?,
                limiter: doors.picker().cloned(),
                metrics: Arc::clone(&metrics),
                settings,
            },
            prefiller: Arc::new(Prefiller::new(args.disaggregation.settings())),
            ledger: Arc::clone(&ledger),
            metrics: Arc::clone(&metrics),
            budget: Arc::new(Budget::new(Arc::clone(&metrics), args.limits.max_buffered_bytes)),
            options: stream_options(&args),
            body_idle_timeout: args.limits.body_idle_timeout,
            decision_timeout: args.limits.decision_timeout,
            drain_over: CancellationToken::new(),
        });
        let watches = Arc::new(Watches::default());
        let documents = Documents { config_problems, ..Documents::default() };
        let documents = Arc::new(RwLock::new(documents));
        let admin = Arc::new(Admin {
            registry: exposition::registry(exposition::Sources {
                metrics: Arc::clone(&metrics),
                store: Arc::clone(&store),
                admission: Arc::clone(&admission),
                ledger: Arc::clone(&ledger),
                scraper: scraper.clone(),
                scheduler: Arc::clone(&scheduler),
                limiter: Arc::clone(doors.watched()),
                tokenizing,
                renderer,
                events: events.clone(),
                watches: Arc::clone(&watches),
                documents: Arc::clone(&documents),
                staleness: args.staleness,
            }),
            scraper,
            events,
            shared: Arc::clone(&shared),
            doors: doors.clone(),
            ring,
            readiness: Arc::default(),
            documents,
            debug_for_all: args.debug_access == DebugAccess::Any,
        });

        tasks.spawn(sweep(Arc::clone(&ledger), Arc::clone(doors.watched()), stop.clone()));
        tasks.spawn(feeds::until_stopped(stop.clone(), async move { admission.tend().await }));
        // Probes are answered while the first configuration is still being read.
        let tls = (tls.as_ref(), webhook_tls);
        let grpc = ports.serve(&args, &admin, tls, &closing, &stop, &tasks)?;
        match &args.resources {
            Some(dir) => feeds::follow_files(dir, &admin, &stop, &tasks)?,
            None => {
                let config = cluster::config(&args).await?;
                cluster::start(config, cluster::scope(&args), &admin, &watches, &stop, &tasks)?;
            }
        }
        feeds::follow_config(&args, extra_plugins, &queue, &admin, &stop, &tasks);
        admin.readiness.release(readiness::START);
        let (stop, closing) = (stopping.disarm(), closed.disarm());
        Ok(Self { bound, admin, args, closing, stop, grpc, tasks })
    }
}

fn settings(args: &ServeArgs, replica: &str) -> Result<Settings> {
    Ok(Settings {
        max_body: args.limits.max_body_bytes,
        default_pool: args.default_pool.clone(),
        trust_hints: args.obeys_hints(),
        allow_transfer_fields: args.disaggregation.allow_transfer_fields,
        usage_injection: args.usage_injection,
        decision_detail: args.decision_detail,
        whole_tables: args.emit_endpoint_scores,
        identity: args.admission.identity.clone().into(),
        session_key: Arc::new(feeds::session_key(args)?),
        replica: replica.into(),
    })
}

/// Half of all that may be held: the other half is for bodies on their way.
fn most_waiting(args: &ServeArgs) -> u64 {
    args.limits.max_buffered_bytes as u64 / 2
}

fn stream_options(args: &ServeArgs) -> extproc::Options {
    extproc::Options {
        ignore_subset: args.disable_endpoint_subset_filter,
        conformance: args.conformance,
        emit_scores: args.emit_endpoint_scores,
        attributes: args.admission.attributes().collect(),
    }
}

/// Settles what has waited long enough, four times a second.
async fn sweep(ledger: Arc<Ledger>, limiter: Arc<Limiter>, stop: CancellationToken) {
    let mut tick = tokio::time::interval(std::time::Duration::from_millis(250));
    loop {
        tokio::select! {
            _ = tick.tick() => {
                ledger.sweep();
                limiter.sweep();
            }
            () = stop.cancelled() => return ledger.settle_all(),
        }
    }
}
