//! A small number for every endpoint that lives, so that numbers about endpoints lie side by side in arrays.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use parking_lot::Mutex;

static FREE: Mutex<Free> = Mutex::new(Free { returned: BinaryHeap::new(), next: 0 });

/// Numbers without an owner: those given back, and all from `next` on.
#[derive(Debug)]
struct Free {
    returned: BinaryHeap<Reverse<u32>>,
    next: u32,
}

/// A number that no other living seat has; the lowest that was free. It is free again when the seat is dropped.
#[derive(Debug)]
pub struct Seat(u32);

impl Seat {
    /// The number.
    pub fn number(&self) -> u32 {
        self.0
    }
}

impl Default for Seat {
    fn default() -> Self {
        let mut free = FREE.lock();
        if let Some(Reverse(number)) = free.returned.pop() {
            return Self(number);
        }
        free.next += 1;
        Self(free.next - 1)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        FREE.lock().returned.push(Reverse(self.0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn living_seats_differ() {
        let seats: Vec<Seat> = (0..100).map(|_| Seat::default()).collect();
        let numbers: HashSet<u32> = seats.iter().map(Seat::number).collect();
        assert_eq!(numbers.len(), 100);
    }
}
