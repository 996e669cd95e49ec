//! An issuer of JSON Web Tokens, and the server that its public keys are fetched from.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::tls::Pair;

/// Signs tokens with a key of its own (ES256).
#[derive(Debug)]
pub struct Issuer {
    key: EcdsaKeyPair,
    random: SystemRandom,
}

impl Issuer {
    /// One with a new key.
    pub fn new() -> Self {
        let random = SystemRandom::new();
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let key =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random).unwrap();
        Self { key, random }
    }

    /// Its public key as a JSON Web Key Set.
    pub fn keys(&self) -> Value {
        // An uncompressed point: 4, x, y.
        let (x, y) = self.key.public_key().as_ref()[1..].split_at(32);
        let (x, y) = (URL_SAFE_NO_PAD.encode(x), URL_SAFE_NO_PAD.encode(y));
        json!({"keys": [{"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "k", "x": x, "y": y}]})
    }

    /// A token with these claims.
    pub fn sign(&self, claims: &Value) -> String {
        let text = unsigned(&json!({"alg": "ES256", "typ": "JWT", "kid": "k"}), claims);
        let signature = self.key.sign(&self.random, text.as_bytes()).unwrap();
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

/// Head and claims of a token, without a signature.
pub fn unsigned(head: &Value, claims: &Value) -> String {
    let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
    format!("{}.{}", part(head), part(claims))
}

/// Seconds since 1970, so many later or earlier than the present.
pub fn seconds(from_now: i64) -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64 + from_now
}

/// A server with TLS that answers everything with one JSON document.
#[derive(Debug)]
pub struct KeyServer {
    /// Where it listens.
    pub address: SocketAddr,
    _task: AbortOnDropHandle<()>,
}

impl KeyServer {
    /// Starts it at an address.
    pub async fn start(address: SocketAddr, pair: &Pair, document: &Value) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let acceptor = acceptor(pair);
        let document = Bytes::from(document.to_string());
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(serve(acceptor.clone(), stream, document.clone()));
            }
        });
        Self { address, _task: AbortOnDropHandle::new(task) }
    }
}

async fn serve(acceptor: TlsAcceptor, stream: tokio::net::TcpStream, document: Bytes) {
    let Ok(stream) = acceptor.accept(stream).await else { return };
    let answer = service_fn(move |_| {
        let document = document.clone();
        async move { Ok::<_, Infallible>(http::Response::new(Full::new(document))) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), answer).await;
}

fn acceptor(pair: &Pair) -> TlsAcceptor {
    let certificates = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth().with_single_cert(certificates, key).unwrap();
    TlsAcceptor::from(Arc::new(config))
}
