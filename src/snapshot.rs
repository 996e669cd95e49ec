//! One consistent view of endpoints, pools and routes, replaced as a whole: readers take it once per request and never block.

use std::sync::Arc;
use std::time::Duration;

use ahash::{AHashMap, AHashSet};
use arc_swap::{ArcSwap, Guard};

use crate::admission::limits::Limit;
use crate::refusal::{Reason, Refusal};
use crate::route::rewrite::{Rewrite, Rewrites};
use crate::route::{Question, RouteTable};
use crate::state::{Endpoint, ObjectName, Pool, PoolKind, PoolName};

/// How important the requests of a pool are that name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Objective {
    /// The pool.
    pub pool: ObjectName,
    /// Higher is earlier; below 0 may be shed.
    pub priority: i32,
}

/// One consistent view of the topology.
#[derive(Debug, Default)]
pub struct Snapshot {
    /// All pools.
    pub pools: Vec<Arc<Pool>>,
    /// All endpoints, whether or not a pool selects them.
    pub endpoints: Vec<Arc<Endpoint>>,
    /// ModelRoutes, ready for matching.
    pub routes: RouteTable,
    /// What becomes of model names in InferencePools, by pool.
    pub rewrites: AHashMap<ObjectName, Rewrites>,
    /// InferenceObjectives.
    pub objectives: AHashMap<ObjectName, Objective>,
    by_name: AHashMap<PoolName, usize>,
    /// ModelServers that routes with limits lead to.
    limited: AHashSet<ObjectName>,
    /// Whether it was read from anywhere: the empty one that a process begins with was not.
    stands: bool,
}

impl Snapshot {
    /// Builds a snapshot; `pools` with the same name: the last wins.
    pub fn new(endpoints: Vec<Arc<Endpoint>>, pools: Vec<Arc<Pool>>, routes: RouteTable) -> Self {
        let by_name = pools.iter().enumerate().map(|(at, pool)| (pool.name.clone(), at)).collect();
        let limited = routes.limited_servers().cloned().collect();
        Self { pools, endpoints, routes, by_name, limited, stands: true, ..Self::default() }
    }

    /// The same with rewrites, each with its pool, and with objectives.
    pub fn with_models(
        mut self,
        rewrites: Vec<(ObjectName, Rewrite)>,
        objectives: Vec<(ObjectName, Objective)>,
    ) -> Self {
        let mut by_pool: AHashMap<ObjectName, Vec<Rewrite>> = AHashMap::new();
        for (pool, rewrite) in rewrites {
            by_pool.entry(pool).or_default().push(rewrite);
        }
        self.rewrites = by_pool.into_iter().map(|(pool, all)| (pool, Rewrites::new(all))).collect();
        self.objectives = objectives.into_iter().collect();
        self
    }

    /// Whether a route with a limit leads to the pool: what reached it without a model would be limited by nothing.
    pub fn has_limits(&self, pool: &PoolName) -> bool {
        pool.kind == PoolKind::ModelServer && self.limited.contains(&pool.object)
    }

    /// The pool of that kind and name.
    pub fn pool(&self, name: &PoolName) -> Option<&Arc<Pool>> {
        self.by_name.get(name).map(|&at| &self.pools[at])
    }

    /// The pool that `namespace/name` means whatever its kind; a ModelServer wins over an InferencePool of the same name.
    pub fn pool_of_any_kind(&self, object: &ObjectName) -> Option<&Arc<Pool>> {
        [PoolKind::ModelServer, PoolKind::InferencePool]
            .into_iter()
            .find_map(|kind| self.pool(&PoolName { kind, object: object.clone() }))
    }
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The model name the engine sees, and every plugin too.
    pub target_model: Arc<str>,
    /// The ModelRoute that decided, `namespace/name`, or `rewrite namespace/name`.
    pub route: Option<Arc<str>>,
    /// The tokens that the ModelRoute may take.
    pub limit: Option<Arc<Limit>>,
}

impl Routed {
    /// Whether its output tokens are limited.
    pub fn limits_output(&self) -> bool {
        self.limit.as_ref().is_some_and(|limit| limit.rates.output.is_some())
    }
}

