//! Where a lookup writes: the depth of every holder, in scratch space that the next lookup uses again.

use crate::state::endpoint::Holder;

/// Depths by seat. Only the seats that were written are wiped for the next lookup, so a lookup that few hold is cheap
/// however many endpoints there are.
#[derive(Debug, Default)]
pub struct DepthSink {
    by_seat: Vec<(u64, u32)>,
    written: Vec<u32>,
}

impl DepthSink {
    /// Starts a lookup.
    pub fn begin(&mut self) {
        for seat in self.written.drain(..) {
            self.by_seat[seat as usize] = (0, 0);
        }
    }

    /// `holder` holds the first `depth` blocks. Of two reports the deeper counts.
    pub fn report(&mut self, holder: Holder, depth: u32) {
        let at = holder.seat as usize;
        if at >= self.by_seat.len() {
            self.by_seat.resize(at + 1, (0, 0));
        }
        let entry = &mut self.by_seat[at];
        if entry.1 == 0 {
            self.written.push(holder.seat);
        }
        if entry.0 != holder.slot || entry.1 < depth {
            *entry = (holder.slot, depth);
        }
    }

    /// What `holder` holds: 0 if it was not reported. A former occupant of its seat does not count.
    pub fn depth(&self, holder: Holder) -> u32 {
        match self.by_seat.get(holder.seat as usize) {
            Some(&(slot, depth)) if slot == holder.slot => depth,
            _ => 0,
        }
    }

    /// The deepest that was reported.
    pub fn deepest(&self) -> u32 {
        self.written.iter().map(|&seat| self.by_seat[seat as usize].1).max().unwrap_or(0)
    }

    /// Holders reported.
    pub fn holders(&self) -> usize {
        self.written.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lookup_sees_nothing_of_the_one_before_nor_of_a_former_occupant() {
        let mut sink = DepthSink::default();
        let (old, new) = (Holder { seat: 3, slot: 7 }, Holder { seat: 3, slot: 8 });
        sink.begin();
        sink.report(old, 5);
        assert_eq!((sink.depth(old), sink.depth(new), sink.holders()), (5, 0, 1));
        sink.begin();
        assert_eq!((sink.depth(old), sink.holders()), (0, 0));
        assert_eq!(sink.depth(Holder { seat: 99, slot: 1 }), 0);
    }
}
