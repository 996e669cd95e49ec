//! A real redis-server on a port of its own.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use redis::aio::MultiplexedConnection;
use redis::{Client, Cmd, FromRedisValue};
use tempfile::TempDir;

use super::eventually::eventually;

/// A running server, killed when dropped.
#[derive(Debug)]
pub struct RedisServer {
    port: u16,
    child: Option<Child>,
    dir: TempDir,
}

impl RedisServer {
    /// Starts an empty one.
    pub async fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut server = Self { port, child: None, dir: TempDir::new().unwrap() };
        server.restart().await;
        server
    }

    /// Starts it again at its port, empty.
    pub async fn restart(&mut self) {
        self.kill();
        let mut command = Command::new(binary());
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"]);
        command.arg(self.dir.path());
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        self.client().await;
    }

    /// Kills it at once.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops it where it is: connections stay and nothing is answered.
    pub fn hang(&self) {
        self.signal("STOP");
    }

    /// Lets it go on.
    pub fn go_on(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let line = format!("kill -{name} {}", self.child.as_ref().unwrap().id());
        assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
    }

    /// Its address for flags.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Its `host:port`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The answer to a command.
    pub async fn call<T: FromRedisValue>(&self, words: &[&str]) -> T {
        let mut client = self.client().await;
        command(words).query_async(&mut client).await.unwrap()
    }

    /// Runs a command with a password.
    pub async fn call_as(&self, password: &str, words: &[&str]) {
        let client = Client::open(format!("redis://:{password}@127.0.0.1:{}", self.port)).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        command(words).exec_async(&mut connection).await.unwrap();
    }

    /// A connection that was answered.
    pub async fn client(&self) -> MultiplexedConnection {
        eventually("Redis answers", async || {
            let client = Client::open(self.url()).unwrap();
            let mut connection = client.get_multiplexed_async_connection().await.ok()?;
            redis::cmd("PING").exec_async(&mut connection).await.ok().map(|()| connection)
        })
        .await
    }

    /// Claims a block at a time, as Kthena's engines do.
    pub async fn claim(&self, key: &str, owner: &str, time: &str) {
        let mut client = self.client().await;
        redis::cmd("HSET").arg(key).arg(owner).arg(time).exec_async(&mut client).await.unwrap();
    }

    /// The keys with a field of that name, sorted.
    pub async fn claims(&self, owner: &str) -> Vec<String> {
        let mut client = self.client().await;
        let keys: Vec<String> = redis::cmd("KEYS").arg("*").query_async(&mut client).await.unwrap();
        let mut claimed = Vec::new();
        for key in keys {
            if redis::cmd("HEXISTS").arg(&key).arg(owner).query_async(&mut client).await.unwrap() {
                claimed.push(key);
            }
        }
        claimed.sort();
        claimed
    }
}

fn command(words: &[&str]) -> Cmd {
    let mut command = redis::cmd(words[0]);
    command.arg(&words[1..]);
    command
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The pinned server: of `make test`, else installed by the script.
fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("PILOTFISH_REDIS_SERVER").filter(|path| !path.is_empty()) {
            return path.into();
        }
        let script = Path::new("scripts/redis.sh");
        let found = Command::new(script).stderr(Stdio::inherit()).output().unwrap();
        assert!(found.status.success(), "scripts/redis.sh found no redis-server");
        String::from_utf8(found.stdout).unwrap().trim().into()
    })
}
