//! Sends equal beginnings of prompts to one endpoint by a hash, and past it when it has more than its share of the load.

use schemars::JsonSchema;
use serde::Deserialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::rendezvous;
use crate::schedule::plugin::{Instance, Kind, Needs, ParameterError, Scorer, parameters};
use crate::schedule::{Candidate, Cycle};
use crate::state::rates;

/// Consistent hashing with bounded loads. The key is the first `prefixCharLength` bytes of the prompt's text and the model
/// name, which is the adapter's name where one is asked for. Every endpoint draws a number in (0, 1) from key and address,
/// weighted by its `weight`; the highest draw wins among the endpoints whose load with one more request is at most
/// `ceil(meanLoadFactor / 100 x (all load + 1) x weight / all weights)`, at least 1. The score is 0.5 + draw / 2 within that
/// bound and draw / 2 above it, so that endpoints are tried in the order of the draw, each once, whatever their number. A
/// prompt that is unknown or empty makes it abstain. `replication` is accepted and has no effect: there is no ring.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
pub struct Config {
    /// Most load of an endpoint, percent of the mean; 100 or more.
    pub mean_load_factor: u32,
    /// What load is counted in.
    pub load: LoadUnit,
    /// Leading bytes of the prompt that make the key.
    pub prefix_char_length: u32,
    /// Has no effect.
    pub replication: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { mean_load_factor: 125, load: LoadUnit::default(), prefix_char_length: 100, replication: 256 }
    }
}

/// Units of load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LoadUnit {
    /// Requests, ours and others'.
    #[default]
    Requests,
    /// Tokens booked and not yet done.
    OutstandingTokens,
    /// Seconds of prefill booked, at the speed of an A100 with an 8-billion-parameter model.
    ExpectedSeconds,
}

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "bounded-load-hash",
    schema: || schemars::schema_for!(Config),
    build: |given| {
        let config: Config = parameters(given)?;
        if config.mean_load_factor < 100 {
            let given = config.mean_load_factor;
            return Err(ParameterError(format!("meanLoadFactor must be 100 or more, not {given}")));
        }
        let head = config.prefix_char_length.max(1) as usize;
        let factor = f64::from(config.mean_load_factor) / 100.0;
        Ok(Instance::scorer(BoundedLoadHash { factor, unit: config.load, head })
            .needs(Needs { head_bytes: Some(head), ..Needs::default() }))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct BoundedLoadHash {
    factor: f64,
    unit: LoadUnit,
    head: usize,
}

impl BoundedLoadHash {
    /// Load of a candidate, and what this request adds, both in parts of what it adds.
    fn load(&self, cx: &Cycle<'_>, candidate: &Candidate) -> f64 {
        let load = &candidate.load;
        let tokens = cx.ask.prompt.tokens as f64;
        let (there, adds) = match self.unit {
            LoadUnit::Requests => (f64::from(load.requests()), 1.0),
            LoadUnit::OutstandingTokens => {
                (f64::from(load.prefill_tokens + load.decode_tokens), tokens + cx.output_tokens as f64)
            }
            LoadUnit::ExpectedSeconds => (f64::from(load.prefill_seconds), rates::prefill(tokens, 0.0)),
        };
        there / if adds > 0.0 { adds } else { 1.0 }
    }
}

impl Scorer for BoundedLoadHash {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        let Some(prefix) = cx.ask.prompt.head(self.head) else { return };
        let key = xxh3_64_with_seed(cx.ask.model.as_bytes(), prefix);
        let all: f64 = candidates.iter().map(|candidate| self.load(cx, candidate)).sum();
        let weights: f64 = candidates.iter().map(|candidate| f64::from(cx.endpoint(candidate).weight)).sum();
        for (candidate, out) in candidates.iter().zip(out) {
            let endpoint = cx.endpoint(candidate);
            let bound = rendezvous::bound(self.factor, all, f64::from(endpoint.weight), weights);
            let within = if self.load(cx, candidate) + 1.0 <= bound { 0.5 } else { 0.0 };
            *out = (within + rendezvous::draw(key, endpoint) / 2.0) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::state::Pool;

    const REQUESTS: BoundedLoadHash = BoundedLoadHash { factor: 1.25, unit: LoadUnit::Requests, head: 100 };

    fn prompt(text: &str) -> Prepared {
        let mut prompt = Prepared { tokens: 10, ..Prepared::default() };
        prompt.add_head(100, |sink| sink(text.as_bytes()));
        prompt
    }

    fn winner(pool: &Pool, text: &str, open: &[f32]) -> usize {
        let prompt = prompt(text);
        cycle(pool, &ask(&prompt, "m"), |cx, candidates| {
            for (candidate, own) in candidates.iter_mut().zip(open) {
                candidate.load.own = *own;
            }
            let mut out = vec![f32::NAN; candidates.len()];
            REQUESTS.score(cx, candidates, &mut out);
            (0..out.len()).max_by(|a, b| out[*a].total_cmp(&out[*b])).unwrap()
        })
    }

    #[test]
    fn nobody_is_loaded_above_the_bound_while_others_are_empty() {
        let pool = pool(250);
        let mut open = vec![0.0; 250];
        for n in 0..60 {
            let text = if n % 4 == 0 { "the same".to_owned() } else { format!("prompt {n}") };
            let at = winner(&pool, &text, &open);
            open[at] += 1.0;
        }
        assert_eq!(open.iter().copied().fold(0.0, f32::max), 1.0);
    }

    #[test]
    fn keys_spread_and_a_new_endpoint_moves_only_what_it_wins() {
        let (before, after) = (pool(10), pool(11));
        let mut counts = [0; 10];
        let mut moved = 0;
        for n in 0..1_000 {
            let text = format!("prompt {n}");
            let (old, new) = (winner(&before, &text, &[]), winner(&after, &text, &[]));
            counts[old] += 1;
            assert!(old == new || new == 10, "a key moved between endpoints that stayed");
            moved += usize::from(old != new);
        }
        assert!(counts.iter().all(|count| (40..=160).contains(count)), "{counts:?}");
        assert!(moved <= 2 * 1_000 / 11, "{moved}");
    }

    #[test]
    fn those_above_the_bound_are_passed_over_in_the_order_of_the_draw() {
        let pool = pool(4);
        let mut open = [0.0; 4];
        let mut order = Vec::new();
        for _ in 0..4 {
            let at = winner(&pool, "x", &open);
            open[at] += 1.0;
            order.push(at);
        }
        let three: std::collections::HashSet<usize> = order[..3].iter().copied().collect();
        assert_eq!(three.len(), 3, "with up to 2 open the bound is ceil(1.25 x 3 / 4) = 1");
        assert_eq!(order[3], order[0], "with 3 open it is 2");
    }

    #[test]
    fn the_only_candidate_takes_it_whatever_its_load() {
        assert_eq!(winner(&pool(1), "x", &[50.0]), 0);
    }
}
