//! Decodes a compressed response aside, so that its usage can be read while the client gets the bytes as they are.

use std::io::{self, Write};

use super::{Body, Forward};
use crate::request::encoding::Encoding;

/// Decoded bytes after which reading stops: a response of that size is no text, and inflating costs time.
const DECODED_MAX: u64 = 256 << 20;

/// Window limit of RFC 9659 for the `zstd` content coding: 8 MiB.
const ZSTD_WINDOW_LOG_MAX: u32 = 23;

pub(super) enum Decoding {
    Plain(Body),
    /// `deflate` before its first byte, which tells whether it is zlib or the raw stream.
    Deflate(Body),
    Aside {
        decoder: Box<dyn Decoder>,
        /// The bytes were not what the header says: the rest is not read.
        failed: bool,
    },
    /// An encoding we cannot read.
    Opaque(Body),
}

impl Decoding {
    pub(super) fn new(content_encoding: Option<&str>, body: Body) -> Decoding {
        let aside = |decoder| Decoding::Aside { decoder, failed: false };
        match content_encoding.map_or(Ok(Encoding::Identity), Encoding::from_header) {
            Ok(Encoding::Identity) => Decoding::Plain(body),
            Ok(Encoding::Gzip) => aside(Box::new(flate2::write::MultiGzDecoder::new(Aside::new(body)))),
            Ok(Encoding::Deflate) => Decoding::Deflate(body),
            Ok(Encoding::Brotli) => aside(Box::new(brotli::DecompressorWriter::new(Aside::new(body), 4096))),
            Ok(Encoding::Zstd) => match zstd::stream::raw::Decoder::new() {
                Ok(mut raw) => {
                    let limit = zstd::stream::raw::DParameter::WindowLogMax(ZSTD_WINDOW_LOG_MAX);
                    let failed = raw.set_parameter(limit).is_err();
                    let writer = zstd::stream::zio::Writer::new(Aside::new(body), raw);
                    Decoding::Aside { decoder: Box::new(writer), failed }
                }
                Err(_) => Decoding::Opaque(body),
            },
            Err(_) => Decoding::Opaque(body),
        }
    }

    pub(super) fn push(&mut self, chunk: &[u8]) -> Forward {
        match self {
            Decoding::Plain(body) => return body.push(chunk),
            Decoding::Deflate(body) => {
                if let Some(first) = chunk.first() {
                    let aside = Aside::new(std::mem::take(body));
                    // RFC 1950: the low nibble is the method, 8. A raw stream would begin with a stored block of an odd
                    // layout, which no encoder writes.
                    let decoder: Box<dyn Decoder> = if first & 0x0f == 8 {
                        Box::new(flate2::write::ZlibDecoder::new(aside))
                    } else {
                        Box::new(flate2::write::DeflateDecoder::new(aside))
                    };
                    *self = Decoding::Aside { decoder, failed: false };
                    return self.push(chunk);
                }
            }
            Decoding::Aside { decoder, failed } => *failed = *failed || decoder.write_all(chunk).is_err(),
            Decoding::Opaque(_) => {}
        }
        Forward::Unchanged
    }

    pub(super) fn finish(&mut self) -> Vec<u8> {
        match self {
            Decoding::Plain(body) => body.finish(),
            Decoding::Aside { decoder, failed } => {
                // What was decoded before the error or the early end is read all the same.
                *failed = *failed || decoder.end().is_err();
                decoder.aside_mut().body.finish()
            }
            Decoding::Deflate(_) | Decoding::Opaque(_) => Vec::new(),
        }
    }

    pub(super) fn body(&self) -> &Body {
        match self {
            Decoding::Plain(body) | Decoding::Deflate(body) | Decoding::Opaque(body) => body,
            Decoding::Aside { decoder, .. } => &decoder.aside().body,
        }
    }
}

/// Where decoded bytes go: to the body's reader, and nowhere else.
pub(super) struct Aside {
    body: Body,
    decoded: u64,
}

impl Aside {
    fn new(body: Body) -> Aside {
        Aside { body, decoded: 0 }
    }
}

impl Write for Aside {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.decoded += bytes.len() as u64;
        if self.decoded > DECODED_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.body.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A decoder that is fed with encoded bytes.
pub(super) trait Decoder: Write + Send {
    fn aside(&self) -> &Aside;
    fn aside_mut(&mut self) -> &mut Aside;
    /// Hands on what is still inside.
    fn end(&mut self) -> io::Result<()>;
}

macro_rules! decoder {
    ($type:ty, $end:ident, $get:ident, $get_mut:ident) => {
        impl Decoder for $type {
            fn aside(&self) -> &Aside {
                self.$get()
            }

            fn aside_mut(&mut self) -> &mut Aside {
                self.$get_mut()
            }

            fn end(&mut self) -> io::Result<()> {
                self.$end()
            }
        }
    };
}

decoder!(flate2::write::MultiGzDecoder<Aside>, try_finish, get_ref, get_mut);
decoder!(flate2::write::ZlibDecoder<Aside>, flush, get_ref, get_mut);
decoder!(flate2::write::DeflateDecoder<Aside>, flush, get_ref, get_mut);
decoder!(brotli::DecompressorWriter<Aside>, close, get_ref, get_mut);
decoder!(zstd::stream::zio::Writer<Aside, zstd::stream::raw::Decoder<'static>>, flush, writer, writer_mut);
