//! Which callers may tell us how requests ended: only loopback and holders of certificates, unless the operator lists more.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

/// An address block in CIDR form; a bare address is a block of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    address: IpAddr,
    prefix: u8,
}

impl Block {
    /// Whether it holds the address; IPv4 addresses in IPv6 form are what they stand for.
    pub fn holds(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(block), IpAddr::V4(address)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                u32::from(block) & mask == u32::from(address) & mask
            }
            (IpAddr::V6(block), IpAddr::V6(address)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                u128::from(block) & mask == u128::from(address) & mask
            }
            _ => false,
        }
    }
}

impl FromStr for Block {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not an address block: write 10.0.0.0/8 or fd00::/8");
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let address: IpAddr = address.trim().parse().map_err(|_| wrong())?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(longest), |prefix| prefix.trim().parse().map_err(|_| wrong()))?;
        if prefix > longest { Err(wrong()) } else { Ok(Self { address, prefix }) }
    }
}

/// Who calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Where from, if the connection has an address.
    pub address: Option<SocketAddr>,
    /// Whether it has shown a certificate of a CA that vouches for clients.
    pub certified: bool,
}

/// Callers that are trusted.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    blocks: Arc<[Block]>,
}

impl Trust {
    /// Loopback and these blocks.
    pub fn new(blocks: impl Into<Arc<[Block]>>) -> Self {
        Self { blocks: blocks.into() }
    }

    /// Whether a caller is trusted: by its certificate, or by its address.
    pub fn admits(&self, caller: &Caller) -> bool {
        caller.certified
            || caller.address.is_some_and(|address| {
                let ip = address.ip().to_canonical();
                ip.is_loopback() || self.blocks.iter().any(|block| block.holds(ip))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("10.0.0.0/8", "10.200.1.1", true)]
    #[case("10.0.0.0/8", "11.0.0.1", false)]
    #[case("10.0.0.0/8", "::ffff:10.0.0.1", true)]
    #[case("0.0.0.0/0", "192.0.2.1", true)]
    #[case("10.1.2.3", "10.1.2.3", true)]
    #[case("10.1.2.3", "10.1.2.4", false)]
    #[case("fd00::/8", "fd12::1", true)]
    #[case("::/0", "fe80::1", true)]
    fn blocks(#[case] block: &str, #[case] address: &str, #[case] held: bool) {
        assert_eq!(block.parse::<Block>().unwrap().holds(address.parse().unwrap()), held);
    }

    #[rstest]
    #[case("10.0.0.0/33")]
    #[case("gateway")]
    #[case("10.0.0.0/x")]
    fn what_is_no_block_is_said_so(#[case] text: &str) {
        assert!(text.parse::<Block>().unwrap_err().contains(text));
    }

    #[test]
    fn loopback_and_the_certified_are_admitted_and_strangers_never() {
        let trust = Trust::default();
        let from = |address: &str| Caller { address: Some(address.parse().unwrap()), certified: false };
        assert!(trust.admits(&from("127.0.0.1:1")));
        assert!(trust.admits(&from("[::1]:1")));
        assert!(!trust.admits(&from("10.0.0.1:1")));
        assert!(!trust.admits(&Caller::default()), "nothing is known of it");
        assert!(trust.admits(&Caller { certified: true, ..from("10.0.0.1:1") }));
    }
}
