//! Where resources, configuration and signals come from, first at the start and then whenever they change.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::effect::{Effect, report};
use crate::admin::Admin;
use crate::admission::QueueSettings;
use crate::admission::limits::{Doors, Limiter, Outage};
use crate::args::{AdmissionArgs, Enforcement, Secret, ServeArgs};
use crate::config::{self, TokenizerSettings};
use crate::decide::{Tokenizing, Wait};
use crate::document::Problem;
use crate::feed::file::{self, Resources, Timing, Watch};
use crate::feed::kv_events::EventFeed;
use crate::feed::redis::limits::{Allowed, OnHealth, RedisStores};
use crate::feed::redis::{Address, Connection, Health, RedisIndex};
use crate::feed::render::Renderer;
use crate::feed::scrape::{ScrapeConfig, Scraper};
use crate::index::shared::SharedIndex;
use crate::metrics::{Degraded, Metrics};
use crate::prompt::{Tokenizers, tokenize};
use crate::schedule::plugin::Kind;
use crate::schedule::{Pipeline, Scheduler};
use crate::session::Key;
use crate::settle::OnUnknownModel;
use crate::topology::GRACE;

/// The name under which problems of `--config-text` are reported.
const CONFIG_TEXT: &str = "--config-text";

/// The configuration to start with.
#[derive(Debug)]
pub struct FirstConfig {
    /// The pipeline.
    pub pipeline: Pipeline,
    /// Where tokenizers are.
    pub tokenizers: Arc<TokenizerSettings>,
    /// What queues go by.
    pub queue: QueueSettings,
    /// What is wrong with it.
    pub problems: Vec<Problem>,
}

/// What queues go by before any configuration is read: what Kthena's environment variables say.
pub fn queue_of_environment() -> Result<QueueSettings> {
    let mut queue = QueueSettings::default();
    let notes = config::kthena_env::apply(&mut queue, |name| std::env::var(name).ok())?;
    for note in notes {
        tracing::warn!("{note}");
    }
    Ok(queue)
}

/// The configuration to start with. Errors end the start: there is no last good.
pub fn first_config(
    args: &ServeArgs,
    extra: &'static [&'static Kind],
    queue: &Arc<QueueSettings>,
) -> Result<FirstConfig> {
    let (name, text) = match (&args.config, &args.config_text) {
        (Some(path), _) => {
            (path.clone(), file::text_of(path).map_err(|why| anyhow::anyhow!("{}: {why}", path.display()))?)
        }
        (None, Some(text)) => (PathBuf::from(CONFIG_TEXT), text.as_str().into()),
        (None, None) => {
            let pipeline = Pipeline::assemble("default", crate::plugins::default_parts(), None)?;
            let queue = args.admission.over(QueueSettings::clone(queue));
            return Ok(FirstConfig { pipeline, tokenizers: Arc::default(), queue, problems: Vec::new() });
        }
    };
    let read = config::read(&name, text, &options(args, extra).with(queue), None);
    match read.pipeline {
        Some(pipeline) => Ok(FirstConfig {
            pipeline,
            tokenizers: Arc::new(read.tokenizers),
            queue: args.admission.over(read.queue),
            problems: read.problems,
        }),
        None => bail!("the scheduler configuration cannot be used:\n{}", listed(&read.problems)),
    }
}

fn options(args: &ServeArgs, extra: &'static [&'static Kind]) -> config::Options<'static> {
    config::Options {
        allow_unsupported: args.allow_unsupported,
        shared_index: args.redis_url.is_some(),
        extra_plugins: extra,
        queue: None,
    }
}

/// What session tokens are signed with.
pub fn session_key(args: &ServeArgs) -> Result<Key> {
    let Some(path) = &args.session_key_file else { return Ok(Key::random()) };
    let of = || format!("--session-key-file {}", path.display());
    let bytes = std::fs::read(path).with_context(of)?;
    Key::from_file(&bytes).with_context(of)
}

/// Says once that tokens are of this process alone, when a pipeline begins to use them.
pub fn tell_of_tokens(key: &Key, before: Option<&Pipeline>, pipeline: &Pipeline) {
    if pipeline.uses_tokens() && !key.is_shared() && !before.is_some_and(Pipeline::uses_tokens) {
        tracing::warn!(
            "session tokens are valid in this process only; give --session-key-file the same key for all replicas"
        );
    }
}

