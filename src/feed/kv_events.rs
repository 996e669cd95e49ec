//! Follows the events that engines publish of their KV caches.
pub mod follower;
pub mod holdings;
pub mod pending;
pub mod sequence;
pub mod status;
pub mod wire;
