//! What endpoints hold behind a prompt: the answer to it, which the next turn of the conversation brings back.
//!
//! The ids of an answer are not known here, only how many there were. That is enough: whoever continues a prompt whose
//! whole blocks and last tokens are equal continues that conversation, and its engine holds
//! `(tail + answer - 1) / block` blocks more; the last token of an answer is never computed.

use ahash::AHashMap;
use smallvec::SmallVec;

use crate::prompt::Blocks;
use crate::prompt::blocks::Ending;

/// Answers to prompts with the same whole blocks that are kept: such prompts differ in their last tokens.
const SIBLINGS: usize = 4;

/// Answers of one endpoint, by the name of the last whole block of their prompts.
#[derive(Debug, Default)]
pub struct Answers {
    by_name: AHashMap<u64, SmallVec<[Answer; 1]>>,
}

#[derive(Clone, Copy, Debug)]
struct Answer {
    tail: u64,
    tail_tokens: u32,
    tokens: u32,
}

impl Answers {
    /// The prompt that ends so was answered with `tokens`.
    pub fn add(&mut self, ending: Ending, tokens: u32) {
        let siblings = self.by_name.entry(ending.name).or_default();
        siblings.retain(|answer| answer.tail != ending.tail);
        if siblings.len() == SIBLINGS {
            siblings.remove(0);
        }
        siblings.push(Answer { tail: ending.tail, tail_tokens: ending.tail_tokens, tokens });
    }

    /// Blocks held beyond the first `depth`, if the prompt continues one that was answered.
    pub fn beyond(&self, blocks: &Blocks, ids: &[u32], depth: u32) -> u32 {
        let Some(name) = (depth as usize).checked_sub(1).and_then(|last| blocks.names().get(last)) else {
            return 0;
        };
        let Some(siblings) = self.by_name.get(name) else { return 0 };
        let rest = &ids[ids.len().min(depth as usize * blocks.unit())..];
        let continued = siblings.iter().rev().find(|answer| {
            rest.get(..answer.tail_tokens as usize).is_some_and(|tail| Ending::hash(tail) == answer.tail)
        });
        continued
            .map_or(0, |answer| (answer.tail_tokens + answer.tokens).saturating_sub(1) / blocks.unit() as u32)
    }

    /// Forgets the answers behind blocks that are gone.
    pub fn forget(&mut self, names: &[u64]) {
        if !self.by_name.is_empty() {
            for name in names {
                self.by_name.remove(name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::Namespace;

    fn cut(ids: &[u32]) -> Blocks {
        Blocks::of_tokens(ids, 16, Namespace::default())
    }

    #[test]
    fn the_next_turn_finds_the_whole_blocks_of_the_answer() {
        let first: Vec<u32> = (0..40).collect();
        let mut answers = Answers::default();
        answers.add(cut(&first).ending(&first).unwrap(), 25);
        let next: Vec<u32> = (0..100).collect();
        // 40 + 25 - 1 = 64 tokens: 4 blocks, 2 of them the prompt's own.
        assert_eq!(answers.beyond(&cut(&next), &next, 2), 2);
        assert_eq!(answers.beyond(&cut(&next), &next, 1), 0, "another block, another ending");
        let mut other = next.clone();
        other[39] = 7;
        assert_eq!(answers.beyond(&cut(&other), &other, 2), 0, "another question behind the same blocks");
        answers.forget(&[cut(&first).names()[1]]);
        assert_eq!(answers.beyond(&cut(&next), &next, 2), 0);
    }

    #[test]
    fn prompts_that_differ_in_their_tails_are_kept_apart_and_bounded() {
        let mut answers = Answers::default();
        let prompt = |last: u32| -> Vec<u32> { (0..17).chain([last]).collect() };
        for last in 100..106 {
            answers.add(cut(&prompt(last)).ending(&prompt(last)).unwrap(), 20);
        }
        let found = |last| {
            let next: Vec<u32> = prompt(last).into_iter().chain(0..40).collect();
            answers.beyond(&cut(&next), &next, 1)
        };
        assert_eq!([found(100), found(101), found(102), found(105)], [0, 0, 1, 1]);
    }

    #[test]
    fn a_prompt_without_a_whole_block_has_no_ending() {
        let short: Vec<u32> = (0..15).collect();
        assert!(cut(&short).ending(&short).is_none());
    }
}
