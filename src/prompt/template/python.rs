//! What Python does otherwise than Rust: JSON, numbers as text, what counts as a sequence.

use std::cmp::Ordering;
use std::fmt::Write;

use std::sync::LazyLock;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value, escape_formatter};
use regex::Regex;

/// Teaches an environment Python's ways.
pub fn teach(environment: &mut Environment<'static>) {
    minijinja_contrib::add_to_environment(environment);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match as_text(value)? {
        Some(text) => out.write_str(&text).map_err(Error::from),
        None => escape_formatter(out, state, value),
    });
    environment.add_filter("string", |value: &Value| -> Result<String, Error> {
        Ok(as_text(value)?.unwrap_or_else(|| value.to_string()))
    });
    environment.add_filter("tojson", tojson);
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_sequence);
}

/// `str()` of what Rust would print otherwise: containers and numbers that are not whole.
fn as_text(value: &Value) -> Result<Option<String>, Error> {
    let differs = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => true,
        ValueKind::Number => !value.is_integer(),
        _ => false,
    };
    if !differs {
        return Ok(None);
    }
    let mut out = String::new();
    repr(value, &mut out)?;
    Ok(Some(out))
}

/// `repr()`.
fn repr(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.kind() {
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            let number = f64::try_from(value.clone())?;
            match (number.is_nan(), number.is_infinite()) {
                (true, _) => out.push_str("nan"),
                (_, true) => out.push_str(if number > 0.0 { "inf" } else { "-inf" }),
                _ => out.push_str(&float(number)),
            }
        }
        ValueKind::Map => {
            out.push('{');
            for (at, name) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                repr(&name, out)?;
                out.push_str(": ");
                repr(&value.get_item(&name)?, out)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            for (at, item) in value.try_iter()?.enumerate() {
                out.push_str(if at > 0 { ", " } else { "" });
                repr(&item, out)?;
            }
            if value.is_tuple() && value.len() == Some(1) {
                out.push(',');
            }
            out.push(close);
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A text as Python quotes it: single quotes unless it has such and no double ones, and escapes for what is not printed.
fn repr_text(text: &str, out: &mut String) {
    #[expect(clippy::expect_used, reason = "a constant pattern")]
    static UNPRINTABLE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}--\x20]").expect("the pattern is valid"));
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for letter in text.chars() {
        // Writing into a string cannot fail.
        let _ = match letter {
            '\\' => out.write_str("\\\\"),
            '\n' => out.write_str("\\n"),
            '\r' => out.write_str("\\r"),
            '\t' => out.write_str("\\t"),
            _ if letter == quote => write!(out, "\\{letter}"),
            ' '..='~' => out.write_char(letter),
            _ if !UNPRINTABLE.is_match(letter.encode_utf8(&mut [0; 4])) => out.write_char(letter),
            '\0'..='\u{ff}' => write!(out, "\\x{:02x}", letter as u32),
            '\u{100}'..='\u{ffff}' => write!(out, "\\u{:04x}", letter as u32),
            _ => write!(out, "\\U{:08x}", letter as u32),
        };
    }
    out.push(quote);
}

/// Strings, dictionaries and even what is undefined are sequences: all have a length and items.
fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
}

/// transformers' filter: `json.dumps(x, ensure_ascii, indent, separators, sort_keys)`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja hands arguments over")]
fn tojson(value: &Value, ensure_ascii: Option<bool>, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = kwargs.get("indent")?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(usize::try_from(indent).unwrap_or(0))),
        },
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("separators are two texts")),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let named: Option<bool> = kwargs.get("ensure_ascii")?;
    let dump = Dump {
        ascii: named.or(ensure_ascii).unwrap_or(false),
        sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        item,
        key,
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    dump.value(value, 0, &mut out)?;
    Ok(out)
}

fn invalid(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

struct Dump {
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Dump {
    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => number(value, out)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.between("[", "]", &items, depth, out, |item, out| self.value(item, depth + 1, out))?;
            }
            ValueKind::Map => {
                let mut members = Vec::new();
                for name in value.try_iter()? {
                    members.push((value.get_item(&name)?, key_text(&name)?));
                }
                if self.sorted {
                    members.sort_by(|a, b| a.1.cmp(&b.1));
                }
                self.between("{", "}", &members, depth, out, |(member, name), out| {
                    self.string(name, out);
                    out.push_str(&self.key);
                    self.value(member, depth + 1, out)
                })?;
            }
            _ => return Err(invalid("this value has no JSON")),
        }
        Ok(())
    }

    fn between<T>(
        &self,
        open: &str,
        close: &str,
        items: &[T],
        depth: usize,
        out: &mut String,
        one: impl Fn(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push_str(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(&self.item);
            }
            self.new_line(depth + 1, out);
            one(item, out)?;
        }
        if !items.is_empty() {
            self.new_line(depth, out);
        }
        out.push_str(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for letter in text.chars() {
            match letter {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                '\0'..='\u{1f}' => escape(letter, out),
                '\u{7f}'.. if self.ascii => escape(letter, out),
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value, out: &mut String) -> Result<(), Error> {
    if value.is_integer() {
        out.push_str(&value.to_string());
        return Ok(());
    }
    let number = f64::try_from(value.clone())?;
    if number.is_nan() {
        out.push_str("NaN");
    } else if number.is_infinite() {
        out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" });
    } else {
        out.push_str(&float(number));
    }
    Ok(())
}

fn escape(letter: char, out: &mut String) {
    for unit in letter.encode_utf16(&mut [0; 2]) {
        // Writing into a string cannot fail.
        let _ = write!(out, "\\u{unit:04x}");
    }
}

/// A dictionary's key as JSON has it.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::Number if key.is_integer() => Ok(key.to_string()),
        ValueKind::Number => Ok(float(f64::try_from(key.clone())?)),
        _ => Err(invalid("keys are texts or numbers")),
    }
}

/// `float.__repr__`: the shortest digits that read back, plain for exponents from -4 to 15.
pub fn float(number: f64) -> String {
    let digits = format!("{number:e}");
    let Some((mantissa, exponent)) = digits.split_once('e') else { return digits };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{number}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = match exponent.cmp(&0) {
        Ordering::Less => '-',
        _ => '+',
    };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(1.0, "1.0")]
    #[case(0.1, "0.1")]
    #[case(-0.0, "-0.0")]
    #[case(1e15, "1000000000000000.0")]
    #[case(1e16, "1e+16")]
    #[case(1.5e-4, "0.00015")]
    #[case(1.5e-5, "1.5e-05")]
    #[case(1e22, "1e+22")]
    #[case(1.797_693_134_862_315_7e308, "1.7976931348623157e+308")]
    fn floats_are_pythons(#[case] number: f64, #[case] expected: &str) {
        assert_eq!(float(number), expected);
    }
}
