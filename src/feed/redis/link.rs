//! One connection to Redis, whatever its deployment: commands in one round trip.

use std::time::Duration;

use futures::future::try_join_all;
use redis::aio::MultiplexedConnection;
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ErrorKind, FromRedisValue, Pipeline, RedisError, RedisResult,
    ScriptInvocation, TlsMode, Value,
};

use super::address::{Address, Deployment, Sentinels};

/// Time to connect, and for any answer. Whoever asks has a shorter deadline of their own.
const PATIENCE: Duration = Duration::from_secs(1);

/// A connection. Clones share it.
#[derive(Clone)]
pub enum Link {
    /// To one server.
    One(MultiplexedConnection),
    /// To the master that sentinels named.
    Master(MultiplexedConnection),
    /// To the nodes of a cluster.
    Cluster(ClusterConnection),
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Link")
    }
}

impl Link {
    /// Connects.
    pub async fn connect(address: &Address) -> RedisResult<Self> {
        // One provider of cryptography for the process; an error says that it was chosen before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(PATIENCE))
            .set_response_timeout(Some(PATIENCE));
        match &address.deployment {
            Deployment::One(info) => {
                let client = Client::open(info.clone())?;
                Ok(Link::One(client.get_multiplexed_async_connection_with_config(&config).await?))
            }
            Deployment::Cluster(nodes) => {
                let client = ClusterClient::builder(nodes.clone())
                    .connection_timeout(PATIENCE)
                    .response_timeout(PATIENCE)
                    .retries(1)
                    .build()?;
                Ok(Link::Cluster(client.get_async_connection().await?))
            }
            Deployment::Sentinel(sentinels) => {
                let mut client = builder(sentinels)?.build()?;
                Ok(Link::Master(client.get_async_connection_with_config(&config).await?))
            }
        }
    }

    /// Whether it still leads to a server that answers, and to a master where sentinels named one.
    pub async fn check(&self) -> RedisResult<()> {
        match self {
            Link::One(connection) => redis::cmd("PING").exec_async(&mut connection.clone()).await,
            Link::Cluster(connection) => redis::cmd("PING").exec_async(&mut connection.clone()).await,
            Link::Master(connection) => {
                let role: Vec<Value> = redis::cmd("ROLE").query_async(&mut connection.clone()).await?;
                match role.first() {
                    Some(Value::BulkString(role)) if role == b"master" => Ok(()),
                    _ => Err(RedisError::from((ErrorKind::Io, "the master has become a replica"))),
                }
            }
        }
    }

    /// Runs a script, which Redis is sent only if it does not know it.
    pub async fn run<T: FromRedisValue>(&self, script: &ScriptInvocation<'_>) -> RedisResult<T> {
        match self {
            Link::One(connection) | Link::Master(connection) => {
                script.invoke_async(&mut connection.clone()).await
            }
            Link::Cluster(connection) => script.invoke_async(&mut connection.clone()).await,
        }
    }

    /// Runs commands that do not depend on each other, in one round trip; the answers in their order. The first error is
    /// the error of all.
    pub async fn all(&self, commands: Vec<Cmd>) -> RedisResult<Vec<Value>> {
        match self {
            Link::One(connection) | Link::Master(connection) => {
                let mut pipeline = Pipeline::with_capacity(commands.len());
                for command in commands {
                    pipeline.add_command(command);
                }
                pipeline.query_async(&mut connection.clone()).await
            }
            // A pipeline must stay within one node: the commands are sent at once, each to its own.
            Link::Cluster(connection) => {
                try_join_all(commands.into_iter().map(|command| {
                    let mut connection = connection.clone();
                    async move { command.query_async(&mut connection).await }
                }))
                .await
            }
        }
    }
}

fn builder(sentinels: &Sentinels) -> RedisResult<SentinelClientBuilder> {
    let addresses = sentinels.addresses.clone();
    let mut builder = SentinelClientBuilder::new(addresses, &sentinels.service, SentinelServerType::Master)?
        .set_client_to_redis_db(sentinels.master.db());
    if let Some(user) = sentinels.master.username() {
        builder = builder.set_client_to_redis_username(user);
    }
    if let Some(password) = sentinels.master.password() {
        builder = builder.set_client_to_redis_password(password);
    }
    if let Some(user) = sentinels.own.username() {
        builder = builder.set_client_to_sentinel_username(user);
    }
    if let Some(password) = sentinels.own.password() {
        builder = builder.set_client_to_sentinel_password(password);
    }
    if sentinels.tls {
        builder = builder
            .set_client_to_redis_tls_mode(TlsMode::Secure)
            .set_client_to_sentinel_tls_mode(TlsMode::Secure);
    }
    Ok(builder)
}
