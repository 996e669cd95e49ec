//! Prefers endpoints that have answered fast lately.

use schemars::JsonSchema;
use serde::Deserialize;

use super::ranking::share_of_range;
use crate::schedule::plugin::{Instance, Kind, Needs, ParameterError, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::SignalKind;

/// `a x S(time to first token) + (1 - a) x S(time per output token)` with `S(x) = (max - x) / (max - min)` over the
/// candidates, 1 where all are equal; a is `TTFTTPOTWeightFactor`. Times are means over the last scrapes that saw any
/// request; where either is unknown or stale the endpoint abstains, so one slow burst does not starve it for ever.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Share of the time to first token in the score, 0 to 1.
    #[serde(rename = "TTFTTPOTWeightFactor")]
    pub ttft_tpot_weight_factor: f32,
}

impl Default for Config {
    fn default() -> Self {
        Self { ttft_tpot_weight_factor: 0.5 }
    }
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "least-latency",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let ttft_share = parameters::<Config>(given)?.ttft_tpot_weight_factor;
        if !(0.0..=1.0).contains(&ttft_share) {
            return Err(ParameterError(format!("TTFTTPOTWeightFactor must be in 0..1, not {ttft_share}")));
        }
        Ok(Instance::scorer(LeastLatency { ttft_share }).needs(Needs { metrics: true, ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct LeastLatency {
    ttft_share: f32,
}

/// The smallest and largest of the known values.
#[derive(Clone, Copy)]
struct Range(f32, f32);

impl Range {
    fn of(values: impl Iterator<Item = f32>) -> Self {
        values.fold(Self(f32::INFINITY, f32::NEG_INFINITY), |Self(lo, hi), x| Self(lo.min(x), hi.max(x)))
    }

    fn score(self, value: f32) -> f32 {
        let mut one = [self.0, value, self.1];
        share_of_range(&mut one);
        one[1]
    }
}

impl Scorer for LeastLatency {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let both = |candidate: &Candidate| {
            let ttft = cx.signal(candidate, SignalKind::TimeToFirstToken)?;
            let tpot = cx.signal(candidate, SignalKind::TimePerOutputToken)?;
            (ttft > 0.0 && tpot > 0.0).then_some((ttft, tpot))
        };
        let ttft_range = Range::of(candidates.iter().filter_map(both).map(|(ttft, _)| ttft));
        let tpot_range = Range::of(candidates.iter().filter_map(both).map(|(_, tpot)| tpot));
        for (candidate, out) in candidates.iter().zip(out) {
            if let Some((ttft, tpot)) = both(candidate) {
                let share = self.ttft_share;
                *out = share * ttft_range.score(ttft) + (1.0 - share) * tpot_range.score(tpot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{pool, scores, signal};
    use crate::state::SignalKind::{TimePerOutputToken, TimeToFirstToken};

    #[test]
    fn fast_wins_by_the_given_share_and_no_samples_abstain() {
        let pool = pool(3);
        for (at, ttft, tpot) in [(0, 0.1, 0.04), (1, 0.3, 0.02)] {
            signal(&pool, at, TimeToFirstToken, ttft);
            signal(&pool, at, TimePerOutputToken, tpot);
        }
        signal(&pool, 2, TimeToFirstToken, 0.2);
        let found = scores(&LeastLatency { ttft_share: 0.75 }, &pool);
        assert_eq!(&found[..2], [0.75, 0.25]);
        assert!(found[2].is_nan());
    }

    #[test]
    fn the_factor_is_checked_and_matched_in_any_letter_case() {
        assert!((KIND.build)(serde_json::json!({"ttfttpotweightfactor": 0})).is_ok());
        assert!((KIND.build)(serde_json::json!({"TTFTTPOTWeightFactor": 1.5})).is_err());
    }
}
