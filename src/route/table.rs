//! All ModelRoutes, found by the model name a request asks for.

use std::sync::Arc;

use ahash::AHashMap;

use super::{Question, RequestMatch, Routed};
use crate::refusal::{Reason, Refusal};
use crate::state::{ObjectName, PoolKind, PoolName, Snapshot};

/// One ModelRoute.
#[derive(Clone, Debug)]
pub struct Route {
    /// `namespace/name`.
    pub label: Arc<str>,
    /// Identity, which breaks ties of age.
    pub name: ObjectName,
    /// Seconds since the epoch at which it was created; older routes are tried first.
    pub created: i64,
    /// The base model it serves.
    pub model: Option<Arc<str>>,
    /// Adapters it serves; their names are never rewritten.
    pub adapters: Vec<Arc<str>>,
    /// Rules in order.
    pub rules: Vec<Rule>,
}

/// One rule of a route.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Its name, or its position.
    pub label: Arc<str>,
    /// When it applies.
    pub matches: RequestMatch,
    /// Targets with their weights.
    pub targets: Vec<Target>,
    /// Why it cannot choose a target, found when it was loaded.
    pub broken: Option<Arc<str>>,
}

/// A weighted ModelServer, in the namespace of its route.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its name.
    pub server: ObjectName,
    /// Its share; 0 takes nothing.
    pub weight: u32,
}

/// Routes by model and by adapter name, oldest first.
#[derive(Clone, Debug, Default)]
pub struct RouteTable {
    by_model: AHashMap<Arc<str>, Vec<Arc<Route>>>,
    by_adapter: AHashMap<Arc<str>, Vec<Arc<Route>>>,
    all: Vec<Arc<Route>>,
}

impl RouteTable {
    /// Sorts routes by age, then by name.
    pub fn new(mut all: Vec<Arc<Route>>) -> Self {
        all.sort_by(|a, b| (a.created, &a.name).cmp(&(b.created, &b.name)));
        let mut table = Self::default();
        for route in &all {
            if let Some(model) = &route.model {
                table.by_model.entry(Arc::clone(model)).or_default().push(Arc::clone(route));
            }
            for adapter in &route.adapters {
                table.by_adapter.entry(Arc::clone(adapter)).or_default().push(Arc::clone(route));
            }
        }
        table.all = all;
        table
    }

    /// Whether there is no route at all.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// All routes, oldest first.
    pub fn all(&self) -> &[Arc<Route>] {
        &self.all
    }

    /// Every model and adapter name once, sorted: what `GET /v1/models` lists.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.by_model.keys().chain(self.by_adapter.keys()).map(|name| &**name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Takes the first matching rule of the oldest route for the model. A base name hides an equal adapter name.
    pub fn route(&self, snapshot: &Snapshot, model: &str, ask: &Question<'_>) -> Result<Routed, Refusal> {
        let (routes, is_adapter) = match (self.by_model.get(model), self.by_adapter.get(model)) {
            (Some(routes), _) => (routes, false),
            (None, Some(routes)) => (routes, true),
            (None, None) => return Err(Refusal::new(Reason::UnknownModel, "the model is not served here")),
        };
        let found = routes.iter().find_map(|route| {
            route.rules.iter().find(|rule| rule.matches.matches(ask)).map(|rule| (route, rule))
        });
        let Some((route, rule)) = found else {
            return Err(Refusal::new(Reason::UnknownModel, "no rule for this model matches the request"));
        };
        let refuse = |why: String| {
            Refusal::new(
                Reason::NoEndpoints,
                format!("rule {} of ModelRoute {}: {why}", rule.label, route.label),
            )
        };
        if let Some(broken) = &rule.broken {
            return Err(refuse(broken.to_string()));
        }
        let target =
            draw(&rule.targets, ask.draw).ok_or_else(|| refuse("every target has weight 0".to_owned()))?;
        let name = PoolName { kind: PoolKind::ModelServer, object: target.server.clone() };
        let pool =
            snapshot.pool(&name).ok_or_else(|| refuse(format!("ModelServer {name} does not exist")))?;
        let target_model = match (&pool.model, is_adapter) {
            (Some(served), false) => Arc::clone(served),
            _ => model.into(),
        };
        Ok(Routed { pool: Arc::clone(pool), target_model, route: Some(Arc::clone(&route.label)) })
    }
}

/// A target with a chance proportional to its weight; `None` if the sum is 0.
fn draw(targets: &[Target], draw: u64) -> Option<&Target> {
    let sum: u64 = targets.iter().map(|target| u64::from(target.weight)).sum();
    if sum == 0 {
        return None;
    }
    // Multiply-shift maps the draw to 0..sum without the bias of a remainder.
    let mut at = ((u128::from(draw) * u128::from(sum)) >> 64) as u64;
    targets.iter().find(|target| {
        let weight = u64::from(target.weight);
        let here = at < weight;
        at = at.saturating_sub(weight);
        here
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{RngExt, SeedableRng, rngs::SmallRng};
    use rstest::rstest;

    #[rstest]
    #[case(&[100, 0], &[10_000, 0])]
    #[case(&[90, 10], &[9_000, 1_000])]
    #[case(&[1, 1], &[5_000, 5_000])]
    #[case(&[1, 0, 0, 0], &[10_000, 0, 0, 0])]
    #[case(&[0, 1], &[0, 10_000])]
    #[case(&[u32::MAX, 1], &[10_000, 0])]
    #[case(&[u32::MAX, u32::MAX], &[5_000, 5_000])]
    fn weights_share_out(#[case] weights: &[u32], #[case] expected: &[i64]) {
        let targets: Vec<Target> = weights
            .iter()
            .map(|&weight| Target { server: ObjectName::new("default", "t"), weight })
            .collect();
        let mut rng = SmallRng::seed_from_u64(7);
        let mut counts = vec![0i64; weights.len()];
        for _ in 0..10_000 {
            let chosen = draw(&targets, rng.random()).unwrap();
            counts[targets.iter().position(|t| std::ptr::eq(t, chosen)).unwrap()] += 1;
        }
        for (found, expected) in counts.iter().zip(expected) {
            assert!((found - expected).abs() <= 150 && (*expected > 0 || *found == 0), "{counts:?}");
        }
    }

    #[test]
    fn nothing_is_drawn_from_zero_weights() {
        let zero = [Target { server: ObjectName::new("default", "t"), weight: 0 }];
        assert!(draw(&zero, 1).is_none());
        assert!(draw(&[], 1).is_none());
    }
}
