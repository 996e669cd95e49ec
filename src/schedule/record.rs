//! What a cycle leaves behind: the table that debug pages and `explain` show. Names are read from the profile on reading.

use std::sync::Arc;

use smallvec::SmallVec;

use super::pipeline::Profile;
use crate::state::cache::Rung;
use crate::state::reservation::{Role, Work};

/// The filter that dropped a candidate.
#[derive(Clone, Copy, Debug)]
pub struct FilteredBy {
    /// Index into the profile's filters.
    pub filter: u16,
    /// Why.
    pub why: &'static str,
}

/// One candidate of a cycle.
#[derive(Clone, Debug)]
pub struct CandidateRow {
    /// `ip:port`.
    pub endpoint: Arc<str>,
    /// The filter that dropped it, if one did.
    pub filtered_by: Option<FilteredBy>,
    /// Scores as given, one a scorer; NaN = abstained.
    pub raw: SmallVec<[f32; 4]>,
    /// Scores as used.
    pub used: SmallVec<[f32; 4]>,
    /// The weighted sum.
    pub total: f32,
    /// Prompt tokens it was believed to hold.
    pub cached_tokens: u32,
    /// The source that said so.
    pub rung: Rung,
}

/// The cycle of one leg.
#[derive(Clone, Debug)]
pub struct LegRecord {
    /// What the leg is for.
    pub role: Role,
    /// The profile that ran; names of filters and scorers are read from it.
    pub profile: Arc<Profile>,
    /// Endpoints of the pool.
    pub candidates_total: u32,
    /// Whether `rows` holds them all.
    pub complete: bool,
    /// Candidates, the picked first.
    pub rows: Vec<CandidateRow>,
    /// `ip:port`, best first.
    pub picked: SmallVec<[Arc<str>; 3]>,
    /// Requests booked: none where a decision is only explained.
    pub reserved_requests: u32,
    /// Prompt tokens booked as prefill.
    pub reserved_prefill: u64,
    /// Output tokens booked as decode.
    pub reserved_decode: u64,
}

impl LegRecord {
    /// Notes what was booked.
    pub fn reserve(&mut self, work: Work) {
        self.reserved_requests = 1;
        self.reserved_prefill = work.prefill_tokens;
        self.reserved_decode = work.decode_tokens;
    }

    /// Notes that the endpoint does the whole request after all.
    pub fn takes_all(&mut self, work: Work) {
        self.role = Role::Serve;
        self.reserve(work);
    }
}
