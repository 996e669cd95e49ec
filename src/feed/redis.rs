//! What is shared in Redis: the block index of Kthena's engines, and the token buckets of replicas.
//!
//! `address` says where Redis is, `link` speaks to it, `connection` keeps a link. `limits` keeps buckets, and [`RedisIndex`]
//! answers questions about blocks: one round trip a question, one question for all who ask the same within a second, and nobody waits past a deadline.

pub mod address;
mod answers;
pub mod connection;
pub mod limits;
pub mod link;

use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use redis::{FromRedisValue, RedisResult};
use tokio::time::timeout;

pub use address::{Address, BadAddress};
pub use connection::{Connection, Health};

use crate::index::shared::{Answer, BlockOwners, Question, SharedIndex, key};
use answers::{Answers, Asked};
use link::Link;

/// The shared index behind one connection.
#[derive(Debug)]
pub struct RedisIndex {
    connection: Connection,
    answers: Mutex<Answers>,
}

impl RedisIndex {
    /// Asks over `connection`, which somebody else [keeps](Connection::keep).
    pub fn new(connection: Connection) -> Self {
        Self { connection, answers: Mutex::default() }
    }

    /// The answer under way or still fresh; none if the index cannot be asked.
    fn ask(&self, question: &Question) -> Option<Asked> {
        let mut answers = self.answers.lock();
        let name = answers::name_of(question);
        if let Some(asked) = answers.find(name) {
            return Some(asked);
        }
        let link = self.connection.link()?;
        let (connection, question) = (self.connection.clone(), question.clone());
        answers.admit(name, || {
            // A task of its own: whoever asked first may give up before the others do.
            let asking = tokio::spawn(async move {
                match look_up(&link, &question).await {
                    Ok(answer) => Some(Arc::new(answer)),
                    Err(error) => {
                        connection.failed(&error);
                        None
                    }
                }
            });
            asking.map(|done| done.ok().flatten()).boxed().shared()
        })
    }
}

impl SharedIndex for RedisIndex {
    fn owners(&self, question: Question) -> BoxFuture<'_, Option<Arc<Answer>>> {
        Box::pin(async move {
            let asked = self.ask(&question)?;
            match timeout(question.deadline, asked).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.connection.late();
                    None
                }
            }
        })
    }
}

/// By the target's name, and by the client's if that finds nothing.
async fn look_up(link: &Link, question: &Question) -> RedisResult<Answer> {
    let answer = owners(link, &question.model, &question.hashes).await?;
    match &question.fallback {
        Some(model) if answer.is_empty() => owners(link, model, &question.hashes).await,
        _ => Ok(answer),
    }
}

async fn owners(link: &Link, model: &str, hashes: &[u64]) -> RedisResult<Answer> {
    let commands = hashes.iter().map(|hash| {
        let mut command = redis::cmd("HGETALL");
        command.arg(key(model, *hash));
        command
    });
    let mut blocks: Vec<BlockOwners> = Vec::with_capacity(hashes.len());
    for found in link.all(commands.collect()).await? {
        blocks.push(BlockOwners::from_redis_value(found)?);
    }
    Ok(Answer::of(blocks))
}
