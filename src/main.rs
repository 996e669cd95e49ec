//! The `pilotfish` command.

use std::process::ExitCode;

use clap::Parser;
use pilotfish::args::Args;
use pilotfish::command;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    command::run(Args::parse(), &[])
}
