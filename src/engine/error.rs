//! The errors of the API, with the bodies that vLLM sends.

use axum::body::Body;
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// A request that gets an error.
#[derive(Debug)]
pub(super) enum ApiError {
    /// 400 with the offset at which the body stops being JSON.
    BadJson(usize),
    /// 400 with the field at fault.
    BadRequest { message: String, parameter: Option<&'static str> },
    /// 404.
    UnknownModel { model: String, served: String },
    /// 403: `/render` without `--scale-out`.
    NotScaledOut,
    /// 503.
    QueueFull,
    /// 500.
    Dead,
    /// 500 for one request.
    Internal(String),
}

impl ApiError {
    pub fn invalid(parameter: &'static str, message: impl Into<String>) -> Self {
        Self::BadRequest { message: message.into(), parameter: Some(parameter) }
    }

    /// The error that `body` gets which serde refused.
    pub fn from_json(error: &serde_json::Error, body: &[u8]) -> Self {
        if error.is_data() {
            return Self::BadRequest {
                message: format!(
                    "1 validation error:\n  {{'type': 'invalid', 'loc': 'body', 'at': {}}}",
                    error.column()
                ),
                parameter: Some("body"),
            };
        }
        let lines = body.split(|byte| *byte == b'\n');
        let before: usize = lines.take(error.line().saturating_sub(1)).map(|line| line.len() + 1).sum();
        let column = if error.is_eof() { error.column() } else { error.column().saturating_sub(1) };
        Self::BadJson(before + column)
    }

    /// Status and JSON text.
    fn parts(&self) -> (StatusCode, String) {
        let body = |message: &str, kind: &str, parameter: Option<&str>, code: StatusCode| {
            let quoted = |text: &str| json!(text).to_string();
            let parameter = parameter.map_or_else(|| "null".to_owned(), quoted);
            let text = format!(
                r#"{{"error":{{"message":{},"type":{},"param":{parameter},"code":{}}}}}"#,
                quoted(message),
                quoted(kind),
                code.as_u16()
            );
            (code, text)
        };
        match self {
            Self::BadJson(offset) => {
                let message = format!(
                    "1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{offset}', 'msg': 'JSON decode error', \
                     'input': '<dict of 0 items>', 'ctx': {{'error': 'Expecting value'}}}}"
                );
                body(&message, "Bad Request", Some(&format!("body.{offset}")), StatusCode::BAD_REQUEST)
            }
            Self::BadRequest { message, parameter } => {
                body(message, "BadRequestError", *parameter, StatusCode::BAD_REQUEST)
            }
            Self::UnknownModel { model, served } => body(
                &format!("The model `{model}` does not exist. Valid aliases: {served}."),
                "NotFoundError",
                Some("model"),
                StatusCode::NOT_FOUND,
            ),
            Self::NotScaledOut => body(
                "This endpoint is served with --enable-scale-out only.",
                "Forbidden",
                None,
                StatusCode::FORBIDDEN,
            ),
            Self::QueueFull => body(
                "The engine is currently busy and cannot accept new requests. Please try again later or on a different \
                 instance.",
                "Service Unavailable",
                None,
                StatusCode::SERVICE_UNAVAILABLE,
            ),
            Self::Dead => body(
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
                "InternalServerError",
                None,
                StatusCode::INTERNAL_SERVER_ERROR,
            ),
            Self::Internal(message) => {
                body(message, "InternalServerError", None, StatusCode::INTERNAL_SERVER_ERROR)
            }
        }
    }

    /// The error as the data of a stream that has begun.
    pub fn event(&self) -> String {
        format!("data: {}\n\ndata: [DONE]\n\n", self.parts().1)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, text) = self.parts();
        json_response(status, text)
    }
}

/// A response with a JSON text.
pub(super) fn json_response(status: StatusCode, text: String) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], Body::from(text)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case(r#"{"model":"#, 9)]
    #[case(r#"{"model": x}"#, 10)]
    #[case("{\n\"model\": x}", 11)]
    #[case("", 0)]
    fn the_offset_is_where_python_would_stop(#[case] body: &str, #[case] expected: usize) {
        let error = serde_json::from_str::<serde_json::Value>(body).unwrap_err();
        assert!(
            matches!(ApiError::from_json(&error, body.as_bytes()), ApiError::BadJson(offset) if offset == expected)
        );
    }

    #[test]
    fn a_wrong_type_is_told_without_its_value() {
        let body = r#"["secret prompt"]"#;
        let error = serde_json::from_str::<Vec<u32>>(body).unwrap_err();
        assert!(!ApiError::from_json(&error, body.as_bytes()).parts().1.contains("secret"));
    }
}
