//! What Kubernetes takes for names and labels; nothing else can be there.

const LONGEST_LABEL: usize = 63;
const LONGEST_NAME: usize = 253;

/// Whether it is an RFC 1123 label, as the names of namespaces are.
pub fn is_label(text: &str) -> bool {
    is_bounded(text, LONGEST_LABEL) && text.bytes().all(|b| is_lower(b) || b == b'-')
}

/// Whether it is an RFC 1123 subdomain, as the names of objects are.
pub fn is_object(text: &str) -> bool {
    is_bounded(text, LONGEST_NAME) && text.bytes().all(|b| is_lower(b) || matches!(b, b'-' | b'.'))
}

/// Whether it is `NAME` or `DOMAIN/NAME`.
pub fn is_label_key(text: &str) -> bool {
    let (domain, name) = text.split_once('/').map_or((None, text), |(domain, name)| (Some(domain), name));
    is_label_text(name) && domain.is_none_or(is_object)
}

/// Whether it can be the value of a label, which may be empty.
pub fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_label_text(text)
}

fn is_label_text(text: &str) -> bool {
    is_bounded(text, LONGEST_LABEL)
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

/// Whether it begins and ends with a letter or digit.
fn is_bounded(text: &str, longest: usize) -> bool {
    let is_end = |end: Option<&u8>| end.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= longest && is_end(bytes.first()) && is_end(bytes.last())
}

fn is_lower(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit()
}
