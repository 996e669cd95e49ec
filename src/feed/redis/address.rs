//! Where Redis is: one server, a cluster, or the master that sentinels name, as one URL.

use std::fmt;
use std::str::FromStr;

use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisConnectionInfo};

/// The port of sentinels that name none.
const SENTINEL_PORT: &str = "26379";

/// A URL that is no address of Redis. The text never repeats the URL: it may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    /// No such scheme.
    #[error(
        "write redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, redis+sentinel:// or rediss+sentinel://"
    )]
    Scheme,
    /// A sentinel URL without the name of the master.
    #[error("a sentinel's URL ends with the name of the master: redis+sentinel://HOST:PORT,HOST:PORT/NAME")]
    NoService,
    /// A cluster has database 0 only.
    #[error("a cluster has no numbered databases: remove what follows the hosts")]
    ClusterDatabase,
    /// The rest of it.
    #[error("not an address of Redis: {0}")]
    Other(String),
}

/// An address of Redis. Shown without its password.
#[derive(Clone)]
pub struct Address {
    /// What is there.
    pub deployment: Deployment,
    shown: String,
}

/// How Redis is deployed.
#[derive(Clone, Debug)]
pub enum Deployment {
    /// One server.
    One(ConnectionInfo),
    /// A cluster, by some of its nodes.
    Cluster(Vec<ConnectionInfo>),
    /// The master that sentinels name.
    Sentinel(Sentinels),
}

/// Sentinels and the master they watch.
#[derive(Clone)]
pub struct Sentinels {
    /// Where they are.
    pub addresses: Vec<ConnectionAddr>,
    /// What they call the master.
    pub service: String,
    /// How to log in at the master, and its database.
    pub master: RedisConnectionInfo,
    /// How to log in at the sentinels.
    pub own: RedisConnectionInfo,
    /// Whether both speak TLS.
    pub tls: bool,
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels")
            .field("service", &self.service)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Address").field(&self.shown).finish()
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(url: &str) -> Result<Self, BadAddress> {
        let (scheme, rest) = url.split_once("://").ok_or(BadAddress::Scheme)?;
        let user_end = rest.find('/').unwrap_or(rest.len());
        let (login, rest) = match rest[..user_end].rsplit_once('@') {
            Some((login, _)) => rest.split_at(login.len() + 1),
            None => ("", rest),
        };
        let shown = format!("{scheme}://{}", rest.split(['?', '#']).next().unwrap_or_default());
        let deployment = match scheme {
            "redis" | "rediss" | "valkey" | "valkeys" | "unix" | "redis+unix" | "valkey+unix" => {
                Deployment::One(info(url)?)
            }
            "redis+cluster" | "rediss+cluster" => cluster(plain(scheme), login, rest)?,
            "redis+sentinel" | "rediss+sentinel" => sentinels(plain(scheme), login, rest)?,
            _ => return Err(BadAddress::Scheme),
        };
        Ok(Self { deployment, shown })
    }
}

/// `redis` or `rediss`.
fn plain(scheme: &str) -> &str {
    scheme.split('+').next().unwrap_or_default()
}

fn info(url: &str) -> Result<ConnectionInfo, BadAddress> {
    url.into_connection_info().map_err(|error| {
        // The error's detail may repeat a part of the URL.
        BadAddress::Other(error.to_string().split(" - ").next().unwrap_or_default().to_owned())
    })
}

fn cluster(scheme: &str, login: &str, rest: &str) -> Result<Deployment, BadAddress> {
    let (hosts, more) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    if more.trim_start_matches('/').starts_with(|c: char| c.is_ascii_digit()) {
        return Err(BadAddress::ClusterDatabase);
    }
    let nodes = hosts.split(',').map(|host| info(&format!("{scheme}://{login}{host}{more}")));
    Ok(Deployment::Cluster(nodes.collect::<Result<_, _>>()?))
}

