//! Which form of message content a template reads, found in its source as vLLM finds it in the syntax tree.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

/// The form of message content that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentFormat {
    /// One text; the parts of a list are joined with newlines.
    Text,
    /// A list of parts, which the template iterates over; a text becomes a list of one part.
    Parts,
}

#[expect(clippy::expect_used, reason = "constant patterns")]
fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("the pattern is valid")
}

static TAG: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?s)\{%[-+]?\s*(.*?)\s*[-+]?%\}"));
static SET: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?s)^set\s+(\w+)\s*=\s*(.*)$"));
static FOR: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?s)^for\s+(\w+)\s+in\s+(.*?)(?:\s+if\s.*|\s+recursive)?$"));
static MACRO: LazyLock<Regex> = LazyLock::new(|| pattern(r"(?s)^macro\s+(\w+)\s*\((.*)\)$"));
static TAIL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"(?s)^(.*?)\s*(?:\|.*|\sis\s.*|\[[^\[\]]*:[^\[\]]*\])$"));

/// One loop: its variable, what it goes through, and the macro it stands in.
struct Loop<'s> {
    target: &'s str,
    through: &'s str,
    within: Option<usize>,
}

struct Macro<'s> {
    name: &'s str,
    parameters: Vec<&'s str>,
}

/// A template reads parts if a loop goes through the content of a message, through `content`, or through a parameter of a
/// macro that is called with the content of a message.
pub fn detect(source: &str) -> ContentFormat {
    let mut sets = Vec::new();
    let mut loops: Vec<Loop<'_>> = Vec::new();
    let mut macros: Vec<Macro<'_>> = Vec::new();
    let mut within = None;
    for tag in TAG.captures_iter(source).filter_map(|tag| tag.get(1)).map(|tag| tag.as_str()) {
        if let Some(set) = SET.captures(tag) {
            sets.push((set.get(1).map_or("", |m| m.as_str()), set.get(2).map_or("", |m| m.as_str())));
        } else if let Some(found) = FOR.captures(tag) {
            let part = |at| found.get(at).map_or("", |m: regex::Match<'_>| m.as_str());
            loops.push(Loop { target: part(1), through: part(2), within });
        } else if let Some(found) = MACRO.captures(tag) {
            let part = |at| found.get(at).map_or("", |m: regex::Match<'_>| m.as_str());
            let name = |parameter: &'_ str| parameter.find('=').unwrap_or(parameter.len());
            let parameters = part(2).split(',').map(|p| p[..name(p)].trim()).collect();
            macros.push(Macro { name: part(1), parameters });
            within = Some(macros.len() - 1);
        } else if tag == "endmacro" || tag.starts_with("endmacro ") {
            within = None;
        }
    }
    let lists = aliases(&sets, "messages");
    let messages: BTreeSet<&str> =
        loops.iter().filter(|l| lists.iter().any(|list| is(l.through, list))).map(|l| l.target).collect();
    let of_message = |text: &str| messages.iter().any(|message| is_member(text, message, "content"));
    let given: Vec<BTreeSet<&str>> = macros.iter().map(|m| given_content(source, m, &of_message)).collect();
    let reads_parts = loops.iter().any(|l| {
        let through = bare(l.through);
        of_message(l.through)
            || match l.within {
                Some(at) => given[at].contains(through),
                None => through == "content",
            }
    });
    if reads_parts { ContentFormat::Parts } else { ContentFormat::Text }
}

/// A variable, and all that it or a part of it is assigned to.
fn aliases<'s>(sets: &[(&'s str, &'s str)], of: &'s str) -> Vec<&'s str> {
    let mut known = vec![of];
    let mut at = 0;
    while let Some(&name) = known.get(at) {
        for (target, value) in sets {
            if is(value, name) && !known.contains(target) {
                known.push(target);
            }
        }
        at += 1;
    }
    known
}

/// The parameters of a macro that some call gives the content of a message.
fn given_content<'s>(source: &str, of: &Macro<'s>, of_message: &dyn Fn(&str) -> bool) -> BTreeSet<&'s str> {
    let mut given = BTreeSet::new();
    let call = format!("{}(", of.name);
    for (at, _) in source.match_indices(&call) {
        let start = at + call.len();
        let arguments = &source[start..start + closing(&source[start..])];
        for (place, argument) in top_level(arguments).into_iter().enumerate() {
            match argument.split_once('=') {
                Some((name, value)) if of_message(value.trim()) => {
                    given.extend(of.parameters.iter().find(|p| **p == name.trim()));
                }
                None if of_message(argument.trim()) => given.extend(of.parameters.get(place)),
                _ => {}
            }
        }
    }
    given
}

/// Where the bracket that is open closes.
fn closing(text: &str) -> usize {
    let mut depth = 1;
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// Arguments between the commas that are in no bracket.
fn top_level(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

/// An expression without filters, tests, slices and brackets round it.
fn bare(mut text: &str) -> &str {
    loop {
        text = text.trim();
        if let Some(inner) = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
            text = inner;
        } else if let Some(head) = TAIL.captures(text).and_then(|tail| tail.get(1)) {
            text = head.as_str();
        } else {
            return text;
        }
    }
}

fn is(text: &str, name: &str) -> bool {
    bare(text) == name
}

fn is_member(text: &str, of: &str, name: &str) -> bool {
    let Some(rest) = bare(text).strip_prefix(of).map(str::trim) else { return false };
    rest.strip_prefix('.').is_some_and(|rest| rest == name)
        || rest
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
            .is_some_and(|key| key.trim().trim_matches(['\'', '"']) == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case("{% for m in messages %}{{ m.content }}{% endfor %}", ContentFormat::Text)]
    #[case(
        "{%- for m in messages -%}{% for part in m['content'] %}{% endfor %}{% endfor %}",
        ContentFormat::Parts
    )]
    #[case(
        "{% for m in messages[1:] %}{% for p in m.content | list %}{% endfor %}{% endfor %}",
        ContentFormat::Parts
    )]
    #[case(
        "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{% endfor %}{% endfor %}",
        ContentFormat::Parts
    )]
    #[case("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", ContentFormat::Text)]
    #[case("{% for item in content %}{% endfor %}", ContentFormat::Parts)]
    #[case(
        "{% macro show(x, n=1) %}{% for p in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.content) }}{% endfor %}",
        ContentFormat::Parts
    )]
    #[case(
        "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}{% for m in messages %}{{ show(m.tools) }}{% endfor %}",
        ContentFormat::Text
    )]
    #[case("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", ContentFormat::Text)]
    #[case(
        "{% for m in messages if m.role == 'user' %}{% for p in m.content %}{% endfor %}{% endfor %}",
        ContentFormat::Parts
    )]
    fn a_template_that_iterates_over_content_reads_parts(
        #[case] source: &str,
        #[case] expected: ContentFormat,
    ) {
        assert_eq!(detect(source), expected);
    }
}
