//! Prefers the endpoint that a session is bound to.

use super::session_affinity::{self, Affinity};
use crate::schedule::plugin::{Instance, Kind, Scorer};
use crate::schedule::{Candidate, Cycle};

const MANUAL: &str = "\
1 for the endpoint that the request's session is bound to, 0 for every other, and 0 for all where the session is bound to no
candidate. Other scorers may outweigh it: the binding of a session id then stays, and a token follows the endpoint that
served. What tokens are, and which header Envoy must answer with, stands in [operating.md](operating.md#sessions).";

/// The plugin type.
pub const KIND: Kind = Kind {
    name: "session-affinity-scorer",
    schema: || session_affinity::schema(MANUAL),
    build: |given| {
        let affinity = session_affinity::affinity(given)?;
        let needs = affinity.needs();
        Ok(Instance::scorer(SessionAffinity { affinity }).needs(needs))
    },
};

/// The scorer.
#[derive(Debug)]
pub struct SessionAffinity {
    affinity: Affinity,
}

impl Scorer for SessionAffinity {
    fn score(&self, cx: &Cycle<'_>, candidates: &[Candidate], out: &mut [f32]) {
        out.fill(0.0);
        if let Some(bound) = self.affinity.bound(cx, candidates) {
            out[bound] = 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::session_affinity::testing::session;
    use crate::plugins::testing::{ask, cycle, pool};
    use crate::prompt::Prepared;
    use crate::schedule::Ask;
    use serde_json::Value;

    #[test]
    fn the_bound_endpoint_has_one_and_all_others_nothing() {
        let scorer = (KIND.build)(Value::Null).unwrap().scorer.unwrap();
        let (pool, larger) = (pool(3), pool(4));
        let prompt = Prepared::default();
        let scores = |sessions: &[crate::session::Session]| {
            cycle(&pool, &Ask { sessions, ..ask(&prompt, "m") }, |cx, candidates| {
                let mut out = vec![f32::NAN; candidates.len()];
                scorer.score(cx, candidates, &mut out);
                out
            })
        };
        assert_eq!(scores(&[session(&pool, &pool.members[2].endpoint)]), [0.0, 0.0, 1.0]);
        assert_eq!(scores(&[session(&pool, &larger.members[3].endpoint)]), [0.0; 3]);
        assert_eq!(scores(&[]), [0.0; 3]);
    }
}
