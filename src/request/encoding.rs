//! Undoes the `content-encoding` of a request body, never beyond a limit.

use std::io::{self, Read};

/// How a body is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// Not at all.
    Identity,
    /// RFC 1952, several members in a row included.
    Gzip,
    /// RFC 1950 (zlib), and the raw RFC 1951 stream that some clients send under the same name.
    Deflate,
    /// RFC 7932.
    Brotli,
    /// RFC 8878, with windows of up to 8 MiB (RFC 9659).
    Zstd,
}

/// The encoding is unknown, or there are several in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the content-encoding is not supported; send the body plain or as one of gzip, deflate, br, zstd")]
pub struct Unsupported;

/// Why a body could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The decoded body passes the limit.
    #[error(
        "the decoded request body is longer than {limit} bytes; send a shorter one or raise --max-body-bytes"
    )]
    TooLarge {
        /// Most bytes that were allowed.
        limit: usize,
    },
    /// The bytes are not what the header says, or end too early.
    #[error("the request body is not valid {}; check content-encoding and send the body whole", .encoding.name())]
    Corrupt {
        /// What the header says.
        encoding: Encoding,
    },
}

/// 8 MiB, the most that RFC 9659 lets a sender of the `zstd` content coding use.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

impl Encoding {
    /// Reads a `content-encoding` header. Empty and `identity` elements mean nothing; two real encodings are refused.
    pub fn from_header(value: &str) -> Result<Encoding, Unsupported> {
        let mut encoding = Encoding::Identity;
        for token in value.split(',').map(str::trim) {
            let next = match token {
                "" => continue,
                _ if token.eq_ignore_ascii_case("identity") => continue,
                _ if token.eq_ignore_ascii_case("gzip") || token.eq_ignore_ascii_case("x-gzip") => {
                    Encoding::Gzip
                }
                _ if token.eq_ignore_ascii_case("deflate") => Encoding::Deflate,
                _ if token.eq_ignore_ascii_case("br") => Encoding::Brotli,
                _ if token.eq_ignore_ascii_case("zstd") => Encoding::Zstd,
                _ => return Err(Unsupported),
            };
            if encoding != Encoding::Identity {
                return Err(Unsupported);
            }
            encoding = next;
        }
        Ok(encoding)
    }

    /// The token in a `content-encoding` header.
    pub fn name(self) -> &'static str {
        match self {
            Encoding::Identity => "identity",
            Encoding::Gzip => "gzip",
            Encoding::Deflate => "deflate",
            Encoding::Brotli => "br",
            Encoding::Zstd => "zstd",
        }
    }

    /// Decodes a body that arrived in chunks, to at most `limit` bytes. Decoding stops one byte beyond the limit, so that a
    /// small body which inflates without end costs no more than a long one.
    pub fn decode(self, chunks: &[Vec<u8>], limit: usize) -> Result<Vec<u8>, DecodeError> {
        let mut body = Chunks { rest: chunks, at: 0 };
        let corrupt = DecodeError::Corrupt { encoding: self };
        match self {
            Encoding::Identity => {
                let length = chunks.iter().map(Vec::len).sum::<usize>();
                if length > limit { Err(DecodeError::TooLarge { limit }) } else { Ok(chunks.concat()) }
            }
            Encoding::Gzip => read_within(flate2::read::MultiGzDecoder::new(body), limit, corrupt),
            Encoding::Deflate if starts_with_zlib_header(chunks) => {
                read_within(flate2::read::ZlibDecoder::new(body), limit, corrupt)
            }
            Encoding::Deflate => read_within(flate2::read::DeflateDecoder::new(body), limit, corrupt),
            Encoding::Brotli => read_within(brotli::Decompressor::new(&mut body, 4096), limit, corrupt),
            Encoding::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::new(body).map_err(|_| corrupt)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG_MAX).map_err(|_| corrupt)?;
                read_within(decoder, limit, corrupt)
            }
        }
    }
}

fn read_within(decoder: impl Read, limit: usize, corrupt: DecodeError) -> Result<Vec<u8>, DecodeError> {
    let mut out = Vec::new();
    decoder.take(limit as u64 + 1).read_to_end(&mut out).map_err(|_| corrupt)?;
    if out.len() > limit { Err(DecodeError::TooLarge { limit }) } else { Ok(out) }
}

/// RFC 1950: method 8, and the first two bytes as a big-endian number are a multiple of 31. A raw stream that starts so
/// would open with a stored block of an odd layout, which no encoder writes.
fn starts_with_zlib_header(chunks: &[Vec<u8>]) -> bool {
    let mut bytes = chunks.iter().flatten().map(|byte| u16::from(*byte));
    match (bytes.next(), bytes.next()) {
        (Some(method), Some(flags)) => method & 0x0f == 8 && (method << 8 | flags).is_multiple_of(31),
        _ => false,
    }
}

