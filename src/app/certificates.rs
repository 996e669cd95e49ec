//! The certificates of the gRPC port and of the webhook's, first at the start and then whenever its files change.

use std::sync::Arc;

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::select_all;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args::{ServeArgs, TlsVersion};
use crate::feed::file::{Timing, Watch};
use crate::metrics::{Degraded, Metrics};
use crate::tls::{Tls, TlsOptions};

/// TLS as the flags want it; `None` without it. A pair that cannot be used ends the start: there is no last good.
pub fn start(
    args: &ServeArgs,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Option<Arc<Tls>>> {
    if !args.secure() {
        return Ok(None);
    }
    let options = TlsOptions {
        dir: args.tls.cert_path.clone(),
        client_ca: args.tls.client_ca_file.clone(),
        only_1_3: args.tls.tls_min_version == TlsVersion::Tls13,
        cipher_suites: args.tls.tls_cipher_suites.clone(),
        http_1: false,
    };
    for suite in options.unknown_suites() {
        tracing::warn!(suite, "--tls-cipher-suites: this suite is not known and not used");
    }
    if matches!(args.tls.tls_min_version, TlsVersion::Tls10 | TlsVersion::Tls11) {
        tracing::warn!("--tls-min-version: TLS 1.2 is the least that is spoken");
    }
    if options.dir.is_none() {
        tracing::info!(
            "gRPC is served with a certificate made now; --cert-path names one that clients can verify"
        );
    }
    let tls =
        serve(options, args.tls.enable_cert_reload, metrics, stop, tasks).context("TLS of the gRPC port")?;
    Ok(Some(tls))
}

/// TLS of the webhook; `None` without a webhook.
pub fn of_webhook(
    args: &ServeArgs,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Option<Arc<Tls>>> {
    if args.webhook.webhook_port.is_none() {
        return Ok(None);
    }
    let options =
        TlsOptions { dir: args.webhook.webhook_cert_path.clone(), http_1: true, ..TlsOptions::default() };
    Ok(Some(serve(options, true, metrics, stop, tasks).context("TLS of the webhook")?))
}

fn serve(
    options: TlsOptions,
    reload: bool,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Result<Arc<Tls>> {
    // The watches begin first: what changes while the first version is read is seen.
    let files = if reload { options.files() } else { Vec::new() };
    let watches: Vec<Watch> = files.iter().map(|file| Watch::new(file, Timing::default())).collect();
    let tls = Arc::new(Tls::new(options)?);
    if !watches.is_empty() {
        let follow = follow(watches, Arc::clone(&tls), Arc::clone(metrics));
        let stop = stop.clone();
        tasks.spawn(async move { stop.run_until_cancelled(follow).await });
    }
    Ok(tls)
}

async fn follow(mut watches: Vec<Watch>, tls: Arc<Tls>, metrics: Arc<Metrics>) {
    loop {
        select_all(watches.iter_mut().map(|watch| watch.changed().boxed())).await;
        match tls.reload() {
            Ok(()) => {
                metrics.set_degraded(Degraded::Certificate, false);
                tracing::info!("new connections are served with the certificate that is there now");
            }
            Err(error) => {
                metrics.set_degraded(Degraded::Certificate, true);
                tracing::warn!("{error}; new connections are served with the last good certificate");
            }
        }
    }
}
