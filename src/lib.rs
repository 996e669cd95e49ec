//! Pilotfish picks the engine, Envoy moves the bytes.
//!
//! ```text
//!        Envoy --ext_proc--> extproc    stream plumbing round a pure state machine: event in, actions out, no IO
//!                              |  headers, body
//!                            request    one pass over the body: model, stream, limits, prompt spans; edits, never re-encoding
//!                              |  LlmRequest
//!                            route      ModelRoute | InferencePool -> pool + the model name its engines see
//!                              |
//!                            prompt     text -> chained block hashes, only if a plugin of the profile asks
//!                              |
//!                            admission  whose request, may its tokens be spent, is it its turn: 429, or a wait
//!                              |
//!                            schedule   candidates -> filter -> score -> pick and reserve, one step    <- plugins
//!                              |  decision + reservation
//!                              |  - - - prefill    the call to the endpoint that computes the prompt, if that is another  <- disagg
//!                              |
//!        Envoy <--headers--- extproc    destination, metadata, edited body; usage and timing on the way back
//!                              |
//!                            settle     what became of it: bookings released, tokens counted, one record kept
//!
//!        snapshot <- topology <- feed   endpoints, pools, routes, signals       index   who holds which blocks
//! ```
//!
//! Imports point downwards and to the right: `plugins` and `schedule` know `state`, `index` and `request`; nothing but
//! `extproc`, `prefill`, `feed`, `admin` and `app` knows of gRPC or HTTP, and only `app` wires.

pub mod admin;
pub mod admission;
pub mod app;
pub mod args;
pub mod check;
pub mod clock;
pub mod command;
pub mod config;
pub mod decide;
pub mod decision;
pub mod disagg;
pub mod document;
pub mod engine;
pub mod extproc;
pub mod feed;
pub mod index;
pub mod manual;
pub mod metrics;
pub mod plugins;
pub mod prefill;
pub mod prompt;
pub mod readiness;
pub mod refusal;
pub mod request;
pub mod resources;
pub mod route;
pub mod schedule;
pub mod session;
pub mod settle;
pub mod snapshot;
pub mod state;
pub mod status;
pub mod telemetry;
pub mod tls;
pub mod topology;
pub mod trust;
pub mod usage;
pub mod webhook;
pub mod zmtp;
