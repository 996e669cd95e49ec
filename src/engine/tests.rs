//! The engine over real sockets, compared with captures of vLLM and with what it promises.

mod behaviour;
mod faults;
mod shapes;
mod support;
mod tokens;
mod transfer;