impl Snapshot {
    /// Where a request goes: to the pool that the gateway names, else by ModelRoutes if there are any and it names a model,
    /// else to the default or the only pool, whose rewrites then apply. A forced model name goes before both.
    pub fn route(&self, default_pool: Option<&ObjectName>, ask: &Question<'_>) -> Result<Routed, Refusal> {
        if !self.stands {
            let why = "the first resources are still being read: try again shortly";
            return Err(Refusal::new(Reason::NotReady, why).retry_after(Duration::from_secs(1)));
        }
        let mut routed = self.routed(default_pool, ask)?;
        if let Some(forced) = ask.forced_model {
            routed.target_model = forced.into();
        } else if routed.route.is_none()
            && routed.pool.name.kind == PoolKind::InferencePool
            && (ask.model.is_some() || ask.takes_model)
            && let Some(rewrites) = self.rewrites.get(&routed.pool.name.object)
            && let Some(rewritten) = rewrites.apply(ask.model, ask.draw)
        {
            routed.target_model = rewritten.model;
            routed.route = Some(rewritten.label);
        }
        Ok(routed)
    }

    fn routed(&self, default_pool: Option<&ObjectName>, ask: &Question<'_>) -> Result<Routed, Refusal> {
        if let (None, Some(model)) = (ask.pool, ask.model)
            && !self.routes.is_empty()
        {
            return self.by_model_route(model, ask);
        }
        let named = |role: &str, name: &ObjectName| {
            let missing = || format!("the {role} pool {name} does not exist");
            self.pool_of_any_kind(name).ok_or_else(|| Refusal::new(Reason::NoEndpoints, missing()))
        };
        let pool = match (ask.pool, default_pool) {
            (Some(name), _) => named("gateway's", name)?,
            (None, Some(name)) => named("default", name)?,
            (None, None) => match &self.pools[..] {
                [only] => only,
                [] => return Err(Refusal::new(Reason::NoEndpoints, "no pool is configured")),
                _ => return Err(undecided(ask.model.is_some())),
            },
        };
        let target_model = match (ask.model, &pool.model) {
            (Some(_), Some(model)) => Arc::clone(model),
            (Some(model), None) => model.into(),
            (None, _) => "".into(),
        };
        Ok(Routed { pool: Arc::clone(pool), target_model, route: None, limit: None })
    }

    fn by_model_route(&self, model: &str, ask: &Question<'_>) -> Result<Routed, Refusal> {
        let drawn = self.routes.draw(model, ask)?;
        let name = PoolName { kind: PoolKind::ModelServer, object: drawn.server.clone() };
        let pool =
            self.pool(&name).ok_or_else(|| drawn.refuse(&format!("ModelServer {name} does not exist")))?;
        let target_model = match (&pool.model, drawn.is_adapter) {
            (Some(served), false) => Arc::clone(served),
            _ => model.into(),
        };
        let route = drawn.route;
        Ok(Routed {
            pool: Arc::clone(pool),
            target_model,
            route: Some(Arc::clone(&route.label)),
            limit: route.limit.clone(),
        })
    }
}

fn undecided(has_model: bool) -> Refusal {
    let why = if has_model {
        "several pools exist, no ModelRoute and no default pool says which serves this request"
    } else {
        "the request names no model, and several pools could serve it"
    };
    Refusal::new(Reason::UnknownModel, why)
}

/// The current snapshot, replaced as a whole.
#[derive(Debug, Default)]
pub struct Store {
    current: ArcSwap<Snapshot>,
}

impl Store {
    /// The snapshot of this moment, for the length of one request.
    pub fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// The snapshot of this moment, to be kept.
    pub fn load_full(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Makes `next` what later requests see.
    pub fn replace(&self, next: Snapshot) {
        self.current.store(Arc::new(next));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn before_anything_is_read_the_reason_is_another_than_with_nothing_read() {
        let ask = Question {
            model: Some("m"),
            pool: None,
            forced_model: None,
            takes_model: true,
            path: "/",
            header: &|_| None,
            draw: 0,
        };
        let refused = |snapshot: &Snapshot| snapshot.route(None, &ask).unwrap_err().reason;
        assert_eq!(refused(&Snapshot::default()), Reason::NotReady);
        let read = Snapshot::new(Vec::new(), Vec::new(), RouteTable::default());
        assert_eq!(refused(&read), Reason::NoEndpoints);
    }
}
