//! How fast an endpoint computes: a model of one engine step, and by how much each endpoint differs from it.
//!
//! The model is a unit, not a claim: an endpoint's two factors (prefill and decode) say how many times longer it takes.
//! They start from what the operator says of it and follow what responses show. Picks compare endpoints, so a factor that
//! is wrong everywhere by the same amount changes little, and one that is wrong by 2 costs about 1 %.

mod learned;

use super::signals::Millis;
use learned::Learned;

/// Seconds of one engine step: `t0 + sqrt(w^2 + (c N)^2) + kv * context + r * sequences`, and of attention while prefilling
/// `a * (new * cached + new^2 / 2)`. The constants are an 8-billion-parameter model on an A100, fitted to Vidur's measured
/// layer times: 67 us a prompt token, 9.8 ms to read the weights.
mod unit {
    /// Host overhead of a step.
    pub const T0: f64 = 0.001_5;
    /// Reading the weights once.
    pub const W: f64 = 0.009_8;
    /// Dense compute of one token.
    pub const C: f64 = 66.8e-6;
    /// Attention between one pair of tokens.
    pub const A: f64 = 3.4e-9;
    /// Reading one token's KV entry.
    pub const KV: f64 = 1.0e-7;
    /// Host overhead of one sequence.
    pub const R: f64 = 5.0e-6;
}

/// Seconds to prefill `uncached` tokens behind `cached` ones, at unit speed.
pub fn prefill(uncached: f64, cached: f64) -> f64 {
    unit::C * uncached + unit::A * (uncached * cached + uncached * uncached / 2.0)
}

/// How many times longer than the unit an endpoint takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factors {
    /// For prefill.
    pub prefill: f64,
    /// For a decode step.
    pub step: f64,
}

impl Factors {
    /// Seconds to prefill `uncached` tokens behind `cached` ones.
    pub fn prefill(self, uncached: f64, cached: f64) -> f64 {
        self.prefill * prefill(uncached, cached)
    }

    /// Seconds of a step that decodes `sequences` with `context` tokens between them. A token costs the same compute in
    /// decode as in prefill, so what a batch adds follows the prefill rate.
    pub fn step(self, sequences: f64, context: f64) -> f64 {
        let compute = self.prefill * unit::C * sequences;
        let weights = self.step * unit::W;
        weights.hypot(compute) + self.step * (unit::T0 + unit::KV * context + unit::R * sequences)
    }

    /// By how much one more sequence of `length` tokens prolongs a step of `sequences`.
    pub fn step_growth(self, sequences: f64, length: f64) -> f64 {
        let token = self.prefill * unit::C;
        let compute = token * sequences;
        token * compute / (self.step * unit::W).hypot(compute) + self.step * (unit::KV * length + unit::R)
    }

    /// The unit itself.
    pub const UNIT: Factors = Factors { prefill: 1.0, step: 1.0 };

    /// Factors of a pool whose operator says how fast an endpoint of weight 1 is.
    pub fn given(prefill_tokens_per_second: Option<f64>, step_seconds: Option<f64>) -> Self {
        Self {
            prefill: prefill_tokens_per_second.map_or(1.0, |rate| 1.0 / (rate * unit::C)),
            step: step_seconds.map_or(1.0, |seconds| seconds / Factors::UNIT.step(1.0, 0.0)),
        }
    }

    /// Factors of one `speed` times as fast.
    pub fn at_speed(self, speed: Speed) -> Self {
        Self { prefill: self.prefill / speed.prefill, step: self.step / speed.step }
    }
}

/// How fast an operator says an endpoint is, relative to its pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// In prefill.
    pub prefill: f64,
    /// In decode steps.
    pub step: f64,
}

impl Speed {
    /// A plain weight: so many times as fast in everything.
    pub fn of_weight(weight: f32) -> Self {
        Self { prefill: f64::from(weight), step: f64::from(weight) }
    }

    /// The GPUs that step times are published for, relative to an A100: dense compute a token 66.8 us (A100), 21.5 us
    /// (H100), 157 us (L4, FP8); weights read in 9.8, 5.6 and 32 ms.
    pub fn of_gpu(name: &str) -> Option<Self> {
        let (prefill, step) = match name.to_ascii_uppercase().as_str() {
            "A100" => (1.0, 1.0),
            "H100" => (66.8 / 21.5, 9.8 / 5.6),
            "L4" => (66.8 / 157.0, 9.8 / 32.0),
            _ => return None,
        };
        Some(Self { prefill, step })
    }

    /// Both at once.
    pub fn times(self, other: Self) -> Self {
        Self { prefill: self.prefill * other.prefill, step: self.step * other.step }
    }
}

impl Default for Speed {
    fn default() -> Self {
        Self { prefill: 1.0, step: 1.0 }
    }
}

/// Differences up to this factor are noise, and from the second on they count whole. Decoding in a larger batch costs so
/// little that an endpoint which looks 15 % faster would be given everything.
const NOISE: f64 = 1.2;
const CERTAIN: f64 = 1.5;