fn sentinels(scheme: &str, login: &str, rest: &str) -> Result<Deployment, BadAddress> {
    let (hosts, more) = rest.split_once('/').ok_or(BadAddress::NoService)?;
    let (path, query) = more.split_once('?').unwrap_or((more, ""));
    let (service, database) = path.split_once('/').unwrap_or((path, ""));
    if service.is_empty() {
        return Err(BadAddress::NoService);
    }
    let parameter = |name: &str| {
        let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or_default()
    };
    let (user, password) = (parameter("sentinel_user"), parameter("sentinel_password"));
    let own_login = if password.is_empty() { String::new() } else { format!("{user}:{password}@") };
    let mut addresses = Vec::new();
    let mut own = RedisConnectionInfo::default();
    for host in hosts.split(',') {
        let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let host = if has_port { host.to_owned() } else { format!("{host}:{SENTINEL_PORT}") };
        let found = info(&format!("{scheme}://{own_login}{host}"))?;
        addresses.push(found.addr().clone());
        own = found.redis_settings().clone();
    }
    let master = info(&format!("{scheme}://{login}master/{database}"))?.redis_settings().clone();
    let service = service.to_owned();
    Ok(Deployment::Sentinel(Sentinels { addresses, service, master, own, tls: scheme == "rediss" }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn parsed(url: &str) -> Address {
        url.parse().unwrap()
    }

    #[rstest]
    #[case("redis://h", "h:6379", 0, None, None)]
    #[case("redis://:p%40ss@h:1/3", "h:1", 3, None, Some("p@ss"))]
    #[case("redis://me:p@[::1]:1", "[::1]:1", 0, Some("me"), Some("p"))]
    #[case("rediss://h:1/2", "h:1", 2, None, None)]
    #[case("unix:///run/redis.sock?db=4&user=me&pass=p", "/run/redis.sock", 4, Some("me"), Some("p"))]
    #[case("redis+unix:///run/redis.sock", "/run/redis.sock", 0, None, None)]
    fn one_server(
        #[case] url: &str,
        #[case] address: &str,
        #[case] database: i64,
        #[case] user: Option<&str>,
        #[case] password: Option<&str>,
    ) {
        let found = parsed(url);
        let Deployment::One(info) = &found.deployment else { panic!("{found:?}") };
        let login = info.redis_settings();
        assert_eq!(info.addr().to_string().replace("[::1]", "::1"), address.replace("[::1]", "::1"));
        assert_eq!((login.db(), login.username(), login.password()), (database, user, password));
        assert_eq!(matches!(info.addr(), ConnectionAddr::TcpTls { .. }), url.starts_with("rediss:"));
    }

    #[test]
    fn a_cluster_is_named_by_some_of_its_nodes() {
        let found = parsed("rediss+cluster://me:p@a:1,b");
        let Deployment::Cluster(nodes) = &found.deployment else { panic!("{found:?}") };
        let shown: Vec<String> = nodes.iter().map(|node| node.addr().to_string()).collect();
        assert_eq!(shown, ["a:1", "b:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("p")));
        assert!(nodes.iter().all(|node| matches!(node.addr(), ConnectionAddr::TcpTls { .. })));
        assert_eq!("redis+cluster://a/1".parse::<Address>().unwrap_err(), BadAddress::ClusterDatabase);
    }

    #[test]
    fn sentinels_name_a_master_and_have_passwords_of_their_own() {
        let found = parsed("redis+sentinel://me:p@a,b:7/main/5?sentinel_user=s&sentinel_password=%23");
        let Deployment::Sentinel(sentinels) = &found.deployment else { panic!("{found:?}") };
        let shown: Vec<String> = sentinels.addresses.iter().map(ToString::to_string).collect();
        assert_eq!((shown, &*sentinels.service), (vec!["a:26379".to_owned(), "b:7".to_owned()], "main"));
        let (master, own) = (&sentinels.master, &sentinels.own);
        assert_eq!((master.username(), master.password(), master.db()), (Some("me"), Some("p"), 5));
        assert_eq!((own.username(), own.password(), sentinels.tls), (Some("s"), Some("#"), false));
        for url in ["redis+sentinel://a:1", "redis+sentinel://a:1/"] {
            assert_eq!(url.parse::<Address>().unwrap_err(), BadAddress::NoService);
        }
    }

    #[rstest]
    #[case("redis://me:secret@h:1/3", "redis://h:1/3")]
    #[case("unix:///run/x.sock?pass=secret", "unix:///run/x.sock")]
    #[case("redis+cluster://me:secret@a,b", "redis+cluster://a,b")]
    #[case("redis+sentinel://:secret@a/m?sentinel_password=secret", "redis+sentinel://a/m")]
    fn passwords_are_not_shown(#[case] url: &str, #[case] shown: &str) {
        let found = parsed(url);
        assert_eq!(found.to_string(), shown);
        assert!(!format!("{found:?}").contains("secret"));
    }

    #[rstest]
    #[case("h:6379")]
    #[case("http://:secret@h")]
    #[case("redis://:secret@h/secret")]
    #[case("redis://:secret@h:99999")]
    #[case("redis+sentinel://:secret@h/m/secret")]
    fn what_is_no_address_is_refused_and_not_repeated(#[case] url: &str) {
        let error = url.parse::<Address>().unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
    }
}
