//! Runs the commands: what `main` does, for binaries of your own that add plugins too.

mod explain;

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::app::{App, NoSource};
use crate::args::{Args, CheckArgs, Command, EngineArgs, Format, RelayArgs, Secret, ServeArgs};
use crate::engine::{Engine, EngineConfig};
use crate::feed::redis::Address;
use crate::feed::redis::limits::Allowed;
use crate::feed::relay::{Relay, RelayConfig};
use crate::resources::crd;
use crate::schedule::plugin::Kind;
use crate::{check, config, telemetry, tls};

/// Wrong use: what clap exits with, too.
const USAGE: u8 = 2;

/// Runs one command with plugins beside the built-in ones.
pub fn run(args: Args, extra_plugins: &'static [&'static Kind]) -> ExitCode {
    tls::install_provider();
    let done = match args.command {
        Command::Serve(args) => return serve(*args, extra_plugins),
        Command::Check(args) => return check(&args, extra_plugins),
        Command::Explain(args) => explain::run(&args, extra_plugins),
        Command::Crds => crds(),
        Command::Engine(args) => engine(args),
        Command::KvRelay(args) => relay(*args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error, 1),
    }
}

fn check(args: &CheckArgs, extra_plugins: &[&Kind]) -> ExitCode {
    if args.resources.is_none() && args.config.is_none() {
        return fail(
            &anyhow::anyhow!("check needs something to read: give --resources DIR, --config FILE or both"),
            USAGE,
        );
    }
    let address = args.redis_url.as_ref().map(|url| url.expose().parse::<Address>().context("--redis-url"));
    if let Some(Err(error)) = address {
        return fail(&error, USAGE);
    }
    let redis_url = args.redis_url.as_ref().map(Secret::expose);
    let stores = match Allowed::by_flags(redis_url, args.redis_allow.iter().map(Secret::expose)) {
        Ok(stores) => stores,
        Err(error) => return fail(&error.into(), USAGE),
    };
    let options = check::Options {
        stores: Some(&stores),
        default_pool: args.default_pool.as_ref(),
        config: config::Options {
            allow_unsupported: args.allow_unsupported,
            shared_index: args.redis_url.is_some(),
            extra_plugins,
            queue: None,
        },
    };
    let report = check::check(args.resources.as_deref(), args.config.as_deref(), &options);
    match args.format {
        Format::Text => print!("{report}"),
        Format::Json => println!("{}", report.json()),
    }
    ExitCode::from(report.exit_code())
}

fn crds() -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(crd::stream()?.as_bytes())?;
    Ok(out.flush()?)
}

fn fail(error: &anyhow::Error, code: u8) -> ExitCode {
    eprintln!("pilotfish: {error:#}");
    ExitCode::from(code)
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start threads")
}

fn serve(args: ServeArgs, extra_plugins: &'static [&'static Kind]) -> ExitCode {
    if let Some(why) = args.contradiction() {
        return fail(&anyhow::anyhow!(why), USAGE);
    }
    let served = telemetry::init(args.log.format(), args.log.filter()).and_then(|()| {
        runtime()?.block_on(async {
            for flag in args.without_effect() {
                tracing::warn!(flag, "this flag has no effect in this version");
            }
            let app = App::start(args, extra_plugins).await?;
            tracing::info!(version = env!("CARGO_PKG_VERSION"), bound = ?app.bound, "serving");
            say(&json!({"listening": app.bound}))?;
            terminated().await?;
            app.drain().await;
            Ok(())
        })
    });
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<NoSource>() => fail(&error, USAGE),
        Err(error) => fail(&error, 1),
    }
}

fn engine(args: EngineArgs) -> Result<()> {
    runtime()?.block_on(async {
        let engine = Engine::bind(EngineConfig::from(args)).await?;
        let state = engine.state();
        let mut listening = json!({"engine": engine.address()});
        let others = [
            ("kv_events", state.events_address()),
            ("replay", state.replay_address()),
            ("bootstrap", state.bootstrap_address()),
        ];
        for (name, address) in others.into_iter().filter_map(|(name, address)| Some((name, address?))) {
            listening[name] = json!(address);
        }
        say(&json!({"listening": listening}))?;
        engine.run(async { drop(terminated().await) }).await?;
        Ok(())
    })
}

fn relay(args: RelayArgs) -> Result<()> {
    telemetry::init(args.log_format, &args.log_level)?;
    let config = RelayConfig {
        engine: args.engine,
        kind: args.engine_kind.into(),
        identity: args.identity,
        model: args.model,
        events: args.events,
        replay: args.replay,
        redis: args.redis_url.expose().parse().context("--redis-url")?,
    };
    runtime()?.block_on(async {
        tracing::info!(version = env!("CARGO_PKG_VERSION"), identity = config.identity, "relaying");
        let relay = Relay::new(config);
        tokio::select! {
            () = relay.run() => {}
            ended = terminated() => ended?,
        }
        Ok(())
    })
}

/// One line on standard output, at once: who started us waits for it.
fn say(line: &serde_json::Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// SIGTERM or SIGINT.
async fn terminated() -> Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    Ok(())
}
