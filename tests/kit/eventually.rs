//! Polling with a deadline.

use std::fmt::Display;
use std::time::Duration;

use tokio::time::{Instant, sleep};

/// How long anything may take before a test fails.
pub const DEADLINE: Duration = Duration::from_secs(20);
/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until `look` gives a value; fails the test, saying `what` was awaited, when the deadline passes.
pub async fn eventually<T>(what: impl Display, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "never happened: {what}");
        sleep(PAUSE).await;
    }
}

/// The result of `future`, which must come before the deadline.
pub async fn within<T>(what: impl Display, future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(DEADLINE, future).await;
    result.unwrap_or_else(|_| panic!("never happened: {what}"))
}
