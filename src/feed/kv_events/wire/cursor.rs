//! Reads msgpack values one after another, each bounded by what is left of the payload.

use std::borrow::Cow;

use rmp::Marker;

use super::Shape;

/// A value of another kind than expected, or the end within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bad;

/// How deep values may lie in each other. The deepest that engines send is four.
const MOST_DEPTH: usize = 16;

/// What is left to read.
#[derive(Clone, Copy, Debug)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Bad> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or(Bad)?;
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, bytes: usize) -> Result<u64, Bad> {
        Ok(self.take(bytes)?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn peek(&self) -> Result<Marker, Bad> {
        self.rest.first().map(|byte| Marker::from_u8(*byte)).ok_or(Bad)
    }

    fn marker(&mut self) -> Result<Marker, Bad> {
        Ok(Marker::from_u8(self.take(1)?[0]))
    }

    /// How the value ahead is written, if it is an array or a map.
    pub fn shape(&self) -> Option<Shape> {
        match self.peek().ok()? {
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => Some(Shape::Array),
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => Some(Shape::Map),
            _ => None,
        }
    }

    /// Elements of the array ahead; none, and nothing is read, if it is something else.
    pub fn array_if(&mut self) -> Result<Option<usize>, Bad> {
        if self.shape() != Some(Shape::Array) {
            return if self.is_empty() { Err(Bad) } else { Ok(None) };
        }
        let n = match self.marker()? {
            Marker::FixArray(n) => usize::from(n),
            Marker::Array16 => self.number(2)? as usize,
            _ => self.number(4)? as usize,
        };
        // Every element has a byte at least.
        if n > self.rest.len() { Err(Bad) } else { Ok(Some(n)) }
    }

    /// Members of the map ahead.
    pub fn map(&mut self) -> Result<usize, Bad> {
        let n = match self.marker()? {
            Marker::FixMap(n) => usize::from(n),
            Marker::Map16 => self.number(2)? as usize,
            Marker::Map32 => self.number(4)? as usize,
            _ => return Err(Bad),
        };
        if n > self.rest.len() / 2 { Err(Bad) } else { Ok(n) }
    }

    /// Text or bytes; none for nil.
    fn bytes(&mut self) -> Result<Option<&'a [u8]>, Bad> {
        let n = match self.marker()? {
            Marker::Null => return Ok(None),
            Marker::FixStr(n) => usize::from(n),
            Marker::Str8 | Marker::Bin8 => self.number(1)? as usize,
            Marker::Str16 | Marker::Bin16 => self.number(2)? as usize,
            Marker::Str32 | Marker::Bin32 => self.number(4)? as usize,
            _ => return Err(Bad),
        };
        self.take(n).map(Some)
    }

    /// Text, of whatever encoding; none for nil.
    pub fn text(&mut self) -> Result<Option<Cow<'a, str>>, Bad> {
        Ok(self.bytes()?.map(String::from_utf8_lossy))
    }

    /// Text; none for nil.
    pub fn text_if(&mut self) -> Result<Option<&'a str>, Bad> {
        self.bytes()?.map(|bytes| std::str::from_utf8(bytes).map_err(|_| Bad)).transpose()
    }

    /// Text if that is ahead. Anything else is skipped, and its bytes given.
    pub fn text_or_raw(&mut self) -> Result<Result<&'a str, &'a [u8]>, Bad> {
        let before = *self;
        let is_text =
            matches!(self.peek()?, Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32);
        if is_text && let Some(text) = self.text_if()? {
            return Ok(Ok(text));
        }
        *self = before;
        Ok(Err(self.raw()?))
    }

    /// The bytes of the value ahead, which is skipped.
    pub fn raw(&mut self) -> Result<&'a [u8], Bad> {
        let before = self.rest;
        self.skip()?;
        Ok(&before[..before.len() - self.rest.len()])
    }

    /// A whole number, negative ones as the same bits; none for nil.
    pub fn int(&mut self) -> Result<Option<u64>, Bad> {
        Ok(Some(match self.marker()? {
            Marker::Null => return Ok(None),
            Marker::FixPos(n) => u64::from(n),
            Marker::FixNeg(n) => i64::from(n) as u64,
            Marker::U8 => self.number(1)?,
            Marker::U16 => self.number(2)?,
            Marker::U32 => self.number(4)?,
            Marker::U64 | Marker::I64 => self.number(8)?,
            Marker::I8 => i64::from(self.number(1)? as i8) as u64,
            Marker::I16 => i64::from(self.number(2)? as i16) as u64,
            Marker::I32 => i64::from(self.number(4)? as i32) as u64,
            _ => return Err(Bad),
        }))
    }

    /// A number; none for nil.
    pub fn float(&mut self) -> Result<Option<f64>, Bad> {
        match self.peek()? {
            Marker::F64 => {
                self.marker()?;
                Ok(Some(f64::from_bits(self.number(8)?)))
            }
            Marker::F32 => {
                self.marker()?;
                Ok(Some(f64::from(f32::from_bits(self.number(4)? as u32))))
            }
            _ => Ok(self.int()?.map(|n| n as i64 as f64)),
        }
    }

    /// The hash of a block: a number, or the last eight bytes of a longer one; none for nil.
    pub fn hash_if(&mut self) -> Result<Option<u64>, Bad> {
        match self.peek()? {
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 | Marker::FixStr(_) | Marker::Str8 => {
                let bytes = self.bytes()?.filter(|bytes| !bytes.is_empty()).ok_or(Bad)?;
                let last = &bytes[bytes.len().saturating_sub(8)..];
                Ok(Some(last.iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))))
            }
            _ => self.int(),
        }
    }

    /// A list of hashes, appended to `into`.
    pub fn hashes(&mut self, into: &mut Vec<u64>) -> Result<(), Bad> {
        let n = self.array_if()?.ok_or(Bad)?;
        into.reserve(n);
        for _ in 0..n {
            into.push(self.hash_if()?.ok_or(Bad)?);
        }
        Ok(())
    }

    /// A list of token ids, appended to `into`. Of a pair, as speculative decoding hashes them, the first counts.
    pub fn tokens(&mut self, into: &mut Vec<u32>) -> Result<(), Bad> {
        if self.peek()? == Marker::Null {
            return self.skip();
        }
        let n = self.array_if()?.ok_or(Bad)?;
        into.reserve(n);
        for _ in 0..n {
            let token = match self.rest {
                [token @ 0..=0x7f, rest @ ..] => {
                    self.rest = rest;
                    u32::from(*token)
                }
                [0xcd, high, low, rest @ ..] => {
                    self.rest = rest;
                    u32::from(u16::from_be_bytes([*high, *low]))
                }
                [0xce, rest @ ..] => {
                    let (token, rest) = rest.split_first_chunk().ok_or(Bad)?;
                    self.rest = rest;
                    u32::from_be_bytes(*token)
                }
                _ => self.token()?,
            };
            into.push(token);
        }
        Ok(())
    }

    fn token(&mut self) -> Result<u32, Bad> {
        let token = if let Some(n) = self.array_if()? {
            let first = self.int()?.filter(|_| n > 0).ok_or(Bad)?;
            for _ in 1..n {
                self.int()?;
            }
            first
        } else {
            self.int()?.ok_or(Bad)?
        };
        u32::try_from(token).map_err(|_| Bad)
    }

    /// Skips one value.
    pub fn skip(&mut self) -> Result<(), Bad> {
        self.skip_within(MOST_DEPTH)
    }

    fn skip_within(&mut self, depth: usize) -> Result<(), Bad> {
        let bytes = match self.marker()? {
            Marker::Null | Marker::True | Marker::False | Marker::FixPos(_) | Marker::FixNeg(_) => 0,
            Marker::U8 | Marker::I8 => 1,
            Marker::U16 | Marker::I16 | Marker::FixExt1 => 2,
            Marker::U32 | Marker::I32 | Marker::F32 => 4,
            Marker::U64 | Marker::I64 | Marker::F64 => 8,
            Marker::FixExt2 => 3,
            Marker::FixExt4 => 5,
            Marker::FixExt8 => 9,
            Marker::FixExt16 => 17,
            Marker::FixStr(n) => usize::from(n),
            Marker::Str8 | Marker::Bin8 => self.number(1)? as usize,
            Marker::Str16 | Marker::Bin16 => self.number(2)? as usize,
            Marker::Str32 | Marker::Bin32 => self.number(4)? as usize,
            Marker::Ext8 => self.number(1)? as usize + 1,
            Marker::Ext16 => self.number(2)? as usize + 1,
            Marker::Ext32 => self.number(4)? as usize + 1,
            Marker::FixArray(n) => return self.skip_many(usize::from(n), depth),
            Marker::Array16 => {
                let n = self.number(2)? as usize;
                return self.skip_many(n, depth);
            }
            Marker::Array32 => {
                let n = self.number(4)? as usize;
                return self.skip_many(n, depth);
            }
            Marker::FixMap(n) => return self.skip_many(2 * usize::from(n), depth),
            Marker::Map16 => {
                let n = self.number(2)? as usize;
                return self.skip_many(2 * n, depth);
            }
            Marker::Map32 => {
                let n = self.number(4)? as usize;
                return self.skip_many(2 * n, depth);
            }
            Marker::Reserved => return Err(Bad),
        };
        self.take(bytes).map(drop)
    }

    fn skip_many(&mut self, n: usize, depth: usize) -> Result<(), Bad> {
        let depth = depth.checked_sub(1).ok_or(Bad)?;
        (0..n).try_for_each(|_| self.skip_within(depth))
    }
}
