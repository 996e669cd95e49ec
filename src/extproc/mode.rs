//! How Envoy hands us bodies, learned from `protocol_config` of the first message.

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration;

/// A body mode of the ext_proc filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// Not shown.
    None,
    /// Piece by piece, each to be answered; the headers may be gone by then.
    Streamed,
    /// Whole, in one message.
    Buffered,
    /// Whole, or its beginning if it outgrows Envoy's buffer.
    BufferedPartial,
    /// Piece by piece, in both directions and independently.
    FullDuplex,
}

/// The modes of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Request bodies.
    pub request: BodyMode,
    /// Response bodies.
    pub response: BodyMode,
    /// Whether the filter said so, or we assumed it.
    pub known: bool,
}

impl Modes {
    /// Reads the configuration. Filters that send none are those of gateways that know full duplex only.
    pub fn learn(config: Option<&ProtocolConfiguration>) -> Self {
        match config {
            None => Self { request: BodyMode::FullDuplex, response: BodyMode::FullDuplex, known: false },
            Some(config) => Self {
                request: mode(config.request_body_mode),
                response: mode(config.response_body_mode),
                known: true,
            },
        }
    }

    /// Whether response bodies pass through us for certain.
    pub fn sees_response(self) -> bool {
        self.known && matches!(self.response, BodyMode::Streamed | BodyMode::FullDuplex | BodyMode::Buffered)
    }
}

fn mode(number: i32) -> BodyMode {
    match BodySendMode::try_from(number) {
        Ok(BodySendMode::Streamed) => BodyMode::Streamed,
        Ok(BodySendMode::Buffered) => BodyMode::Buffered,
        Ok(BodySendMode::BufferedPartial) => BodyMode::BufferedPartial,
        Ok(BodySendMode::FullDuplexStreamed) => BodyMode::FullDuplex,
        _ => BodyMode::None,
    }
}
