//! Signed tokens: which endpoint of a pool served a client, for the client to bring back.
//!
//! A token is 41 bytes in base64url without padding, 55 characters:
//!
//! ```text
//! version 1 | XXH3-64 of the endpoint's name, little-endian | HMAC-SHA256 over version, pool and endpoint
//! ```
//!
//! The hash finds the endpoint, the signature proves it. It names no address, so it survives a change of address; it is good
//! for any request to the pool until the endpoint's name or the key goes.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::hmac;
use smallvec::SmallVec;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::state::{Endpoint, Pool, PoolKind};

/// A token as it stands in a header.
pub type Token = String;

/// First byte of every token. It changes with the layout.
const VERSION: u8 = 1;
/// First byte of what is signed of a session id, so that no digest is a signature.
const ID: u8 = 0;
const HASH_END: usize = 9;
const BYTES: usize = HASH_END + 32;
const CHARACTERS: usize = (BYTES * 4).div_ceil(3);
/// Shortest key in bytes: as long as the signature.
const SHORTEST: usize = 32;

/// A key that is too short to sign with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the key has {0} bytes and needs {SHORTEST} or more: write one with `openssl rand -base64 48` and give all replicas the same"
)]
pub struct ShortKey(usize);

/// What tokens are signed with.
pub struct Key {
    key: hmac::Key,
    is_shared: bool,
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Key").field("is_shared", &self.is_shared).finish_non_exhaustive()
    }
}

impl Default for Key {
    fn default() -> Self {
        Self::random()
    }
}

impl Key {
    /// A key of this process alone.
    pub fn random() -> Self {
        let bytes: [u8; SHORTEST] = rand::random();
        Self { key: hmac::Key::new(hmac::HMAC_SHA256, &bytes), is_shared: false }
    }

    /// The key that a file holds; line ends behind it do not count.
    pub fn from_file(bytes: &[u8]) -> Result<Self, ShortKey> {
        let ends = bytes.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
        let bytes = &bytes[..bytes.len() - ends];
        if bytes.len() < SHORTEST {
            return Err(ShortKey(bytes.len()));
        }
        Ok(Self { key: hmac::Key::new(hmac::HMAC_SHA256, bytes), is_shared: true })
    }

    /// Whether other processes may have it.
    pub fn is_shared(&self) -> bool {
        self.is_shared
    }

    /// The token of an endpoint of `pool`.
    pub fn token(&self, pool: &Pool, endpoint: &Endpoint) -> Token {
        let mut bytes = [VERSION; BYTES];
        bytes[1..HASH_END].copy_from_slice(&hash(endpoint).to_le_bytes());
        let tag = hmac::sign(&self.key, &signed(pool, endpoint));
        bytes[HASH_END..].copy_from_slice(tag.as_ref());
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// The endpoint that a token of ours names, if it is still in `pool`. Signatures are compared in constant time.
    pub fn endpoint<'p>(&self, token: &str, pool: &'p Pool) -> Option<&'p Endpoint> {
        if token.len() != CHARACTERS {
            return None;
        }
        // The decoder wants room for its estimate, which is rounded up.
        let mut bytes = [0; BYTES + 3];
        let len = URL_SAFE_NO_PAD.decode_slice(token, &mut bytes).ok()?;
        let (head, tag) = bytes.get(..len.min(BYTES))?.split_at_checked(HASH_END)?;
        let (version, wanted) = head.split_first()?;
        let wanted = u64::from_le_bytes(wanted.try_into().ok()?);
        if *version != VERSION {
            return None;
        }
        let mut named = pool.members.iter().map(|member| &*member.endpoint).filter(|e| hash(e) == wanted);
        named.find(|endpoint| hmac::verify(&self.key, &signed(pool, endpoint), tag).is_ok())
    }

    /// A name for a session id of `pool`, from which the id cannot be found.
    pub fn digest(&self, pool: &Pool, id: &str) -> u128 {
        let mut message = pool_bytes(ID, pool);
        message.extend_from_slice(id.as_bytes());
        let tag = hmac::sign(&self.key, &message);
        tag.as_ref().iter().take(16).fold(0, |digest, byte| digest << 8 | u128::from(*byte))
    }
}

fn hash(endpoint: &Endpoint) -> u64 {
    let name = &endpoint.name;
    let named = xxh3_64_with_seed(name.name.as_bytes(), xxh3_64(name.namespace.as_bytes()));
    engine_port(endpoint).map_or(named, |port| xxh3_64_with_seed(&port, named))
}

/// What tells the engines of one pod apart.
fn engine_port(endpoint: &Endpoint) -> Option<[u8; 2]> {
    endpoint.pod.as_ref().map(|_| endpoint.address.port().to_be_bytes())
}

