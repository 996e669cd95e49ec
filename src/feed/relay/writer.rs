//! Makes Redis say what the mirror says: the only one who writes, so that the last write of a field is its newest.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, FromRedisValue, RedisResult};
use tokio::time::{Instant, sleep, timeout};

use super::Relay;
use super::mirror::Field;
use crate::feed::redis::Connection;
use crate::feed::redis::link::Link;
use crate::index::shared::{PREFIX, key};

/// Fields written in one round trip, two commands each.
const BATCH: usize = 512;
/// Time that a key lives without a refresh, seconds. Kthena's routers drop fields of this age.
const LIFE: u64 = 86_400;
/// Time after which everything held is written anew, so that nothing in use comes near that age.
const REFRESH: Duration = Duration::from_hours(6);
/// Longest pause between two looks at what there is to do.
const LOOK: Duration = Duration::from_millis(200);
/// Pause after a failure.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// How long leftovers of a former run wait for an engine that does not answer.
const ENGINE_GRACE: Duration = Duration::from_secs(30);
/// Keys looked at in one step of a search, and the pause between two: about 5,000 keys a second.
const SEARCHED: usize = 512;
const BETWEEN_STEPS: Duration = Duration::from_millis(100);

/// The task that writes.
pub struct Writer<'a> {
    relay: &'a Relay,
    connection: Connection,
    link: Option<Arc<Link>>,
    /// The run of the Redis process that was last written to.
    run: Option<String>,
    /// Where a search for claims of ours that nobody holds goes on.
    search: Option<u64>,
    stepped: Instant,
    refreshed: Instant,
    began: Instant,
}

impl<'a> Writer<'a> {
    /// Has written nothing.
    pub fn new(relay: &'a Relay, connection: Connection) -> Self {
        let now = Instant::now();
        Self {
            relay,
            connection,
            link: None,
            run: None,
            // What a former run left and the engine holds no more.
            search: Some(0),
            stepped: now,
            refreshed: now,
            began: now,
        }
    }

    /// Writes until dropped.
    pub async fn run(mut self) {
        loop {
            let Some(link) = self.connection.link() else {
                sleep(AFTER_FAILURE).await;
                continue;
            };
            let done = match self.step(&link).await {
                Ok(done) => done,
                Err(error) => {
                    self.connection.failed(&error);
                    sleep(AFTER_FAILURE).await;
                    continue;
                }
            };
            if !done {
                // Woken or not, there may be a search to go on with.
                let _ = timeout(LOOK, self.relay.changed.notified()).await;
            }
        }
    }

    /// One round trip; false if there was nothing to do.
    async fn step(&mut self, link: &Arc<Link>) -> RedisResult<bool> {
        if self.link.as_ref().is_none_or(|known| !Arc::ptr_eq(known, link)) {
            let run = run_of(link).await;
            // Another process, or one that does not say: it may have lost what was written, or have it back.
            if run.is_none() || run != self.run {
                self.relay.state.lock().mirror.write_all();
                self.search = Some(0);
            }
            self.run = run;
            self.link = Some(Arc::clone(link));
        }
        if self.refreshed.elapsed() >= REFRESH {
            let mut state = self.relay.state.lock();
            if state.is_connected() {
                state.mirror.write_all();
                self.refreshed = Instant::now();
            }
        }
        if self.write(link).await? {
            return Ok(true);
        }
        self.search(link).await?;
        Ok(false)
    }

    async fn write(&mut self, link: &Link) -> RedisResult<bool> {
        let (taken, commands) = {
            let mut state = self.relay.state.lock();
            if state.mirror.take_lost_removals() {
                self.search = Some(0);
            }
            let taken = state.mirror.take_unwritten(BATCH);
            let stamp = state.stamp();
            let commands: Vec<Cmd> = taken
                .iter()
                .flat_map(|(field, claimed)| {
                    let key = key(state.mirror.model(*field), field.hash);
                    self.relay.commands(&key, claimed.then_some(stamp))
                })
                .collect();
            (taken, commands)
        };
        if taken.is_empty() {
            return Ok(false);
        }
        match link.all(commands).await {
            Ok(_) => Ok(true),
            Err(error) => {
                self.relay.state.lock().mirror.put_back(&taken);
                Err(error)
            }
        }
    }

