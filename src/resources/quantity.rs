//! Numbers as Kubernetes writes them: `500`, `1k`, `64Mi`, `1.5Gi`.

const SUFFIXES: [(&str, u64); 9] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

/// Reads a quantity of whole things; `None` if it is not one, negative, or too large.
pub fn parse(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, factor) =
        SUFFIXES.iter().find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, *factor)))?;
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let is_decimal = digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = digits.parse().ok().filter(|_| is_decimal)?;
    let scaled = number * factor as f64;
    (scaled < u64::MAX as f64).then_some(scaled as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0", Some(0))]
    #[case("500", Some(500))]
    #[case(" 1k ", Some(1_000))]
    #[case("64Mi", Some(64 << 20))]
    #[case("1.5Gi", Some(3 << 29))]
    #[case("18446744073709551615", Some(u64::MAX))]
    #[case("18446744073709551616", None)]
    #[case("1e3", None)]
    #[case("-1", None)]
    #[case("inf", None)]
    #[case("", None)]
    #[case("k", None)]
    #[case("3x", None)]
    fn quantities(#[case] text: &str, #[case] value: Option<u64>) {
        assert_eq!(parse(text), value);
    }
}
