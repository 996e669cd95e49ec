//! Reads JSON members of any type without failing: a value of an unexpected type is skipped, never an error.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// A JSON string: still in the body, or decoded because it had escapes.
pub(crate) enum Text<'t, 'b> {
    InBody(&'b str),
    Decoded(&'t str),
}

impl Text<'_, '_> {
    pub(crate) fn as_str(&self) -> &str {
        match self {
            Text::InBody(text) | Text::Decoded(text) => text,
        }
    }
}

/// What to do with a value, by its type; whatever is not overridden counts as [`Take::other`].
pub(crate) trait Take<'b>: Sized {
    type Out;

    /// The value is of a type that means nothing here.
    fn other(self) -> Self::Out;

    fn text(self, _text: Text<'_, 'b>) -> Self::Out {
        self.other()
    }

    /// A whole number that is not negative.
    fn number(self, _number: u64) -> Self::Out {
        self.other()
    }

    fn list<A: SeqAccess<'b>>(self, mut list: A) -> Result<Self::Out, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(self.other())
    }

    fn object<A: MapAccess<'b>>(self, mut object: A) -> Result<Self::Out, A::Error> {
        while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(self.other())
    }
}

/// Makes a [`Take`] the reader of one value.
pub(crate) struct Any<T>(pub(crate) T);

impl<'b, T: Take<'b>> DeserializeSeed<'b> for Any<T> {
    type Value = T::Out;

    fn deserialize<D: Deserializer<'b>>(self, deserializer: D) -> Result<T::Out, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'b, T: Take<'b>> Visitor<'b> for Any<T> {
    type Value = T::Out;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<T::Out, E> {
        Ok(self.0.other())
    }

    fn visit_i64<E>(self, _: i64) -> Result<T::Out, E> {
        Ok(self.0.other())
    }

    fn visit_u64<E>(self, number: u64) -> Result<T::Out, E> {
        Ok(self.0.number(number))
    }

    fn visit_f64<E>(self, _: f64) -> Result<T::Out, E> {
        Ok(self.0.other())
    }

    fn visit_unit<E>(self) -> Result<T::Out, E> {
        Ok(self.0.other())
    }

    fn visit_str<E>(self, text: &str) -> Result<T::Out, E> {
        Ok(self.0.text(Text::Decoded(text)))
    }

    fn visit_borrowed_str<E>(self, text: &'b str) -> Result<T::Out, E> {
        Ok(self.0.text(Text::InBody(text)))
    }

    fn visit_seq<A: SeqAccess<'b>>(self, list: A) -> Result<T::Out, A::Error> {
        self.0.list(list)
    }

    fn visit_map<A: MapAccess<'b>>(self, object: A) -> Result<T::Out, A::Error> {
        self.0.object(object)
    }
}

/// Reads a member name and tells what it stands for, without keeping it.
pub(crate) struct Name<K>(pub(crate) fn(&str) -> K);

impl<'b, K> DeserializeSeed<'b> for Name<K> {
    type Value = K;

    fn deserialize<D: Deserializer<'b>>(self, deserializer: D) -> Result<K, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<K> Visitor<'_> for Name<K> {
    type Value = K;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a member name")
    }

    fn visit_str<E>(self, name: &str) -> Result<K, E> {
        Ok((self.0)(name))
    }
}
