//! All ModelRoutes, found by the model name a request asks for.

use std::sync::Arc;

use ahash::AHashMap;

use super::{Question, RequestMatch};
use crate::admission::limits::Limit;
use crate::refusal::{Reason, Refusal};
use crate::state::ObjectName;

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
    /// Tokens it may take.
    pub limit: Option<Arc<Limit>>,
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

    /// The targets of all routes with a limit, some of them more than once.
    pub fn limited_servers(&self) -> impl Iterator<Item = &ObjectName> {
        let limited = self.all.iter().filter(|route| route.limit.is_some());
        limited.flat_map(|route| &route.rules).flat_map(|rule| &rule.targets).map(|target| &target.server)
    }

    /// Every model and adapter name once, sorted: what `GET /v1/models` lists.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.by_model.keys().chain(self.by_adapter.keys()).map(|name| &**name).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Draws a target of the first matching rule of the oldest route for the model. A base name hides an equal adapter name.
    pub fn draw(&self, model: &str, ask: &Question<'_>) -> Result<Drawn<'_>, Refusal> {
        let (routes, is_adapter) = match (self.by_model.get(model), self.by_adapter.get(model)) {
            (Some(routes), _) => (routes, false),
            (None, Some(routes)) => (routes, true),
            (None, None) => {
                let why = format!("the model `{}` is not served here", cut(model));
                return Err(Refusal::new(Reason::UnknownModel, why));
            }
        };
        let found = routes.iter().find_map(|route| {
            route.rules.iter().find(|rule| rule.matches.matches(ask)).map(|rule| (route, rule))
        });
        let Some((route, rule)) = found else {
            let why = format!("no rule for the model `{}` matches the request", cut(model));
            return Err(Refusal::new(Reason::UnknownModel, why));
        };
        if let Some(broken) = &rule.broken {
            return Err(refuse(route, rule, broken));
        }
        let target = draw_weighted(&rule.targets, |target| target.weight, ask.draw)
            .ok_or_else(|| refuse(route, rule, "every target has weight 0"))?;
        Ok(Drawn { server: &target.server, is_adapter, route, rule })
    }
}

/// What a ModelRoute decided.
#[derive(Clone, Copy, Debug)]
pub struct Drawn<'a> {
    /// The ModelServer.
    pub server: &'a ObjectName,
    /// Whether the model is an adapter, whose name is never rewritten.
    pub is_adapter: bool,
    /// The route.
    pub route: &'a Route,
    rule: &'a Rule,
}

impl Drawn<'_> {
    /// Refuses the request since its target cannot serve it; names route and rule.
    pub fn refuse(&self, why: &str) -> Refusal {
        refuse(self.route, self.rule, why)
    }
}

fn refuse(route: &Route, rule: &Rule, why: &str) -> Refusal {
    Refusal::new(Reason::NoEndpoints, format!("rule {} of ModelRoute {}: {why}", rule.label, route.label))
}

/// A client's string in a message, bounded.
fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(128)]
}

/// A target with a chance proportional to its weight; `None` if the sum is 0.
pub(super) fn draw_weighted<T>(targets: &[T], weight: impl Fn(&T) -> u32, draw: u64) -> Option<&T> {
    let sum: u64 = targets.iter().map(|target| u64::from(weight(target))).sum();
    if sum == 0 {
        return None;
    }
    // Multiply-shift maps the draw to 0..sum without the bias of a remainder.
    let mut at = ((u128::from(draw) * u128::from(sum)) >> 64) as u64;
    targets.iter().find(|target| {
        let weight = u64::from(weight(target));
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
            let chosen = draw_weighted(&targets, |target| target.weight, rng.random()).unwrap();
            counts[targets.iter().position(|t| std::ptr::eq(t, chosen)).unwrap()] += 1;
        }
        for (found, expected) in counts.iter().zip(expected) {
            assert!((found - expected).abs() <= 150 && (*expected > 0 || *found == 0), "{counts:?}");
        }
    }

    #[test]
    fn nothing_is_drawn_from_zero_weights() {
        let zero = [Target { server: ObjectName::new("default", "t"), weight: 0 }];
        assert!(draw_weighted(&zero, |target| target.weight, 1).is_none());
        assert!(draw_weighted(&[0u32; 0], |weight| *weight, 1).is_none());
    }
}