/// Version, kind and length of the pool's name, the pool's name, the endpoint's, and the port of an engine in a pod.
fn signed(pool: &Pool, endpoint: &Endpoint) -> SmallVec<[u8; 256]> {
    let mut message = pool_bytes(VERSION, pool);
    message.extend_from_slice(endpoint.name.namespace.as_bytes());
    message.push(b'/');
    message.extend_from_slice(endpoint.name.name.as_bytes());
    if let Some(port) = engine_port(endpoint) {
        message.push(b':');
        message.extend_from_slice(&port);
    }
    message
}

fn pool_bytes(purpose: u8, pool: &Pool) -> SmallVec<[u8; 256]> {
    let kind = match pool.name.kind {
        PoolKind::ModelServer => 0,
        PoolKind::InferencePool => 1,
    };
    let mut message = SmallVec::new();
    message.extend_from_slice(&[purpose, kind]);
    message.extend_from_slice(&(pool.label.len() as u64).to_le_bytes());
    message.extend_from_slice(pool.label.as_bytes());
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::pool;
    use crate::state::endpoint::tests::endpoint;
    use crate::state::reservation::tests::pool_of;
    use proptest::prelude::*;

    fn key(text: &str) -> Key {
        Key::from_file(text.repeat(SHORTEST).as_bytes()).unwrap()
    }

    proptest! {
        #[test]
        fn a_token_names_its_endpoint_and_no_changed_token_names_anybody(
            at in 0usize..5,
            place in 0usize..CHARACTERS,
            instead in "[A-Za-z0-9_-]",
            cut in 0usize..CHARACTERS,
        ) {
            let (pool, key) = (pool(5), key("k"));
            let token = key.token(&pool, &pool.members[at].endpoint);
            prop_assert_eq!(token.len(), CHARACTERS);
            let named = key.endpoint(&token, &pool).map(|endpoint| endpoint.slot);
            prop_assert_eq!(named, Some(pool.members[at].endpoint.slot));
            prop_assert!(key.endpoint(&token[..cut], &pool).is_none());
            let long = format!("{token}A");
            prop_assert!(key.endpoint(&long, &pool).is_none());
            let mut forged = token.clone();
            forged.replace_range(place..=place, &instead);
            prop_assert_eq!(key.endpoint(&forged, &pool).is_some(), forged == token);
        }

        #[test]
        fn any_text_is_read_without_harm(text in any::<String>(), token in "[A-Za-z0-9_-]{55}") {
            let (pool, key) = (pool(2), key("k"));
            prop_assert!(key.endpoint(&text, &pool).is_none());
            prop_assert!(key.endpoint(&token, &pool).is_none());
        }
    }

    #[test]
    fn tokens_of_another_key_pool_or_endpoint_are_nobodys() {
        let (pool, ours) = (pool(2), key("k"));
        let token = ours.token(&pool, &pool.members[0].endpoint);
        assert!(key("l").endpoint(&token, &pool).is_none());
        assert!(Key::random().endpoint(&token, &pool).is_none());
        let same = |change: fn(&mut Pool)| {
            let mut other = std::sync::Arc::into_inner(pool_of(&[endpoint("e1", "10.0.0.1:8000")])).unwrap();
            change(&mut other);
            ours.endpoint(&token, &other).is_some()
        };
        assert!(same(|_| {}), "a replica knows the endpoint by its name");
        assert!(!same(|pool| pool.label = "default/other".into()));
        assert!(!same(|pool| {
            pool.name.kind = match pool.name.kind {
                PoolKind::ModelServer => PoolKind::InferencePool,
                PoolKind::InferencePool => PoolKind::ModelServer,
            }
        }));
        assert!(!same(|pool| pool.members.clear()), "the endpoint is gone");
    }

    #[test]
    fn tokens_survive_a_change_of_address_and_of_process() {
        let here = pool_of(&[endpoint("e1", "10.0.0.1:8000")]);
        let there = pool_of(&[endpoint("e1", "10.0.0.9:8000")]);
        let token = key("k").token(&here, &here.members[0].endpoint);
        let named = Key::from_file("k".repeat(SHORTEST).as_bytes()).unwrap();
        assert_eq!(named.endpoint(&token, &there).map(|e| e.slot), Some(there.members[0].endpoint.slot));
    }

    #[test]
    fn short_keys_are_refused_and_line_ends_are_no_part_of_a_key() {
        let text = "k".repeat(SHORTEST);
        let refused = Key::from_file(format!("{}\r\n\n", &text[1..]).as_bytes()).unwrap_err();
        assert!(refused.to_string().starts_with("the key has 31 bytes and needs 32 or more: "), "{refused}");
        let pool = pool(1);
        let token = |key: &Key| key.token(&pool, &pool.members[0].endpoint);
        let with_end = Key::from_file(format!("{text}\n").as_bytes()).unwrap();
        assert_eq!(token(&with_end), token(&key("k")));
        assert!(!format!("{with_end:?}").contains('k'.to_string().repeat(4).as_str()));
    }
}
