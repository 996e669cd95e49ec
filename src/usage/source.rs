//! Who said how many tokens a response had.

/// Where the token counts of a response came from, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UsageSource {
    /// Envoy's own usage filter, in the response trailers.
    Trailers,
    /// Our scanner over the response body.
    Scanner,
    /// Envoy's access log.
    AccessLog,
    /// Nobody said: from the size of the response, or from what requests of this pool usually produce.
    Estimate,
}

impl UsageSource {
    /// Every source.
    pub const ALL: [UsageSource; 4] =
        [UsageSource::Trailers, UsageSource::Scanner, UsageSource::AccessLog, UsageSource::Estimate];

    /// The name in metrics and JSON.
    pub fn name(self) -> &'static str {
        match self {
            UsageSource::Trailers => "trailers",
            UsageSource::Scanner => "scanner",
            UsageSource::AccessLog => "access_log",
            UsageSource::Estimate => "estimate",
        }
    }
}
