//! What can happen to the order of batches, as it is counted.

/// Something worth knowing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// A batch that was applied already.
    Duplicate,
    /// Batches are missing.
    Gap,
    /// They came by replay.
    Repaired,
    /// The engine has them no longer: all was forgotten.
    Lost,
    /// The replay failed: all was forgotten.
    ReplayFailed,
    /// There is no replay socket: what is known is kept and not trusted.
    NoReplay,
    /// A replay is wanted.
    Replay,
    /// The engine started anew: all was forgotten.
    Restarted,
}

impl Note {
    /// Every note, in the order of their counters.
    pub const ALL: [Note; 8] = [
        Note::Duplicate,
        Note::Gap,
        Note::Repaired,
        Note::Lost,
        Note::ReplayFailed,
        Note::NoReplay,
        Note::Replay,
        Note::Restarted,
    ];
}
