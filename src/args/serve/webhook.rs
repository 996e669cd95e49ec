//! How API servers have objects validated.

use std::path::PathBuf;

use clap::Args;

/// Flags of the validating webhook.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Validating webhook")]
pub struct WebhookArgs {
    /// Port on which API servers have objects validated before they store them, always with TLS; 0 picks a free one. Without
    /// the flag nothing is validated.
    #[arg(long, value_name = "PORT", requires = "webhook_cert_path", env = "PILOTFISH_WEBHOOK_PORT")]
    pub webhook_port: Option<u16>,
    /// Folder with tls.crt and tls.key, both PEM, of the webhook's port; read again when they change.
    #[arg(long, value_name = "DIR", requires = "webhook_port", env = "PILOTFISH_WEBHOOK_CERT_PATH")]
    pub webhook_cert_path: Option<PathBuf>,
}
