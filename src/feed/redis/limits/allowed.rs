//! Which Redis the limits of ModelRoutes may name: whoever may write a route must not make the picker call anybody.

use redis::ConnectionAddr;

use crate::admission::limits::store::place_of;
use crate::feed::redis::address::{Address, BadAddress, Deployment};

/// An address that limits cannot be counted at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAllowable {
    /// No address.
    #[error("{0}; HOST:PORT is enough for one without password and TLS")]
    Bad(#[from] BadAddress),
    /// The buckets of a request lie on different nodes.
    #[error(
        "limits cannot be counted in a cluster: one script call changes both buckets of a route; name one server"
    )]
    Cluster,
}

/// A flag with an address that limits cannot be counted at.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{flag}: {error}")]
pub struct BadFlag {
    flag: &'static str,
    error: NotAllowable,
}

/// Allowed addresses, by the hosts and ports that routes name.
#[derive(Clone, Debug, Default)]
pub struct Allowed(Vec<(String, Address)>);

impl Allowed {
    /// What `--redis-url` and `--redis-allow` name. The first may lead to a cluster, which is nothing to limits.
    pub fn by_flags<'a>(
        redis_url: Option<&str>,
        redis_allow: impl Iterator<Item = &'a str>,
    ) -> Result<Self, BadFlag> {
        let mut allowed = Self::default();
        match redis_url.map(|url| allowed.add(url)) {
            None | Some(Ok(()) | Err(NotAllowable::Cluster)) => {}
            Some(Err(error)) => return Err(BadFlag { flag: "--redis-url", error }),
        }
        for address in redis_allow {
            allowed.add(address).map_err(|error| BadFlag { flag: "--redis-allow", error })?;
        }
        Ok(allowed)
    }

    /// Allows `HOST:PORT`, or what a URL leads to with the login and TLS that it says.
    pub fn add(&mut self, text: &str) -> Result<(), NotAllowable> {
        let url = if text.contains("://") { text.to_owned() } else { format!("redis://{text}") };
        let address: Address = url.parse()?;
        let places = match &address.deployment {
            Deployment::One(info) => vec![place(info.addr())],
            Deployment::Sentinel(sentinels) => sentinels.addresses.iter().map(place).collect(),
            Deployment::Cluster(_) => return Err(NotAllowable::Cluster),
        };
        self.0.extend(places.into_iter().map(|place| (place, address.clone())));
        Ok(())
    }

    /// What `host:port` of a route leads to.
    pub fn find(&self, address: &str) -> Option<&Address> {
        let wanted = place_of(address);
        self.0.iter().find(|(place, _)| *place == wanted).map(|(_, address)| address)
    }
}

fn place(address: &ConnectionAddr) -> String {
    match address {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            format!("{}:{port}", host.trim_matches(['[', ']']).to_ascii_lowercase())
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("redis.kthena:6379", "redis.kthena:6379", true)]
    #[case("redis.kthena", "redis.kthena:6379", true)]
    #[case("redis.kthena:6379", "Redis.Kthena", true)]
    #[case("rediss://me:p@redis.kthena:1/3", "redis.kthena:1", true)]
    #[case("[fd00::1]:7", "[fd00::1]:7", true)]
    #[case("[fd00::1]:7", "[fd00::1]:8", false)]
    #[case("redis:6379", "redis:6380", false)]
    #[case("redis:6379", "evil:6379", false)]
    #[case("redis:6379", "redis:6379@evil:1", false)]
    fn routes_name_what_is_allowed(#[case] allowed: &str, #[case] named: &str, #[case] found: bool) {
        let mut all = Allowed::default();
        all.add(allowed).unwrap();
        assert_eq!(all.find(named).is_some(), found);
    }

    #[test]
    fn what_cannot_be_allowed_is_said_so_without_passwords() {
        let mut all = Allowed::default();
        assert_eq!(all.add("redis+cluster://a:1").unwrap_err(), NotAllowable::Cluster);
        let error = all.add("redis://:secret@h:99999").unwrap_err().to_string();
        assert!(!error.contains("secret"), "{error}");
        all.add("redis+sentinel://:secret@a:1,b/main").unwrap();
        assert!(all.find("b:26379").is_some());
        assert!(!format!("{all:?}").contains("secret"));
    }
}
