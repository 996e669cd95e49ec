//! What several plugins do with their numbers: turn loads into scores, choose at random among equals.

use rand::RngExt;
use rand::rngs::SmallRng;

/// Turns loads into scores in place: `(max - x) / max`, 1 for all if the largest is 0. NaN stays NaN.
pub fn share_of_max(loads: &mut [f32]) {
    let max = loads.iter().copied().filter(|x| !x.is_nan()).fold(0.0, f32::max);
    for load in loads.iter_mut().filter(|x| !x.is_nan()) {
        *load = if max > 0.0 { ((max - *load) / max).clamp(0.0, 1.0) } else { 1.0 };
    }
}

/// Turns loads into scores in place: `(max - x) / (max - min)`, 1 for all if they are equal. NaN stays NaN.
pub fn share_of_range(loads: &mut [f32]) {
    let known = loads.iter().copied().filter(|x| !x.is_nan());
    let (min, max) = known.fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), x| (lo.min(x), hi.max(x)));
    for load in loads.iter_mut().filter(|x| !x.is_nan()) {
        *load = if max > min { ((max - *load) / (max - min)).clamp(0.0, 1.0) } else { 1.0 };
    }
}

/// Pushes the `wanted` candidates with the highest keys, best first, equals in random order.
pub fn push_best(
    candidates: usize,
    wanted: usize,
    rng: &mut SmallRng,
    ranked: &mut Vec<u32>,
    key: impl Fn(usize) -> f32,
) {
    while ranked.len() < wanted.min(candidates) {
        let mut best: Option<(usize, f32)> = None;
        let mut equals = 0u32;
        for at in (0..candidates).filter(|&at| !ranked.contains(&(at as u32))) {
            // A key that is not a number ranks last rather than poisoning the comparison.
            let key = if key(at).is_nan() { f32::NEG_INFINITY } else { key(at) };
            match best {
                Some((_, most)) if key < most => {}
                Some((_, most)) if key == most => {
                    equals += 1;
                    if rng.random_range(0..equals) == 0 {
                        best = Some((at, key));
                    }
                }
                _ => {
                    best = Some((at, key));
                    equals = 1;
                }
            }
        }
        match best {
            Some((at, _)) => ranked.push(at as u32),
            None => return,
        }
    }
}

/// Pushes candidates not yet ranked, in random order, until `wanted` are ranked.
pub fn push_random(candidates: usize, wanted: usize, rng: &mut SmallRng, ranked: &mut Vec<u32>) {
    push_best(candidates, wanted, rng, ranked, |_| 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn shares_skip_the_unknown() {
        let mut loads = [0.0, f32::NAN, 5.0, 10.0];
        share_of_max(&mut loads);
        assert_eq!((loads[0], loads[2], loads[3]), (1.0, 0.5, 0.0));
        assert!(loads[1].is_nan());
        let mut equal = [3.0, 3.0];
        share_of_range(&mut equal);
        assert_eq!(equal, [1.0, 1.0]);
    }

    #[test]
    fn equals_are_drawn_evenly_and_nan_ranks_last() {
        let mut counts = [0; 4];
        for seed in 0..4_000 {
            let mut ranked = Vec::new();
            let keys = [1.0, f32::NAN, 1.0, 1.0];
            push_best(4, 4, &mut SmallRng::seed_from_u64(seed), &mut ranked, |at| keys[at]);
            assert_eq!(ranked[3], 1);
            counts[ranked[0] as usize] += 1;
        }
        assert!(
            counts.iter().enumerate().all(|(at, &n)| if at == 1 { n == 0 } else { n > 1_200 }),
            "{counts:?}"
        );
    }
}
