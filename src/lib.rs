//! Pilotfish picks the engine, Envoy moves the bytes.

pub mod clock;
pub mod decision;
pub mod document;
pub mod index;
pub mod metrics;
pub mod plugins;
pub mod prompt;
pub mod refusal;
pub mod resources;
pub mod route;
pub mod schedule;
pub mod state;
pub mod topology;
