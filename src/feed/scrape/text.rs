//! Finds the wanted lines of a Prometheus text page without looking closely at any other.
//!
//! A page of vLLM has 700 lines of which a dozen matter. A line is cut at its line break, its name is compared, and only
//! a wanted one is read further. A line that cannot be read is skipped alone: the lines round it still count.

use std::borrow::Cow;

use memchr::{memchr, memchr_iter, memchr2, memchr3};

/// One wanted line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// What the caller's `find` said of its name.
    pub series: u16,
    /// The text between the braces; empty without labels.
    pub labels: &'a [u8],
    /// The value; NaN and infinities are passed on, since a series that is there without a number is not missing.
    pub value: f64,
}

/// Calls `take` with every line of `page` whose name `find` knows.
pub fn scan<'a>(page: &'a [u8], find: impl Fn(&[u8]) -> Option<u16>, mut take: impl FnMut(Sample<'a>)) {
    let mut start = 0;
    for end in memchr_iter(b'\n', page).chain(std::iter::once(page.len())) {
        let line = &page[start..end];
        start = end + 1;
        if let Some(sample) = read_line(line, &find) {
            take(sample);
        }
    }
}

/// The whole lines of a page that was cut somewhere: `12` may have become `1`.
pub fn whole_lines(page: &[u8]) -> &[u8] {
    &page[..memchr::memrchr(b'\n', page).map_or(0, |at| at + 1)]
}

fn read_line<'a>(line: &'a [u8], find: &impl Fn(&[u8]) -> Option<u16>) -> Option<Sample<'a>> {
    let line = if line.first().is_some_and(|&byte| is_blank(byte)) { line.trim_ascii_start() } else { line };
    if matches!(line.first(), None | Some(b'#')) {
        return None;
    }
    let name_end = memchr3(b'{', b' ', b'\t', line)?;
    let series = find(&line[..name_end])?;
    let rest = line[name_end..].trim_ascii_start();
    let (labels, rest) = match rest.strip_prefix(b"{") {
        Some(inside) => {
            let end = labels_end(inside)?;
            (&inside[..end], inside[end + 1..].trim_ascii_start())
        }
        None => (&[][..], rest),
    };
    let value_end = rest.iter().position(|&byte| is_blank(byte)).unwrap_or(rest.len());
    let value = std::str::from_utf8(&rest[..value_end]).ok()?.parse().ok()?;
    Some(Sample { series, labels, value })
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\r')
}

/// Where the closing brace is, given the text after the opening one.
fn labels_end(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let next = at + memchr2(b'}', b'"', &text[at..])?;
        if text[next] == b'}' {
            return Some(next);
        }
        at = next + 1 + quoted_end(&text[next + 1..])? + 1;
    }
}

/// Where the closing quote is, given the text after the opening one.
fn quoted_end(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let next = at + memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[next] == b'"' {
            return Some(next);
        }
        at = next + 2;
    }
}

/// The value of one label, its escapes resolved; `None` if it is not there or is not UTF-8.
pub fn label<'a>(labels: &'a [u8], wanted: &str) -> Option<Cow<'a, str>> {
    let mut rest = labels;
    loop {
        let equals = memchr(b'=', rest)?;
        let name = rest[..equals].trim_ascii();
        let quoted = rest[equals + 1..].trim_ascii_start().strip_prefix(b"\"")?;
        let end = quoted_end(quoted)?;
        if name == wanted.as_bytes() {
            return unescape(&quoted[..end]);
        }
        rest = quoted[end + 1..].trim_ascii_start();
        rest = rest.strip_prefix(b",").unwrap_or(rest);
    }
}