/// `own` where it differs from `usual` by more than noise, `usual` where it does not.
fn beyond_noise(own: f64, usual: f64) -> f64 {
    let ratio = own / usual;
    let far = ratio.max(1.0 / ratio).ln();
    let weight = ((far - NOISE.ln()) / (CERTAIN / NOISE).ln()).clamp(0.0, 1.0);
    usual * ratio.powf(weight)
}

/// Seconds of prefill below which the network and the queue of Envoy are most of what is measured. Below the time of a step
/// it is the wait for the step under way.
const LEAST_PREFILL: f64 = 0.001;

/// What responses show of the speed of an endpoint, or of a pool's endpoints at weight 1.
#[derive(Debug, Default)]
pub struct Rates {
    prefill: Learned,
    step: Learned,
}

impl Rates {
    /// The factors, `prior` before the first sample.
    pub fn factors(&self, prior: Factors) -> Factors {
        Factors { prefill: self.prefill.or(prior.prefill), step: self.step.or(prior.step) }
    }

    /// The factors of one endpoint among others like it, whose factors are `usual`: its own where it has shown them to
    /// differ.
    pub fn among(&self, usual: Factors, now: Millis) -> Factors {
        Factors {
            prefill: beyond_noise(self.prefill.among(usual.prefill, now), usual.prefill),
            step: beyond_noise(self.step.among(usual.step, now), usual.step),
        }
    }

    /// Samples of prefill and of steps that count still.
    pub fn samples(&self, now: Millis) -> (f64, f64) {
        (self.prefill.samples(now), self.step.samples(now))
    }

    /// Learns from a response whose pick had forecast `forecast`, at an endpoint of `speed`.
    pub fn learn(&self, forecast: &Forecast, seen: &Pace, speed: Speed, now: Millis) {
        let usual = self.factors(Factors::UNIT);
        let known = usual.at_speed(speed);
        let step = known.step(forecast.sequences, forecast.context);
        if let Some(token) = seen.token {
            self.step.learn(token, step / (known.step * speed.step), usual.step, now);
        }
        let Some(first) = seen.first_token else { return };
        // Taken for too fast by mistake, it must still be able to show what it is.
        let prefill = known.prefill.max(1.0 / speed.prefill) * forecast.prefill();
        if prefill > LEAST_PREFILL.max(step) {
            let measured = (first - step).max(first * 0.1);
            self.prefill.learn(measured, forecast.prefill() / speed.prefill, usual.prefill, now);
        }
    }

    /// Learns from a response that came as a whole after `seconds` with so many output tokens: what it took more or less
    /// than expected is taken as prefill and decode alike.
    pub fn learn_whole(&self, forecast: &Forecast, seconds: f64, tokens: u64, speed: Speed, now: Millis) {
        let usual = self.factors(Factors::UNIT);
        let known = usual.at_speed(speed);
        let step = known.step(forecast.sequences, forecast.context);
        let expected = known.prefill * forecast.prefill() + step * tokens as f64;
        self.prefill.learn(seconds, expected / (known.prefill * speed.prefill), usual.prefill, now);
        self.step.learn(seconds, expected / (known.step * speed.step), usual.step, now);
    }
}

/// What a pick expected.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Seconds of prefill ahead in the queue at unit speed.
    pub ahead: f64,
    /// Seconds of its own.
    pub own: f64,
    /// Sequences in a step, with this one.
    pub sequences: f64,
    /// Tokens between them.
    pub context: f64,
}

impl Forecast {
    /// Seconds of prefill before the first token at unit speed.
    fn prefill(&self) -> f64 {
        self.ahead + self.own
    }

    /// What would have been expected had it been known how many tokens of the prompt are cached.
    pub fn knowing(self, prompt: u64, cached: u64) -> Self {
        Self { own: prefill(prompt.saturating_sub(cached) as f64, cached as f64), ..self }
    }
}

