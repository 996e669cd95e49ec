//! Who may go, and when.

use clap::Args;

use crate::admission::Source;

/// Flags of identities, limits and queues.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Admission")]
pub struct AdmissionArgs {
    /// Where the identity of a request stands; the first source that says something counts. attribute:NAME, an attribute that
    /// Envoy sends; header:NAME, a header that Envoy sets and whose copies of clients it removes; user, the member of the body,
    /// and session, the header x-session-id, both of which clients choose. Without it all requests are one identity's.
    #[arg(long, value_name = "SOURCE,...", value_delimiter = ',', env = "PILOTFISH_IDENTITY")]
    pub identity: Vec<Source>,
}

impl AdmissionArgs {
    /// Attributes of Envoy that identities may stand in.
    pub fn attributes(&self) -> impl Iterator<Item = Box<str>> {
        self.identity.iter().filter_map(|source| match source {
            Source::Attribute(name) => Some(name.clone()),
            _ => None,
        })
    }
}
