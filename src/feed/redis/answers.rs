//! Answers of the last second, so that equal prompts cost one call, and callers at the same time share it.

use std::sync::Arc;
use std::time::Duration;

use ahash::AHashMap;
use futures::future::{BoxFuture, Shared};
use tokio::time::Instant;
use xxhash_rust::xxh3::Xxh3;

use crate::index::shared::{Answer, Question};

/// An answer that came or is awaited; none if the index failed.
pub type Asked = Shared<BoxFuture<'static, Option<Arc<Answer>>>>;

/// Time that an answer counts. What engines hold changes with every request, and a miss costs one prefill.
const FRESH: Duration = Duration::from_secs(1);
/// Answers kept and calls under way, together.
const MOST: usize = 1_024;

/// Answers by the [name](name_of) of their question.
#[derive(Debug, Default)]
pub struct Answers {
    kept: AHashMap<u128, Kept>,
}

#[derive(Debug)]
struct Kept {
    since: Instant,
    asked: Asked,
}

impl Kept {
    fn is_usable(&self, now: Instant) -> bool {
        match self.asked.peek() {
            None => true,
            Some(answer) => answer.is_some() && now.duration_since(self.since) < FRESH,
        }
    }
}

/// What tells a question from others. 128 bits: a collision would be another prompt's answer.
pub fn name_of(question: &Question) -> u128 {
    let mut hasher = Xxh3::new();
    for model in [Some(&question.model), question.fallback.as_ref()] {
        let model = model.map_or("", |model| model);
        hasher.update(&(model.len() as u64).to_le_bytes());
        hasher.update(model.as_bytes());
    }
    question.hashes.iter().for_each(|hash| hasher.update(&hash.to_le_bytes()));
    hasher.digest128()
}

impl Answers {
    /// The answer of that name, if it is under way or still fresh.
    pub fn find(&self, name: u128) -> Option<Asked> {
        let now = Instant::now();
        self.kept.get(&name).filter(|kept| kept.is_usable(now)).map(|kept| kept.asked.clone())
    }

    /// Keeps what `ask` starts. Nothing is started if too many calls are under way.
    pub fn admit(&mut self, name: u128, ask: impl FnOnce() -> Asked) -> Option<Asked> {
        if self.kept.len() >= MOST {
            let now = Instant::now();
            self.kept.retain(|_, kept| kept.is_usable(now));
        }
        if self.kept.len() >= MOST {
            // A lost answer costs a call, no more.
            self.kept.retain(|_, kept| kept.asked.peek().is_none());
        }
        if self.kept.len() >= MOST {
            return None;
        }
        let asked = ask();
        self.kept.insert(name, Kept { since: Instant::now(), asked: asked.clone() });
        Some(asked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use futures::future::{pending, ready};

    fn answered(answer: Option<Arc<Answer>>) -> Asked {
        ready(answer).boxed().shared()
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_counts_for_a_second_and_a_failure_not_at_all() {
        let mut answers = Answers::default();
        answers.admit(1, || answered(Some(Arc::default()))).unwrap().await;
        answers.admit(2, || answered(None)).unwrap().await;
        assert!(answers.find(1).is_some() && answers.find(2).is_none() && answers.find(3).is_none());
        tokio::time::advance(FRESH).await;
        assert!(answers.find(1).is_none());
    }

    #[tokio::test]
    async fn answers_make_room_for_questions_and_calls_under_way_do_not() {
        let mut answers = Answers::default();
        for name in 0..MOST as u128 {
            answers.admit(name, || answered(Some(Arc::default()))).unwrap().await;
        }
        for name in 0..MOST as u128 {
            assert!(answers.admit(10_000 + name, || pending().boxed().shared()).is_some());
        }
        assert!(answers.admit(1, || answered(None)).is_none());
        assert!(answers.find(10_000).is_some());
    }

    #[test]
    fn questions_differ_by_model_fallback_and_blocks() {
        let question = |model: &str, fallback: Option<&str>, hashes: &[u64]| Question {
            model: model.into(),
            fallback: fallback.map(Into::into),
            hashes: hashes.to_vec(),
            deadline: FRESH,
        };
        let questions =
            [("ab", None, &[1, 2][..]), ("a", Some("b"), &[1, 2]), ("ab", None, &[1]), ("ab", None, &[2, 1])];
        let names: std::collections::HashSet<u128> =
            questions.map(|(model, fallback, hashes)| name_of(&question(model, fallback, hashes))).into();
        assert_eq!(names.len(), 4);
    }
}
