//! Whether new requests are wanted, and if not, why.

use std::collections::BTreeMap;

use futures::{Stream, stream};
use tokio::sync::watch;

/// What holds the readiness back until the process is wired.
pub const START: &str = "start";
/// What holds it back from the signal to end on.
pub const DRAIN: &str = "drain";

/// Ready while nobody holds it back. Health, `/readyz` and the drain all go by it.
#[derive(Debug)]
pub struct Readiness {
    held_by: watch::Sender<BTreeMap<&'static str, String>>,
}

impl Default for Readiness {
    /// Held back by [`START`].
    fn default() -> Self {
        Self {
            held_by: watch::Sender::new(BTreeMap::from([(START, "not everything is read yet".to_owned())])),
        }
    }
}

impl Readiness {
    /// Holds it back on behalf of `part` until that releases it; `why` tells the operator what is missing. The newest
    /// reason of a part is the one that is told.
    pub fn hold(&self, part: &'static str, why: impl Into<String>) {
        let why = why.into();
        self.held_by.send_if_modified(|held_by| {
            if held_by.get(part) == Some(&why) {
                return false;
            }
            tracing::info!(part, why, "not ready");
            held_by.insert(part, why);
            true
        });
    }

    /// `part` has what it needs.
    pub fn release(&self, part: &'static str) {
        self.held_by.send_if_modified(|held_by| {
            let was_held = held_by.remove(part).is_some();
            if was_held && held_by.is_empty() {
                tracing::info!("ready");
            }
            was_held
        });
    }

    /// Whether nobody holds it back.
    pub fn is_ready(&self) -> bool {
        self.held_by.borrow().is_empty()
    }

    /// Who holds it back and why, `part: why`.
    pub fn reasons(&self) -> Vec<String> {
        self.held_by.borrow().iter().map(|(part, why)| format!("{part}: {why}")).collect()
    }

    /// Whether it is ready, now and after every change of that.
    pub fn changes(&self) -> impl Stream<Item = bool> + Send + use<> {
        let receiver = self.held_by.subscribe();
        stream::unfold((receiver, None), |(mut receiver, told)| async move {
            loop {
                let ready = receiver.borrow_and_update().is_empty();
                if told != Some(ready) {
                    return Some((ready, (receiver, Some(ready))));
                }
                receiver.changed().await.ok()?;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};

    #[tokio::test]
    async fn it_is_ready_while_nobody_holds_it_back() {
        let readiness = Readiness::default();
        let mut changes = std::pin::pin!(readiness.changes());
        assert_eq!(changes.next().now_or_never(), Some(Some(false)));
        readiness.hold("pods", "list forbidden");
        readiness.release(START);
        assert!(!readiness.is_ready());
        assert_eq!(changes.next().now_or_never(), None, "another reason is no change");
        readiness.hold("pods", "timed out");
        assert_eq!(readiness.reasons(), ["pods: timed out"]);
        readiness.release("pods");
        assert!(readiness.is_ready() && readiness.reasons().is_empty());
        assert_eq!(changes.next().now_or_never(), Some(Some(true)));
        readiness.hold(DRAIN, "the process was asked to end");
        readiness.release("pods");
        assert_eq!(changes.next().now_or_never(), Some(Some(false)));
    }
}
