//! Frames: a flag byte, a length of one or eight bytes, content.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use smallvec::SmallVec;

use super::Error;

/// Bytes of one frame at most. A batch that removes 400,000 blocks at once has 24 MB.
pub const MAX_FRAME: usize = 32 << 20;
/// Frames of one message at most.
pub const MAX_PARTS: usize = 8;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The frames of one message.
pub type Message = SmallVec<[Bytes; 5]>;

/// What the peer sent.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Message(Message),
    Command(Bytes),
}

/// Puts frames together.
#[derive(Debug, Default)]
pub(super) struct Decoder {
    parts: Message,
    bytes: usize,
}

impl Decoder {
    /// The next message or command in `buffer`, once it is whole. An error ends the connection.
    pub fn decode(&mut self, buffer: &mut BytesMut) -> Result<Option<Incoming>, Error> {
        loop {
            let Some(&flags) = buffer.first() else { return Ok(None) };
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(Error::Protocol("a frame with unknown flags"));
            }
            let head = if flags & LONG == 0 { 2 } else { 9 };
            if buffer.len() < head {
                return Ok(None);
            }
            let length = match buffer.get(1..head) {
                Some([short]) => u64::from(*short),
                Some(long) => long.iter().fold(0, |length, byte| length << 8 | u64::from(*byte)),
                None => return Ok(None),
            };
            let room = (MAX_FRAME - self.bytes) as u64;
            if length > room || self.parts.len() == MAX_PARTS {
                return Err(Error::Protocol("a message larger than any engine sends"));
            }
            let length = length as usize;
            if buffer.len() < head + length {
                // Memory follows the bytes that come, not the length that was announced.
                buffer.reserve((head + length - buffer.len()).min(64 << 10));
                return Ok(None);
            }
            buffer.advance(head);
            let content = buffer.split_to(length).freeze();
            if flags & COMMAND != 0 {
                return Ok(Some(Incoming::Command(content)));
            }
            self.bytes += length;
            self.parts.push(content);
            if flags & MORE == 0 {
                self.bytes = 0;
                return Ok(Some(Incoming::Message(std::mem::take(&mut self.parts))));
            }
        }
    }
}

/// Appends a message of these frames.
pub(super) fn encode<'a>(parts: impl ExactSizeIterator<Item = &'a [u8]>, into: &mut BytesMut) {
    let last = parts.len().saturating_sub(1);
    for (at, part) in parts.enumerate() {
        encode_frame(if at < last { MORE } else { 0 }, part, into);
    }
}

/// Appends a command.
pub(super) fn encode_command(content: &[u8], into: &mut BytesMut) {
    encode_frame(COMMAND, content, into);
}

fn encode_frame(flags: u8, content: &[u8], into: &mut BytesMut) {
    into.reserve(9 + content.len());
    match u8::try_from(content.len()) {
        Ok(short) => into.put_slice(&[flags, short]),
        Err(_) => {
            into.put_u8(flags | LONG);
            into.put_u64(content.len() as u64);
        }
    }
    into.put_slice(content);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(bytes: &[u8]) -> Result<Vec<Incoming>, Error> {
        let (mut decoder, mut buffer, mut found) = (Decoder::default(), BytesMut::new(), Vec::new());
        // Byte by byte, so that every place to wait at is met.
        for byte in bytes {
            buffer.put_u8(*byte);
            found.extend(decoder.decode(&mut buffer)?);
        }
        Ok(found)
    }

    #[test]
    fn messages_survive_the_way() {
        let mut bytes = BytesMut::new();
        let long = vec![7u8; 300];
        encode([&b""[..], &b"topic"[..], &long[..]].into_iter(), &mut bytes);
        encode_command(b"\x04PING", &mut bytes);
        encode([&b""[..]].into_iter(), &mut bytes);
        let parts =
            |parts: &[&[u8]]| Incoming::Message(parts.iter().map(|p| Bytes::copy_from_slice(p)).collect());
        let expected = [
            parts(&[b"", b"topic", &long]),
            Incoming::Command(Bytes::from_static(b"\x04PING")),
            parts(&[b""]),
        ];
        assert_eq!(messages(&bytes).unwrap(), expected);
    }

    #[test]
    fn lengths_beyond_reason_end_the_connection_before_memory_is_taken() {
        assert!(messages(&[LONG, 0x7f, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(messages(&[0x80, 0]).is_err());
        assert!(messages(&[MORE, 0].repeat(MAX_PARTS + 1)).is_err());
        let mut buffer = BytesMut::from(&[LONG, 0, 0, 0, 0, 1, 0, 0, 0][..]);
        assert!(Decoder::default().decode(&mut buffer).unwrap().is_none());
        assert!(buffer.capacity() < 1 << 20);
    }
}