/// The scraper. An engine that started anew holds nothing of what was sent to the old one, nor of what that announced.
pub fn scraper(args: &ServeArgs, scheduler: &Arc<Scheduler>, events: &EventFeed) -> Scraper {
    let config = ScrapeConfig { interval: args.scrape_interval, ..ScrapeConfig::default() };
    let (scheduler, events) = (Arc::clone(scheduler), events.clone());
    let on_restart = move |endpoint: &Arc<crate::state::Endpoint>| {
        scheduler.forget(endpoint);
        events.restarted(endpoint);
    };
    Scraper::new(config, Arc::new(on_restart))
}

/// The way to token ids: worker threads here, and engines and services elsewhere.
pub fn tokenizing(
    args: &ServeArgs,
    renderer: &Renderer,
    sources: Arc<TokenizerSettings>,
) -> Result<Tokenizing> {
    let options = tokenize::Options { dir: args.tokenizer_dir.clone(), ..tokenize::Options::default() };
    let service = Tokenizers::new(options, Some(Arc::new(renderer.clone())))
        .context("the threads that tokenize cannot be started")?;
    let wait = Wait { least: args.tokenize_least_wait, most: args.tokenize_most_wait };
    Ok(Tokenizing { service: Some(service), sources: ArcSwap::new(sources), wait })
}

