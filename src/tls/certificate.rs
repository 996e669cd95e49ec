//! Certificates and keys, read or made.

use std::path::Path;

use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::{CERTIFICATE_FILE, KEY_FILE, TlsError};

/// What a certificate that is made here is for; clients cannot verify it whatever it says.
const SELF_SIGNED_NAME: &str = "pilotfish";

/// A certificate with those between it and its CA, and its key.
pub type Pair = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The pair in a folder.
pub fn pair(dir: &Path) -> Result<Pair, TlsError> {
    let key = dir.join(KEY_FILE);
    let read = PrivateKeyDer::from_pem_file(&key);
    Ok((chain(&dir.join(CERTIFICATE_FILE))?, read.map_err(|error| failed(&key, &error, "private key"))?))
}

/// All certificates of a PEM file, at least one.
pub fn chain(file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |error: pem::Error| failed(file, &error, "certificate");
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(file).map_err(failed)?.collect();
    let certificates = certificates.map_err(failed)?;
    if certificates.is_empty() { Err(failed(pem::Error::NoItemsFound)) } else { Ok(certificates) }
}

fn failed(file: &Path, error: &pem::Error, wanted: &str) -> TlsError {
    let why = match error {
        pem::Error::NoItemsFound => format!("holds no {wanted} in PEM"),
        pem::Error::Io(error) => format!("cannot be read: {error}"),
        other => format!("is no {wanted} in PEM: {other}"),
    };
    TlsError::File { file: file.to_owned(), why }
}

/// A new key and a certificate that it has signed itself.
pub fn self_signed() -> Result<Pair, TlsError> {
    let made = rcgen::generate_simple_self_signed([SELF_SIGNED_NAME.to_owned(), "localhost".to_owned()])?;
    let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    Ok((vec![made.cert.into()], key))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tls::{Tls, TlsOptions};
    use rstest::rstest;
    use std::fs;

    const OTHER: &str = "of another pair";

    fn made() -> (String, String) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key.serialize_pem())
    }

    #[rstest]
    #[case("", "", Some("tls.crt: holds no certificate"))]
    #[case("CERT", "KEY", None)]
    #[case("CERT", OTHER, Some("tls.crt and tls.key"))]
    #[case("", "KEY", Some("tls.crt: holds no certificate"))]
    #[case("nonsense", "KEY", Some("tls.crt: holds no certificate"))]
    #[case("CUT", "KEY", Some("tls.crt: is no certificate"))]
    #[case("CERT", "CERT", Some("tls.key: holds no private key"))]
    fn pairs(#[case] certificate: &str, #[case] key: &str, #[case] told: Option<&str>) {
        let (first, second) = (made(), made());
        let text = |name: &str| match name {
            "CERT" => first.0.clone(),
            "KEY" => first.1.clone(),
            "CUT" => first.0[..first.0.len() / 2].to_owned(),
            OTHER => second.1.clone(),
            text => text.to_owned(),
        };
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(CERTIFICATE_FILE), text(certificate)).unwrap();
        fs::write(dir.path().join(KEY_FILE), text(key)).unwrap();
        let error = Tls::new(TlsOptions { dir: Some(dir.path().to_owned()), ..TlsOptions::default() }).err();
        match (error.map(|error| error.to_string()), told) {
            (None, None) => {}
            (Some(error), Some(told)) => assert!(error.contains(told), "{error}"),
            (error, _) => panic!("{error:?}"),
        }
    }

    #[test]
    fn a_missing_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = pair(dir.path()).unwrap_err().to_string();
        assert!(error.contains(CERTIFICATE_FILE) && error.contains("cannot be read"), "{error}");
    }
}
