//! What the engine received, byte for byte, so that tests can check what a gateway sent.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;

use axum::http::{HeaderMap, Method, Uri};
use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

/// Largest body that is shown in `/debug/requests`, bytes.
const SHOWN_BODY: usize = 64 * 1024;

/// One request as it came from the wire.
#[derive(Clone, Debug)]
pub struct RecordedRequest {
    /// Method.
    pub method: Method,
    /// Path and query.
    pub uri: Uri,
    /// Header fields in order of arrival.
    pub headers: HeaderMap,
    /// Raw body, still encoded; empty when it is larger than 64 KiB.
    pub body: Bytes,
    /// Length of the raw body, bytes.
    pub length: usize,
    /// xxh3-64 of the raw body.
    pub digest: u64,
}

impl RecordedRequest {
    pub(super) fn new(method: Method, uri: Uri, headers: HeaderMap, body: &Bytes) -> Self {
        let (length, digest) = (body.len(), xxh3_64(body));
        let body = if length <= SHOWN_BODY { body.clone() } else { Bytes::new() };
        Self { method, uri, headers, body, length, digest }
    }

    /// The value of a header field, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    fn json(&self) -> Value {
        let headers: Vec<Value> = self
            .headers
            .iter()
            .map(|(name, value)| json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())]))
            .collect();
        let mut object = json!({
            "method": self.method.as_str(),
            "path": self.uri.to_string(),
            "headers": headers,
            "length": self.length,
            "xxh3": hex(self.digest),
        });
        if self.length <= SHOWN_BODY {
            match std::str::from_utf8(&self.body) {
                Ok(text) => object["body"] = text.into(),
                Err(_) => object["body_base64"] = base64(&self.body).into(),
            }
        }
        object
    }
}

/// Sixteen hexadecimal digits.
pub(super) fn hex(digest: u64) -> String {
    format!("{digest:016x}")
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let symbol = DIGITS[(bits >> (18 - 6 * digit) & 63) as usize] as char;
            let _ = out.write_char(if digit <= group.len() { symbol } else { '=' });
        }
    }
    out
}

/// The last requests, oldest first.
#[derive(Default)]
pub(super) struct Records {
    kept: Mutex<VecDeque<Arc<RecordedRequest>>>,
}

impl Records {
    pub fn push(&self, request: RecordedRequest, limit: usize) {
        let mut kept = self.kept.lock();
        kept.push_back(Arc::new(request));
        while kept.len() > limit {
            kept.pop_front();
        }
    }

    pub fn all(&self) -> Vec<Arc<RecordedRequest>> {
        self.kept.lock().iter().cloned().collect()
    }

    pub fn clear(&self) {
        self.kept.lock().clear();
    }

    pub fn json(&self) -> String {
        Value::from(self.all().iter().map(|request| request.json()).collect::<Vec<_>>()).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(b"", "")]
    #[case(b"f", "Zg==")]
    #[case(b"fo", "Zm8=")]
    #[case(b"foo", "Zm9v")]
    #[case(b"\xff\xfe\xfd\xfc", "//79/A==")]
    fn base64_is_the_standard_alphabet_with_padding(#[case] bytes: &[u8], #[case] text: &str) {
        assert_eq!(base64(bytes), text);
    }

    #[test]
    fn only_the_last_requests_are_kept() {
        let records = Records::default();
        for path in ["/a", "/b", "/c"] {
            let body = Bytes::from_static(b"x");
            records
                .push(RecordedRequest::new(Method::POST, path.parse().unwrap(), HeaderMap::new(), &body), 2);
        }
        let paths: Vec<String> = records.all().iter().map(|request| request.uri.to_string()).collect();
        assert_eq!(paths, ["/b", "/c"]);
    }
}