fn unescape(raw: &[u8]) -> Option<Cow<'_, str>> {
    let text = std::str::from_utf8(raw).ok()?;
    if memchr(b'\\', raw).is_none() {
        return Some(Cow::Borrowed(text));
    }
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match (char, char == '\\') {
            (_, true) => match chars.next() {
                Some('n') => plain.push('\n'),
                Some(other) => plain.push(other),
                None => {}
            },
            (char, false) => plain.push(char),
        }
    }
    Some(Cow::Owned(plain))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn find(name: &[u8]) -> Option<u16> {
        [&b"wanted"[..], b"other"].iter().position(|known| *known == name).map(|at| at as u16)
    }

    fn read(page: &[u8]) -> Vec<(u16, String, f64)> {
        let mut seen = Vec::new();
        scan(page, find, |sample| {
            seen.push((sample.series, String::from_utf8_lossy(sample.labels).into_owned(), sample.value));
        });
        seen
    }

    #[rstest]
    #[case::plain("wanted 3", "", 3.0)]
    #[case::float("wanted 1.7959776e+09\n", "", 1_795_977_600.0)]
    #[case::crlf("wanted 3\r\n", "", 3.0)]
    #[case::time_follows("wanted 3 1795977600000", "", 3.0)]
    #[case::tabs_and_indent("\t wanted\t3", "", 3.0)]
    #[case::no_labels("wanted{} 3", "", 3.0)]
    #[case::labels(r#"wanted{a="b"} 3"#, r#"a="b""#, 3.0)]
    #[case::blanks_round_labels(r#"wanted {a="b"}	3"#, r#"a="b""#, 3.0)]
    #[case::brace_in_value(r#"wanted{a="}\"} 7",b="c"} 3"#, r#"a="}\"} 7",b="c""#, 3.0)]
    #[case::exemplar(r#"wanted{a="b"} 3 # {trace_id="x"} 0.5"#, r#"a="b""#, 3.0)]
    #[case::infinite("wanted +Inf", "", f64::INFINITY)]
    fn one_line(#[case] line: &str, #[case] labels: &str, #[case] value: f64) {
        assert_eq!(read(line.as_bytes()), [(0, labels.to_owned(), value)]);
    }

    #[rstest]
    #[case::comment("# TYPE wanted gauge")]
    #[case::longer_name("wanted_total 3")]
    #[case::shorter_name("wante 3")]
    #[case::no_value("wanted")]
    #[case::blank_value("wanted ")]
    #[case::text("wanted line here")]
    #[case::open_brace(r#"wanted{a="b" 3"#)]
    #[case::open_quote(r#"wanted{a="b} 3"#)]
    #[case::ends_in_escape(r#"wanted{a="b\"#)]
    #[case::html("<html><body>wanted 3</body></html>")]
    fn a_bad_line_is_skipped_alone(#[case] line: &str) {
        assert_eq!(read(line.as_bytes()), []);
        let page = format!("other 1\n{line}\nother 2\n");
        assert_eq!(read(page.as_bytes()), [(1, String::new(), 1.0), (1, String::new(), 2.0)]);
    }

    #[rstest]
    #[case("engine", Some("0"))]
    #[case("spaced", Some("x"))]
    #[case("path", Some("C:\\a \"b\"\nc"))]
    #[case("last", Some(""))]
    #[case("engin", None)]
    #[case("0", None)]
    fn labels_are_found_and_unescaped(#[case] name: &str, #[case] value: Option<&str>) {
        let labels = br#"engine="0", spaced = "x" ,path="C:\\a \"b\"\nc",last="","#;
        assert_eq!(label(labels, name).as_deref(), value);
    }

    #[test]
    fn a_cut_page_loses_its_last_line() {
        assert_eq!(whole_lines(b"a 1\nb 1"), b"a 1\n");
        assert_eq!(whole_lines(b"b 1"), b"");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(page in proptest::collection::vec(any::<u8>(), 0..400)) {
            scan(&page, |_| Some(0), |sample| { label(sample.labels, "a"); });
        }

        #[test]
        fn any_text_of_the_alphabet_of_pages_is_read_without_panic(page in "[a{}\"\\\\=, #\n1]{0,200}") {
            scan(page.as_bytes(), |_| Some(0), |sample| { label(sample.labels, "a"); });
        }

        #[test]
        fn what_is_written_is_read(value in any::<f64>(), text in "\\PC{0,20}") {
            let escaped = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let page = format!("wanted{{b=\"}}\",a=\"{escaped}\"}} {value:e}\n");
            let mut seen = Vec::new();
            scan(page.as_bytes(), find, |s| seen.push((s.value, label(s.labels, "a").map(Cow::into_owned))));
            prop_assert_eq!(seen, [(value, Some(text))]);
        }
    }
}
