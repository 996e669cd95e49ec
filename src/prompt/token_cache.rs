//! Token ids that were computed before, by the hash of what they were computed from; bounded in bytes.
//!
//! Three kinds of entries share the room: whole bodies (a repeated request costs one hash), whole texts (the same
//! conversation with other settings) and pieces of texts (the next turn of a conversation costs what is new in it).

use std::sync::Arc;

use quick_cache::Weighter;
use quick_cache::sync::{Cache, DefaultLifecycle};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// What an entry costs beside its ids: key, pointers, the list it stands in.
const OVERHEAD: u64 = 96;

/// What ids were computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    hash: u128,
    bytes: u32,
}

/// Ids by key. The least used entries give way.
#[derive(Debug)]
pub struct TokenCache {
    entries: Cache<Key, Arc<[u32]>, Weight, ahash::RandomState>,
    /// Secret, so that nobody can prepare two texts of one hash.
    seed: u64,
}

#[derive(Clone, Debug)]
struct Weight;

impl Weighter<Key, Arc<[u32]>> for Weight {
    fn weight(&self, _: &Key, ids: &Arc<[u32]>) -> u64 {
        OVERHEAD + 4 * ids.len() as u64
    }
}

impl TokenCache {
    /// A cache of so many bytes.
    pub fn new(bytes: u64) -> Self {
        let entries = usize::try_from(bytes / 1024).unwrap_or(usize::MAX).clamp(16, 1 << 20);
        let entries =
            Cache::with(entries, bytes, Weight, ahash::RandomState::new(), DefaultLifecycle::default());
        Self { entries, seed: rand::random() }
    }

    /// The key of a text within a space of its own: a tokenizer and a purpose.
    pub fn key(&self, space: u64, text: &[u8]) -> Key {
        Key { hash: xxh3_128_with_seed(text, self.seed ^ space), bytes: text.len() as u32 }
    }

    /// The ids, if they are still known.
    pub fn get(&self, key: &Key) -> Option<Arc<[u32]>> {
        self.entries.get(key)
    }

    /// Remembers ids.
    pub fn put(&self, key: Key, ids: Arc<[u32]>) {
        self.entries.insert(key, ids);
    }

    /// Bytes in use.
    pub fn bytes(&self) -> u64 {
        self.entries.weight()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_holds_whatever_is_put_in() {
        let cache = TokenCache::new(64 << 10);
        for n in 0..5_000_u32 {
            let key = cache.key(0, &n.to_le_bytes());
            cache.put(key, vec![n; n as usize % 200].into());
            assert!(cache.bytes() <= 64 << 10);
        }
        let last = cache.key(0, &0_u32.to_le_bytes());
        cache.put(last, vec![7; 3].into());
        assert_eq!(cache.get(&last).as_deref(), Some(&[7, 7, 7][..]));
    }

    #[test]
    fn spaces_and_texts_are_kept_apart() {
        let cache = TokenCache::new(1 << 20);
        assert_ne!(cache.key(1, b"a"), cache.key(2, b"a"));
        assert_ne!(cache.key(1, b"a"), cache.key(1, b"b"));
        assert_eq!(cache.key(1, b"a"), cache.key(1, b"a"));
    }
}
