//! placeholder
/// Token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// prompt
    pub prompt: u64,
    /// completion
    pub completion: u64,
    /// cached
    pub cached: Option<u64>,
}
