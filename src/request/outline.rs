//! The members of a JSON object as positions in its body, so that some can be changed or taken out and the rest stays as sent.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

use super::Edits;

/// An object within a body.
pub struct Outline<'b> {
    body: &'b [u8],
    /// Behind the opening brace.
    open: usize,
    members: Vec<Member<'b>>,
}

/// One of its members.
pub struct Member<'b> {
    /// Its name, unescaped.
    pub name: Cow<'b, str>,
    /// Where its value stands in the body.
    pub value: Range<usize>,
    /// Its value as written.
    pub text: &'b str,
}

impl<'b> Outline<'b> {
    /// The object that a body is; none if it is something else.
    pub fn of(body: &'b [u8]) -> Option<Self> {
        let start = body.iter().position(|byte| *byte == b'{')?;
        Self::at(body, start..body.len())
    }

    /// The object that the value of a member is.
    pub fn of_member(&self, member: &Member<'b>) -> Option<Self> {
        if member.text.starts_with('{') { Self::at(self.body, member.value.clone()) } else { None }
    }

    fn at(body: &'b [u8], range: Range<usize>) -> Option<Self> {
        let text = body.get(range.clone())?;
        let members = serde_json::Deserializer::from_slice(text).deserialize_map(Reading(body)).ok()?;
        Some(Self { body, open: range.start + 1, members })
    }

    /// The body that it stands in.
    pub fn body(&self) -> &'b [u8] {
        self.body
    }

    /// Its members in order, equal names and all.
    pub fn members(&self) -> &[Member<'b>] {
        &self.members
    }

    /// The last member of that name, which is the one that counts.
    pub fn get(&self, name: &str) -> Option<&Member<'b>> {
        self.members.iter().rev().find(|member| member.name == name)
    }

    /// Takes out the members of unwanted names, each with its comma. True if there were any.
    pub fn remove(&self, unwanted: impl Fn(&str) -> bool, edits: &mut Edits) -> bool {
        // Before the first that stays, a member goes with the comma behind it; after it, with the one before.
        let (mut cursor, mut stays, mut removed) = (self.open, false, false);
        for (at, member) in self.members.iter().enumerate() {
            let mut end = member.value.end;
            if unwanted(&member.name) {
                if !stays && at + 1 < self.members.len() {
                    end +=
                        self.body[end..].iter().position(|byte| *byte == b',').map_or(0, |comma| comma + 1);
                }
                edits.replace(cursor..end, Vec::new());
                removed = true;
            } else {
                stays = true;
            }
            cursor = end;
        }
        removed
    }

    /// Puts a member first; there must be another.
    pub fn put_first(&self, name: &str, json: &str, edits: &mut Edits) {
        edits.insert(self.open, format!("\"{name}\":{json},"));
    }

    /// Where [`Outline::put_first`] puts it.
    pub fn front(&self) -> usize {
        self.open
    }
}

/// Names only: values may be a client's text.
impl fmt::Debug for Outline<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.members.iter().map(|member| &member.name)).finish()
    }
}

struct Reading<'b>(&'b [u8]);

impl<'b> Visitor<'b> for Reading<'b> {
    type Value = Vec<Member<'b>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'b>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::with_capacity(12);
        while let Some((name, value)) = map.next_entry::<Key<'b>, &'b RawValue>()? {
            let text = value.get();
            let start = text.as_ptr() as usize - self.0.as_ptr() as usize;
            members.push(Member { name: name.0, value: start..start + text.len(), text });
        }
        Ok(members)
    }
}

#[derive(serde::Deserialize)]
struct Key<'b>(#[serde(borrow)] Cow<'b, str>);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn without(body: &str, unwanted: &str) -> String {
        let mut edits = Edits::new();
        Outline::of(body.as_bytes()).unwrap().remove(|name| unwanted.contains(name), &mut edits);
        String::from_utf8(edits.apply(body.as_bytes())).unwrap()
    }

    #[rstest]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "a", r#"{"b":2,"c":3}"#)]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "b", r#"{"a":1,"c":3}"#)]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "c", r#"{"a":1,"b":2}"#)]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "ab", r#"{"c":3}"#)]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "ac", r#"{"b":2}"#)]
    #[case(r#"{"a":1,"b":2,"c":3}"#, "abc", "{}")]
    #[case(
        " { \"a\" : [1,{\"b\":2}] ,\n \"b\" : \"x,}\" , \"c\":3 } ",
        "b",
        " { \"a\" : [1,{\"b\":2}] , \"c\":3 } "
    )]
    #[case(r#"{"\u0061":1,"b":2,"a":3}"#, "a", r#"{"b":2}"#)]
    fn members_go_with_one_comma(#[case] body: &str, #[case] unwanted: &str, #[case] expected: &str) {
        assert_eq!(without(body, unwanted), expected);
    }

    #[test]
    fn nested_objects_have_members_of_their_own() {
        let body = br#"{"x":{"n":2,"m":3},"y":1}"#;
        let outline = Outline::of(body).unwrap();
        let nested = outline.of_member(outline.get("x").unwrap()).unwrap();
        let mut edits = Edits::new();
        nested.remove(|name| name == "n", &mut edits);
        outline.put_first("z", "0", &mut edits);
        assert_eq!(edits.apply(body), br#"{"z":0,"x":{"m":3},"y":1}"#);
        assert!(outline.of_member(outline.get("y").unwrap()).is_none());
    }

    proptest! {
        /// What is left is what a map without these members is.
        #[test]
        fn what_stays_is_equal(names in prop::collection::vec("[a-d]", 0..8), unwanted in "[a-d]{0,3}", space in " {0,2}") {
            let members: Vec<String> =
                names.iter().enumerate().map(|(at, name)| format!("\"{name}\"{space}:{space}[{at},{{}}]{space}")).collect();
            let body = format!("{space}{{{space}{}}}", members.join(","));
            let mut expected: serde_json::Map<_, _> = serde_json::from_str(&body).unwrap();
            expected.retain(|name, _| !unwanted.contains(name.as_str()));
            let left: serde_json::Map<_, _> = serde_json::from_str(&without(&body, &unwanted)).unwrap();
            prop_assert_eq!(left, expected);
        }
    }
}