    /// One step of the search for claims of ours that nobody holds: of a former run, or of a Redis that came back with what
    /// had been removed. What the engine still holds was announced by its history, and stays.
    async fn search(&mut self, link: &Link) -> RedisResult<()> {
        let Some(cursor) = self.search else { return Ok(()) };
        if matches!(link, Link::Cluster(_)) {
            // Every node would have to be asked; claims of former processes end with their time, and by their age.
            self.search = None;
            return Ok(());
        }
        let may_begin = self.relay.state.lock().has_joined() || self.began.elapsed() >= ENGINE_GRACE;
        if !may_begin || self.stepped.elapsed() < BETWEEN_STEPS {
            return Ok(());
        }
        self.stepped = Instant::now();
        let mut scan = redis::cmd("SCAN");
        scan.arg(cursor).arg("MATCH").arg(format!("{PREFIX}*")).arg("COUNT").arg(SEARCHED);
        let mut found = link.all(vec![scan]).await?;
        let (next, keys) = match found.pop() {
            Some(found) => <(u64, Vec<String>)>::from_redis_value(found)?,
            None => (0, Vec::new()),
        };
        let fields: Vec<Field> = {
            let state = self.relay.state.lock();
            keys.iter().filter_map(|key| field_of(key, |model| state.mirror.known_model(model))).collect()
        };
        let claimed = self.claimed(link, &fields).await?;
        let void: Vec<Cmd> = {
            let state = self.relay.state.lock();
            let void = claimed.into_iter().filter(|field| !state.mirror.claims(*field));
            void.flat_map(|field| self.relay.commands(&key(state.mirror.model(field), field.hash), None))
                .collect()
        };
        if !void.is_empty() {
            link.all(void).await?;
        }
        self.search = (next != 0).then_some(next);
        Ok(())
    }

    /// Those of the fields that are claimed in our name.
    async fn claimed(&self, link: &Link, fields: &[Field]) -> RedisResult<Vec<Field>> {
        if fields.is_empty() {
            return Ok(Vec::new());
        }
        let asks: Vec<Cmd> = {
            let state = self.relay.state.lock();
            let ask = |field: &Field| {
                let mut ask = redis::cmd("HEXISTS");
                ask.arg(key(state.mirror.model(*field), field.hash)).arg(&self.relay.config.identity);
                ask
            };
            fields.iter().map(ask).collect()
        };
        let mut claimed = Vec::new();
        for (field, found) in fields.iter().zip(link.all(asks).await?) {
            if bool::from_redis_value(found)? {
                claimed.push(*field);
            }
        }
        Ok(claimed)
    }
}

impl Relay {
    /// The commands that claim a block at a time, or give it up. Both let the key live on for whoever else is in it.
    fn commands(&self, key: &str, claimed: Option<u64>) -> [Cmd; 2] {
        let identity = &self.config.identity;
        let mut write = match claimed {
            Some(_) => redis::cmd("HSET"),
            None => redis::cmd("HDEL"),
        };
        write.arg(key).arg(identity);
        if let Some(time) = claimed {
            write.arg(time);
        }
        let mut live = redis::cmd("EXPIRE");
        live.arg(key).arg(LIFE);
        [write, live]
    }
}

fn field_of(key: &str, model: impl Fn(&str) -> Option<u16>) -> Option<Field> {
    let (name, hash) = key.strip_prefix(PREFIX)?.rsplit_once('@')?;
    Some(Field { model: model(name)?, hash: hash.parse().ok()? })
}

/// Which process answers; none if it does not say.
async fn run_of(link: &Link) -> Option<String> {
    let mut info = redis::cmd("INFO");
    info.arg("server");
    let found = link.all(vec![info]).await.ok()?.pop()?;
    let text = String::from_redis_value(found).ok()?;
    text.lines().find_map(|line| line.strip_prefix("run_id:")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_a_model_of_any_name_and_a_block() {
        let model = |name: &str| (name == "org/m@v1").then_some(3);
        assert_eq!(field_of(&key("org/m@v1", 7), model), Some(Field { model: 3, hash: 7 }));
        assert_eq!(field_of(&key("other", 7), model), None);
        assert_eq!(field_of("matrix:kv:block:org/m@v1@x", model), None);
        assert_eq!(field_of("vllm:kv:block:org/m@v1@7", model), None);
    }
}
