//! Sizes, durations and pairs on the command line.

use crate::resources::{name, quantity};
use std::time::Duration;

/// `64Mi`, `1Gi`, `1500000`.
pub fn bytes(text: &str) -> Result<usize, String> {
    quantity::parse(text)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .ok_or_else(|| "write a number of bytes, such as 64Mi".to_owned())
}

/// `30s`, `200ms`, `5m`.
pub fn duration(text: &str) -> Result<Duration, String> {
    crate::resources::duration::parse(text)
        .ok_or_else(|| "write a duration, such as 200ms, 30s or 5m".to_owned())
}

/// A duration that must not be zero.
pub fn interval(text: &str) -> Result<Duration, String> {
    let found = duration(text)?;
    if found.is_zero() { Err("must be above 0".to_owned()) } else { Ok(found) }
}

/// `NAME=VALUE`.
pub fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| "write NAME=VALUE".to_owned())?;
    Ok((name.to_ascii_lowercase(), value.to_owned()))
}

/// `NAME.NAMESPACE`.
pub fn identity(text: &str) -> Result<String, String> {
    let is_name = |part: &str| !part.is_empty() && !part.contains(char::is_whitespace);
    match text.rsplit_once('.') {
        Some((name, namespace)) if is_name(name) && is_name(namespace) => Ok(text.to_owned()),
        _ => Err("write NAME.NAMESPACE, such as gpu-0.default".to_owned()),
    }
}

/// `HOST:PORT`, with or without `tcp://` before it.
pub fn socket(text: &str) -> Result<String, String> {
    let socket = text.strip_prefix("tcp://").unwrap_or(text);
    match socket.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => Ok(socket.to_owned()),
        _ => Err("write HOST:PORT, such as 10.0.0.7:5557".to_owned()),
    }
}

/// The name of a namespace.
pub fn label(text: &str) -> Result<String, String> {
    checked(text, name::is_label, "the name of a namespace")
}

/// The name of an object.
pub fn object(text: &str) -> Result<String, String> {
    checked(text, name::is_object, "the name of an object")
}

/// `NAME` or `DOMAIN/NAME`.
pub fn label_key(text: &str) -> Result<String, String> {
    checked(text, name::is_label_key, "a label")
}

/// The value of a label, which may be empty.
pub fn label_value(text: &str) -> Result<String, String> {
    checked(text, name::is_label_value, "the value of a label")
}

fn checked(text: &str, is_one: fn(&str) -> bool, what: &str) -> Result<String, String> {
    if is_one(text) { Ok(text.to_owned()) } else { Err(format!("`{text}` cannot be {what}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn identities_and_sockets() {
        assert!(identity("gpu-0.default").is_ok() && identity("a.b.c").is_ok());
        assert!(identity("gpu-0").is_err() && identity(".default").is_err() && identity("a b.c").is_err());
        assert_eq!(socket("tcp://h:5557").as_deref(), Ok("h:5557"));
        assert!(socket("[::1]:5557").is_ok() && socket("h").is_err() && socket("tcp://*").is_err());
    }

    #[rstest]
    #[case("64Mi", Ok(64 << 20))]
    #[case("10", Ok(10))]
    #[case("2k", Ok(2_000))]
    #[case("1Ti", Ok(1 << 40))]
    #[case("1Pi", Err(()))]
    #[case("", Err(()))]
    #[case("99999999999999999999Gi", Err(()))]
    fn sizes(#[case] text: &str, #[case] expected: Result<usize, ()>) {
        assert_eq!(bytes(text).map_err(|_| ()), expected);
    }
}
