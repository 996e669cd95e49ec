//! Several pieces as one slice, in a buffer that each thread keeps for the next request.
//!
//! A fresh buffer of some hundred kilobytes costs a page fault every 4 KB, more than the copy itself.

use std::cell::Cell;
use std::ops::Deref;

/// Largest buffer a thread keeps.
const MOST_KEPT: usize = 4 << 20;

thread_local! {
    static KEPT: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// One slice: borrowed, or joined in the thread's buffer.
pub struct Joined<'a> {
    borrowed: &'a [u8],
    /// Not empty if it is what counts.
    copied: Vec<u8>,
}

impl<'a> Joined<'a> {
    /// Joins pieces of `len` bytes together.
    pub fn of(pieces: &'a [Vec<u8>], len: usize) -> Self {
        match pieces {
            [] => Self { borrowed: &[], copied: Vec::new() },
            [one] => Self { borrowed: one, copied: Vec::new() },
            many => {
                let mut copied = KEPT.take();
                copied.clear();
                copied.reserve(len);
                for piece in many {
                    copied.extend_from_slice(piece);
                }
                Self { borrowed: &[], copied }
            }
        }
    }
}

impl Deref for Joined<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        if self.copied.is_empty() { self.borrowed } else { &self.copied }
    }
}

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        if (1..=MOST_KEPT).contains(&self.copied.capacity()) {
            KEPT.set(std::mem::take(&mut self.copied));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_at_once_do_not_share_a_buffer_and_the_next_finds_no_trace() {
        let pieces = [b"ab".to_vec(), b"c".to_vec()];
        let (first, second) = (Joined::of(&pieces, 3), Joined::of(&pieces, 3));
        assert_eq!((&*first, &*second), (&b"abc"[..], &b"abc"[..]));
        drop(first);
        drop(second);
        assert_eq!(&*Joined::of(&[b"x".to_vec(), b"y".to_vec()], 2), b"xy");
        assert_eq!(&*Joined::of(&[], 0), b"");
    }
}
