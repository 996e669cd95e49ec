//! A token bucket that may be in debt: pure arithmetic, told the time.
//!
//! It holds a unit's worth of tokens, begins full and fills up evenly. A request larger than the bucket is admitted when
//! the bucket is full and takes all of it; what it has really used becomes debt when it settles. So it is served at last and
//! is paid for: no request is refused for ever, and none that came to nothing leaves a debt.

use std::time::Duration;

use super::Kind;
use crate::refusal::Standing;

/// Up to here all whole numbers are exact; more tokens than this are as many.
const MOST_TOKENS: u64 = 1 << 53;
/// Tokens by which sums of fractions may be off.
pub const SLACK: f64 = 1e-6;

/// A unit of time, as ModelRoutes name them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// 1 s.
    Second,
    /// 60 s.
    Minute,
    /// 3,600 s.
    Hour,
    /// 86,400 s.
    Day,
    /// 30 days.
    Month,
}

impl Unit {
    /// Every unit.
    pub const ALL: [Unit; 5] = [Unit::Second, Unit::Minute, Unit::Hour, Unit::Day, Unit::Month];

    /// The name in ModelRoutes.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Second => "second",
            Unit::Minute => "minute",
            Unit::Hour => "hour",
            Unit::Day => "day",
            Unit::Month => "month",
        }
    }

    /// Its length.
    pub fn seconds(self) -> u32 {
        match self {
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => 86_400,
            Unit::Month => 2_592_000,
        }
    }
}

/// Tokens in a unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// At least 1.
    pub tokens: u32,
    /// In this time.
    pub unit: Unit,
}

impl Rate {
    /// Tokens of a full bucket.
    pub fn capacity(self) -> f64 {
        f64::from(self.tokens)
    }

    /// Tokens that come back in a second.
    pub fn per_second(self) -> f64 {
        f64::from(self.tokens) / f64::from(self.unit.seconds())
    }

    /// The part of one of so many replicas.
    pub fn share(self, replicas: u32) -> Self {
        Self { tokens: (self.tokens / replicas.max(1)).max(1), ..self }
    }

    /// What a bucket must hold for a request of `amount` to be admitted. The output of a request is known only when it is
    /// over: one token must be left.
    pub fn needed(self, kind: Kind, amount: u64) -> f64 {
        match kind {
            Kind::Input => exact(amount).clamp(1.0, self.capacity()),
            Kind::Output => 1.0,
        }
    }

    /// What a request takes from a bucket that admits it: no more than a full one holds. A reservation of output takes no
    /// more than there is: a huge bound is no reason to refuse.
    pub fn taken(self, kind: Kind, amount: u64, level: f64) -> u64 {
        let amount = amount.min(u64::from(self.tokens));
        match kind {
            Kind::Input => amount,
            Kind::Output => amount.min((level + SLACK).max(0.0) as u64),
        }
    }

    /// The time in which `level` becomes `needed`.
    pub fn wait(self, level: f64, needed: f64) -> Duration {
        let seconds = (needed - level).max(0.0) / self.per_second();
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// What a client is told of a bucket.
    pub fn standing(self, level: f64) -> Standing {
        let reset = self.wait(level, self.capacity()).as_secs_f64().ceil();
        Standing { limit: self.tokens, remaining: (level + SLACK).max(0.0) as u32, reset: reset as u32 }
    }
}

/// A number of tokens, exact as far as it matters.
pub fn exact(tokens: u64) -> f64 {
    tokens.min(MOST_TOKENS) as f64
}

/// A bucket at some time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    level: f64,
    at: Duration,
}

impl Bucket {
    /// A full one.
    pub fn full(rate: Rate, now: Duration) -> Self {
        Self { level: rate.capacity(), at: now }
    }

    /// Tokens it holds; fewer than 0 are debt.
    pub fn level(&self, rate: Rate, now: Duration) -> f64 {
        let seconds = now.saturating_sub(self.at).as_secs_f64();
        seconds.mul_add(rate.per_second(), self.level).min(rate.capacity())
    }

    /// Whether it is as good as none.
    pub fn is_full(&self, rate: Rate, now: Duration) -> bool {
        self.level(rate, now) + SLACK >= rate.capacity()
    }

    /// Takes `spent` tokens, whatever it holds; fewer than 0 come back.
    pub fn spend(&mut self, rate: Rate, spent: f64, now: Duration) {
        self.level = (self.level(rate, now) - spent).min(rate.capacity());
        self.at = self.at.max(now);
    }

