//! Who may go, and when: identities, and what is asked of them before an endpoint is picked.
//!
//! ```text
//! routed request -> identity   who sends it
//!                -> limits     may these tokens be spent? 429, or a charge that is settled with what was used
//!                -> queue      its turn among the flows of its pool, while the pool has no room
//!                -> pick       the endpoint is chosen when the request leaves, not when it came
//! ```

pub mod fairness;
pub mod identity;

pub use identity::{Identity, Source};
