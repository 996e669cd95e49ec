//! The task of one endpoint: asks for pages and for the list of models, each in its own rhythm, one at a time.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tracing::{info, trace, warn};

use crate::feed::client::{Bounds, Client, Failure};
use crate::state::Endpoint;
use crate::state::health::State;

use super::adapters::parse_models;
use super::observer::{Observer, Page, ScrapeStatus};
use super::{OnRestart, ScrapeConfig};

/// Time without an answer after which an endpoint that used to answer is warned of: its signals are stale by then.
const QUIET_UNTIL_WARNED: Duration = Duration::from_secs(2);

/// What a worker shares with the scraper.
#[derive(Debug)]
pub struct Shared {
    /// What was found out.
    pub status: Mutex<ScrapeStatus>,
    /// Asks for the list of models.
    pub models: Notify,
}

/// Everything a task needs.
pub struct Worker {
    /// The endpoint.
    pub endpoint: Arc<Endpoint>,
    /// Rhythm and limits.
    pub config: ScrapeConfig,
    /// Called with the slot when the engine restarted.
    pub on_restart: OnRestart,
    /// Shared with the scraper.
    pub shared: Arc<Shared>,
}

impl Worker {
    /// Works until it is dropped.
    pub async fn run(self) {
        let bounds = Bounds {
            timeout: self.config.timeout,
            max_body: self.config.max_page,
            // One for metrics, one for the list of models.
            connections: 2,
        };
        let client = Client::new(&self.endpoint.destination, bounds);
        // A list that does not come must not hold up the pages.
        tokio::join!(self.follow_pages(&client), self.follow_models(&client));
    }

    async fn follow_pages(&self, client: &Client) {
        let mut observer = Observer::new(&self.endpoint, self.config.kv_usage);
        let mut known = (self.endpoint.health.state(), self.endpoint.health.is_wedged());
        let mut answered = false;
        let mut quiet = Quiet::default();
        loop {
            let began = Instant::now();
            let answers = self.scrape(client, &mut observer, began).await;
            self.log_quiet(&mut quiet, answers);
            // The list may be new whenever an engine comes up.
            if answers && !answered {
                self.shared.models.notify_one();
            }
            answered = answers;
            self.log_change(&mut known);
            // An engine that takes longer than the interval gets time for others than us.
            let rest = Instant::now() + self.config.interval / 2;
            sleep_until(rest.max(began + jittered(self.config.interval))).await;
        }
    }

    /// One page; whether any HTTP answer came.
    async fn scrape(&self, client: &Client, observer: &mut Observer, began: Instant) -> bool {
        let endpoint = &self.endpoint;
        let own = endpoint.booked.at_engine();
        match client.get(observer.path()).await {
            Ok(answer) => {
                endpoint.health.accepted();
                trace!(endpoint = %endpoint.name, status = answer.status, bytes = answer.body.len(), "page");
                let restarted = if answer.status == 200 {
                    let page = Page { body: &answer.body, whole: answer.whole, began, own };
                    observer.observe(endpoint, page)
                } else {
                    observer.answered(endpoint, answer.status);
                    false
                };
                let mut status = self.shared.status.lock();
                if *status != *observer.status() {
                    status.clone_from(observer.status());
                }
                drop(status);
                if restarted {
                    info!(endpoint = %endpoint.name, address = &*endpoint.destination, "engine restarted");
                    (self.on_restart)(endpoint);
                    self.shared.models.notify_one();
                }
                true
            }
            Err(failure) => {
                trace!(endpoint = %endpoint.name, %failure, "no page");
                match failure {
                    Failure::Refused => {
                        endpoint.health.refused();
                    }
                    Failure::Silent => endpoint.health.accepted(),
                    Failure::Local => {}
                }
                false
            }
        }
    }

    fn log_change(&self, known: &mut (State, bool)) {
        let (endpoint, health) = (&self.endpoint, &self.endpoint.health);
        let now = (health.state(), health.is_wedged());
        if known.0 != now.0 {
            info!(
                endpoint = %endpoint.name,
                address = &*endpoint.destination,
                before = known.0.name(),
                now = now.0.name(),
                "endpoint changed state"
            );
        }
        if known.1 != now.1 {
            info!(
                endpoint = %endpoint.name,
                address = &*endpoint.destination,
                wedged = now.1,
                "{}",
                if now.1 { "engine stands still with requests open" } else { "engine moves again" }
            );
        }
        *known = now;
    }

    /// Warns once each time the endpoint falls silent.
    fn log_quiet(&self, quiet: &mut Quiet, answers: bool) {
        let (endpoint, now) = (&self.endpoint, Instant::now());
        if answers {
            quiet.last_answer = Some(now);
            if std::mem::take(&mut quiet.warned) {
                info!(endpoint = %endpoint.name, address = &*endpoint.destination, "scrapes are answered again");
            }
        } else if let Some(last) = quiet.last_answer
            && now.duration_since(last) >= QUIET_UNTIL_WARNED
            && !std::mem::replace(&mut quiet.warned, true)
        {
            warn!(
                endpoint = %endpoint.name,
                address = &*endpoint.destination,
                "scrapes get no answer: the signals of this endpoint are stale, and it is rated by our own bookings"
            );
        }
    }

    async fn follow_models(&self, client: &Client) {
        loop {
            let next = Instant::now() + jittered(self.config.models_interval);
            tokio::select! {
                () = sleep_until(next) => {}
                () = self.shared.models.notified() => {}
            }
            let began = Instant::now();
            if let Ok(answer) = client.get("/v1/models").await
                && answer.status == 200
                && answer.whole
                && let Some(adapters) = parse_models(&answer.body)
                && self.endpoint.adapters.load().as_deref() != Some(&adapters)
            {
                self.endpoint.adapters.store(Some(adapters.into()));
            }
            // However many requests miss a model, they ask for the list once per interval.
            sleep_until(began + self.config.interval).await;
        }
    }
}

/// Whether scrapes are answered.
#[derive(Debug, Default)]
struct Quiet {
    last_answer: Option<Instant>,
    warned: bool,
}

/// Ten per cent more or less, so that the scrapes of many endpoints and replicas do not fall together.
fn jittered(interval: Duration) -> Duration {
    interval.mul_f64(rand::random_range(0.9..1.1))
}
