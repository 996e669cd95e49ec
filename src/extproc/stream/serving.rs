//! A request on its way to an endpoint, from its booking to its settlement.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::time::Instant;

use crate::decide::Served;
use crate::decision::Record;
use crate::settle::{Closing, Progress};

/// A request that an endpoint serves.
pub struct Serving {
    pub served: Box<Served>,
    pub record: Box<Record>,
}

impl Serving {
    /// The engine has begun to decode.
    pub fn prefill_done(&mut self) {
        self.served.leg.prefill_done();
        // Its sidecar has had the prompt from there.
        self.served.by_sidecar = None;
    }

    /// Moves the booking to the endpoint that Envoy's retries ended at.
    pub fn served_by(&mut self, address: SocketAddr) {
        let leg = &mut self.served.leg;
        if address != leg.member.endpoint.address
            && let Some(member) = leg.pool.member_at(address).cloned()
        {
            leg.served_by(&member);
        }
    }

    /// What is to be settled, once its stream has ended.
    pub fn closing(self, progress: Progress, sees_response_body: bool, started: Instant) -> Closing {
        let Self { served, record } = self;
        let Served {
            ranked,
            mut leg,
            permit,
            stream,
            answers,
            most_output,
            forecast,
            expected_output,
            sessions,
            limiting,
            ..
        } = *served;
        // Whatever it waited for, nothing more is known of it.
        leg.arrived();
        let booked = record.legs.first();
        Closing {
            pool: Arc::clone(&leg.pool),
            leg: Some(leg),
            permit,
            bill: None,
            ranked,
            progress,
            stream,
            uncached: booked.map_or(0, |leg| leg.reserved_prefill),
            expected_output,
            answers,
            most_output,
            forecast,
            sessions,
            charge: limiting.into_charge(),
            record,
            lasted: None,
            sees_response_body,
            started,
        }
    }
}
