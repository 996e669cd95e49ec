//! The `pilotfish` command.

use std::process::ExitCode;

use pilotfish::args::Args;
use pilotfish::command;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match Args::read(std::env::args_os()) {
        Ok(args) => command::run(args, &[]),
        Err(error) => error.exit(),
    }
}
