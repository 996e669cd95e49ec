//! Keeps a session at the endpoint it is bound to.

use super::session_affinity::{self, Affinity};
use crate::schedule::plugin::{Filter, Instance, Kind};
use crate::schedule::{Candidate, Cycle};

const MANUAL: &str = "\
Drops every endpoint but the one that the request's session is bound to, after all other filters wherever it is listed. That
leaves no other endpoint for a retry; where a session may move, `session-affinity-scorer` prefers its endpoint. A request without a session, or whose endpoint is
no candidate, keeps all candidates and is bound to the pick; its decision says `absent`, `new`, `ignored` or `moved` as
`session`. Bindings are shared with a `session-affinity-scorer` of the same parameters. What tokens are, and which header
Envoy must answer with, stands in [operating.md](operating.md#sessions).";

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "session-affinity-filter",
    schema: || session_affinity::schema(MANUAL),
    build: |given| {
        let affinity = session_affinity::affinity(given)?;
        let needs = affinity.needs();
        Ok(Instance::filter(SessionAffinity { affinity }).needs(needs))
    },
};

/// The filter.
#[derive(Debug)]
pub struct SessionAffinity {
    affinity: Affinity,
}

impl Filter for SessionAffinity {
    fn filter(&self, cx: &Cycle<'_>, candidates: &[Candidate], dropped: &mut [Option<&'static str>]) {
        let Some(bound) = self.affinity.bound(cx, candidates) else { return };
        for (at, dropped) in dropped.iter_mut().enumerate() {
            *dropped = (at != bound).then_some("the session is bound to another endpoint");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::session_affinity::testing::session;
    use crate::plugins::testing::{ask, pool, verdicts};
    use crate::prompt::Prepared;
    use crate::schedule::Ask;
    use serde_json::Value;

    #[test]
    fn a_bound_session_has_one_endpoint_and_any_other_has_all() {
        let filter = (KIND.build)(Value::Null).unwrap().filter.unwrap();
        let (pool, larger) = (pool(3), pool(4));
        let prompt = Prepared::default();
        let kept = |sessions: &[crate::session::Session]| {
            let ask = Ask { sessions, ..ask(&prompt, "m") };
            verdicts(&*filter, &pool, &ask).iter().map(Option::is_none).collect::<Vec<_>>()
        };
        assert_eq!(kept(&[session(&pool, &pool.members[1].endpoint)]), [false, true, false]);
        assert_eq!(kept(&[session(&pool, &larger.members[3].endpoint)]), [true; 3], "its endpoint is gone");
        assert_eq!(kept(&[]), [true; 3]);
    }
}
