//! A store that both engines read and write (vLLM's offloading and example connectors, a file system, a remote cache).
//!
//! llm-d's sidecar sends the decode leg first and asks the engine to refuse when it holds too little. Here the decider knows
//! what each endpoint holds before anything is sent.

use super::connector::Connector;

/// Nothing is told: blocks have names that follow from the prompt.
#[derive(Debug)]
pub struct SharedStorage;

impl Connector for SharedStorage {}
