//! InferenceModelRewrites: the model that serves in place of the one asked for, in pools that no ModelRoute leads to.

use std::sync::Arc;

use super::table::draw_weighted;

/// One InferenceModelRewrite of a pool.
#[derive(Clone, Debug)]
pub struct Rewrite {
    /// `NAMESPACE/NAME`.
    pub label: Arc<str>,
    /// Seconds since the epoch at which it was created; older ones are tried first.
    pub created: i64,
    /// Rules in order.
    pub rules: Vec<Rule>,
}

/// One rule.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Model names it applies to; none means all, and requests without a model too.
    pub models: Vec<Box<str>>,
    /// What the model becomes, with weights; never empty.
    pub targets: Vec<Target>,
}

/// A weighted model name.
#[derive(Clone, Debug)]
pub struct Target {
    /// The name.
    pub model: Arc<str>,
    /// Its share; where all are 0, all are equal.
    pub weight: u32,
}

/// What a rewrite decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// The name that engines see.
    pub model: Arc<str>,
    /// The rewrite, `NAMESPACE/NAME`.
    pub label: Arc<str>,
}

/// The rewrites of one pool.
#[derive(Clone, Debug, Default)]
pub struct Rewrites {
    all: Vec<Rewrite>,
}

impl Rewrites {
    /// Sorts by age; equally old ones keep their order.
    pub fn new(mut all: Vec<Rewrite>) -> Self {
        all.sort_by_key(|rewrite| rewrite.created);
        Self { all }
    }

    /// All of them, oldest first.
    pub fn all(&self) -> &[Rewrite] {
        &self.all
    }

    /// The model that serves in place of `model`: by the first rule that names it, else by the first that names none. `draw`
    /// is uniform over `u64`.
    pub fn apply(&self, model: Option<&str>, draw: u64) -> Option<Rewritten> {
        let rules =
            || self.all.iter().flat_map(|rewrite| rewrite.rules.iter().map(move |rule| (rewrite, rule)));
        let names = |(_, rule): &(&Rewrite, &Rule)| rule.models.iter().any(|name| Some(&**name) == model);
        let generic = |(_, rule): &(&Rewrite, &Rule)| rule.models.is_empty();
        let (rewrite, rule) = rules().find(names).or_else(|| rules().find(generic))?;
        let target = draw_weighted(&rule.targets, |target| target.weight, draw)
            .or_else(|| draw_weighted(&rule.targets, |_| 1, draw))?;
        Some(Rewritten { model: Arc::clone(&target.model), label: Arc::clone(&rewrite.label) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng, rngs::SmallRng};
    use rstest::rstest;

    fn target(model: &str, weight: u32) -> Target {
        Target { model: model.into(), weight }
    }

    /// Rules written `name,name>target`, one after the other.
    fn rewrite(label: &str, created: i64, rules: &str) -> Rewrite {
        let rule = |text: &str| {
            let (names, to) = text.split_once('>').unwrap();
            let models = names.split(',').filter(|name| !name.is_empty()).map(Into::into).collect();
            Rule { models, targets: vec![target(to, 1)] }
        };
        Rewrite { label: label.into(), created, rules: rules.split_whitespace().map(rule).collect() }
    }

    /// An exact rule wins over a generic one wherever they stand, then the older rewrite, then the earlier rule.
    #[rstest]
    #[case::exact_in_a_younger_rewrite(Some("a"), ">generic", 1, "a>exact", 2, Some(("exact", "ns/two")))]
    #[case::exact_behind_generic(Some("a"), ">generic a>exact", 1, "", 2, Some(("exact", "ns/one")))]
    #[case::one_of_several_names(Some("b"), "a,b>exact", 1, "", 2, Some(("exact", "ns/one")))]
    #[case::the_older_exact_rule(Some("a"), "a>young", 5, "a>old", 2, Some(("old", "ns/two")))]
    #[case::the_older_generic_rule(Some("z"), ">young", 5, ">old", 2, Some(("old", "ns/two")))]
    #[case::the_first_of_equal_age(Some("a"), "a>first", 3, "a>second", 3, Some(("first", "ns/one")))]
    #[case::the_earlier_rule(Some("a"), "a>first a>second", 1, "", 1, Some(("first", "ns/one")))]
    #[case::a_generic_rule_fills_in(None, "a>exact >generic", 1, "", 1, Some(("generic", "ns/one")))]
    #[case::no_rule(Some("z"), "a>exact", 1, "", 1, None)]
    #[case::no_model_and_no_generic_rule(None, "a>exact", 1, "", 1, None)]
    #[case::names_are_exact(Some("A"), "a>exact", 1, "", 1, None)]
    fn the_first_rule_by_exactness_age_and_order_decides(
        #[case] model: Option<&str>,
        #[case] one: &str,
        #[case] one_created: i64,
        #[case] two: &str,
        #[case] two_created: i64,
        #[case] expected: Option<(&str, &str)>,
    ) {
        let rewrites =
            Rewrites::new(vec![rewrite("ns/one", one_created, one), rewrite("ns/two", two_created, two)]);
        let expected = expected.map(|(model, label)| Rewritten { model: model.into(), label: label.into() });
        assert_eq!(rewrites.apply(model, 0), expected);
    }

    #[rstest]
    #[case(&[90, 10], &[9_000, 1_000])]
    #[case(&[0, 0], &[5_000, 5_000])]
    #[case(&[1, 0], &[10_000, 0])]
    #[case(&[1_000_000, 1_000_000], &[5_000, 5_000])]
    fn weights_share_out_and_none_is_an_equal_share(#[case] weights: &[u32], #[case] expected: &[i64]) {
        let names = ["a", "b"];
        let targets = names.iter().zip(weights).map(|(name, weight)| target(name, *weight)).collect();
        let rule = Rule { models: Vec::new(), targets };
        let rewrites = Rewrites::new(vec![Rewrite { label: "ns/r".into(), created: 0, rules: vec![rule] }]);
        let mut rng = SmallRng::seed_from_u64(7);
        let mut counts = [0i64; 2];
        for _ in 0..10_000 {
            let drawn = rewrites.apply(None, rng.random()).unwrap().model;
            counts[names.iter().position(|name| **name == *drawn).unwrap()] += 1;
        }
        for (found, expected) in counts.iter().zip(expected) {
            assert!((found - expected).abs() <= 150 && (*expected > 0 || *found == 0), "{counts:?}");
        }
    }
}
