//! How the gRPC port is secured.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, ValueEnum};

/// TLS versions by Go's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TlsVersion {
    /// Is not spoken: 1.2 is the least.
    #[value(name = "VersionTLS10")]
    Tls10,
    /// Is not spoken: 1.2 is the least.
    #[value(name = "VersionTLS11")]
    Tls11,
    /// 1.2 and 1.3.
    #[value(name = "VersionTLS12")]
    Tls12,
    /// 1.3 alone.
    #[value(name = "VersionTLS13")]
    Tls13,
}

/// Flags of TLS.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "TLS of the gRPC port")]
pub struct TlsArgs {
    /// Serve gRPC with TLS: with the certificate in --cert-path, else with one made at the start that nobody can verify.
    /// On by default with --pool-name, --endpoint-selector, --cert-path or --client-ca-file.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_SECURE_SERVING")]
    pub secure_serving: Option<bool>,
    /// Folder with tls.crt, the certificate and those between it and its CA, and tls.key, both PEM.
    #[arg(long, value_name = "DIR", env = "PILOTFISH_CERT_PATH")]
    pub cert_path: Option<PathBuf>,
    /// Read certificates again when their files change; an invalid pair leaves the last good one.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_parser = BoolishValueParser::new(), action = ArgAction::Set, env = "PILOTFISH_ENABLE_CERT_RELOAD")]
    pub enable_cert_reload: bool,
    /// Admit only clients with a certificate of these CAs (PEM), and trust them with the access-log service.
    #[arg(long, value_name = "FILE", env = "PILOTFISH_CLIENT_CA_FILE")]
    pub client_ca_file: Option<PathBuf>,
    /// The least version.
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        default_value = "VersionTLS12",
        env = "PILOTFISH_TLS_MIN_VERSION"
    )]
    pub tls_min_version: TlsVersion,
    /// Cipher suites of TLS 1.2 by their IANA names; those of TLS 1.3 are always on.
    #[arg(long, value_name = "SUITE,...", value_delimiter = ',', env = "PILOTFISH_TLS_CIPHER_SUITES")]
    pub tls_cipher_suites: Vec<String>,
}