/// What a response showed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Seconds to the first token.
    pub first_token: Option<f64>,
    /// Seconds a token after that.
    pub token: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Millis = Millis(1_000);

    fn close(a: f64, b: f64) -> bool {
        (a / b - 1.0).abs() < 0.05
    }

    /// Vidur's layer stacks of Llama-3-8B on an A100: tokens in a step to milliseconds.
    #[test]
    fn the_unit_is_the_measured_engine() {
        for (tokens, milliseconds) in
            [(1.0, 9.8), (128.0, 13.3), (256.0, 19.6), (512.0, 34.9), (8_192.0, 547.0)]
        {
            let stack = unit::W.hypot(unit::C * tokens) * 1e3;
            assert!(close(stack, milliseconds), "{tokens}: {stack} ms");
        }
        let unit = Factors::UNIT;
        let grown = unit.step(33.0, 1_000.0) - unit.step(32.0, 0.0);
        assert!(close(unit.step_growth(32.5, 1_000.0), grown), "{grown}");
    }

    #[test]
    fn factors_come_from_the_operator_then_from_responses() {
        let rates = Rates::default();
        let prior = Factors::given(Some(1.0 / 66.8e-6 / 2.0), None);
        assert!(close(rates.factors(prior).prefill, 2.0) && close(rates.factors(prior).step, 1.0));
        let forecast = Forecast { ahead: 0.0, own: 0.1, sequences: 4.0, context: 4_000.0 };
        let truth = Factors { prefill: 3.0, step: 2.0 };
        let step = truth.step(4.0, 4_000.0);
        for _ in 0..200 {
            rates.learn(
                &forecast,
                &Pace { first_token: Some(0.3 + step), token: Some(step) },
                Speed::default(),
                NOW,
            );
        }
        let learned = rates.factors(prior);
        assert!(close(learned.step, 2.0) && close(learned.prefill, 3.0), "{learned:?}");
    }

    #[test]
    fn a_pool_learns_what_weight_1_would_take() {
        let rates = Rates::default();
        let twice = Speed::of_weight(2.0);
        let forecast = Forecast { ahead: 0.0, own: 0.1, sequences: 1.0, context: 0.0 };
        let truth = Factors { prefill: 1.5, step: 1.5 };
        let step = truth.step(1.0, 0.0);
        for _ in 0..200 {
            rates.learn(&forecast, &Pace { first_token: Some(0.15 + step), token: Some(step) }, twice, NOW);
        }
        let learned = rates.factors(Factors::UNIT);
        assert!(close(learned.step, 3.0) && close(learned.prefill, 3.0), "{learned:?}");
    }

    #[test]
    fn a_prompt_that_is_cached_but_for_its_end_says_nothing_of_prefill() {
        let rates = Rates::default();
        let forecast = Forecast { ahead: 0.0, own: 0.005, sequences: 4.0, context: 4_000.0 };
        rates.learn(&forecast, &Pace { first_token: Some(0.03), token: Some(0.0117) }, Speed::default(), NOW);
        assert_eq!(rates.samples(NOW), (0.0, 1.0));
    }

    #[test]
    fn few_samples_count_little_among_others() {
        let rates = Rates::default();
        let forecast = Forecast { ahead: 0.0, own: 0.1, sequences: 1.0, context: 0.0 };
        let usual = Factors::UNIT;
        rates.learn_whole(&forecast, 3.0 * (0.1 + 100.0 * usual.step(1.0, 0.0)), 100, Speed::default(), NOW);
        assert!(rates.among(usual, NOW).step < 1.1);
        for _ in 0..100 {
            rates.learn_whole(
                &forecast,
                3.0 * (0.1 + 100.0 * usual.step(1.0, 0.0)),
                100,
                Speed::default(),
                NOW,
            );
        }
        assert!(rates.among(usual, NOW).step > 2.0);
    }

    #[test]
    fn whole_responses_teach_the_speed_of_both() {
        let rates = Rates::default();
        let forecast = Forecast { ahead: 0.0, own: 0.1, sequences: 1.0, context: 0.0 };
        for _ in 0..200 {
            rates.learn_whole(
                &forecast,
                3.0 * (0.1 + 100.0 * Factors::UNIT.step(1.0, 0.0)),
                100,
                Speed::default(),
                NOW,
            );
        }
        let learned = rates.factors(Factors::UNIT);
        assert!((2.5..3.2).contains(&learned.prefill) && (2.5..3.2).contains(&learned.step), "{learned:?}");
    }

    #[test]
    fn a_first_sample_can_neither_condemn_a_pool_nor_keep_it_from_learning() {
        let forecast = Forecast { ahead: 0.0, own: 1.0, sequences: 1.0, context: 0.0 };
        for first in [400.0, 0.004] {
            let rates = Rates::default();
            let show = |first| {
                let seen = Pace { first_token: Some(first), token: None };
                rates.learn(&forecast, &seen, Speed::default(), NOW);
            };
            show(first);
            (0..100).for_each(|_| show(1.0 + Factors::UNIT.step(1.0, 0.0)));
            let learned = rates.factors(Factors::UNIT).prefill;
            assert!((0.9..1.5).contains(&learned), "{learned} after {first}");
        }
    }

    #[test]
    fn what_the_engine_says_was_cached_corrects_the_forecast() {
        let believed = Forecast { ahead: 0.5, own: prefill(10.0, 990.0), sequences: 1.0, context: 0.0 };
        let known = believed.knowing(1_000, 0);
        assert_eq!(known, Forecast { own: prefill(1_000.0, 0.0), ..believed });
    }

    #[test]
    fn small_differences_are_noise() {
        assert_eq!(beyond_noise(1.15, 1.0), 1.0);
        assert_eq!(beyond_noise(0.9, 1.0), 1.0);
        assert!(close(beyond_noise(2.0, 1.0), 2.0) && close(beyond_noise(0.5, 1.0), 0.5));
        let between = beyond_noise(1.35, 1.0);
        assert!(1.0 < between && between < 1.35);
    }

    #[test]
    fn a_gpu_is_known_by_its_name() {
        assert!(Speed::of_gpu("h100").unwrap().prefill > 3.0);
        assert_eq!(Speed::of_gpu("abacus"), None);
    }
}
