//! The token ids of a prompt, shared and unchanging, and who computed them.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

/// Who computed token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The client sent them.
    Body,
    /// A tokenizer in this process.
    Local,
    /// An engine or a rendering service.
    Remote,
}

impl Origin {
    /// The name for records and labels.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Body => "body",
            Origin::Local => "local",
            Origin::Remote => "remote",
        }
    }
}

/// The token ids that an engine will compute for a prompt; of a batch those of the first prompt.
#[derive(Clone, PartialEq, Eq)]
pub struct Tokens {
    ids: Arc<[u32]>,
    origin: Origin,
}

impl Tokens {
    /// Ids and where they came from.
    pub fn new(ids: impl Into<Arc<[u32]>>, origin: Origin) -> Self {
        Self { ids: ids.into(), origin }
    }

    /// Who computed them.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// The ids, to be shared further.
    pub fn shared(&self) -> Arc<[u32]> {
        Arc::clone(&self.ids)
    }
}

impl Deref for Tokens {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        &self.ids
    }
}

/// Shows how many there are: ids are the client's text.
impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("count", &self.ids.len()).field("origin", &self.origin).finish()
    }
}
