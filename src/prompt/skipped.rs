//! Why a request has no token ids; it is served all the same, by what is known without them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Why a request has no token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skipped {
    /// Nothing says where its tokenizer is, or the tokenizer is not loaded (yet).
    NoTokenizer,
    /// They were not there within the time the request may wait.
    Deadline,
    /// Too much waits to be tokenized.
    QueueFull,
    /// The remote tokenizer has as much to do as it can bear.
    Saturated,
    /// It has images, audio or other media, whose tokens only the engine knows.
    Media,
    /// The chat template refuses the conversation, or there is none.
    Template,
    /// The API, or a member of the body, has no known way to tokens.
    Unsupported,
    /// The body or the tokenizer cannot be used.
    Failed,
    /// The remote tokenizer cannot be reached.
    Unreachable,
    /// The remote tokenizer refused (4xx).
    Refused,
    /// The remote tokenizer failed (5xx).
    RemoteError,
    /// The remote tokenizer answered something that is no list of token ids.
    BadAnswer,
}

impl Skipped {
    /// Every reason, in the order of [`SkippedCounts::read`].
    pub const ALL: [Skipped; 12] = [
        Skipped::NoTokenizer,
        Skipped::Deadline,
        Skipped::QueueFull,
        Skipped::Saturated,
        Skipped::Media,
        Skipped::Template,
        Skipped::Unsupported,
        Skipped::Failed,
        Skipped::Unreachable,
        Skipped::Refused,
        Skipped::RemoteError,
        Skipped::BadAnswer,
    ];

    /// The label value of `pilotfish_tokenize_skipped_total`.
    pub fn name(self) -> &'static str {
        match self {
            Skipped::NoTokenizer => "no-tokenizer",
            Skipped::Deadline => "deadline",
            Skipped::QueueFull => "queue-full",
            Skipped::Saturated => "saturated",
            Skipped::Media => "media",
            Skipped::Template => "template",
            Skipped::Unsupported => "unsupported",
            Skipped::Failed => "failed",
            Skipped::Unreachable => "unreachable",
            Skipped::Refused => "refused",
            Skipped::RemoteError => "remote-error",
            Skipped::BadAnswer => "bad-answer",
        }
    }
}

/// How often requests were skipped, by reason.
#[derive(Debug, Default)]
pub struct SkippedCounts([AtomicU64; Skipped::ALL.len()]);

impl SkippedCounts {
    /// Counts one.
    pub fn count(&self, reason: Skipped) {
        self.0[reason as usize].fetch_add(1, Relaxed);
    }

    /// Every reason with its count.
    pub fn read(&self) -> impl Iterator<Item = (Skipped, u64)> + '_ {
        Skipped::ALL.into_iter().map(|reason| (reason, self.0[reason as usize].load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_is_counted_under_its_own_name() {
        let counts = SkippedCounts::default();
        for (times, reason) in Skipped::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| counts.count(reason));
        }
        let read: Vec<u64> = counts.read().map(|(_, count)| count).collect();
        assert_eq!(read, (0..Skipped::ALL.len() as u64).collect::<Vec<_>>());
        let names: std::collections::HashSet<_> = Skipped::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), Skipped::ALL.len());
    }
}
