//! ModelRoutes: which rule of which route a request meets, and which target it draws; and what rewrites make of its model.

pub mod matching;
pub mod rewrite;
pub mod table;

pub use matching::{HeaderMatch, RequestMatch, TextMatch};
pub use table::{Drawn, Route, RouteTable, Rule, Target};

use crate::state::ObjectName;

/// What of a request its routing looks at.
pub struct Question<'a> {
    /// The client's model name, if the request names one.
    pub model: Option<&'a str>,
    /// The pool that the gateway names, which leaves nothing for routes to decide.
    pub pool: Option<&'a ObjectName>,
    /// Path without query.
    pub path: &'a str,
    /// First value of a header by lower-case name.
    pub header: &'a dyn Fn(&str) -> Option<&'a str>,
    /// Draw for weighted targets, uniform over `u64`.
    pub draw: u64,
    /// The model name that a trusted caller forces.
    pub forced_model: Option<&'a str>,
    /// Whether it names no model and could be given one.
    pub takes_model: bool,
}
