//! Why a watch failed, and how long to wait before the next attempt.

use std::time::Duration;

use kube::runtime::watcher;

/// Why a watch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The API server does not know the kind, or is about to forget it.
    Absent,
    /// We may not read it.
    Forbidden,
    /// The API server wants fewer requests, or fails.
    Overloaded(String),
    /// No answer, or a cut connection.
    Unreachable(String),
}

impl Trouble {
    /// Longest wait. It is staleness: after an outage we are current again this long after the API server is.
    ///
    /// Right after its start an API server answers 403 and 404 for a moment, so these start short as well.
    fn longest(&self) -> Duration {
        match self {
            Trouble::Unreachable(_) => Duration::from_secs(1),
            Trouble::Overloaded(_) => Duration::from_secs(5),
            Trouble::Absent | Trouble::Forbidden => Duration::from_secs(10),
        }
    }
}

impl From<&kube::Error> for Trouble {
    fn from(error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(status),
            other => Trouble::Unreachable(with_causes(other)),
        }
    }
}

impl From<&watcher::Error> for Trouble {
    fn from(error: &watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => error.into(),
            watcher::Error::WatchError(status) => Self::of_status(status),
            watcher::Error::NoResourceVersion => Trouble::Overloaded(error.to_string()),
        }
    }
}

impl Trouble {
    fn of_status(status: &kube::core::Status) -> Self {
        match status.code {
            404 => Trouble::Absent,
            401 | 403 => Trouble::Forbidden,
            429 | 500.. => Trouble::Overloaded(status.message.clone()),
            _ => Trouble::Unreachable(status.message.clone()),
        }
    }
}

/// An error with what caused it: the outermost often says only that something failed.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let why = next.to_string();
        if !text.contains(&why) {
            text.push_str(": ");
            text.push_str(&why);
        }
        cause = next.source();
    }
    text
}

/// Waits that double from attempt to attempt.
#[derive(Debug, Default)]
pub struct BackOff {
    failures: u32,
}

impl BackOff {
    const FIRST: Duration = Duration::from_millis(100);

    /// How long to wait after one more failure. `jitter` is between 0 and 1: replicas must not come all at once.
    pub fn next(&mut self, trouble: &Trouble, jitter: f64) -> Duration {
        let doubled = Self::FIRST.saturating_mul(1_u32 << self.failures.min(10));
        self.failures += 1;
        doubled.min(trouble.longest()).mul_f64(1.0 - jitter / 2.0)
    }

    /// It works again.
    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kube::core::Status;
    use rstest::rstest;

    #[rstest]
    #[case(404, Trouble::Absent)]
    #[case(403, Trouble::Forbidden)]
    #[case(401, Trouble::Forbidden)]
    #[case(429, Trouble::Overloaded("why".to_owned()))]
    #[case(503, Trouble::Overloaded("why".to_owned()))]
    #[case(410, Trouble::Unreachable("why".to_owned()))]
    fn statuses(#[case] code: u16, #[case] expected: Trouble) {
        let status = Status { code, message: "why".to_owned(), ..Status::default() };
        let error = kube::Error::Api(status.clone().boxed());
        assert_eq!(Trouble::from(&error), expected);
        assert_eq!(Trouble::from(&watcher::Error::WatchError(status.boxed())), expected);
    }

    #[test]
    fn waits_double_up_to_the_longest_of_the_trouble() {
        let mut back_off = BackOff::default();
        let gone = Trouble::Unreachable(String::new());
        let waits: Vec<u128> = (0..6).map(|_| back_off.next(&gone, 0.0).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(back_off.next(&Trouble::Absent, 1.0).as_millis(), 3200);
        for _ in 0..40 {
            back_off.next(&Trouble::Absent, 0.0);
        }
        assert_eq!(back_off.next(&Trouble::Absent, 0.0), Duration::from_secs(10));
        back_off.reset();
        assert_eq!(back_off.next(&gone, 0.0).as_millis(), 100);
    }
}
