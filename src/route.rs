//! Which pool serves a request, and under which model name: ModelRoutes first, else the only or the default pool.

pub mod matching;
pub mod table;

use std::sync::Arc;

pub use matching::{HeaderMatch, RequestMatch, TextMatch};
pub use table::{Route, RouteTable, Rule, Target};

use crate::refusal::{Reason, Refusal};
use crate::state::{ObjectName, Pool, Snapshot};

/// What of a request its routing looks at.
pub struct Question<'a> {
    /// The client's model name, if the request names one.
    pub model: Option<&'a str>,
    /// Path without query.
    pub path: &'a str,
    /// First value of a header by lower-case name.
    pub header: &'a dyn Fn(&str) -> Option<&'a str>,
    /// Draw for weighted targets, uniform over `u64`.
    pub draw: u64,
}

/// Where a request goes.
#[derive(Clone, Debug)]
pub struct Routed {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The model name the engine sees, and every plugin too.
    pub target_model: Arc<str>,
    /// The ModelRoute that decided, `namespace/name`.
    pub route: Option<Arc<str>>,
}

/// Routes one request.
pub fn route(
    snapshot: &Snapshot,
    default_pool: Option<&ObjectName>,
    ask: &Question<'_>,
) -> Result<Routed, Refusal> {
    if let Some(model) = ask.model
        && !snapshot.routes.is_empty()
    {
        return snapshot.routes.route(snapshot, model, ask);
    }
    let pool = match default_pool {
        Some(name) => snapshot.pool_of_any_kind(name).ok_or_else(|| {
            Refusal::new(Reason::NoEndpoints, format!("the default pool {name} does not exist"))
        })?,
        None => match &snapshot.pools[..] {
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
    Ok(Routed { pool: Arc::clone(pool), target_model, route: None })
}

fn undecided(has_model: bool) -> Refusal {
    let why = if has_model {
        "several pools exist, no ModelRoute and no default pool says which serves this request"
    } else {
        "the request names no model, and several pools could serve it"
    };
    Refusal::new(Reason::UnknownModel, why)
}
