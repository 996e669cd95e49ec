//! How many calls a target bears at once: more while answers come in time, fewer when they do not.
//!
//! Additive increase, multiplicative decrease, as TCP does it. A renderer's time grows with its queue, so calls are let in
//! up to the number at which answers still come within the budget of the requests: the knee of its throughput.

use std::time::Duration;

/// Calls allowed before anything is known.
const FIRST: f64 = 4.0;
/// What is left of the allowance after an answer that came too late or not at all.
const DECREASE: f64 = 0.7;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Within the budget.
    InTime(Duration),
    /// After it.
    Late(Duration),
    /// Without an answer, or with one that says that it has too much to do.
    Failed,
    /// With a refusal that says nothing of the load.
    Neutral,
}

/// The calls of one target.
#[derive(Debug)]
pub struct Limit {
    allowed: f64,
    under_way: u32,
    most: u32,
    /// Running mean of what answers take, seconds.
    took: Option<f64>,
}

impl Limit {
    /// Allows `most` at best.
    pub fn new(most: u32) -> Self {
        Self { allowed: FIRST.min(f64::from(most)), under_way: 0, most, took: None }
    }

    /// Whether one more may begin; it is then under way.
    pub fn begin(&mut self) -> bool {
        let free = f64::from(self.under_way) < self.allowed.floor().max(1.0);
        self.under_way += u32::from(free);
        free
    }

    /// One ended.
    pub fn end(&mut self, verdict: Verdict) {
        // An allowance that is not used proves nothing.
        let used = f64::from(self.under_way) * 2.0 >= self.allowed;
        self.under_way = self.under_way.saturating_sub(1);
        match verdict {
            Verdict::InTime(took) => {
                self.learn(took);
                if used {
                    self.allowed = (self.allowed + 1.0 / self.allowed).min(f64::from(self.most));
                }
            }
            Verdict::Late(took) => {
                self.learn(took);
                self.allowed = (self.allowed * DECREASE).max(1.0);
            }
            Verdict::Failed => self.allowed = (self.allowed * DECREASE).max(1.0),
            Verdict::Neutral => {}
        }
    }

    fn learn(&mut self, took: Duration) {
        let took = took.as_secs_f64();
        self.took = Some(self.took.map_or(took, |mean| mean + (took - mean) / 4.0));
    }

    /// What an answer takes, if one was seen.
    pub fn expected(&self) -> Option<Duration> {
        self.took.map(Duration::from_secs_f64)
    }

    /// Calls under way over calls allowed.
    pub fn saturation(&self) -> f64 {
        f64::from(self.under_way) / self.allowed.floor().max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Verdict = Verdict::InTime(Duration::from_millis(5));
    const SLOW: Verdict = Verdict::Late(Duration::from_millis(100));

    #[test]
    fn late_answers_shrink_the_allowance_to_one_call_and_no_further() {
        let mut limit = Limit::new(32);
        for _ in 0..20 {
            assert!(limit.begin());
            limit.end(SLOW);
        }
        assert!(limit.begin() && !limit.begin());
        assert_eq!(limit.saturation(), 1.0);
        assert_eq!(limit.expected(), Some(Duration::from_millis(100)));
    }

    #[test]
    fn answers_in_time_widen_it_up_to_the_most_but_only_where_it_is_used() {
        let mut limit = Limit::new(8);
        for _ in 0..1_000 {
            assert!(limit.begin());
            limit.end(QUICK);
        }
        let taken = (0..100).filter(|_| limit.begin()).count();
        assert_eq!(taken, 4, "one call at a time proves nothing about more");
        for _ in 0..100 {
            limit.end(QUICK);
            limit.begin();
        }
        let more = (0..100).filter(|_| limit.begin()).count();
        assert_eq!(taken + more, 8);
    }
}
