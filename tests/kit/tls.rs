//! Certificates of a CA of one's own, and clients that go by it.

use std::net::SocketAddr;
use std::path::Path;

use pilotfish::tls::{CERTIFICATE_FILE, KEY_FILE};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// A CA.
#[derive(Debug)]
pub struct Ca(CertifiedIssuer<'static, KeyPair>);

/// A certificate of it with its key, as PEM.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The certificate.
    pub certificate: String,
    /// The key.
    pub key: String,
}

impl Ca {
    /// A new one.
    pub fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// Its own certificate, as PEM.
    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// A new certificate of it for `localhost` and its address.
    pub fn issue(&self) -> Pair {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pair { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// What a client verifies servers by that trusts this CA alone.
    pub fn client(&self) -> ClientTlsConfig {
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(self.pem())).domain_name("localhost")
    }
}

impl Pair {
    /// As a client shows it.
    pub fn identity(&self) -> Identity {
        Identity::from_pem(&self.certificate, &self.key)
    }

    /// Writes both files into a folder, each in one step.
    pub fn write(&self, dir: &Path) {
        put(&dir.join(CERTIFICATE_FILE), &self.certificate);
        put(&dir.join(KEY_FILE), &self.key);
    }
}

/// Writes a file in one step, so that nobody sees half of it.
pub fn put(file: &Path, text: &str) {
    let draft = file.with_extension("draft");
    std::fs::write(&draft, text).unwrap();
    std::fs::rename(&draft, file).unwrap();
}

/// A new connection with TLS.
pub async fn connect(address: SocketAddr, tls: ClientTlsConfig) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls)?.connect().await
}
