//! TLS of the gRPC port and of the webhook's: one certificate for new connections, replaced while older ones run on.

mod certificate;
mod incoming;

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, SupportedCipherSuite, SupportedProtocolVersion, version};

pub use incoming::{Connection, incoming};

/// The file of the certificate and those between it and its CA.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// The file of its private key.
pub const KEY_FILE: &str = "tls.key";
/// gRPC is HTTP/2 alone.
const HTTP_2: &[u8] = b"h2";
/// API servers call webhooks so.
const HTTP_1: &[u8] = b"http/1.1";

/// Why TLS cannot be served so.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or holds nothing of what it is for.
    #[error("{}: {why}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The certificate and the key do not work together.
    #[error("{} and {KEY_FILE}: {source}", certificate.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// What is wrong.
        source: rustls::Error,
    },
    /// The CA of the clients cannot be used.
    #[error("{}: {why}", file.display())]
    ClientCa {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// No certificate could be made.
    #[error("no certificate could be made: {0}")]
    SelfSigned(#[from] rcgen::Error),
    /// Versions and cipher suites leave nothing to agree on.
    #[error("the versions and cipher suites allowed leave nothing to agree on: {0}")]
    Nothing(rustls::Error),
}

/// How TLS is served.
#[derive(Clone, Debug, Default)]
pub struct TlsOptions {
    /// Folder of certificate and key; without it a certificate is made.
    pub dir: Option<PathBuf>,
    /// The CAs of clients: without it any client is admitted, with it only those that it vouches for.
    pub client_ca: Option<PathBuf>,
    /// TLS 1.3 alone.
    pub only_1_3: bool,
    /// IANA names of the suites of TLS 1.2 that are allowed; all if empty.
    pub cipher_suites: Vec<String>,
    /// HTTP/1.1 instead of HTTP/2.
    pub http_1: bool,
}

impl TlsOptions {
    /// The files that are read.
    pub fn files(&self) -> Vec<PathBuf> {
        let pair = self.dir.iter().flat_map(|dir| [dir.join(CERTIFICATE_FILE), dir.join(KEY_FILE)]);
        pair.chain(self.client_ca.clone()).collect()
    }

    /// The names among the cipher suites that this program does not know.
    pub fn unknown_suites(&self) -> Vec<&str> {
        let known =
            |name: &&String| ring::ALL_CIPHER_SUITES.iter().any(|suite| iana_name(*suite) == name.trim());
        self.cipher_suites.iter().filter(|name| !known(name)).map(String::as_str).collect()
    }

    fn provider(&self) -> CryptoProvider {
        let mut provider = ring::default_provider();
        if !self.cipher_suites.is_empty() {
            let allowed = |suite: SupportedCipherSuite| {
                suite.tls13().is_some()
                    || self.cipher_suites.iter().any(|name| name.trim() == iana_name(suite))
            };
            provider.cipher_suites.retain(|suite| allowed(*suite));
        }
        provider
    }

    fn config(&self) -> Result<ServerConfig, TlsError> {
        let provider = Arc::new(self.provider());
        let has_1_2 = provider.cipher_suites.iter().any(|suite| suite.tls13().is_none());
        let versions: &[&SupportedProtocolVersion] =
            if self.only_1_3 || !has_1_2 { &[&version::TLS13] } else { &[&version::TLS13, &version::TLS12] };
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(versions)
            .map_err(TlsError::Nothing)?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(file) => {
                let failed = |why: String| TlsError::ClientCa { file: file.clone(), why };
                let mut roots = RootCertStore::empty();
                for certificate in certificate::chain(file)? {
                    roots.add(certificate).map_err(|error| failed(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder
                    .with_client_cert_verifier(verifier.build().map_err(|error| failed(error.to_string()))?)
            }
        };
        let (chain, key) = match &self.dir {
            Some(dir) => certificate::pair(dir)?,
            None => certificate::self_signed()?,
        };
        let mut config = builder.with_single_cert(chain, key).map_err(|source| TlsError::Pair {
            certificate: self.dir.clone().unwrap_or_default().join(CERTIFICATE_FILE),
            source,
        })?;
        config.alpn_protocols = vec![if self.http_1 { HTTP_1 } else { HTTP_2 }.to_vec()];
        Ok(config)
    }
}

/// rustls writes `TLS13_` where IANA writes `TLS_`.
fn iana_name(suite: SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite()).replacen("TLS13_", "TLS_", 1)
}

/// What new connections are served with.
#[derive(Debug)]
pub struct Tls {
    options: TlsOptions,
    config: ArcSwap<ServerConfig>,
}

impl Tls {
    /// Reads what `options` name.
    pub fn new(options: TlsOptions) -> Result<Self, TlsError> {
        let config = ArcSwap::from_pointee(options.config()?);
        Ok(Self { options, config })
    }

    /// Reads the files again. On an error what was served before is served on.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.config.store(Arc::new(self.options.config()?));
        Ok(())
    }

    fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }
}

/// Makes ring what every library of this process uses for TLS; some panic where none was chosen.
pub fn install_provider() {
    // An error says that one was installed before, by an earlier call or by a program that embeds us.
    let _ = ring::default_provider().install_default();
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn options(suites: &[&str], only_1_3: bool) -> TlsOptions {
        let cipher_suites = suites.iter().map(|name| (*name).to_owned()).collect();
        TlsOptions { only_1_3, cipher_suites, ..TlsOptions::default() }
    }

    #[rstest]
    #[case(&[], &[])]
    #[case(&["TLS_AES_128_GCM_SHA256", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"], &[])]
    #[case(&["TLS_RSA_WITH_AES_128_CBC_SHA", " TLS_CHACHA20_POLY1305_SHA256"], &["TLS_RSA_WITH_AES_128_CBC_SHA"])]
    fn suites_that_are_not_known_are_named(#[case] suites: &[&str], #[case] unknown: &[&str]) {
        assert_eq!(options(suites, false).unknown_suites(), unknown);
    }

    #[rstest]
    #[case(&[], false, (3, 6))]
    #[case(&["TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"], false, (3, 1))]
    #[case(&["TLS_RSA_WITH_AES_128_CBC_SHA"], false, (3, 0))]
    #[case(&[], true, (3, 6))]
    fn suites_of_tls_1_2_are_chosen_and_those_of_1_3_stay(
        #[case] suites: &[&str],
        #[case] only_1_3: bool,
        #[case] expected: (usize, usize),
    ) {
        let options = options(suites, only_1_3);
        let config = Tls::new(options).unwrap().config();
        let of_1_3 = config.crypto_provider().cipher_suites.iter().filter(|suite| suite.tls13().is_some());
        let of_1_3 = of_1_3.count();
        assert_eq!((of_1_3, config.crypto_provider().cipher_suites.len() - of_1_3), expected);
        assert_eq!(config.alpn_protocols, [HTTP_2]);
    }
}