    /// Goes on at another rate with what it holds. A full one stays full, as one that is not there would.
    pub fn change(&mut self, from: Rate, to: Rate, now: Duration) {
        let level = self.level(from, now);
        let full = self.is_full(from, now);
        self.level = if full { to.capacity() } else { level.min(to.capacity()) };
        self.at = self.at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PER_MINUTE: Rate = Rate { tokens: 100, unit: Unit::Minute };

    fn seconds(s: u64) -> Duration {
        Duration::from_secs(s)
    }

    /// The way of a request through a bucket; the wait if it is refused.
    fn reserve(
        bucket: &mut Bucket,
        rate: Rate,
        kind: Kind,
        amount: u64,
        now: Duration,
    ) -> Result<u64, Duration> {
        let (level, needed) = (bucket.level(rate, now), rate.needed(kind, amount));
        if level + SLACK < needed {
            return Err(rate.wait(level, needed));
        }
        let taken = rate.taken(kind, amount, level);
        bucket.spend(rate, exact(taken), now);
        Ok(taken)
    }

    #[test]
    fn what_was_used_beyond_the_balance_is_paid_for_before_the_next_request() {
        let mut bucket = Bucket::full(PER_MINUTE, seconds(0));
        assert_eq!(reserve(&mut bucket, PER_MINUTE, Kind::Output, 0, seconds(0)), Ok(0));
        bucket.spend(PER_MINUTE, 500.0, seconds(0));
        assert_eq!(bucket.level(PER_MINUTE, seconds(0)), -400.0);
        let wait = reserve(&mut bucket, PER_MINUTE, Kind::Output, 0, seconds(1)).unwrap_err();
        assert_eq!(super::super::whole_seconds(wait), 240);
        assert_eq!(reserve(&mut bucket, PER_MINUTE, Kind::Output, 0, seconds(241)), Ok(0));
    }

    #[test]
    fn a_prompt_larger_than_the_bucket_takes_all_of_a_full_one_and_borrows_when_it_settles() {
        let rate = Rate { tokens: 10, unit: Unit::Minute };
        let mut bucket = Bucket::full(rate, seconds(0));
        assert_eq!(reserve(&mut bucket, rate, Kind::Input, u64::MAX, seconds(0)), Ok(10));
        assert_eq!(bucket.level(rate, seconds(0)), 0.0);
        bucket.spend(rate, 40.0, seconds(0));
        let wait = reserve(&mut bucket, rate, Kind::Input, 50, seconds(0)).unwrap_err();
        assert_eq!(wait, seconds(300), "until it is full again");
        assert_eq!(reserve(&mut bucket, rate, Kind::Input, 50, wait), Ok(10));
    }

    #[test]
    fn an_edited_limit_keeps_the_level_and_the_debt() {
        let wide = Rate { tokens: 1_000, unit: Unit::Minute };
        let mut bucket = Bucket::full(PER_MINUTE, seconds(0));
        bucket.change(PER_MINUTE, wide, seconds(0));
        assert_eq!(bucket.level(wide, seconds(0)), 1_000.0, "nothing was taken");
        bucket.spend(wide, 400.0, seconds(0));
        bucket.change(wide, PER_MINUTE, seconds(0));
        assert_eq!(bucket.level(PER_MINUTE, seconds(0)), 100.0, "never more than fits");
        bucket.spend(PER_MINUTE, 160.0, seconds(0));
        bucket.change(PER_MINUTE, wide, seconds(30));
        let level = bucket.level(wide, seconds(30));
        assert!((level + 10.0).abs() < SLACK, "half a minute at the rate of that time: {level}");
    }

    #[test]
    fn a_share_of_a_limit_is_never_nothing() {
        assert_eq!(PER_MINUTE.share(3).tokens, 33);
        assert_eq!(PER_MINUTE.share(0).tokens, 100);
        assert_eq!(PER_MINUTE.share(1_000).tokens, 1);
    }

    fn rates() -> impl Strategy<Value = Rate> {
        (1..=u32::MAX, 0..Unit::ALL.len()).prop_map(|(tokens, unit)| Rate { tokens, unit: Unit::ALL[unit] })
    }

    fn steps() -> impl Strategy<Value = Vec<(u32, bool, u64, u64)>> {
        let amount = prop_oneof![0..100u64, 0..1_000_000u64, Just(u64::MAX)];
        prop::collection::vec((0..100_000u32, any::<bool>(), amount.clone(), amount), 1..50)
    }

    proptest! {
        /// A request that waits as long as it is told is admitted, and one that waits noticeably less is not.
        #[test]
        fn the_wait_is_exact(rate in rates(), debt in 0..1_000_000u64, amount in 0..1_000_000u64) {
            for kind in Kind::ALL {
                let mut bucket = Bucket::full(rate, Duration::ZERO);
                bucket.spend(rate, rate.capacity() + debt as f64, Duration::ZERO);
                let wait = reserve(&mut bucket, rate, kind, amount, Duration::ZERO).unwrap_err();
                let early = wait.mul_f64(0.999);
                if rate.per_second() * wait.saturating_sub(early).as_secs_f64() > 1e-3 {
                    prop_assert!(reserve(&mut bucket.clone(), rate, kind, amount, early).is_err());
                }
                prop_assert!(reserve(&mut bucket, rate, kind, amount, wait + Duration::from_micros(1)).is_ok());
            }
        }

        /// What is admitted never exceeds the limit times the time, one bucket, and what single requests borrowed.
        #[test]
        fn no_schedule_gets_more_than_limit_and_debt(rate in rates(), steps in steps()) {
            for kind in Kind::ALL {
                let mut bucket = Bucket::full(rate, Duration::ZERO);
                let (mut now, mut used, mut largest) = (Duration::ZERO, 0.0, 0.0_f64);
                for &(millis, settles, amount, more) in &steps {
                    now += Duration::from_millis(u64::from(millis));
                    let before = bucket.level(rate, now);
                    prop_assert!(before <= rate.capacity());
                    let Ok(taken) = reserve(&mut bucket, rate, kind, amount, now) else {
                        prop_assert!(before < rate.needed(kind, amount), "refused while credit stands");
                        continue;
                    };
                    let really = if settles { more } else { taken };
                    bucket.spend(rate, exact(really) - exact(taken), now);
                    used += exact(really);
                    largest = largest.max(exact(really));
                }
                let bound = rate.per_second().mul_add(now.as_secs_f64(), rate.capacity()) + largest;
                prop_assert!(used <= bound * (1.0 + 1e-9) + 1.0, "{used} > {bound}");
            }
        }
    }
}
