//! `SGLang`: both engines are told a room of the prefill engine's bootstrap server, and meet there.

use std::fmt::Write;

use serde_json::json;

use super::connector::{Connector, Fields, Meeting, Order, Prefilled, Useless, bootstrap_port};
use crate::state::disaggregation::DataParallel;

/// Both bodies get the same host, port and room; each a list where prompts come as one.
#[derive(Debug)]
pub struct Sglang;

impl Connector for Sglang {
    fn order(&self) -> Order {
        Order::Together
    }

    fn prefill(&self, meeting: &Meeting<'_>) -> Fields {
        let ranks = meeting.prefill.transfer.data_parallel;
        let host = json!(meeting.prefill.address.ip().to_string()).to_string();
        let port = bootstrap_port(meeting.prefill).to_string();
        let rooms = |at: usize| room(meeting.room_seed, at as u64, ranks).to_string();
        let mut fields = Fields::new();
        for (name, value) in [
            ("bootstrap_host", each(meeting.batch, |_| host.clone())),
            ("bootstrap_port", each(meeting.batch, |_| port.clone())),
            ("bootstrap_room", each(meeting.batch, rooms)),
        ] {
            // Writing to a string cannot fail.
            let _ = write!(fields, "\"{name}\":{value},");
        }
        fields
    }

    fn decode(&self, meeting: &Meeting<'_>, _: Prefilled<'_>) -> Result<Fields, Useless> {
        Ok(self.prefill(meeting))
    }
}

/// One value, or a list of one for each prompt.
fn each(batch: Option<usize>, value: impl Fn(usize) -> String) -> String {
    match batch {
        None => value(0),
        Some(prompts) => format!("[{}]", (0..prompts).map(value).collect::<Vec<_>>().join(",")),
    }
}

/// A room that no other prompt has, positive in 63 bits; the prefill engine's rank is its remainder by their number, as the
/// engine reads it. Rooms of one seed follow each other.
fn room(seed: u64, at: u64, ranks: Option<DataParallel>) -> u64 {
    // Far enough from the end that the rooms of one request stay below it.
    const MOST: u64 = i64::MAX as u64 >> 1;
    let (rank, size) = match ranks {
        Some(DataParallel { rank: Some(rank), size, .. }) => (u64::from(rank), u64::from(size)),
        _ => (0, 1),
    };
    ((seed & MOST) / size + at) * size + rank
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rooms_name_their_rank_and_differ(seed in any::<u64>(), size in 1u16..=64, rank in 0u16..64, n in 1usize..64) {
            let rank = rank % size;
            let ranks = Some(DataParallel { rank: Some(rank), size, told: false });
            let rooms: Vec<u64> = (0..n as u64).map(|at| room(seed, at, ranks)).collect();
            prop_assert!(rooms.iter().all(|room| room % u64::from(size) == u64::from(rank)));
            prop_assert!(rooms.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(i64::try_from(*rooms.last().unwrap()).is_ok());
            prop_assert!(i64::try_from(room(seed, 0, None)).is_ok());
        }
    }

    #[test]
    fn a_list_only_where_prompts_are_one() {
        assert_eq!(each(None, |at| at.to_string()), "0");
        assert_eq!(each(Some(1), |at| at.to_string()), "[0]");
        assert_eq!(each(Some(2), |at| at.to_string()), "[0,1]");
    }
}
