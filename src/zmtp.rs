//! ZeroMQ's wire protocol over TCP, as far as engines speak it: PUB and SUB, ROUTER and DEALER, without encryption.
//!
//! ZMTP 3.0 with the NULL mechanism (RFC 23): a greeting of 64 bytes, one READY command each way, then messages of frames.
//! The crate `zeromq` 0.7 is not used: it reserves memory for whatever length a peer announces, so that one frame header
//! ends the process; it reconnects on its own with pauses of up to 30 s; and it never notices a peer that vanished without
//! closing. Here every length is bounded before memory is taken, nobody reconnects but the caller, and a connection is one
//! value without tasks.

mod frame;
mod socket;

pub use frame::{MAX_FRAME, MAX_PARTS, Message};
pub use socket::{Error, Kind, Socket};
