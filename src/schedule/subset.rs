//! The candidate restriction that a gateway sends with a request: `ip:port` entries, compared as parsed addresses.

use std::net::{IpAddr, SocketAddr};

use smallvec::SmallVec;

/// Endpoints a request may go to. An empty list allows none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subset {
    exact: SmallVec<[SocketAddr; 8]>,
    hosts: SmallVec<[IpAddr; 2]>,
}

impl Subset {
    /// Reads list entries; a string entry may itself be a comma list. Entries that are no address are ignored, so a
    /// list of nothing but garbage allows nothing rather than everything.
    pub fn from_entries<'a>(entries: impl IntoIterator<Item = &'a str>) -> Self {
        let mut subset = Self::default();
        for entry in entries.into_iter().flat_map(|list| list.split(',')).map(str::trim) {
            if let Ok(address) = entry.parse::<SocketAddr>() {
                // A zone id names an interface of the gateway's host: it means nothing here.
                if !entry.contains('%') {
                    subset.exact.push(address);
                }
            } else if let Ok(host) = entry.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
                subset.hosts.push(host);
            }
        }
        subset
    }

    /// Whether it allows the endpoint at `address`: port-exact where the entry has a port, else any port of that host.
    pub fn allows(&self, address: SocketAddr) -> bool {
        self.exact.contains(&address) || self.hosts.contains(&address.ip())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&["[fd00::10]:8001"], "[fd00::10]:8001", true)]
    #[case(&["[fd00::10]:8001"], "[fd00::10]:8000", false)]
    #[case(&["[FD00:0:0:0:0:0:0:10]:8001"], "[fd00::10]:8001", true)]
    #[case(&["fd00::10"], "[fd00::10]:8000", true)]
    #[case(&["[fd00::10]"], "[fd00::10]:8001", true)]
    #[case(&["10.0.0.10:8000,10.0.0.11:8000"], "10.0.0.11:8000", true)]
    #[case(&[" 10.0.0.10:8000 , 10.0.0.11:8000"], "10.0.0.10:8000", true)]
    #[case(&["[fe80::1%2]:8000"], "[fe80::1]:8000", false)]
    #[case(&["nonsense", ""], "10.0.0.10:8000", false)]
    #[case(&[], "10.0.0.10:8000", false)]
    fn entries_are_compared_as_addresses(
        #[case] entries: &[&str],
        #[case] address: &str,
        #[case] allowed: bool,
    ) {
        let subset = Subset::from_entries(entries.iter().copied());
        assert_eq!(subset.allows(address.parse().unwrap()), allowed);
    }
}
