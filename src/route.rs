//! ModelRoutes: which rule of which route a request meets, and which target it draws.

pub mod matching;
pub mod table;

pub use matching::{HeaderMatch, RequestMatch, TextMatch};
pub use table::{Drawn, Route, RouteTable, Rule, Target};

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
