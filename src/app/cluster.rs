//! Resources from a cluster: how it is reached, what of it is read, and what readiness and gauges say of it.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::FutureExt;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::effect::Effect;
use super::feeds::until_stopped;
use crate::admin::Admin;
use crate::args::ServeArgs;
use crate::feed::kube::{Objects, Scope, Standing, Unnamed, Watches, follow};
use crate::metrics::Degraded;
use crate::resources::lower::Lowered;
use crate::state::{ObjectName, PoolKind, PoolName};
use crate::status::{self, Report, Writer};
use crate::topology::GRACE;

/// Pause before the cluster is read anew.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// What readiness is held back by until everything that must be read was listed once.
const WATCHES: &str = "watches";
/// What readiness is held back by until what was listed is served.
const RESOURCES: &str = "resources";
/// How long the API server may be silent before a connection counts as dead: longer than a watch lasts.
const SILENCE: Duration = Duration::from_secs(90);
/// How long a connection to the API server may take: the pause after a failed one is part of our staleness.
const CONNECT: Duration = Duration::from_secs(3);

/// Neither files nor a cluster say what to serve.
#[derive(Debug, thiserror::Error)]
#[error(
    "serve needs resources: give --resources DIR with YAML files, or --kubeconfig FILE outside of a cluster"
)]
pub struct NoSource(#[source] kube::config::InferConfigError);

/// How the cluster is reached: by the file that the flag names, by `KUBECONFIG` or `~/.kube/config`, or as a pod of it.
///
/// # Errors
///
/// There is no cluster, or a file that does not say where.
pub async fn config(args: &ServeArgs) -> Result<Config> {
    let mut config = match &args.kubernetes.kubeconfig {
        Some(file) => {
            let of = || format!("--kubeconfig {}", file.display());
            let kubeconfig = Kubeconfig::read_from(file).with_context(of)?;
            Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
                .await
                .with_context(of)?
        }
        None => Config::infer().await.map_err(NoSource)?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    Ok(config)
}

/// What of the cluster is read.
pub fn scope(args: &ServeArgs) -> Scope {
    let flags = &args.kubernetes;
    let in_namespace = |name: &str| ObjectName::new(flags.pool_namespace(), name);
    let unnamed = flags.endpoint_selector.as_ref().zip(flags.endpoint_target_ports.as_ref());
    Scope {
        namespaces: flags.namespaces.iter().cloned().collect(),
        pool: flags.pool_name.as_deref().map(in_namespace),
        unnamed: unnamed.map(|(selector, ports)| Unnamed {
            name: in_namespace("endpoints"),
            selector: selector.labels().clone(),
            ports: ports.ports().to_vec(),
        }),
    }
}

/// Starts to follow the cluster. Readiness waits for what nothing can be served without.
pub fn start(
    config: Config,
    scope: Scope,
    admin: &Arc<Admin>,
    watches: &Arc<Watches>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<()> {
    let client = Client::try_from(config).context("the cluster's address or certificates cannot be used")?;
    admin.readiness.hold(RESOURCES, "the cluster is not read yet");
    tasks.spawn(tell(Arc::clone(admin), Arc::clone(watches), stop.clone()));
    let (told, reports) = watch::channel(Arc::default());
    let writer = Writer::new(client.clone(), admin.shared.decider.settings.replica.to_string());
    tasks.spawn(until_stopped(stop.clone(), writer.follow(reports)));
    let cluster = Cluster::new(Arc::clone(admin), scope.pool.clone(), told);
    let cluster = Arc::new(Mutex::new(cluster));
    tasks.spawn(forget_the_gone(Arc::clone(&cluster), stop.clone()));
    tasks.spawn(follow_on(client, scope, Arc::clone(watches), cluster, stop.clone()));
    Ok(())
}

/// Follows the cluster until `stop`, even if something that it holds makes the reader panic: a world that nobody follows any
/// more would look current for ever.
async fn follow_on(
    client: Client,
    scope: Scope,
    watches: Arc<Watches>,
    cluster: Arc<Mutex<Cluster>>,
    stop: CancellationToken,
) {
    loop {
        let at_work = stop.child_token();
        let sink = |standing| cluster.lock().stand(standing);
        let following = follow(client.clone(), scope.clone(), Arc::clone(&watches), at_work.clone(), sink);
        let ended = AssertUnwindSafe(following).catch_unwind().await;
        at_work.cancel();
        if stop.is_cancelled() {
            return;
        }
        if ended.is_err() {
            tracing::error!("reading the cluster failed, which is an error of this program: it is read anew");
        }
        watches.clear();
        tokio::time::sleep(AFTER_PANIC).await;
    }
}

struct Cluster {
    effect: Effect,
    pool: Option<PoolName>,
    admin: Arc<Admin>,
    objects: Objects,
    told: watch::Sender<Arc<Vec<Report>>>,
}

impl Cluster {
    fn new(admin: Arc<Admin>, pool: Option<ObjectName>, told: watch::Sender<Arc<Vec<Report>>>) -> Self {
        let pool = pool.map(|object| PoolName { kind: PoolKind::InferencePool, object });
        Self {
            effect: Effect::new(Arc::clone(&admin)),
            pool,
            admin,
            objects: Objects { read: Lowered::default(), versions: HashMap::new() },
            told,
        }
    }

    fn stand(&mut self, standing: Standing) {
        self.effect.stand(standing.world);
        if let Some(mut objects) = standing.objects {
            self.effect.judge(&mut objects.read);
            self.effect.show(objects.read.clone());
            self.objects = objects;
            self.effect.tell();
        }
        let snapshot = self.admin.shared.decider.store.load_full();
        let reports = status::reports(&self.objects, &snapshot, &standing.unroutable);
        self.told.send_if_modified(|told| {
            let is_new = **told != reports;
            *told = Arc::new(reports);
            is_new
        });
        self.effect.show_pods(standing.pod_problems, standing.unroutable);
        let store = &self.admin.shared.decider.store;
        match &self.pool {
            Some(pool) if store.load().pool(pool).is_none() => {
                self.admin.readiness.hold(RESOURCES, format!("InferencePool {} does not exist", pool.object));
            }
            _ => self.admin.readiness.release(RESOURCES),
        }
    }
}

/// Pods that are gone are forgotten even where nothing changes any more.
async fn forget_the_gone(cluster: Arc<Mutex<Cluster>>, stop: CancellationToken) {
    let mut grace = tokio::time::interval(GRACE);
    while stop.run_until_cancelled(grace.tick()).await.is_some() {
        cluster.lock().effect.forget_the_gone();
    }
}

/// Says to readiness and gauges how current the watches are.
async fn tell(admin: Arc<Admin>, watches: Arc<Watches>, stop: CancellationToken) {
    let mut changed = watches.changed();
    loop {
        match watches.missing() {
            Some(missing) => admin.readiness.hold(WATCHES, missing),
            None => admin.readiness.release(WATCHES),
        }
        admin.shared.metrics.set_degraded(Degraded::Kubernetes, watches.is_behind());
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changed.changed() => if changed.is_err() { return },
        }
    }
}
