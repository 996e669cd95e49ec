//! Durations as Kubernetes writes them: `1s`, `500ms`, `1m30s`, `1.5h`.

use std::time::Duration;

/// What [`parse`] reads, as a definition says it to an API server.
pub const PATTERN: &str = r"^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$";

/// Reads a Go duration; `None` if it is not one, or negative.
pub fn parse(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let mut rest = text.trim();
    let mut total = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        // Longer units first, since `ms` begins like `m`.
        let (unit, seconds) =
            [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("h", 3600.0), ("m", 60.0), ("s", 1.0)]
                .into_iter()
                .find(|(unit, _)| rest.starts_with(unit))?;
        rest = &rest[unit.len()..];
        total += number * seconds;
    }
    Duration::try_from_secs_f64(total).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("1s", Some(1_000))]
    #[case("500ms", Some(500))]
    #[case("1m30s", Some(90_000))]
    #[case("1.5h", Some(5_400_000))]
    #[case("0", Some(0))]
    #[case("0s", Some(0))]
    #[case("5", None)]
    #[case("-1s", None)]
    #[case("", None)]
    #[case("1x", None)]
    fn go_durations(#[case] text: &str, #[case] millis: Option<u64>) {
        assert_eq!(parse(text), millis.map(Duration::from_millis));
        let defined = regex::Regex::new(PATTERN).unwrap();
        assert_eq!(defined.is_match(text), millis.is_some());
    }
}
