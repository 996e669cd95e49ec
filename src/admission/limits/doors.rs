//! Which of the two front doors a limiter has: the picker, or Envoy's rate limit filter.
//!
//! There is one limiter behind one door. Behind both, every request that passes the filter and the picker would be charged
//! twice; who holds [`Doors`] gets the limiter by the door that is open, and nothing by the other.

use std::sync::Arc;

use super::Limiter;

/// A limiter and its door.
#[derive(Clone, Debug)]
pub enum Doors {
    /// The picker charges requests, and refuses them.
    Picker(Arc<Limiter>),
    /// Envoy's filter asks our rate limit service; the picker only says what to ask about.
    Envoy(Arc<Limiter>),
}

impl Doors {
    /// The limiter of the picker.
    pub fn picker(&self) -> Option<&Arc<Limiter>> {
        match self {
            Doors::Picker(limiter) => Some(limiter),
            Doors::Envoy(_) => None,
        }
    }

    /// The limiter of the rate limit service.
    pub fn envoy(&self) -> Option<&Arc<Limiter>> {
        match self {
            Doors::Picker(_) => None,
            Doors::Envoy(limiter) => Some(limiter),
        }
    }

    /// The limiter for whoever neither charges nor settles: its configuration, its numbers.
    pub fn watched(&self) -> &Arc<Limiter> {
        match self {
            Doors::Picker(limiter) | Doors::Envoy(limiter) => limiter,
        }
    }
}
