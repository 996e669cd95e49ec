//! Answers as server-sent events: headers go out at once, before the prompt is computed, as vLLM does.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::Notify;

use super::generation::{Generation, Usage};
use super::scheduler::{Event, Finish};

/// Resets the connection that a request came on. Lives in the extensions of the request.
#[derive(Clone, Default)]
pub(super) struct ConnectionReset(pub Arc<Notify>);

/// How one API writes its events.
pub(super) trait Dialect: Send + 'static {
    /// Written before anything is computed.
    fn open(&mut self, _usage: &Usage, _out: &mut String) {}
    /// Written for each token.
    fn token(&mut self, event: &Event, usage: &Usage, out: &mut String);
    /// Written after the last token.
    fn close(&mut self, usage: &Usage, out: &mut String);
}

/// OpenAI's word for the end of a sequence, as JSON.
pub(super) fn finish_reason(event: &Event) -> &'static str {
    match event.finish {
        None => "null",
        Some(Finish::Stop) => "\"stop\"",
        Some(Finish::Length) => "\"length\"",
        Some(Finish::Error) => "\"error\"",
    }
}

struct Stream<D> {
    generation: Generation,
    dialect: D,
    reset: ConnectionReset,
    stage: Stage,
}

#[derive(PartialEq)]
enum Stage {
    Open,
    Tokens,
    Closed,
}

impl<D: Dialect> Stream<D> {
    /// The next piece of the body, never empty.
    async fn next(&mut self) -> Option<Bytes> {
        let mut out = String::new();
        loop {
            match self.stage {
                Stage::Open => {
                    self.dialect.open(&self.generation.usage, &mut out);
                    self.stage = Stage::Tokens;
                }
                Stage::Tokens => {
                    self.play_faults().await;
                    match self.generation.next().await {
                        Err(error) => {
                            out.push_str(&error.event());
                            self.stage = Stage::Closed;
                        }
                        Ok(Some(event)) => self.dialect.token(&event, &self.generation.usage, &mut out),
                        Ok(None) => {
                            self.dialect.close(&self.generation.usage, &mut out);
                            self.stage = Stage::Closed;
                        }
                    }
                }
                Stage::Closed => return None,
            }
            if !out.is_empty() {
                return Some(out.into());
            }
        }
    }

    async fn play_faults(&mut self) {
        let tokens = self.generation.usage.completion;
        let mut faults = self.generation.state().faults.subscribe();
        let cut = faults.borrow().cuts_stream_after().is_some_and(|limit| tokens >= limit);
        if cut {
            self.reset.0.notify_one();
            return std::future::pending().await;
        }
        // The sender lives in the state that this stream holds, so that waiting cannot fail.
        let _ =
            faults.wait_for(|faults| faults.stalls_stream_after().is_none_or(|limit| tokens < limit)).await;
    }
}

/// The streamed answer.
pub(super) fn respond(generation: Generation, dialect: impl Dialect, reset: ConnectionReset) -> Response {
    let stream = Stream { generation, dialect, reset, stage: Stage::Open };
    let body = futures::stream::unfold(stream, |mut stream| async move {
        let piece = stream.next().await?;
        Some((Ok::<_, std::convert::Infallible>(piece), stream))
    });
    ([(CONTENT_TYPE, "text/event-stream; charset=utf-8")], Body::from_stream(body)).into_response()
}
