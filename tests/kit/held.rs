//! A request that waits for its response, without a socket between: time that is paused stands still.

use std::sync::Arc;

use futures::{FutureExt, StreamExt};
use pilotfish::extproc::stream::{Replies as Stream, replies_to};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::extproc::message;
use super::picker::Picker;
use super::replies::Replies;

/// A request that is decided and waits for its response.
pub struct Answer {
    to: mpsc::UnboundedSender<Value>,
    from: Stream,
    replies: Replies,
}

impl Answer {
    /// Sends a request, which is decided at once.
    pub fn held(picker: &Picker, steps: &[Value]) -> Self {
        let (to, steps_to_come) = mpsc::unbounded_channel();
        for step in steps {
            to.send(step.clone()).unwrap();
        }
        let messages =
            UnboundedReceiverStream::new(steps_to_come).map(|step: Value| Ok(message(&step, None)));
        let shared = Arc::clone(&picker.app.admin.shared);
        let mut held =
            Self { to, from: replies_to(shared, None, messages.boxed()), replies: Replies::default() };
        while let Some(Some(Ok(reply))) = held.from.next().now_or_never() {
            held.replies.all.push(reply);
        }
        held
    }

    /// Sends the response and takes everything that comes.
    pub async fn finish(self, steps: &[Value]) -> Replies {
        let Self { to, mut from, mut replies } = self;
        for step in steps {
            to.send(step.clone()).unwrap();
        }
        drop(to);
        while let Some(Ok(reply)) = from.next().await {
            replies.all.push(reply);
        }
        replies
    }
}