struct Chunks<'a> {
    rest: &'a [Vec<u8>],
    at: usize,
}

impl Read for Chunks<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some((first, rest)) = self.rest.split_first() {
            let left = &first[self.at..];
            if left.is_empty() {
                self.rest = rest;
                self.at = 0;
                continue;
            }
            let length = left.len().min(buffer.len());
            buffer[..length].copy_from_slice(&left[..length]);
            self.at += length;
            return Ok(length);
        }
        Ok(0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::{DecodeError, Encoding, Unsupported};
    use rstest::rstest;

    fn encode(encoding: Encoding, plain: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let level = flate2::Compression::default();
        match encoding {
            Encoding::Identity => out.extend_from_slice(plain),
            Encoding::Gzip => {
                flate2::read::GzEncoder::new(plain, level).read_to_end(&mut out).unwrap();
            }
            Encoding::Deflate => {
                flate2::read::ZlibEncoder::new(plain, level).read_to_end(&mut out).unwrap();
            }
            Encoding::Brotli => {
                brotli::CompressorWriter::new(&mut out, 4096, 5, 22).write_all(plain).unwrap();
            }
            Encoding::Zstd => out = zstd::encode_all(plain, 3).unwrap(),
        }
        out
    }

    #[rstest]
    #[case("", Ok(Encoding::Identity))]
    #[case("identity", Ok(Encoding::Identity))]
    #[case(" GZip ", Ok(Encoding::Gzip))]
    #[case("x-gzip", Ok(Encoding::Gzip))]
    #[case("identity, gzip", Ok(Encoding::Gzip))]
    #[case("deflate", Ok(Encoding::Deflate))]
    #[case("br", Ok(Encoding::Brotli))]
    #[case("zstd", Ok(Encoding::Zstd))]
    #[case("gzip, gzip", Err(Unsupported))]
    #[case("compress", Err(Unsupported))]
    fn header_names_the_encoding(#[case] value: &str, #[case] expected: Result<Encoding, Unsupported>) {
        assert_eq!(Encoding::from_header(value), expected);
    }

    #[rstest]
    fn every_encoding_decodes_in_any_chunks(
        #[values(Encoding::Identity, Encoding::Gzip, Encoding::Deflate, Encoding::Brotli, Encoding::Zstd)]
        encoding: Encoding,
    ) {
        let plain = br#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#.repeat(50);
        let encoded = encode(encoding, &plain);
        let bytes: Vec<Vec<u8>> = encoded.iter().map(|byte| vec![*byte]).collect();
        assert_eq!(encoding.decode(std::slice::from_ref(&encoded), plain.len()).unwrap(), plain);
        assert_eq!(encoding.decode(&bytes, plain.len()).unwrap(), plain);
        assert_eq!(
            encoding.decode(&bytes, plain.len() - 1),
            Err(DecodeError::TooLarge { limit: plain.len() - 1 })
        );
        if encoding != Encoding::Identity {
            let cut = vec![encoded[..encoded.len() / 2].to_vec()];
            assert_eq!(encoding.decode(&cut, plain.len()), Err(DecodeError::Corrupt { encoding }));
            let not_encoded = vec![plain.clone()];
            assert_eq!(encoding.decode(&not_encoded, 1 << 20), Err(DecodeError::Corrupt { encoding }));
        }
    }

    #[test]
    fn deflate_accepts_the_raw_stream() {
        let mut raw = Vec::new();
        flate2::read::DeflateEncoder::new(&b"hello hello"[..], flate2::Compression::best())
            .read_to_end(&mut raw)
            .unwrap();
        assert_eq!(Encoding::Deflate.decode(&[raw], 100).unwrap(), b"hello hello");
    }

    #[test]
    fn gzip_of_two_members_is_one_body() {
        let encoded = [encode(Encoding::Gzip, b"a"), encode(Encoding::Gzip, b"b")];
        assert_eq!(Encoding::Gzip.decode(&encoded, 10).unwrap(), b"ab");
    }

    /// 64 MiB of zeros in some 64 KiB: what is kept stays within the limit.
    #[test]
    fn a_bomb_stops_at_the_limit() {
        let mut encoded = Vec::new();
        flate2::read::GzEncoder::new(std::io::repeat(0).take(64 << 20), flate2::Compression::fast())
            .read_to_end(&mut encoded)
            .unwrap();
        assert_eq!(Encoding::Gzip.decode(&[encoded], 1 << 16), Err(DecodeError::TooLarge { limit: 1 << 16 }));
    }
}