/// The limiter and its door.
pub fn doors(
    args: &ServeArgs,
    metrics: &Arc<Metrics>,
    replica: &str,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Doors> {
    let redis_url = args.redis_url.as_ref().map(Secret::expose);
    let allowed = Allowed::by_flags(redis_url, args.redis_allow.iter().map(Secret::expose))?;
    let outage = args.admission.limit_outage;
    let on_health = limiter_health(Arc::clone(metrics), outage);
    let stores = RedisStores::new(allowed, replica, on_health, stop.clone(), tasks.clone());
    let limiter = Arc::new(Limiter::new(args.admission.limits(), Some(Arc::new(stores))));
    Ok(match args.admission.limit_enforcement {
        Enforcement::Picker => Doors::Picker(limiter),
        Enforcement::Envoy => Doors::Envoy(limiter),
    })
}

/// Says how stores do: the gauge is 1 while any does not answer.
fn limiter_health(metrics: Arc<Metrics>, outage: Outage) -> OnHealth {
    let failing: Mutex<HashSet<String>> = Mutex::default();
    let meanwhile = match outage {
        Outage::Local => "each replica counts its part of the limits",
        Outage::Open => "nothing is limited",
        Outage::Closed => "limited requests are answered 503",
    };
    Arc::new(move |address, health| {
        let mut failing = failing.lock();
        match health {
            Health::Well => {
                failing.remove(&address.to_string());
                tracing::info!(redis = %address, "the Redis of token limits answers");
            }
            Health::Failing(why) => {
                failing.insert(address.to_string());
                tracing::warn!(redis = %address, why, meanwhile, "the Redis of token limits does not answer");
            }
        }
        metrics.set_degraded(Degraded::Limiter, !failing.is_empty());
    })
}

/// The block index in Redis, if the flags name one.
pub fn shared_index(
    args: &ServeArgs,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Option<Arc<dyn SharedIndex>>> {
    let Some(url) = &args.redis_url else { return Ok(None) };
    let address: Address = url.expose().parse().context("--redis-url")?;
    let connection = Connection::new(address.clone());
    let metrics = Arc::clone(metrics);
    let report = move |health| {
        metrics.set_degraded(Degraded::Redis, health != Health::Well);
        match health {
            Health::Well => tracing::info!(redis = %address, "the shared block index answers"),
            Health::Failing(why) => tracing::warn!(
                redis = %address,
                why,
                "the shared block index does not answer: picks go on without it until it does; check --redis-url"
            ),
        }
    };
    tasks.spawn(until_stopped(stop.clone(), connection.clone().keep(report)));
    Ok(Some(Arc::new(RedisIndex::new(connection))))
}

/// What to do when an engine does not serve a model: ask it again what it serves.
pub fn refresh_models(scraper: &Scraper) -> OnUnknownModel {
    let scraper = scraper.clone();
    Arc::new(move |endpoint| scraper.refresh_models(endpoint))
}

/// Starts to follow the resources in `dir`. Returns once the first stand.
///
/// # Errors
///
/// The folder cannot be listed.
pub fn follow_files(
    dir: &Path,
    admin: &Arc<Admin>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<()> {
    // The watch is created first: what changes while the first version is read is seen.
    let watch = Watch::new(dir, Timing::default());
    let effect = Effect::new(Arc::clone(admin));
    let mut feed = ResourceFeed { dir: dir.to_owned(), resources: Resources::default(), effect };
    feed.reload()?;
    tasks.spawn(until_stopped(stop.clone(), follow_resources(feed, watch, Arc::clone(admin))));
    Ok(())
}

/// Starts to follow the scheduler configuration, if it is a file.
pub fn follow_config(
    args: &ServeArgs,
    extra: &'static [&'static Kind],
    queue: &Arc<QueueSettings>,
    admin: &Arc<Admin>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) {
    if let Some(path) = args.config.clone() {
        let watch = Watch::new(&path, Timing::default());
        let reload = Reload {
            path,
            options: options(args, extra),
            queue: Arc::clone(queue),
            flags: args.admission.clone(),
            admin: Arc::clone(admin),
        };
        let follow = reload_when_changed(reload, watch);
        tasks.spawn(until_stopped(stop.clone(), follow));
    }
}

/// Runs a feed until `stop`.
pub async fn until_stopped(stop: CancellationToken, feed: impl Future<Output = ()>) {
    tokio::select! {
        () = stop.cancelled() => {}
        () = feed => {}
    }
}

struct ResourceFeed {
    dir: PathBuf,
    resources: Resources,
    effect: Effect,
}

impl ResourceFeed {
    fn reload(&mut self) -> Result<()> {
        let loaded = file::load(&self.dir)
            .map_err(|error| anyhow::anyhow!("--resources {}: {error}", self.dir.display()))?;
        let mut lowered = self.resources.reload(loaded);
        self.effect.stand(std::mem::take(&mut lowered.world));
        self.effect.show(lowered);
        self.effect.tell();
        Ok(())
    }
}

async fn follow_resources(mut feed: ResourceFeed, mut watch: Watch, admin: Arc<Admin>) {
    let mut minute = tokio::time::interval(GRACE);
    loop {
        tokio::select! {
            () = watch.changed() => {}
            _ = minute.tick() => {
                feed.effect.forget_the_gone();
                continue;
            }
        }
        if let Err(error) = feed.reload() {
            tracing::warn!("{error:#}; the last resources stay");
            admin.shared.metrics.set_degraded(Degraded::Resources, true);
        }
    }
}

/// How the scheduler configuration is read again.
struct Reload {
    path: PathBuf,
    options: config::Options<'static>,
    /// What queues go by where the file says nothing.
    queue: Arc<QueueSettings>,
    flags: AdmissionArgs,
    admin: Arc<Admin>,
}

async fn reload_when_changed(reload: Reload, mut watch: Watch) {
    loop {
        watch.changed().await;
        reload_config(&reload);
    }
}

fn reload_config(reload: &Reload) {
    let Reload { path, options, queue, flags, admin } = reload;
    let text = match file::text_of(path) {
        Ok(text) => text,
        Err(why) => {
            tracing::warn!("{}: {why}; the last configuration stays", path.display());
            admin.shared.metrics.set_degraded(Degraded::Config, true);
            return;
        }
    };
    let scheduler = &admin.shared.decider.scheduler;
    let read = config::read(path, text, &options.with(queue), Some(&scheduler.pipeline()));
    report("the scheduler configuration", &read.problems);
    admin.shared.metrics.set_degraded(Degraded::Config, read.pipeline.is_none());
    match read.pipeline {
        Some(pipeline) => {
            let key = &admin.shared.decider.settings.session_key;
            tell_of_tokens(key, Some(&scheduler.pipeline()), &pipeline);
            scheduler.replace(pipeline);
            admin.shared.decider.admission.replace(flags.over(read.queue));
            let tokenizing = &admin.shared.decider.tokenizing;
            tokenizing.sources.store(Arc::new(read.tokenizers));
            tokenizing.follow(admin.shared.decider.store.load().pools.iter().map(|pool| &**pool));
            tracing::info!("a new scheduler configuration stands");
        }
        None => tracing::warn!("the scheduler configuration is invalid; the last one stays"),
    }
    admin.documents.write().config_problems = read.problems;
}

fn listed(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect()
}
